"""A driver for Triton that compiles for sm_90 and launches nothing, to see what the host does with a GPU.

It is used in a process of its own, without TRITON_INTERPRET. The tensors are on the CPU and keep the values that they
have: the results mean nothing.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

H100 = {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65_536}


class Utils:
    """What Triton asks about a device."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return H100

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, largest number of threads


class Driver:
    """Compiles, and records the launches."""

    def __init__(self) -> None:
        self.utils, self.launches, self.compiled = Utils(), list[list[Any]](), list[str]()
        self.guarded_by: Tensor | None = None  # whose device is selected
        self.unguarded: list[str] = []  # kernels launched on another device than that of their tensors

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @contextmanager
    def device_of(self, tensor: Tensor) -> Iterator[None]:
        """Take the place of `torch.cuda.device_of`."""
        self.guarded_by = tensor
        yield
        self.guarded_by = None

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return a function that takes the place of a launcher."""
        self.compiled.append(source.fn.__name__)

        def launch(grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, *rest: Any) -> None:
            if not any(x is self.guarded_by for x in rest[4:] if isinstance(x, Tensor)):
                self.unguarded.append(source.fn.__name__)
            arguments = [x for x in rest[4:] if not isinstance(x, Tensor)]
            self.launches.append([source.fn.__name__, [grid_x, grid_y, grid_z], [str(x) for x in arguments]])

        return launch


class Operations(TorchDispatchMode):
    """Records the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Records what the host would wait for if the tensors were on a GPU: copies, and numbers that it reads."""

    READS = (
        *("cpu", "item", "tolist", "nonzero", "unique", "bincount", "__bool__", "__int__", "__float__", "__index__"),
        *("equal", "masked_select", "tensor", "new_tensor"),  # the last two copy from ordinary memory
    )  # and not `numpy`: it follows `cpu`, and raises for tensors on a GPU

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        copies = name in ("cuda", "copy_") or (
            name == "to" and any(isinstance(x, torch.device | str) for x in (*args, *kwargs.values()))
        )
        from_host = name == "as_tensor" and not isinstance(args[0], Tensor)
        sizes = name == "repeat_interleave" and "output_size" not in kwargs
        # To index with a mask is to look for the entries that are true.
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        masks = any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in (index if type(index) is tuple else [index])
        )
        if name in self.READS or sizes or masks or from_host or (copies and not kwargs.get("non_blocking")):
            self.names.append(name)
        return func(*args, **kwargs)


def interactions(n_users: int, n_items: int) -> Any:
    """Return a random matrix of users and items, with weights."""
    from drm_triton.data.csr import CSR

    dense = torch.rand(n_users, n_items, generator=torch.Generator().manual_seed(0)) < 0.05
    users, items = dense.numpy().nonzero()
    return CSR.from_pairs(users, items, (n_users, n_items), np.arange(1, len(users) + 1, dtype=np.float32))


def to_gpu(tensor: Tensor, device: torch.device) -> Tensor:
    """Take the place of a copy from pinned memory, for which the host does not wait."""
    return tensor


@contextmanager
def as_on_a_gpu(results: int) -> Iterator[Driver]:
    """Launch nothing, and let the code treat tensors as if they were on a GPU. All results of kernels are `results`."""
    from drm_triton.data import csr
    from drm_triton.kernels import devices
    from drm_triton.ranking import evaluate, fold_in

    fake = Driver()
    driver.set_active(fake)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "_assert_async"))
        empty = lambda *shape, **options: torch.zeros(*shape, **options).fill_(results)  # noqa: E731
        patches.enter_context(mock.patch.object(torch, "empty", empty))
        patches.enter_context(mock.patch.object(devices, "on_host", return_value=False))
        for module in (devices, evaluate, fold_in):
            patches.enter_context(mock.patch.object(module, "to_device", to_gpu))
        assert not hasattr(csr, "to_device")  # imported when it is called
        yield fake


def evaluation(score: str, n_users: int, block: int) -> dict[str, Any]:
    """Evaluate as on a GPU, in blocks of users; return waits and launches."""
    from drm_triton.kernels import gpu
    from drm_triton.ranking import evaluate

    seen, held_out = interactions(n_users, 300), interactions(n_users, 300)
    U, V = torch.randn(n_users, 16), torch.randn(300, 16)
    with as_on_a_gpu(-1) as fake, mock.patch.object(evaluate, "QUERIES_PER_BLOCK", block):
        with Waits() as packing:
            ranker = evaluate.factor_ranker(gpu, U, V, score)
        with Waits() as waits, Operations() as operations:
            evaluate.evaluate(ranker, seen, held_out, min_train=0)
    return {
        "packing": packing.names,
        "waits": waits.names,
        "operations": operations.names,
        "launches": len(fake.launches),
    }


@contextmanager
def values_not_read() -> Iterator[None]:
    """Let no check look at the values of indices, as on a GPU."""
    from drm_triton.kernels import batches, checks

    with mock.patch.object(checks, "check_index"), mock.patch.object(batches, "check_index"):
        yield


def folding(options: dict[str, Any], people: int) -> dict[str, Any]:
    """Fold people in as on a GPU; return waits and launches."""
    from drm_triton import TrainConfig
    from drm_triton.kernels import gpu
    from drm_triton.ranking.fold_in import fold_in

    config, histories, V = TrainConfig(**options), interactions(people, 300), torch.randn(300, 16)
    with as_on_a_gpu(0) as fake, values_not_read(), Waits() as waits:
        fold_in(V, histories, config, gpu)
    return {"waits": waits.names, "launches": len(fake.launches)}


def steps(options: dict[str, Any]) -> dict[str, Any]:
    """Train as on a GPU and return what the host did: compiled kernels, launches and operations of torch."""
    from drm_triton import TrainConfig
    from drm_triton.kernels import gpu
    from drm_triton.kernels.precision import table_type
    from drm_triton.kernels.protocol import ListPlan
    from drm_triton.training import preflight, step
    from drm_triton.training.capture import DeviceStep
    from drm_triton.training.loop import initial_state
    from drm_triton.training.step import catalogue_step, objective_of, take_step, training_plan

    fake = Driver()
    driver.set_active(fake)
    config = TrainConfig(**{"objective": "hinge+drm", "batch_size": 64, "init": "normal", "epochs": 2, **options})
    fit, device = interactions(500, 300), torch.device("cpu")
    # On a GPU, values are not looked at, and nothing is asserted on the host.
    with (
        mock.patch.object(torch.cuda, "device_of", fake.device_of),
        values_not_read(),
        mock.patch.object(torch, "_assert_async"),
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(step, "reads_at_once", return_value=False),
    ):
        preflight.warm_up(config, gpu, device)
        warm, fake.compiled = fake.compiled, []
        state, plan = initial_state(config, fit, device), training_plan(config, fit, device)
        state = state.to(device, table_type(config.precision, gpu.name))
        objective = objective_of(config, fit.shape[1])
        found: dict[str, Any] = {"compiled in warm-up": warm, "device steps": [], "host steps": []}
        take_step(state, plan, 64, config, objective, gpu, 0.1)

        def record(kind: str, run: Any) -> None:
            fake.launches = []
            with Waits() as waits, Operations() as operations:
                run()
            taken = {"launches": list(fake.launches), "operations": sorted(operations.names), "waits": waits.names}
            found[kind].append(taken)

        for _ in range(2):
            stop = state.position + 64
            if isinstance(plan, ListPlan):
                record("device steps", DeviceStep(state, plan, config, objective, gpu).run)
                record("host steps", partial(take_step, state, plan, stop, config, objective, gpu, 0.1))
            else:  # the host puts the batch together: what it does for that is not on tensors of the GPU
                batch = plan.batch(state.epoch, state.position, stop)
                record("host steps", partial(catalogue_step, state, batch, config, objective, gpu, 0.1))
                state.position = stop
        # The last, shorter batch of an epoch, and a validation.
        state.position = plan.n_lists // 64 * 64
        take_step(state, plan, plan.n_lists, config, objective, gpu, 0.1)
        indptr, indices = fit.tensors(device)
        gpu.top_k(state.U[:100], gpu.pack_items(state.V, config.score_in_force), 50, (indptr[:101], indices))
    return {
        **found,
        "n": plan.n if isinstance(plan, ListPlan) else plan.n_items,
        "weighted": config.interaction_weights != "off",
        "compiled later": sorted(Counter(fake.compiled)),
        "unguarded": fake.unguarded,
    }


def print_each(function: str, calls: list[list[Any]]) -> None:
    """Print what a function of this file returns in each call, a line each.

    A compiled kernel keeps the driver that it was compiled with. So each call is made in a process that is forked from
    this one, which has compiled nothing. The imports are common to them.
    """
    for module in ("kernels.gpu", "ranking.fold_in", "training.loop", "training.preflight"):
        import_module(f"drm_triton.{module}")
    import_module("torch._dynamo")  # the modes of torch load it
    for arguments in calls:
        child = os.fork()
        if child == 0:
            print(json.dumps(globals()[function](*arguments)), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, arguments


def observe(function: str, *calls: tuple[object, ...]) -> list[dict[str, Any]]:
    """Return what a function of this file returns in each call, each with nothing compiled before."""
    from tests.conftest import ROOT, run_python  # it asks for Triton's interpreter, so not in the new process

    program = "import json, sys; sys.path.insert(0, sys.argv[1]); from tests.fake_driver import print_each; "
    program += "print_each(sys.argv[2], json.loads(sys.argv[3]))"
    done = run_python("-c", program, str(ROOT), function, json.dumps(calls), TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
