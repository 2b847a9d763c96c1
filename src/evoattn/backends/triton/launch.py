"""What a launcher needs to know about tensors and the device: strides, dtypes, matmul precision, shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Kernel",
    "Layout",
    "TensorLike",
    "capability",
    "folds",
    "grain",
    "head_block",
    "is_wide",
    "layout_for",
    "layout_of",
    "on_amd",
    "precision",
    "shared_memory_limit",
    "split",
    "split_precision",
    "strides",
    "tensor_map",
    "tensor_map_strides",
    "units",
]

TensorLike = Any
"""A Tensor, or a record of one with `shape` and `stride` as tuples."""

_FOLDABLE_SCALE = 1e-3
"""Below this, bias / scale could leave float32's range for a bias that is itself in range."""

_MAX_GRAIN = 16
_MAX_SPLIT_CHANNELS = 64
_MAX_TILE_ROWS = 256

_NO_DEVICE_LIMIT = 1 << 30

_MOST_KEPT = 4096
"""Launches that a kernel remembers before it forgets them all."""


def on_amd() -> bool:
    """Whether torch was built for AMD's GPUs, whose Triton backend knows no TF32 in general."""
    return torch.version.hip is not None


def precision(dtype: torch.dtype) -> str:
    """Triton's input_precision for matmuls of `dtype`: float32 is exact unless torch is told that TF32 will do."""
    if dtype != torch.float32:
        return "ieee"
    # Not allow_tf32: reading that raises once fp32_precision was set, while this one follows both.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" and not on_amd() else "ieee"


def split_precision(dtype: torch.dtype, channels: int) -> str:
    """Like `precision`, but float32 goes through the tensor cores as three TF32 products where that is as exact.

    A float32 number is the sum of two TF32 numbers to 22 bits. Measured on H200 against float64: 2.6e-7, where exact products
    on the ALUs lose 5.3e-7 (their sums round more often) and take twice as long. Above 64 channels the parts no longer fit
    in registers.
    """
    exact = precision(dtype)
    splits = dtype == torch.float32 and exact == "ieee" and channels <= _MAX_SPLIT_CHANNELS and not on_amd()
    return "tf32x3" if splits else exact


def head_block(channels: int) -> int:
    """The power of two, at least 16 (the smallest matmul), that holds `channels`."""
    return max(16, 1 << (channels - 1).bit_length())


def folds(scale: float) -> bool:
    """Whether biases may be divided by the scale, so that the matmul's accumulator starts from them."""
    return scale >= _FOLDABLE_SCALE and math.isfinite(scale)


def layout_of(tensor: TensorLike) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, stride) of a tensor, or of anything that remembers them as plain tuples."""
    return tuple(tensor.shape), tensor.stride() if callable(tensor.stride) else tensor.stride


def grain(*tensors: TensorLike | None) -> int:
    """The largest power of two up to 16 that divides every stride of the tensors but their innermost one.

    Kernels take strides in units of it, as a constant: so a row of 24 channels still loads 16 bytes at a time, and the only
    variants are five grains, whatever the lengths.
    """
    common = _MAX_GRAIN
    for tensor in tensors:
        if tensor is not None:
            shape, stride = layout_of(tensor)
            for size, step in zip(shape[:-1], stride[:-1], strict=True):
                common = math.gcd(common, step if size > 1 else 0)
    return common


def strides(tensor: TensorLike | None, axes: int) -> tuple[int, ...]:
    """Strides with 0 along axes of size 1, which are thereby broadcast; zeros for a tensor that is not given."""
    if tensor is None:
        return (0,) * axes
    return tuple(0 if size == 1 else step for size, step in zip(*layout_of(tensor), strict=True))


def units(tensor: TensorLike | None, axes: int, grain: int) -> tuple[int, ...]:
    """`strides`, all but the innermost in units of `grain`."""
    *outer, inner = strides(tensor, axes)
    return (*(step // grain for step in outer), inner)


def is_wide(*tensors: TensorLike | None) -> bool:
    """Whether offsets inside one (b, n, h) can pass 2**31 elements, so that loops over keys must count in 64 bits."""
    return any(_extent(tensor) >= 1 << 31 for tensor in tensors if tensor is not None)


def _extent(tensor: TensorLike) -> int:
    shape, stride = layout_of(tensor)
    return sum((size + _MAX_TILE_ROWS) * step for size, step in zip(shape[-2:], stride[-2:], strict=True))


class Layout(NamedTuple):
    """How kernels walk through some tensors: strides of all in units of `grain`, and whether offsets are long."""

    grain: int
    strides: tuple[int, ...]
    wide: bool


class _Strided(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _layout_of(*tensors: tuple[tuple[int, ...], tuple[int, ...]]) -> Layout:
    strided = [_Strided(*tensor) for tensor in tensors]
    common = grain(*strided)
    return Layout(common, sum((units(tensor, len(tensor.shape), common) for tensor in strided), ()), is_wide(*strided))


def layout_for(*tensors: Tensor | None) -> Layout:
    """The layout of the tensors (kept: working it out takes 30 us of a call); that of no tensor where one is not given."""
    known = [(tuple(x.shape), x.stride()) for x in tensors if x is not None]
    return _layout_of(*known) if len(known) == len(tensors) else Layout(1, (0, 0, 0, 0), False)


def tensor_map_strides(tensor: TensorLike) -> list[int]:
    """Strides as the copy engine wants them: those along axes of size 1 are multiples of 16 elements too."""
    return [
        _MAX_GRAIN if size == 1 and axis < 3 else step for axis, (size, step) in enumerate(zip(*layout_of(tensor), strict=True))
    ]


def tensor_map(tensor: Tensor, strides: list[int], block: list[int]) -> Any:
    """A descriptor through which a kernel loads `block`-sized tiles of the tensor, 0 outside it."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), strides, block)


def split(length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Cut `length` rows into (start, rows, block): whole blocks, and what is left in the smallest tile that holds it.

    397 queries in tiles of 128 alone would compute 29% too many scores; 3 tiles of 128 and one of 16 compute 1%.
    """
    whole = length // block * block
    left = length - whole
    small = max(16, 1 << (left - 1).bit_length()) if left else 0
    if left and small >= block:
        yield 0, length, block
        return
    if whole:
        yield 0, whole, block
    if left:
        yield whole, left, small


@functools.cache
def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on `device`."""
    if device.type != "cuda":
        return _NO_DEVICE_LIMIT
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not on_amd() else None


class Kernel:
    """A jitted kernel that remembers what was compiled for calls that look alike.

    Triton's own look-up of a launch with 45 arguments is most of what a small call costs the host. Calls look alike when every
    whole number is the same and every tensor has the same dtype and lies on a multiple of 16 bytes or does not: all that
    Triton's compiler may look at.

    Args:
        jitted: a `triton.jit` function whose compile-time constants come after all its other parameters.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._constants = tuple(p.name for p in getattr(jitted, "params", ()) if p.is_constexpr)

    def __call__(self, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launch `programs` programs on the current stream of the first argument's device, which is the current one."""
        first = arguments[0]
        if not first.is_cuda or on_amd():
            self.jitted[(programs,)](*arguments, **constants)
            return
        looks = [argument if argument.__class__ is int else _look(argument) for argument in arguments]
        key = (first.device.index, *looks, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(programs, 1, 1)](*arguments, *[constants[name] for name in self._constants])
            return
        if len(self._compiled) >= _MOST_KEPT:
            self._compiled.clear()
        self._compiled[key] = self.jitted[(programs,)](*arguments, **constants)


def _look(argument: Any) -> Any:
    """What a compiler may look at in an argument that is no whole number."""
    if argument.__class__ is float:
        return float
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.base.dtype, tuple(argument.block_shape)  # a tensor descriptor
