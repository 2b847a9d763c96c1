"""What only the kernels of a call read and write, in one piece of memory: one allocation a call."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Workspace"]

_ALIGNMENT = 256


class Workspace:
    """A plan adds tensors to it, a call makes the memory.

    Args:
        device: where that is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def add(self, like: Tensor) -> int:
        """Room for a tensor that lies in memory like this one, contiguous or a permutation of it: where it starts, in bytes."""
        start = self.bytes
        self.bytes += -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
        return start

    def make(self) -> Tensor:
        """The memory of one call: the caller keeps it until all is launched."""
        return torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
