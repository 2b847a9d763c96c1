"""Calls of DTensors, and pair representations that lie on several processes, split along one axis.

Each process runs the call of the queries that it holds, and gathers only what must be complete. The placements of q decide. If
a dimension of the mesh splits one of q's leading axes, its heads or its queries, tensors with that axis are split alike. Others
are replicated, and their gradients are sums over the processes. That serves rows or batches on several devices (dynamic axial
parallelism), heads (tensor parallelism) and queries. If q is replicated, or is split along its channels or as a sum, all is
replicated. Other tensors are redistributed. Each gradient comes back with its tensor's placements; that of a sum is replicated.

All processes of a group have to make the same calls in the same order.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from evoattn.core.inputs import Inputs
from evoattn.core.numerics import accumulate_dtype
from evoattn.dispatch.autograd import once_differentiable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_distributed(x: Any) -> bool:
    """Return whether a value is a DTensor, without importing DTensor, which takes a second: before that nothing is one."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def attend(attention: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs, layout: str) -> tuple[Tensor, ...]:
    """Return o, and lse if `attention` makes it of one process's tensors, as DTensors, of valid arguments.

    TypeError: some are DTensors, and some are not. ValueError: they are on different meshes.
    """
    # What this process holds of the arguments once all are split as q is. All processes have to ask for it together.
    local = [
        None if x is None else x.redistribute(placements=placements).to_local(grad_placements=grad_placements)
        for x, placements, grad_placements in _places(inputs, layout)
    ]
    outputs = attention(Inputs._make(local))
    q: Any = inputs.q
    split, sizes = _split(q), q.shape
    o = _distributed(outputs[0], q, split, (*sizes[:-1], inputs.v.shape[-1]))
    if len(outputs) == 1:
        return (o,)
    heads, length = _heads_and_length(len(sizes), layout)
    lse_axes = {heads: len(sizes) - 3, length: len(sizes) - 2}
    axes = [None if axis is None else lse_axes.get(axis, axis) for axis in split]
    return o, _distributed(outputs[1], q, axes, (*sizes[:-3], sizes[heads], sizes[length]))


def outlines(inputs: Inputs, layout: str) -> Inputs:
    """Contiguous, uninitialised tensors of the shapes that this process would hold. One process may call this alone."""
    from torch.distributed.tensor import empty

    def outline(x: Any, placements: list[Placement]) -> Any:
        local = empty(x.shape, dtype=x.dtype, device_mesh=x.device_mesh, placements=placements).to_local()
        return local.requires_grad_(x.requires_grad)

    return Inputs._make([None if x is None else outline(x, placements) for x, placements, _ in _places(inputs, layout)])


def _places(inputs: Inputs, layout: str) -> Iterator[tuple[Any, list[Placement], list[Placement]]]:
    """Each argument, the placements that it has to have, and those of the gradient of its local part."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = next(x.device_mesh for x in inputs if isinstance(x, DTensor))
    for name, x in inputs._asdict().items():
        if x is not None and not isinstance(x, DTensor):
            raise TypeError(
                f"{name} must be a DTensor, as others are, got a plain tensor; "
                "torch.distributed.tensor.distribute_tensor makes one of it"
            )
        if x is not None and x.device_mesh != mesh:
            raise ValueError(f"{name} must be on the device mesh of q, {mesh}, got {x.device_mesh}")
    q: Any = inputs.q
    split = _split(q)
    for name, x in inputs._asdict().items():
        own = [None if x is None or axis is None else _own_axis(name, x, axis, q, layout) for axis in split]
        grad_placements: list[Placement] = [
            Replicate() if axis is None else Partial() if mine is None else Shard(mine)
            for axis, mine in zip(split, own, strict=True)
        ]
        yield x, _placements(own), grad_placements


def _split(q: DTensor) -> list[int | None]:
    """For each dimension of the mesh the axis of q that it splits, if the call can be split along it."""
    from torch.distributed.tensor import Shard

    axes = [p.dim % q.ndim if type(p) is Shard else None for p in q.placements]
    return [None if axis == q.ndim - 1 else axis for axis in axes]


def _distributed(x: Tensor, q: DTensor, axes: list[int | None], shape: tuple[int, ...]) -> DTensor:
    """An output of this shape on q's mesh, of which the process holds x: as much as others, more, or nothing."""
    from torch.distributed.tensor import DTensor

    sizes: dict[str, Any] = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(x, q.device_mesh, _placements(axes), run_check=False, **sizes)


def _placements(axes: list[int | None]) -> list[Placement]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if axis is None else Shard(axis) for axis in axes]


def _heads_and_length(ndim: int, layout: str) -> tuple[int, int]:
    """The axes of q's heads and queries."""
    return (ndim - 2, ndim - 3) if layout == "bnlhd" else (ndim - 3, ndim - 2)


def _own_axis(name: str, x: Tensor, axis: int, q: Tensor, layout: str) -> int | None:
    """The axis of a tensor that runs along an axis of q; None where there is none, or x is the same all along it."""
    heads, length = _heads_and_length(q.ndim, layout)
    if name == "pair_bias":  # [*, N, H, Lq, Lk]
        own = x.ndim - q.ndim + {heads: q.ndim - 3, length: q.ndim - 2}.get(axis, axis)
    elif name in ("mask", "mask_bias"):  # [*, N, Lk] or [*, N, 1, 1, Lk]
        units = 2 if x.ndim > max(2, q.ndim - 2) else 0
        own = -1 if axis in (heads, length) else x.ndim - units - (q.ndim - 2) + axis
    else:
        own = -1 if axis == length and name in ("k", "v") else axis
    return own if own >= 0 and x.shape[own] == q.shape[axis] else None


@dataclasses.dataclass(frozen=True)
class Split:
    """The split of rows or columns of a pair representation among the processes of a group.

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
        """The part of a full tensor that this process holds, as a view."""
        sizes = self.sizes(x.shape[axis])
        return x.narrow(axis, sum(sizes[: self.rank]), sizes[self.rank])

    def turned(self, x: Tensor) -> Tensor:
        """Exchange x `[*, I, J, C]`, of which this process holds rows, for columns, or the other way round."""
        here, there = self.axis, -5 - self.axis
        width = x.shape[there]
        return _step(x, lambda x: self.exchange(x, here, there, self.length), lambda dx: self.exchange(dx, there, here, width))

    def exchange(self, x: Tensor, here: int, there: int, length: int) -> Tensor:
        """Exchange x, split along axis `here` of `length` in all, for the same tensor split along axis `there`."""
        sizes_here, sizes_there = self.sizes(length), self.sizes(x.shape[there])
        mine = list(x.shape)
        mine[there] = sizes_there[self.rank]
        shapes = [[part if axis - x.ndim == here else size for axis, size in enumerate(mine)] for part in sizes_here]
        counts = [math.prod(shape) for shape in shapes]
        parts = x.split(sizes_there, there)
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
        held = x.shape[axis]
        return _step(x, lambda x: self._gathered(x, axis), lambda dx: self._summed(dx, axis, held))

    def enter(self, x: Tensor, axis: int) -> Tensor:
        """Take this process's part of a tensor that all processes have. The gradient is that of all parts, on each."""
        # A copy, so that nothing keeps the full tensor.
        return _step(x, lambda x: self.held(x, axis).clone(), lambda dx: self._gathered(dx, axis))

    def leave(self, x: Tensor, axis: int) -> Tensor:
        """Gather parts for all processes. These then compute the same, so each has the full gradient already."""
        return _step(x, lambda x: self._gathered(x, axis), lambda dx: self.held(dx, axis))

    def _gathered(self, x: Tensor, axis: int) -> Tensor:
        """The full tensor of which each process holds a part along an axis of the split's length."""
        most = self.sizes(self.length)[0]
        rows = _padded(x.movedim(axis, 0), most)
        gathered = rows.new_empty(most * dist.get_world_size(self.group), *rows.shape[1:])
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since torch 2.13
        gather(gathered, rows, self.group)
        return gathered[: self.length].movedim(0, axis)

    def _summed(self, x: Tensor, axis: int, held: int) -> Tensor:
        """This process's part of the sum of all processes' full tensors, added in a fixed order."""
        processes = dist.get_world_size(self.group)
        most = self.sizes(self.length)[0]
        sent = _padded(x.movedim(axis, 0), most * processes)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        summed: Tensor = received.unflatten(0, (processes, most)).sum(0, dtype=accumulate_dtype(x.dtype)).to(x.dtype)
        return summed[:held].movedim(0, axis)

    def same(self, x: Tensor) -> Tensor:
        """Copy the first process's x to all processes of the group."""
        dist.broadcast(x, dist.get_global_rank(self.group, 0), self.group)
        return x


def _step(x: Tensor, step: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`step(x)`, with `back` for the gradient."""
    result: Tensor = _Step.apply(x, step, back)  # type: ignore[no-untyped-call]
    return result


class _Step(torch.autograd.Function):
    """A linear step between processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return step(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        back: Callable[[Tensor], Tensor] = ctx.back
        return back(dx), None, None


def _is_first(shape: Sequence[int], axis: int) -> bool:
    """Return whether this axis is the outermost in memory, so that parts along it follow one another."""
    return math.prod(shape[:axis]) == 1


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """All elements of parts, one part after the other."""
    packed = parts[0].new_empty(sum(part.numel() for part in parts))
    for part, place in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
        place.view(part.shape).copy_(part)
    return packed


def _padded(x: Tensor, rows: int) -> Tensor:
    """x with zeros below it, up to so many `rows`, contiguous."""
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
