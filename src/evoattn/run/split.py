"""Tensors that lie on several processes, split along one axis: exchanges between two ways to split, and gathers.

All processes of the group have to make the same calls in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evoattn.numerics import accumulate_dtype
from evoattn.run.once import once_differentiable

__all__ = ["Split"]


@dataclasses.dataclass(frozen=True)
class Split:
    """How rows or columns of a pair representation lie on the processes of a group.

    Each process holds as much as DTensors of a split axis do: the first ones hold ceil(length / processes), the last ones less
    or nothing.

    Args:
        group: the processes.
        axis: the axis that is split: -3 for rows, -2 for columns.
        length: of this axis on all processes together.
    """

    group: Any
    axis: int
    length: int

    @property
    def rank(self) -> int:
        """The place of this process in the group."""
        return dist.get_rank(self.group)

    def sizes(self, length: int) -> list[int]:
        """The length that each process holds of a split axis of `length`."""
        processes = dist.get_world_size(self.group)
        most = -(-length // processes)
        return [max(0, min(most, length - rank * most)) for rank in range(processes)]

    def held(self, x: Tensor, axis: int) -> Tensor:
        """The part that this process holds of a whole tensor that it has, a view."""
        sizes = self.sizes(x.shape[axis])
        return x.narrow(axis, sum(sizes[: self.rank]), sizes[self.rank])

    def turned(self, x: Tensor) -> Tensor:
        """Exchange x `[*, I, J, C]`, of which this process holds rows, for columns, or the other way round."""
        to = -5 - self.axis
        made: Tensor = _Exchange.apply(x, self, self.axis, to, self.length)  # type: ignore[no-untyped-call]
        return made

    def exchange(self, x: Tensor, here: int, there: int, length: int) -> Tensor:
        """Exchange x, split along axis `here` of `length` in all, for the same tensor split along axis `there`."""
        of_here, of_there = self.sizes(length), self.sizes(x.shape[there])
        mine = list(x.shape)
        mine[there] = of_there[self.rank]
        shapes = [[size if axis - x.ndim == here else whole for axis, whole in enumerate(mine)] for size in of_here]
        counts = [math.prod(shape) for shape in shapes]
        parts = x.split(of_there, there)
        received = x.new_empty(sum(counts))
        sent = x.reshape(-1) if _is_first(x.shape, there) else _packed(parts)
        dist.all_to_all_single(received, sent, counts, [part.numel() for part in parts], self.group)
        if _is_first(mine, here):
            mine[here] = length
            return received.view(mine)
        return torch.cat([part.view(shape) for part, shape in zip(received.split(counts), shapes, strict=True)], here)

    def gather(self, x: Tensor, axis: int = -3) -> Tensor:
        """Gather a tensor of which each process holds a part along an axis of this split's length.

        Each process gets back the gradient of its own part, summed over processes.
        """
        made: Tensor = _Gather.apply(x, self, axis)  # type: ignore[no-untyped-call]
        return made

    def enter(self, x: Tensor, axis: int) -> Tensor:
        """Take this process's part of a tensor that all processes have. The gradient is that of all parts, on each."""
        made: Tensor = _Enter.apply(x, self, axis)  # type: ignore[no-untyped-call]
        return made

    def leave(self, x: Tensor, axis: int) -> Tensor:
        """Gather parts for all processes, which then do the same with the whole, so each has the whole's gradient already."""
        made: Tensor = _Leave.apply(x, self, axis)  # type: ignore[no-untyped-call]
        return made

    def same(self, x: Tensor) -> Tensor:
        """Copy the first process's x to all processes of the group."""
        dist.broadcast(x, dist.get_global_rank(self.group, 0), self.group)
        return x


class _Exchange(torch.autograd.Function):
    """`Split.exchange` with a gradient, which the reverse exchange sends back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, here: int, there: int, length: int) -> Tensor:
        ctx.split, ctx.way = split, (there, here, x.shape[there])
        return split.exchange(x, here, there, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.split.exchange(dx, *ctx.way), None, None, None, None


class _Enter(torch.autograd.Function):
    """The part of a process, a copy, so that nothing keeps the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, axis: int) -> Tensor:
        ctx.split, ctx.axis = split, axis
        return split.held(x, axis).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(dx, ctx.split, ctx.axis), None, None


class _Leave(torch.autograd.Function):
    """The whole, of which each process takes back the gradient of its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, axis: int) -> Tensor:
        ctx.split, ctx.axis = split, axis
        return _gathered(x, split, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return ctx.split.held(dx, ctx.axis), None, None


class _Gather(torch.autograd.Function):
    """Gather an axis of all processes. Each gets back the gradient of its own, summed over processes in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, axis: int) -> Tensor:
        ctx.split, ctx.axis, ctx.held = split, axis, x.shape[axis]
        return _gathered(x, split, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        processes = dist.get_world_size(ctx.split.group)
        most = ctx.split.sizes(ctx.split.length)[0]
        sent = _padded(dx.movedim(ctx.axis, 0), most * processes)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.split.group)
        summed = received.unflatten(0, (processes, most)).sum(0, dtype=accumulate_dtype(dx.dtype)).to(dx.dtype)
        return summed[: ctx.held].movedim(0, ctx.axis), None, None


def _gathered(x: Tensor, split: Split, axis: int) -> Tensor:
    """The whole of a tensor of which each process holds a part along an axis of the split's length."""
    most = split.sizes(split.length)[0]
    rows = _padded(x.movedim(axis, 0), most)
    made = rows.new_empty(most * dist.get_world_size(split.group), *rows.shape[1:])
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13
    gather(made, rows, split.group)
    return made[: split.length].movedim(0, axis)


def _is_first(shape: Sequence[int], axis: int) -> bool:
    """Whether no other axis lies before this one in memory, so that parts along it follow one another."""
    return math.prod(shape[:axis]) == 1


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """All elements of parts, one part after the other."""
    made = parts[0].new_empty(sum(part.numel() for part in parts))
    for part, place in zip(parts, made.split([part.numel() for part in parts]), strict=True):
        place.view(part.shape).copy_(part)
    return made


def _padded(x: Tensor, rows: int) -> Tensor:
    """x with zeros below it, up to so many `rows`, contiguous."""
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
