"""Batched products of squares, which are the halves of triangle multiplication by channel."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["multiply", "multiply_backward", "side"]

_SIDES = 8
"""The sides of the squares are multiples of this: batched products of other sides take up to five times as long."""

_BMM_WIDENS = hasattr(torch.ops.aten.bmm, "dtype")
"""True if torch multiplies 16 bits into float32, as it does from 2.8 on."""


def side(length: int) -> int:
    """The side of the squares for so many residues."""
    return length + -length % _SIDES


def multiply(a: Tensor, b: Tensor, *, outgoing: bool) -> Tensor:
    """t[i,j] = sum over k of a[i,k] b[j,k] (outgoing) or a[k,i] b[k,j]. In float32 for float16, which cannot hold the sums."""
    a, b = (a, b.mT) if outgoing else (a.mT, b)
    if a.dtype != torch.float16:
        return torch.bmm(a, b)
    has_kernel = a.is_cuda and _BMM_WIDENS
    return torch.bmm(a, b, out_dtype=torch.float32) if has_kernel else torch.bmm(a.float(), b.float())


def multiply_backward(dt: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, *, outgoing: bool) -> None:
    """Write the gradients of a and b."""
    if outgoing:
        torch.bmm(dt, b, out=da)
        torch.bmm(dt.mT, a, out=db)
    else:
        torch.bmm(b, dt.mT, out=da)
        torch.bmm(a, dt, out=db)
