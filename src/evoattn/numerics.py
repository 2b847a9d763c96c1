"""Numerical conventions that every backend shares: the compute dtype and the row shift of the saved statistic.

**The row shift.** A row of an alignment that is padding carries mask_bias = -1e9 at every key. Its scores are then near
-1e9, where float32 numbers are 64 apart: the scores lose all their digits, and `LSE = -1e9 + log(sum)` loses the sum.
Softmax does not change when a constant is added to a row, so every backend measures scores from the row's largest mask bias

    shift[b,n] = max over attended k of mask_bias[b,n,k]     (0 where that is not finite)

and returns the LSE of the shifted scores. The backward uses the same shift, so P = exp(S - LSE) keeps full precision.
`api` adds the shift back to an LSE that goes to the user.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulate_dtype", "row_bias", "row_shift"]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, statistics and sums: float64 for float64, float32 for all narrower ones."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _masked_bias(mask: Tensor | None, mask_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask_bias is None and mask is None:
        return None
    if mask_bias is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device)  # type: ignore[union-attr]
    else:
        bias = mask_bias.to(dtype)
    return bias if mask is None else torch.where(mask, bias, -torch.inf)


def _shift(bias: Tensor) -> Tensor:
    if bias.shape[-1] == 0:
        return bias.new_zeros(bias.shape[:-1])
    largest = bias.amax(-1)
    return torch.where(largest.isfinite(), largest, 0)


def row_shift(mask: Tensor | None, mask_bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The constant that each row's scores are measured from, `[b|1, n|1]`; no gradient flows through it."""
    bias = _masked_bias(mask, mask_bias.detach(), dtype)
    return _shift(bias)  # type: ignore[arg-type]


def row_bias(mask: Tensor | None, mask_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """mask and mask_bias as one additive bias `[b|1, n|1, k]`, shifted, or None if neither is given.

    It is -inf where a key is not attended.
    """
    bias = _masked_bias(mask, mask_bias, dtype)
    if bias is None or mask_bias is None:
        return bias
    return bias - _shift(bias).unsqueeze(-1)
