"""What the references of pair operators share."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from evoattn.numerics import accumulate_dtype

__all__ = ["norm"]


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """A layer norm over the last axis, in float32 or wider."""
    wide = accumulate_dtype(x.dtype)
    weight, bias = (None if y is None else y.to(wide) for y in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
