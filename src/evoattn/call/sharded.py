"""Calls of DTensors: each process runs the call of the queries that it holds, and gathers nothing that need not be whole.

q decides. Along a dimension of the mesh that splits one of its leading axes, its heads or its queries, what has that axis too
is split alike; what has not is whole on every process, and its gradient a sum over them. That serves rows or batches on several
devices (dynamic axial parallelism), heads (tensor parallelism) and queries. Where q is whole, or is split along its channels or
as a sum, all is whole. What lies otherwise is redistributed, and every gradient comes back as its tensor lies; that of a sum is
whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evoattn.inputs import Inputs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["attend", "is_distributed", "is_sharded", "outlines"]


def is_sharded(inputs: Inputs) -> bool:
    """Whether a DTensor is among them."""
    return any(is_distributed(x) for x in inputs)


def is_distributed(x: Any) -> bool:
    """Whether a value is a DTensor. Nobody has one who has not imported them, which takes a second."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def attend(attention: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs, layout: str) -> tuple[Tensor, ...]:
    """o, and lse if it is made, as DTensors, of valid arguments.

    Args:
        attention: what makes o, and lse if that is wanted, of what one process holds of the tensors.
        inputs: of a call, in the user's axes.
        layout: the order of axes in q, k, v, gate and o.

    Raises:
        TypeError: some are DTensors, and some are not.
        ValueError: they are on different meshes.
    """
    made = attention(_local(inputs, layout))
    q: Any = inputs.q
    split, sizes = _split(q), q.shape
    outputs = [_distributed(made[0], q, split, (*sizes[:-1], inputs.v.shape[-1]))]
    if len(made) > 1:
        heads, length = _heads_and_length(len(sizes), layout)
        in_lse = {heads: len(sizes) - 3, length: len(sizes) - 2}
        axes = [None if axis is None else in_lse.get(axis, axis) for axis in split]
        outputs.append(_distributed(made[1], q, axes, (*sizes[:-3], sizes[heads], sizes[length])))
    return tuple(outputs)


def _local(inputs: Inputs, layout: str) -> Inputs:
    """What this process holds of the arguments once all are split as q is. All processes have to ask for it together."""
    return Inputs._make(
        None if x is None else x.redistribute(placements=lies).to_local(grad_placements=of_gradient)
        for x, lies, of_gradient in _places(inputs, layout)
    )


def outlines(inputs: Inputs, layout: str) -> Inputs:
    """Tensors like those that this process would hold, but for what is in them, and contiguous; it may ask for them alone.

    Raises:
        TypeError, ValueError: see `attend`.
    """
    from torch.distributed.tensor import empty

    held: list[Any] = []
    for x, lies, _ in _places(inputs, layout):
        like = None if x is None else empty(x.shape, dtype=x.dtype, device_mesh=x.device_mesh, placements=lies).to_local()
        held.append(like if like is None else like.requires_grad_(x.requires_grad))
    return Inputs._make(held)


def _places(inputs: Inputs, layout: str) -> Iterator[tuple[Any, list[Placement], list[Placement]]]:
    """Each argument, how it has to lie, and how the gradient of what a process holds of it does."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    _check_one_mesh(inputs)
    q: Any = inputs.q
    split = _split(q)
    for name, x in inputs._asdict().items():
        own = [None if x is None or axis is None else _own_axis(name, x, axis, q, layout) for axis in split]
        of_gradient: list[Placement] = [
            Replicate() if axis is None else Partial() if mine is None else Shard(mine)
            for axis, mine in zip(split, own, strict=True)
        ]
        yield x, _placements(own), of_gradient


def _check_one_mesh(inputs: Inputs) -> None:
    from torch.distributed.tensor import DTensor

    mesh = next(x.device_mesh for x in inputs if isinstance(x, DTensor))
    for name, x in inputs._asdict().items():
        if x is None:
            continue
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name} must be a DTensor, as others are, got a plain tensor; "
                "torch.distributed.tensor.distribute_tensor makes one of it"
            )
        if x.device_mesh != mesh:
            raise ValueError(f"{name} must be on the device mesh of q, {mesh}, got {x.device_mesh}")


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
