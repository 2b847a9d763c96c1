"""The arguments of the pair operators as values: parameters and settings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MultiplicationWeights(NamedTuple):
    """The parameters of a triangle multiplication. A norm's weight that is None is 1, a bias that is None is 0.

    Shapes, for C channels of z and D hidden channels: norms `[C]` and `[D]`; `p_in`, `g_in` `[2 D, C]`; `p_out` `[C, D]`;
    `g_out` `[C, C]`; each bias has the first size of its weight. `p_in[:D]` and `g_in[:D]` make the half a, the others b.
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

    def product_dtype(self) -> torch.dtype:
        """The dtype of the products. No property: torch.compile of torch 2.7 cannot read one of a named tuple."""
        return self.p_in_weight.dtype


class MultiplicationOptions(NamedTuple):
    """Settings of a triangle multiplication; with `residual` z is added to the update.

    With `outgoing` edges (i, k) and (j, k) are multiplied, else (k, i) and (k, j).
    """

    outgoing: bool
    eps: float
    residual: bool


class TransitionWeights(NamedTuple):
    """The parameters of a transition. A norm's weight that is None is 1, a bias that is None is 0.

    Shapes, for C channels of x and H hidden channels: norm `[C]`; `a` and `b` `[H, C]`; `out` `[C, H]`; each bias has the first
    size of its weight. Without `b_weight` the activation is ReLU.
    """

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    a_weight: Tensor
    a_bias: Tensor | None
    b_weight: Tensor | None
    b_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None

    def product_dtype(self) -> torch.dtype:
        """The dtype of the products. No property: torch.compile of torch 2.7 cannot read one of a named tuple."""
        return self.a_weight.dtype

    @property
    def hidden(self) -> int:
        """The number of hidden channels."""
        return self.a_weight.shape[0]


class TransitionOptions(NamedTuple):
    """Settings of a transition; with `residual` x is added to the update."""

    eps: float
    residual: bool
