"""The arguments of triangle multiplication as values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Options", "Weights"]


class Weights(NamedTuple):
    """The parameters. A norm's weight that is None is 1, a bias that is None is 0.

    Shapes, for C channels of z and D hidden channels: norms `[C]` and `[D]`; `p_in`, `g_in` `[2 D, C]`; `p_out` `[C, D]`;
    `g_out` `[C, C]`; each bias has the first size of its weight. Rows 0 to D of `p_in` and `g_in` make the half
    a, the others b.
    """

    norm_in_weight: Tensor | None
    norm_in_bias: Tensor | None
    p_in_weight: Tensor
    p_in_bias: Tensor | None
    g_in_weight: Tensor
    g_in_bias: Tensor | None
    norm_out_weight: Tensor | None
    norm_out_bias: Tensor | None
    p_out_weight: Tensor
    p_out_bias: Tensor | None
    g_out_weight: Tensor
    g_out_bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products."""
        return self.p_in_weight.dtype


class Options(NamedTuple):
    """Settings of a triangle multiplication.

    Args:
        outgoing: whether edges (i, k) and (j, k) are multiplied, or (k, i) and (k, j).
        eps: is added to the variance in both norms.
        residual: whether z is added to the update.
    """

    outgoing: bool
    eps: float
    residual: bool
