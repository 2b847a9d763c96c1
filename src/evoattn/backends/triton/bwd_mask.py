"""The gradient of mask_bias: where the kernel of the keys leaves it, and what torch sums at last."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from evoattn.backends.triton.bwd_dkdv import MASK_ADD, MASK_STORE
from evoattn.backends.triton.bwd_plan import Call
from evoattn.backends.triton.launch import Strided, contiguous, empty

__all__ = ["MaskGradient", "plan_mask_gradient"]


@dataclasses.dataclass(frozen=True)
class MaskGradient:
    """The gradient of mask_bias: added up in memory, or stored a head each and summed in a fixed order."""

    mode: int
    sums: Strided
    summed: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def begin(self) -> Tensor:
        """Where the kernel adds or stores: [b, n, h, k], with 1 for what it sums over."""
        sums = empty(self.sums, self.device)
        return sums.zero_() if self.mode == MASK_ADD else sums

    def finish(self, sums: Tensor) -> Tensor:
        """The gradient, [b|1,n|1,k]."""
        whole = sums.sum(self.summed, keepdim=True) if self.summed else sums
        return whole.squeeze(2).to(self.dtype)


def plan_mask_gradient(call: Call, mask_bias: Tensor, deterministic: bool) -> MaskGradient:
    """How the gradient of a mask bias `[b|1,n|1,k]` is made."""
    problem = call.problem
    if deterministic:
        shape: tuple[int, ...] = (problem.b, problem.n, problem.h, problem.lk)
    else:
        shape = (*mask_bias.shape[:2], 1, problem.lk)
    summed = tuple(axis for axis in (0, 1, 2) if shape[axis] > 1 and (axis == 2 or mask_bias.shape[axis] == 1))
    mode = MASK_STORE if deterministic else MASK_ADD
    return MaskGradient(mode, contiguous(shape, torch.float32), summed, mask_bias.dtype, call.device)
