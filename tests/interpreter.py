"""Makes Triton's interpreter faster. It computes the same, bit for bit.

Most of its time goes into Python objects for types and shapes, one for each operation of a kernel. The kernels of these
tests are small, so that the numbers themselves take nearly none.
"""

import dataclasses
import importlib.util
import os
from typing import Any

import numpy as np


def hasten() -> None:
    """Patch the interpreter, if the tests use it and this version of Triton has what is patched."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch_language_once(interpreter)
    leave_out_overflows(interpreter)
    remember_types(interpreter)
    keep_equal_shapes(interpreter)
    combine_slices(interpreter)


def patch_language_once(interpreter: Any) -> None:
    """Let the interpreter patch `triton.language` once in each launch.

    It does so again in each call of a function by a kernel, where most of it is patched already and the rest gets the
    same functions once more.
    """
    patch, core = interpreter._patch_lang, interpreter.tl.core

    def patch_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is interpreter.tl or value is core]
        if any(core.is_builtin(place) for place in (core.tensor.__add__, *(language.load for language in languages))):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def leave_out_overflows(interpreter: Any) -> None:
    """Do not compute whether sums and products of integers overflow: outside the debug mode, nobody reads it."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_types(interpreter: Any) -> None:
    """Make the shape of a block, and NumPy's name of a type, once."""
    core, numpy_type = interpreter.tl.core, interpreter._get_np_dtype
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[x.value if type(x) is core.constexpr else x for x in shape]
        known = blocks.get(key)
        if known is None:
            make_block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        known = tensors.get(key)
        if known is None:
            make_tensor(self, handle, type)
            others = vars(self).keys() - {"handle", "type", "dtype"}
            tensors[key] = {name: getattr(self, name) for name in others}
        else:
            vars(self).update(known)
            self.handle, self.type, self.dtype = handle, type, type.scalar

    def known_numpy_type(dtype: Any) -> Any:
        found = numpy_types.get(dtype.name)
        if found is None:
            found = numpy_types[dtype.name] = numpy_type(dtype)
        return found

    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init
    interpreter._get_np_dtype = known_numpy_type


def keep_equal_shapes(interpreter: Any) -> None:
    """Return operands of the same shape at once where they would be broadcast."""
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:  # `remember_types` makes it the same object
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unequal


def combine_slices(interpreter: Any) -> None:
    """Reduce and scan with functions that NumPy does not have slice by slice, in the order of the elements."""
    reduce_ops, scan_ops, standard = interpreter.ReduceOps, interpreter.ScanOps, interpreter.tl.standard
    apply, scan = reduce_ops.apply_impl, scan_ops.generic_scan

    def reduce(self: Any, inputs: Any) -> Any:
        if self.combine_fn is standard._xor_combine:
            data = np.bitwise_xor.reduce(inputs[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(data, inputs[0].dtype)
        return apply(self, inputs)

    def scan_slices(self: Any, inputs: Any) -> Any:
        if len(inputs) > 1 or inputs[0].handle.data.ndim < 2:
            return scan(self, inputs)
        data, dtype = np.moveaxis(inputs[0].handle.data, self.axis, 0), inputs[0].dtype
        slices = [self.to_tensor(data[0], dtype)]
        for values in data[1:]:
            slices.append(self.combine_fn.fn(slices[-1], self.to_tensor(values, dtype)))
        return [self.to_tensor(np.stack([x.handle.data for x in slices], axis=self.axis), dtype)]

    reduce_ops.apply_impl = reduce
    scan_ops.generic_scan = scan_slices
