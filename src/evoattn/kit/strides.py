"""Strides: what a plan and its kernels need to know of how tensors lie in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.core.sizes import power_of_two

_MAX_GRAIN = 16
_MAX_TILE_ROWS = 256


class Strided(NamedTuple):
    """A tensor as a plan sees it: one that is there, or that will be when the plan runs."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True  # whether its first element lies on a multiple of 16 bytes


def strided(tensor: Tensor) -> Strided:
    """The record of a tensor."""
    return Strided(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Strided:
    """The record of a tensor that a plan allocates when it runs."""
    return Strided(shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), dtype)


def empty(like: Strided, device: torch.device) -> Tensor:
    """Memory for a record. torch.empty takes 1.9 us of the host, this 1.1."""
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)


def grain(*tensors: Strided | None) -> int:
    """The largest power of two up to 16 that divides every stride of the tensors but their innermost one.

    Kernels take strides in units of it, as a constant: so a row of 24 channels still loads 16 bytes at a time, and the only
    variants are five grains, whatever the lengths. If two queries or keys lie 2**31 elements apart it is 1: kernels turn units
    back into elements in 32 bits, which such a stride does not fit.
    """
    common = _MAX_GRAIN
    for tensor in tensors:
        if tensor is not None:
            if len(tensor.shape) > 1 and tensor.shape[-2] > 1 and tensor.stride[-2] >= 1 << 31:
                return 1
            for size, step in zip(tensor.shape[:-1], tensor.stride[:-1], strict=True):
                common = math.gcd(common, step if size > 1 else 0)
    return common


def strides(tensor: Strided | None, axes: int) -> tuple[int, ...]:
    """Strides with 0 along axes of size 1, which are thereby broadcast; zeros for None."""
    if tensor is None:
        return (0,) * axes
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride, strict=True))


def units(tensor: Strided | None, axes: int, grain: int) -> tuple[int, ...]:
    """`strides`, all but the innermost in units of `grain`."""
    *outer, inner = strides(tensor, axes)
    return (*(step // grain for step in outer), inner)


def is_long(*tensors: Strided | None) -> bool:
    """Return whether offsets inside one (b, n, h) can pass 2**31 elements, so that kernels count them in 64 bits."""
    return any(extent(tensor) >= 1 << 31 for tensor in tensors if tensor is not None)


def extent(tensor: Strided) -> int:
    return sum((size + _MAX_TILE_ROWS) * step for size, step in zip(tensor.shape[-2:], tensor.stride[-2:], strict=True))


def loads_vectors(pair_bias: Strided) -> bool:
    """Return whether the keys of each query start on 16 bytes and have stride 1, so that a thread loads 16 bytes at a time."""
    per_load = 16 // pair_bias.dtype.itemsize
    *outer, inner = pair_bias.stride
    aligned = all(step % per_load == 0 for step, size in zip(outer, pair_bias.shape[:-1], strict=True) if size > 1)
    return inner == 1 and aligned and pair_bias.aligned


def split(length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Cut `length` queries into (start, queries, block): full blocks, then the smallest tile that holds the remainder.

    397 queries in tiles of 128 alone would compute 29% too many scores; 3 tiles of 128 and one of 16 compute 1%.
    """
    left = length % block
    small = power_of_two(left)
    if left and small >= block:
        yield 0, length, block
        return
    if length > left:
        yield 0, length - left, block
    if left:
        yield length - left, left, small
