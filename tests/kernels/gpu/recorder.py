"""Records the loads and stores of kernels in Triton's interpreter, and raises if one of them is a fault.

- Out of bounds: an access outside the tensor that its pointer was made from, even if it meets another tensor.
- A race: programs of a launch run in any order, or at once. Two of them may use an address only if both read it, or
  both use atomics. The lanes of one store may write to an address only if they write the same value.
- Memory that nobody wrote: a load from the result of `torch.empty`, `empty_like` or `new_empty`, which `poisoned` fills
  with a pattern that no kernel computes.

The interpreter runs the programs one after the other, and each operation on all lanes at once. So the order of warps in
a program is not seen here, but in the emulator (`bench.ptx`).
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Place: TypeAlias = tuple[int, Array, Array]
"""(argument, its lanes, bytes of its storage): where an access is. Nearly always, an access has one place."""

# By the size of an element. Those of 2, 4 and 8 bytes are NaN as floats, and larger than any index.
POISON = {1: 0xCB, 2: 0x7FCB, 4: 0x7FFBADBD, 8: 0x7FFBADBDBADBADBD}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_POISONED = 1 << 30  # bytes; a test of large offsets reserves more memory than it touches

ARGUMENT_BIT = 48  # a pointer is the number of the argument that it was made from << 48 | its address
ADDRESS = np.uint64((1 << ARGUMENT_BIT) - 1)
SEVERAL = -1  # in place of the number of a program


class FaultError(AssertionError):
    """A kernel did with memory what it must not do. The message names kernel, program and argument."""


class Accesses:
    """Accesses of one kind to a storage in a launch: programs by number, and the first byte of each access."""

    def __init__(self) -> None:
        self.programs: list[Array] = []
        self.bytes: list[Array] = []

    def add(self, program: int, index: Array) -> None:
        """Note that a program accessed bytes [lanes]."""
        self.programs.append(np.full(len(index), program))
        self.bytes.append(index)

    def clashes(self, other: "Accesses") -> Iterator[tuple[int, int]]:
        """Return a byte, if there is one, of which two programs made an access of these two kinds, and the first."""
        if self.bytes and other.bytes:
            index, place, which = np.unique(np.concatenate(other.bytes), return_index=True, return_inverse=True)
            programs = np.concatenate(other.programs)
            user = programs[place]
            user[which[programs != user[which]]] = SEVERAL
            mine = np.concatenate(self.bytes)
            nearest = np.minimum(np.searchsorted(index, mine), len(index) - 1)
            programs = np.concatenate(self.programs)
            for clash in np.flatnonzero((index[nearest] == mine) & (user[nearest] != programs))[:1]:
                yield int(mine[clash]), int(programs[clash])


class Memory:
    """A storage that begins at the address `first`."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.loads, self.stores, self.updates = Accesses(), Accesses(), Accesses()

    def clashes(self) -> Iterator[tuple[str, int, int]]:
        """Return what a program did at a byte that another one changed: the access, the byte, and its number."""
        for what, accesses in (("store to", self.stores), ("load of", self.loads)):
            for changes in (self.stores, self.updates):
                for byte, program in accesses.clashes(changes):
                    yield what, byte, program


class Launch:
    """The accesses of one launch. `tensors` are the arguments of the kernel by name."""

    def __init__(self, kernel: str, tensors: dict[str, Tensor]) -> None:
        self.kernel, self.names, self.tensors = kernel, list(tensors), list(tensors.values())
        storages = [x.untyped_storage().data_ptr() for x in self.tensors]
        memories = {first: Memory(first) for first in storages}
        self.memories = [memories[first] for first in storages]
        self.program, self.grid = 0, (1, 1, 1)

    def locate(self, what: str, pointers: Array, size: int) -> list[Place]:
        """Check the bounds of an access; return where it is."""
        places = []
        arguments = (pointers >> np.uint64(ARGUMENT_BIT)).astype(np.int64) - 1
        several = (arguments != arguments[:1]).any()
        for argument in np.unique(arguments).tolist() if several else arguments[:1].tolist():
            if not 0 <= argument < len(self.tensors):
                raise self.fault(f"{what} at an address that was not made from an argument")
            tensor, memory = self.tensors[argument], self.memories[argument]
            lanes = arguments == argument
            index = (pointers[lanes] & ADDRESS).astype(np.int64) - memory.first
            begin = tensor.data_ptr() - memory.first
            end = begin + extent(tensor) * tensor.element_size()
            for byte in (int(index.min()), int(index.max())):
                if byte < begin or byte + size > end:
                    raise self.fault(f"{what} out of bounds", argument, byte)
            places.append((argument, lanes, index))
        return places

    def note(self, kind: str, places: list[Place]) -> None:
        """Add an access of a kind: "loads", "stores" or "updates"."""
        for argument, _, index in places:
            getattr(self.memories[argument], kind).add(self.program, index)

    def check_written(self, places: list[Place], values: Array) -> None:
        """Check that values [lanes] that were read are not `POISON`."""
        marked = values.view(f"u{values.itemsize}") == POISON[values.itemsize]
        for argument, lanes, index in places:
            # A kernel may compute any integer of 8 bits, but no bool other than 0 and 1.
            if values.itemsize > 1 or self.tensors[argument].dtype == torch.bool:
                for byte in index[marked[lanes]][:1].tolist():
                    raise self.fault("load of memory that nobody wrote", argument, byte)

    def finish(self) -> None:
        """Check what needs all accesses of the launch."""
        for argument, memory in enumerate(self.memories):
            for what, byte, self.program in memory.clashes():
                raise self.fault(f"{what} memory that another program changes", argument, byte)

    def fault(self, what: str, argument: int | None = None, byte: int = 0) -> FaultError:
        """Return the error for an access to a byte of the storage of an argument."""
        program = tuple(int(x) for x in np.unravel_index(self.program, self.grid))
        message = f"{self.kernel}, program {program}: {what}"
        if argument is not None:
            tensor = self.tensors[argument]
            element = (self.memories[argument].first + byte - tensor.data_ptr()) // tensor.element_size()
            message += f": {self.names[argument]}[{element}], of {extent(tensor)} elements"
        return FaultError(message)


def extent(x: Tensor) -> int:
    """Return the number of elements from the first to the last one of a tensor."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Check all launches in Triton's interpreter; return how often each kernel was launched. It cannot be nested."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas
    convert, host_arguments, run = interpreter._implicit_cvt, executor._init_args_hst, executor.__call__
    handle = interpreter.TensorHandle
    launches: Counter[str] = Counter()
    running: list[Launch] = []  # the launch, while there is one

    def begin(self: Any, *arguments: Any) -> Any:
        on_host = host_arguments(self, *arguments)
        bound = inspect.signature(self.fn).bind(*on_host[0], **on_host[1]).arguments
        tensors = {name: x for name, x in bound.items() if isinstance(x, Tensor)}
        launches[self.fn.__name__] += 1
        running[:] = [Launch(self.fn.__name__, tensors)]
        return on_host

    def call(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            run(self, *arguments, **options)
            running[0].finish()
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, FaultError):
                raise error.__cause__ from None
            raise
        finally:
            running.clear()

    def tagged(x: Any) -> Any:
        result = convert(x)
        for number, tensor in enumerate(running[0].tensors if running else [], 1):
            if x is tensor:
                result.handle.data += np.uint64(number << ARGUMENT_BIT)
        return result

    def visit(self: Any, what: str, pointers: Any, size: int, active: Array) -> tuple[Launch, list[Place], Any]:
        """Check the bounds of an access before it is done, which might end the process; return its plain addresses."""
        launch = running[0]
        launch.grid, launch.program = self.grid_dim, int(np.ravel_multi_index(self.grid_idx, self.grid_dim))
        places = launch.locate(what, pointers.data[active], size)
        return launch, places, handle(pointers.data & ADDRESS, pointers.dtype)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        active = mask.data.astype(bool)
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        launch, places, plain = visit(self, "load", pointers, size, active)
        result = load(self, plain, mask, *rest)
        launch.note("loads", places)
        launch.check_written(places, result.data[active])
        return result

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch, places, plain = visit(self, "store", pointers, value.data.itemsize, mask.data.astype(bool))
        launch.note("stores", places)
        store(self, plain, value, mask, *rest)
        stored = interpreter._interpreter.load(plain.data, mask.data, value.data, value.data.dtype)
        if stored.tobytes() != value.data.tobytes():
            raise launch.fault("lanes store different values to one address")

    def checked_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        active = mask.data.astype(bool)
        launch, places, plain = visit(self, "atomic access", pointers, value.data.itemsize, active)
        launch.note("updates", places)
        result = rmw(self, operation, plain, value, mask, *rest)
        launch.check_written(places, result.data[active])
        return result

    def checked_cas(self: Any, pointers: Any, expected: Any, value: Any, *rest: Any) -> Any:
        active = np.ones(pointers.data.shape, bool)
        launch, places, plain = visit(self, "atomic access", pointers, value.data.itemsize, active)
        launch.note("updates", places)
        result = cas(self, plain, expected, value, *rest)
        launch.check_written(places, result.data[active])
        return result

    hooks: list[tuple[Any, str, Callable[..., Any]]] = [
        (builder, "create_masked_load", checked_load),
        (builder, "create_masked_store", checked_store),
        (builder, "create_atomic_rmw", checked_rmw),
        (builder, "create_atomic_cas", checked_cas),
        (interpreter, "_implicit_cvt", tagged),
        (executor, "_init_args_hst", begin),
        (executor, "__call__", call),
    ]
    with ExitStack() as stack:
        for owner, name, hook in hooks:
            stack.enter_context(mock.patch.object(owner, name, hook))
        yield launches


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill tensors that torch leaves uninitialised with `POISON`, unless they are very large."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*arguments: Any, **options: Any) -> Tensor:
            x = make(*arguments, **options)
            if x.nbytes > MOST_POISONED:
                return x
            x.detach().view(INTEGERS[x.element_size()]).fill_(POISON[x.element_size()])
            return x

        return wrapper

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty)),
    ):
        yield
