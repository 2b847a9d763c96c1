"""Memory layouts, and how results lie in memory: their shapes, dtypes and strides are known here and nowhere else.

Every tensor has the canonical axes `[b,n,h,l,d]`; the layout says in which order they lie in memory.

Whoever made q, k and v by one product (`evoattn.nn.project`) needs their gradients as one tensor. Three of their own would have
to be copied together, a pass over memory as long as a product. `Columns.make` makes them as columns of one matrix and notes its
memory; `join` adopts a matrix only if its memory is noted.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.core.inputs import Inputs, Outputs
from evoattn.core.numerics import accumulate_dtype

LAYOUTS = ("bnlhd", "bnhld")


def to_canonical(x: Tensor, layout: str) -> Tensor:
    """View `[*, n, l, h, d]` or `[*, n, h, l, d]` as `[*, n, h, l, d]`, or the other way round."""
    return x.transpose(-2, -3) if layout == "bnlhd" else x


def share_memory(x: Tensor, y: Tensor | None) -> bool:
    """Return whether two tensors have one storage, so that writing one may change the other."""
    return y is not None and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def empty(shape: Sequence[int], layout: str, like: Tensor, device: torch.device | str | None = None) -> Tensor:
    """An uninitialised canonical tensor `[b,n,h,l,d]` contiguous in the user's layout, on a device or that of `like`."""
    b, n, h, l, d = shape
    stored = (b, n, l, h, d) if layout == "bnlhd" else (b, n, h, l, d)
    return to_canonical(torch.empty(stored, dtype=like.dtype, device=device or like.device), layout)


def empty_outputs(inputs: Inputs, layout: str, device: torch.device | str | None = None) -> Outputs:
    """Uninitialised outputs of canonical inputs: o `[b,n,h,q,c]`, lse and reference `[b,n,h,q]`."""
    q, v = inputs.q, inputs.v
    o = empty((*q.shape[:-1], v.shape[-1]), layout, q, device)
    acc = accumulate_dtype(q.dtype)
    lse, reference = (torch.empty(q.shape[:-1], dtype=acc, device=device or q.device) for _ in range(2))
    return Outputs(o, lse, reference)


def empty_gradients(
    inputs: Inputs, layout: str, needs: Sequence[bool], device: torch.device | str | None = None
) -> tuple[Tensor | None, ...]:
    """Uninitialised dq, dk, dv and dgate of canonical inputs, None for one that `needs` does not ask for."""
    wanted = zip((*inputs.qkv, inputs.gate), (needs[0], needs[1], needs[2], needs[5]), strict=True)
    return tuple([empty(x.shape, layout, x, device) if need and x is not None else None for x, need in wanted])


def as_planned(planned: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor | None]], list[Any]]:
    """Return a function that views tensors in the planned shapes and strides; both have the same start and elements."""
    looks = [None if x is None else (x.shape, x.stride()) for x in planned]

    def view(given: Sequence[Tensor | None]) -> list[Any]:
        pairs = zip(given, looks, strict=True)
        return [x if x is None or look is None or (x.shape, x.stride()) == look else x.as_strided(*look) for x, look in pairs]

    return view


_BYTES = 16
"""Columns start on a multiple of this, and so do rows: kernels store so many bytes at a time."""

_MADE: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""The memory that `Columns.make` made for columns alone, as long as it lives."""


class Columns(NamedTuple):
    """The first columns (`offsets`) that tensors have in one contiguous matrix of so many rows and such a width."""

    rows: int
    width: int
    offsets: tuple[int, ...]

    def make(self, likes: Sequence[Tensor], device: torch.device | str | None = None) -> list[Tensor]:
        """Uninitialised tensors that lie in another matrix as these tensors do in their own."""
        first = likes[0]
        matrix = torch.empty(self.rows * self.width, dtype=first.dtype, device=device or first.device)
        if not matrix.is_meta:
            _MADE.add(matrix.untyped_storage())
        return [matrix.as_strided(x.shape, x.stride(), at) for x, at in zip(likes, self.offsets, strict=True)]


def columns_of(tensors: Sequence[Tensor]) -> Columns | None:
    """Return how tensors `[*, H, C]` are columns of one matrix, heads side by side; None if they are not.

    The rows may have any number of axes, in any order. All tensors have the same rows, and each its own columns.
    """
    first = tensors[0]
    if first.is_contiguous():  # what most calls have
        return None
    shape, stride, storage = tuple(first.shape[:-2]), first.stride()[:-2], first.untyped_storage().data_ptr()
    steps = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1)
    if not steps:
        return None
    width, rows = steps[0][0], 1
    for step, size in steps:
        if step != width * rows:
            return None
        rows *= size
    offsets: list[int] = []
    for x in tensors:
        heads, channels = x.shape[-2:]
        at = int(x.storage_offset()) % max(width, 1)
        if tuple(x.shape[:-2]) != shape or x.stride() != (*stride, channels, 1) or x.untyped_storage().data_ptr() != storage:
            return None
        if at + heads * channels > width or at * x.element_size() % _BYTES:
            return None
        offsets.append(at)
    ends = sorted((at, at + math.prod(x.shape[-2:])) for at, x in zip(offsets, tensors, strict=True))
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    return Columns(rows, width, tuple(offsets)) if apart and width * first.element_size() % _BYTES == 0 else None


def join(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """A matrix `[rows, width]` from gradients of its columns, side by side; None stands for zeros, and one is not None.

    Those that lie in one already, as `Columns.make` makes them, stay there.
    """
    ends = list(itertools.accumulate(sizes))
    starts, width = [0, *ends[:-1]], ends[-1]
    matrix = _matrix_of(parts, starts, width)
    if matrix is None:
        some = next(x for x in parts if x is not None)
        pairs = zip(parts, sizes, strict=True)
        return torch.cat([some.new_zeros(some.shape[0], size) if x is None else x for x, size in pairs], -1)
    for x, start, end in zip(parts, starts, ends, strict=True):
        if x is None:
            matrix[:, start:end] = 0
        elif not _lies_in(matrix, x, start):
            matrix[:, start:end] = x
    return matrix


def _matrix_of(parts: Sequence[Tensor | None], starts: Sequence[int], width: int) -> Tensor | None:
    """The matrix in which the first part lies that is there, if it was made for columns and is as large as its memory."""
    x, start = next((x, start) for x, start in zip(parts, starts, strict=True) if x is not None)
    rows = x.shape[0]
    if not guards.only_computes() or x.untyped_storage() not in _MADE:
        return None
    if x.untyped_storage().nbytes() != rows * width * x.element_size():
        return None
    matrix = x.as_strided((rows, width), (width, 1), 0)
    return matrix if _lies_in(matrix, x, start) else None


def _lies_in(matrix: Tensor, x: Tensor, start: int) -> bool:
    """Return whether x is columns of a matrix, from `start` on."""
    return x.stride() == matrix.stride() and x.data_ptr() == matrix.data_ptr() + start * x.element_size()
