"""Makes bfloat16 right in Triton's interpreter, which keeps it as raw uint16 bits and computes with those.

Import this before any kernel is defined. Seen on Triton 3.6 to 3.9: matmuls, arithmetic, negation and comparisons of bfloat16
are silently wrong, so every such operation is taken through float32; conversions to bfloat16 cut digits off where a GPU rounds
to nearest even, which doubles the error of a kernel, so they round here too. And what a comparison finds is of the type int1
here: there it has that of what was compared, which Triton 3.9 refuses as a mask once it was spread out from a single number.

It also saves more than half of the time. Triton's interpreter looks through all of the language at each call of a function
inside a kernel, describes the type of every result anew, compares sizes one by one before each operation, and sums integers in
64 bits to find overflow that it does not tell. A program costs it milliseconds, so a launch of rows has few of them here.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from evoattn.backends import triton as backend
from evoattn.core import devices

__all__ = ["patch"]

_COMPARED = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


def _widen(handle: Any) -> Any:
    """The handle itself, or a float32 copy of a bfloat16 one."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << np.uint32(16)
    return TensorHandle(bits.view(np.float32), tl.float32)


def _narrow(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _read_one_number() -> None:
    """Let Triton 3.6 take an array of one number for a number, which NumPy no longer does since 2.4."""
    replace = interpreter._patch_lang_tensor

    def replace_all(tensor: Any, *scope: Any) -> None:
        replace(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = replace_all


def _replace_once() -> None:
    """Let a function inside a kernel replace nothing in those modules of the language in which its kernel has done so."""
    replace, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[str] = set()
    names: dict[str, set[str]] = {}

    def replace_rest(function: Any) -> Any:
        if function.__module__ not in names:
            names[function.__module__] = {x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core}
        named = names[function.__module__]
        if named and named <= replaced:
            return None
        replaced.update(named)
        return replace(function)

    def execute_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        try:
            execute(self, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_rest, execute_afresh


def _skip_checks_of_overflow() -> None:
    """Leave out the sums in 64 bits beside each sum of integers: the interpreter drops what they find unless it debugs."""
    options = getattr(interpreter.interpreter_builder, "options", None)
    if options is not None and getattr(options, "sanitize_overflow", False) and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _make_types_once() -> None:
    """Keep NumPy's dtype of each type, and the shape of each type of blocks: the interpreter finds both at each operation."""
    find_dtype, make_type, make_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    dtypes: dict[str, Any] = {}
    types: dict[Any, dict[str, Any]] = {}

    def of_tensor(type: Any) -> dict[str, Any]:
        made = tl.tensor.__new__(tl.tensor)
        make_tensor(made, None, type)
        return {name: x for name, x in vars(made).items() if name not in ("handle", "type", "dtype")}

    of_number = of_tensor(tl.float32)

    def numpy_dtype(type: Any) -> Any:
        if type.name not in dtypes:
            dtypes[type.name] = find_dtype(type)
        return dtypes[type.name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = {**vars(self), "of_tensor": of_tensor(self), "sizes": key[1]}
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        vars(self).update(type.of_tensor if type.is_block() else of_number)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    interpreter._get_np_dtype = numpy_dtype
    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor


def _broadcast_at_once() -> None:
    """Return blocks of equal sizes as they are, and broadcast others of as many axes by what NumPy knows of their sizes."""
    semantics = interpreter.interpreter_semantic.__class__
    broadcast = semantics.broadcast_impl_value

    def widened(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
        if x.type.sizes == sizes:
            return x
        return self.tensor(self.builder.create_broadcast(x.handle, sizes), tl.block_type(x.type.scalar, [*sizes]))

    def broadcast_at_once(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = (getattr(x.type, "sizes", ()) for x in (lhs, rhs))
        if left == right:
            return lhs, rhs
        if len(left) != len(right) or any(i != j and 1 not in (i, j) for i, j in zip(left, right, strict=True)):
            return broadcast(self, lhs, rhs)  # type: ignore[no-any-return]
        sizes = tuple(map(max, left, right))
        return widened(self, lhs, sizes), widened(self, rhs, sizes)

    semantics.broadcast_impl_value = broadcast_at_once


def patch() -> None:
    """Route operations on bfloat16 through float32, and make what comparisons find int1. Harmless when called again."""
    backend.INTERPRETED = (*backend.INTERPRETED, torch.bfloat16)
    devices._OF_AN_H200 = 2  # multiprocessors
    if getattr(InterpreterBuilder, "bfloat16_is_right", False):
        return
    dot, binary, unary = InterpreterBuilder.create_dot, InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
    cast = InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widen(a), _widen(b), *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in _COMPARED:
            return TensorHandle(op(_widen(lhs).data, _widen(rhs).data), tl.int1)
        if lhs.dtype.scalar != tl.bfloat16:
            return binary(self, lhs, rhs, op)
        return TensorHandle(_narrow(op(_widen(lhs).data, _widen(rhs).data)), tl.bfloat16)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar != tl.bfloat16:
            return unary(self, arg, op)
        return TensorHandle(_narrow(op(_widen(arg).data)), tl.bfloat16)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(_narrow(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.unary_op = unary_op
    InterpreterBuilder.bfloat16_is_right = True
    _read_one_number()
    _replace_once()
    _skip_checks_of_overflow()
    _make_types_once()
    _broadcast_at_once()
