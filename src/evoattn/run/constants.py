"""Tensors full of one value that are only read, kept for later calls: to make one costs a launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["constant"]


def constant(value: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor full of a value. Nobody may write to it. It is not kept if a CUDA graph makes it at each replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full(shape, value, dtype=dtype, device=device)
    return _kept(value, shape, dtype, device)


@functools.lru_cache(maxsize=256)
def _kept(value: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        made = torch.full(shape, value, dtype=dtype, device=device)
    if made.is_cuda:  # other streams may read it next
        torch.cuda.current_stream(device).synchronize()
    return made
