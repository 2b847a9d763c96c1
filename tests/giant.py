"""Tensors of few elements that lie further apart than 32 bits count."""

import torch
from torch import Tensor


def giant(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Few elements spread over more than 2^31: random where they are read, NaN all around."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    assert extent > 2**31
    x = torch.full((extent,), torch.nan, dtype=dtype, device="cuda").as_strided(shape, stride)
    return x.copy_(torch.randn(shape, device="cuda"))
