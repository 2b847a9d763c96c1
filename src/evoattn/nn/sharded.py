"""A triangle layer whose pair representation z is a DTensor, split over processes by rows or by columns.

The rows of the attention are rows of z around the starting node, and columns of z around the ending node. A process computes
whole rows of the attention. So if z is split along the other axis, one all-to-all exchanges rows and columns before the
attention, and another one after it. Every row needs the pair bias of all queries, so both nodes gather it. It has H channels, z
has C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from evoattn.call.sharded import is_distributed
from evoattn.numerics import accumulate_dtype
from evoattn.run.once import once_differentiable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Split", "update_of"]

Compute = Callable[[Tensor, Tensor | None, Callable[[Tensor], Tensor]], Tensor]
"""Takes the rows that a process holds, their mask, and a function that gathers the pair bias. Returns the update."""


@dataclasses.dataclass(frozen=True)
class Split:
    """How rows or columns of a pair representation lie on the processes of a group.

    Args:
        group: the processes.
        axis: the axis that is split: -3 for rows, -2 for columns.
        length: of this axis on all processes together.
    """

    group: Any
    axis: int
    length: int

    def sizes(self, length: int) -> list[int]:
        """The length that each process holds of a split axis of `length`."""
        processes = dist.get_world_size(self.group)
        most = -(-length // processes)
        return [max(0, min(most, length - rank * most)) for rank in range(processes)]

    def exchange(self, x: Tensor, here: int, there: int, length: int) -> Tensor:
        """Exchange x, split along axis `here` of `length` in all, for the same tensor split along axis `there`."""
        of_here, of_there = self.sizes(length), self.sizes(x.shape[there])
        sent = [part.reshape(-1) for part in x.split(of_there, there)]
        mine = list(x.shape)
        mine[there] = of_there[dist.get_rank(self.group)]
        shapes = [[size if axis - x.ndim == here else whole for axis, whole in enumerate(mine)] for size in of_here]
        counts = [torch.Size(shape).numel() for shape in shapes]
        received = x.new_empty(sum(counts))
        dist.all_to_all_single(received, torch.cat(sent), counts, [part.numel() for part in sent], self.group)
        return torch.cat([part.view(shape) for part, shape in zip(received.split(counts), shapes, strict=True)], here)

    def gather(self, bias: Tensor) -> Tensor:
        """Gather the pair bias `[*, L, K, H]` of all rows; `bias` has those of this process."""
        made: Tensor = _Gather.apply(bias, self)  # type: ignore[no-untyped-call]
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


class _Gather(torch.autograd.Function):
    """Gather rows of all processes. Each gets back the gradient of its own, summed over processes in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split, ctx.rows = split, x.shape[-3]
        most = split.sizes(split.length)[0]
        rows = _padded(x.movedim(-3, 0), most)
        made = rows.new_empty(most * dist.get_world_size(split.group), *rows.shape[1:])
        dist.all_gather_into_tensor(made, rows, split.group)
        return made[: split.length].movedim(0, -3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        processes = dist.get_world_size(ctx.split.group)
        most = ctx.split.sizes(ctx.split.length)[0]
        sent = _padded(dx.movedim(-3, 0), most * processes)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.split.group)
        summed = received.unflatten(0, (processes, most)).sum(0, dtype=accumulate_dtype(dx.dtype)).to(dx.dtype)
        return summed[: ctx.rows].movedim(0, -3), None


def _padded(x: Tensor, rows: int) -> Tensor:
    """x with zeros below it, up to so many `rows`, contiguous."""
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def update_of(
    layer: nn.Module,
    z: DTensor,
    mask: DTensor | None,
    *,
    rows: int,
    compute: Compute,
    finish: Callable[[Tensor, Tensor, Split | None], Tensor],
    **options: Any,
) -> Tensor:
    """Run a layer on a pair representation that is a DTensor. The output is a DTensor with the same placements.

    Args:
        layer: the layer. If its parameters are plain tensors, their gradients come from this process's rows alone. If they are
            DTensors on the mesh of z, their gradients come from all rows.
        z: `[*, I, J, C]`. One dimension of its mesh may split I or J. The others may split leading axes.
        mask: `[*, I, J]`, on the mesh of z.
        rows: the axis of z that holds the rows of the attention, -3 or -2.
        compute: makes the update of the rows that a process holds, if they are split along `rows`.
        finish: makes the output from this process's part of z, the update and the split.
        options: further arguments of the layer's call.

    Raises:
        TypeError: mask is a plain tensor.
        ValueError: z has other placements, or mask or a parameter is on another mesh.
    """
    from torch.distributed.tensor import DTensor

    split = _split(z)
    of_mesh = {name: x for name, x in layer.named_parameters() if is_distributed(x)}
    if of_mesh:
        whole = {name: _whole(name, x, z) for name, x in of_mesh.items()}
        made: Tensor = functional_call(layer, whole, (z, mask), options)
        return made
    x, held = z.to_local(), None if mask is None else _mask_of(mask, z)
    if split is None:
        update = compute(x, held, lambda bias: bias)
    elif split.axis == rows:
        update = compute(x, held, split.gather)
    else:
        turned = Split(split.group, rows, z.shape[rows])
        update = compute(
            _exchanged(x, split, rows),
            None if held is None else _exchanged(held[..., None], split, rows)[..., 0],
            turned.gather,
        )
        update = _exchanged(update, turned, split.axis)
    stride = torch.empty(z.shape, device="meta").stride()
    return DTensor.from_local(
        finish(x, update, split), z.device_mesh, z.placements, run_check=False, shape=z.shape, stride=stride
    )


def _exchanged(x: Tensor, split: Split, to: int) -> Tensor:
    made: Tensor = _Exchange.apply(x, split, split.axis, to, split.length)  # type: ignore[no-untyped-call]
    return made


def _split(z: DTensor) -> Split | None:
    """The split of z along rows or columns, or None if each process has all rows and columns."""
    from torch.distributed.tensor import Replicate, Shard

    found = None
    for dimension, placement in enumerate(z.placements):
        axis = placement.dim % z.ndim - z.ndim if type(placement) is Shard else None
        if type(placement) is Replicate or (axis is not None and axis < -3):
            continue
        if axis not in (-3, -2) or found is not None:
            raise ValueError(
                f"z must be split by rows or by columns, over one dimension of its mesh, and besides along leading axes alone; "
                f"got {z.placements}"
            )
        found = Split(z.device_mesh.get_group(dimension), axis, z.shape[axis])
    return found


def _whole(name: str, x: Any, z: DTensor) -> Tensor:
    """The whole parameter, on each process. Its gradient is summed over the processes that hold different parts of z."""
    from torch.distributed.tensor import Partial, Replicate

    if x.device_mesh != z.device_mesh:
        raise ValueError(f"{name} must be on the device mesh of z, {z.device_mesh}, got {x.device_mesh}")
    lies = [Replicate() if type(placement) is Replicate else Partial() for placement in z.placements]
    made: Tensor = x.redistribute(placements=[Replicate()] * len(lies)).to_local(grad_placements=lies)
    return made


def _mask_of(mask: Any, z: DTensor) -> Tensor:
    """The part of the mask for this process's part of z, in the dtype of z and expanded to its shape without channels."""
    from torch.distributed.tensor import Replicate, Shard

    if not is_distributed(mask):
        raise TypeError(
            "mask must be a DTensor, as z is, got a plain tensor; torch.distributed.tensor.distribute_tensor makes one of it"
        )
    if mask.device_mesh != z.device_mesh:
        raise ValueError(f"mask must be on the device mesh of z, {z.device_mesh}, got {mask.device_mesh}")
    axes = [placement.dim % z.ndim if type(placement) is Shard else None for placement in z.placements]
    lies = [Replicate() if axis is None or mask.shape[axis] == 1 else Shard(axis) for axis in axes]
    held: Tensor = mask.redistribute(placements=lies).to_local()
    return held.to(z.dtype).expand(z.to_local().shape[:-1])
