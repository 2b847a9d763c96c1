"""Checks that the pair operators share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_out"]


def check_out(out: Tensor, x: Tensor, dtype: torch.dtype, *, records: bool) -> None:
    """Raise TypeError or ValueError unless a result can be written into `out`.

    Args:
        out: a tensor of the caller's.
        x: the input, whose shape and device the result has.
        dtype: of the result.
        records: whether autograd would record the call.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    if out.shape != x.shape or out.dtype != dtype or out.device != x.device:
        wanted, got = (f"{list(y.shape)} of {kind} on {y.device}" for y, kind in ((x, dtype), (out, out.dtype)))
        raise ValueError(f"out must be {wanted}, as the result is, got {got}")
    if records or (torch.is_grad_enabled() and out.requires_grad):
        raise ValueError("out takes no result with a gradient: call under torch.no_grad()")
