"""Memory layouts. Every tensor has the canonical axes `[b,n,h,l,d]`; the layout says in which order they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "arranged", "empty", "to_canonical", "to_user"]

LAYOUTS = ("bnlhd", "bnhld")


def to_canonical(x: Tensor, layout: str) -> Tensor:
    """View `[*, n, l, h, d]` or `[*, n, h, l, d]` as `[*, n, h, l, d]`."""
    return x.transpose(-2, -3) if layout == "bnlhd" else x


def to_user(x: Tensor, layout: str) -> Tensor:
    """The inverse of `to_canonical`, which is its own inverse."""
    return to_canonical(x, layout)


def empty(shape: Sequence[int], layout: str, like: Tensor) -> Tensor:
    """An uninitialised canonical tensor `[b,n,h,l,d]` that is contiguous in the user's layout."""
    b, n, h, l, d = shape
    stored = (b, n, l, h, d) if layout == "bnlhd" else (b, n, h, l, d)
    return to_canonical(torch.empty(stored, dtype=like.dtype, device=like.device), layout)


def arranged(x: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """A canonical tensor in `dtype`, contiguous in the user's layout."""
    return to_canonical(to_user(x.to(dtype), layout).contiguous(), layout)
