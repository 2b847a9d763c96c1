"""The arguments of the transition as values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Options", "Weights"]


class Weights(NamedTuple):
    """The parameters. A norm's weight that is None is 1, a bias that is None is 0. Without `b_weight` the activation is ReLU.

    Shapes, for C channels of x and H hidden channels: norm `[C]`; `a` and `b` `[H, C]`; `out` `[C, H]`; each bias has the first
    size of its weight.
    """

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    a_weight: Tensor
    a_bias: Tensor | None
    b_weight: Tensor | None
    b_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products."""
        return self.a_weight.dtype

    @property
    def hidden(self) -> int:
        """The number of hidden channels."""
        return self.a_weight.shape[0]


class Options(NamedTuple):
    """Settings of a transition.

    Args:
        eps: is added to the variance in the norm.
        residual: whether x is added to the update.
    """

    eps: float
    residual: bool
