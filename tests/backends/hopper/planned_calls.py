"""Calls that tests plan for the Hopper backend, and launch without its kernels."""

import dataclasses

import pytest
import torch
from torch import Tensor

from evoattn.backends import Inputs, hopper
from evoattn.backends.hopper import backward_plan as backward
from evoattn.core.config import Config
from evoattn.core.problem import describe


def tensors_of(c: Inputs, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    problem = dataclasses.replace(describe(c, needs=needs), device="cuda", capability=(9, 0))  # type: ignore[arg-type]
    if reasons := hopper.unsupported(problem, Config()):
        pytest.skip("; ".join(reasons))
    return c[:6]


def launch_backward(c: Inputs, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of mask_bias and pair_bias of a backward that adds in memory, with random o, do and lse."""
    o, lse = torch.randn(c.q.shape, dtype=c.q.dtype), torch.randn(c.q.shape[:-1])
    tensors = (torch.randn_like(o), None, *tensors_of(c, needs), o, lse, torch.zeros_like(lse))
    of_qkv = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip((c.q, c.k, c.v), needs, strict=False)]
    return backward.plan_backward(*tensors, scale=0.2, layout="bnlhd", needs=needs, deterministic=False)(*tensors, *of_qkv)
