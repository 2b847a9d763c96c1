"""Layers whose pair representation z is a DTensor, split over processes by rows or by columns.

One rule holds for all layers. A process computes the part of the output that it holds of z. Plain parameters get the gradient
from this part, and their gradients add up over the processes. A DTensor that is whole on every process is computed, and
differentiated, on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evoattn.dispatch.distributed import Split, is_distributed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Run = Callable[[Tensor, "Tensor | None", "Split | None"], Tensor]
"""Returns the output for this process's part of z, its mask, and the split, which is None if it has all rows and columns."""


def run_split(layer: nn.Module, z: Tensor, mask: Tensor | None, run: Run) -> Tensor:
    """Run a layer on a pair representation `[*, I, J, C]` that is a DTensor. The output is a DTensor with the same placements.

    One dimension of the mesh of z may split I or J. The others may split leading axes. Plain parameters get gradients from this
    process's part alone, and DTensors on the mesh of z from all parts. Other arguments raise TypeError or ValueError.
    """
    check_alike("mask", mask, "z", z)
    split = split_of(z)
    if layer.training and vars(layer).get("dropout"):
        check_dropout(z)
    part = None if mask is None else _mask_of(mask, z)
    return like(with_full_parameters(layer, z, lambda: run(local(z), part, split)), z)


def run_local(layer: nn.Module, x: Tensor, mask: Tensor | None, run: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """Run a layer that looks at one entry of x at a time on the parts of a DTensor x `[*, C]`. See `run_split`."""
    from torch.distributed.tensor import Replicate, Shard

    check_alike("mask", mask, "x", x)
    here: Any = x
    for placement in here.placements:
        if type(placement) is not Replicate and (type(placement) is not Shard or placement.dim % x.ndim == x.ndim - 1):
            raise ValueError(f"x must be split along other axes than the last, got {here.placements}")
    part = None if mask is None else _mask_of(mask, x)
    return like(with_full_parameters(layer, x, lambda: run(local(x), part)), x)


def check_dropout(z: Any) -> None:
    """Raise ValueError if several processes hold the same part of z: they would draw masks of their own."""
    from torch.distributed.tensor import Replicate

    if any(type(x) is Replicate and z.device_mesh.size(dimension) > 1 for dimension, x in enumerate(z.placements)):
        raise ValueError(f"with dropout z must be split over all dimensions of its mesh, got {z.placements}")


def split_of(z: Any) -> Split | None:
    """The split of z along rows or columns, or None if each process has all rows and columns."""
    from torch.distributed.tensor import Replicate, Shard

    split = None
    for dimension, placement in enumerate(z.placements):
        axis = placement.dim % z.ndim - z.ndim if type(placement) is Shard else None
        if type(placement) is Replicate or (axis is not None and axis < -3):
            continue
        if axis not in (-3, -2) or split is not None:
            raise ValueError(
                f"z must be split by rows or by columns, over one dimension of its mesh, and besides along leading axes alone; "
                f"got {z.placements}"
            )
        split = Split(z.device_mesh.get_group(dimension), axis, z.shape[axis])
    return split


def queries_of(z: Any, *, split: bool = True) -> list[Placement]:
    """Placements of a tensor `[*, Q, C]` that is split as the rows or columns of z are, or is not split with `split=False`."""
    from torch.distributed.tensor import Replicate, Shard

    layout: list[Placement] = []
    for placement in z.placements:
        axis = placement.dim % z.ndim if type(placement) is Shard else None
        if axis is not None and axis >= z.ndim - 3:
            axis = z.ndim - 3 if split else None
        layout.append(Replicate() if axis is None else Shard(axis))
    return layout


def check_alike(name: str, x: Tensor | None, other: str, z: Any) -> None:
    """Raise TypeError or ValueError unless x is None, or x and z are DTensors on one mesh."""
    if x is None:
        return
    if not is_distributed(z):
        raise TypeError(f"{other} must be a DTensor, as {name} is, got a plain tensor")
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        raise TypeError(
            f"{name} must be a DTensor, as {other} is, got a plain tensor; torch.distributed.tensor.distribute_tensor makes "
            "one of it"
        )
    if mesh != z.device_mesh:
        raise ValueError(f"{name} must be on the device mesh of {other}, {z.device_mesh}, got {mesh}")


def local(x: Any) -> Tensor:
    """The part of a DTensor that this process holds."""
    return x.to_local()  # type: ignore[no-any-return]


def like(part: Tensor, x: Any, placements: Any = None) -> Tensor:
    """A DTensor with the shape, mesh and placements of x, of which this process holds `part`."""
    return from_parts(part, x.device_mesh, x.placements if placements is None else placements, x.shape)


def from_parts(part: Tensor, mesh: Any, placements: Any, shape: torch.Size) -> Tensor:
    """A contiguous DTensor of a shape, of which this process holds `part`."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def part_of(x: Any, layout: list[Placement]) -> Tensor:
    """The part of a DTensor that this process holds after a redistribution."""
    return local(x.redistribute(placements=layout))


def with_full_parameters(layer: nn.Module, z: Any, run: Callable[[], Any]) -> Any:
    """Return what a function returns that computes a layer, while each parameter that is a DTensor is whole on this process.

    Its gradient is summed over the processes that hold other parts of z.
    """
    places = [(own, name, x) for own in _parameters(layer) for name, x in own.items() if is_distributed(x)]
    if not places:
        return run()
    full = {id(x): _full_parameter(name, x, z) for name, x in layer.named_parameters() if is_distributed(x)}
    try:
        for own, name, x in places:
            own[name] = full[id(x)]
        return run()
    finally:
        for own, name, x in places:
            own[name] = x


def _parameters(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The parameters of each module inside, whose full names take torch three times as long. A module may be there twice."""
    yield module._parameters
    for child in module._modules.values():
        if child is not None:
            yield from _parameters(child)


def _full_parameter(name: str, x: Any, z: DTensor) -> Tensor:
    from torch.distributed.tensor import Partial, Replicate

    check_alike(name, x, "z", z)
    layout = [Replicate() if type(placement) is Replicate else Partial() for placement in z.placements]
    return x.redistribute(placements=[Replicate()] * len(layout)).to_local(grad_placements=layout)  # type: ignore[no-any-return]


def _mask_of(mask: Any, z: Any) -> Tensor:
    """The part of the mask for this process's part of z, in the dtype of z and expanded to its shape without channels."""
    from torch.distributed.tensor import Replicate, Shard

    axes = [placement.dim % z.ndim if type(placement) is Shard else None for placement in z.placements]
    layout: list[Placement] = [Replicate() if axis is None or mask.shape[axis] == 1 else Shard(axis) for axis in axes]
    return part_of(mask, layout).to(z.dtype).expand(local(z).shape[:-1])
