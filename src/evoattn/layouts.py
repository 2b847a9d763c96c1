"""Memory layouts, and how results lie in memory: their shapes, dtypes and strides are known here and nowhere else.

Every tensor has the canonical axes `[b,n,h,l,d]`; the layout says in which order they lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.inputs import Inputs, Outputs
from evoattn.numerics import accumulate_dtype

__all__ = ["LAYOUTS", "as_planned", "empty", "empty_gradients", "empty_outputs", "to_canonical", "to_user"]

LAYOUTS = ("bnlhd", "bnhld")


def to_canonical(x: Tensor, layout: str) -> Tensor:
    """View `[*, n, l, h, d]` or `[*, n, h, l, d]` as `[*, n, h, l, d]`."""
    return x.transpose(-2, -3) if layout == "bnlhd" else x


def to_user(x: Tensor, layout: str) -> Tensor:
    """The inverse of `to_canonical`, which is its own inverse."""
    return to_canonical(x, layout)


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
    wanted = zip((*inputs.qkv, inputs.gate), (*needs[:3], needs[5]), strict=True)
    return tuple([empty(x.shape, layout, x, device) if need and x is not None else None for x, need in wanted])


def as_planned(planned: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor | None]], list[Any]]:
    """What views tensors in the shapes and strides of others: both start alike in memory and have the same elements."""
    looks = [None if x is None else (x.shape, x.stride()) for x in planned]

    def view(given: Sequence[Tensor | None]) -> list[Any]:
        pairs = zip(given, looks, strict=True)
        return [x if x is None or look is None or (x.shape, x.stride()) == look else x.as_strided(*look) for x, look in pairs]

    return view
