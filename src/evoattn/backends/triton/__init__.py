"""The Triton backend: one portable set of kernels for NVIDIA GPUs from Ampere on and AMD's CDNA.

Importing this package does not import Triton: the kernels are imported when a call reaches them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Plan
from evoattn.backends.triton.tiles.limits import most_warps
from evoattn.core.config import Config
from evoattn.core.devices import installed, on_device_of, planned
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.problem import Needs, Problem, dtype_name

__all__ = ["NAME", "availability", "faster", "plan_backward", "plan_forward", "unsupported"]

NAME = "triton"

_MAX_CHANNELS = 256
_OLDEST_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = (torch.float16, torch.float32)
_SMALLEST_TILE = 16
_LARGEST_TILE = {"block_q": 256, "block_k": 128}


def availability() -> str | None:
    """None if Triton kernels can run, or can be compiled for the card that is planned for; else why not and what to do."""
    if planned() is not None and installed("triton"):
        return None
    return _missing()


@functools.cache
def _missing() -> str | None:
    if not installed("triton"):
        return "Triton is not installed: pip install triton (or triton-rocm for AMD)"
    if interprets() or torch.cuda.is_available():
        return None
    return "no GPU that torch can use; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly, for tests"


def unsupported(problem: Problem, config: Config) -> list[str]:
    """List all reasons why this backend refuses a problem; empty if it takes it."""
    reasons = []
    if problem.device != "cuda" and not interprets():
        reasons.append(f"needs tensors on a GPU, got device {problem.device}")
    if problem.capability is not None and problem.capability < _OLDEST_CAPABILITY:
        major, minor = problem.capability
        reasons.append(f"needs compute capability 8.0 or newer (Ampere), this card has {major}.{minor}")
    if problem.device == "cpu" and interprets():
        dtypes = {x for x in (problem.dtype, problem.mask_bias, problem.pair_bias) if x in _DTYPES}
        reasons += [
            f"Triton's interpreter computes {dtype_name(dtype)} wrongly" for dtype in dtypes if dtype not in INTERPRETED
        ]
    if problem.dtype not in _DTYPES:
        reasons.append(f"takes float16, bfloat16 and float32, got {dtype_name(problem.dtype)}")
    reasons += [
        f"takes 1 to {_MAX_CHANNELS} {name} channels, got {channels}"
        for name, channels in (("query/key", problem.d), ("value", problem.c))
        if not 1 <= channels <= _MAX_CHANNELS
    ]
    for name, largest in _LARGEST_TILE.items():
        size = getattr(config, name)
        if size is not None and (size & (size - 1) or not _SMALLEST_TILE <= size <= largest):
            reasons.append(f"config.{name} must be a power of two from {_SMALLEST_TILE} to {largest}, got {size}")
    return reasons or _too_many_warps(problem, config)


def _too_many_warps(problem: Problem, config: Config) -> list[str]:
    """List the reasons why a tile of the config cannot hold its warps. Fields that are None fit themselves to the others."""
    reasons, needs = [], Needs(*problem.needs)
    for kernel, name, rows, runs in (
        ("forward", "the forward and dQ", config.block_q, True),
        ("dkdv", "dK and dV", config.block_k, needs.k or needs.v or needs.mask_bias),
    ):
        if not runs or rows is None or config.num_warps is None:
            continue
        block_q, block_k = (config.block_q or _LARGEST_TILE["block_q"]), (config.block_k or _LARGEST_TILE["block_k"])
        most = most_warps(kernel, block_q, block_k, problem.dtype, problem.capability)
        if config.num_warps > most:
            tile = " and ".join(f"config.{field}={size}" for field in _LARGEST_TILE if (size := getattr(config, field)))
            reasons.append(f"config.num_warps must be at most {most} with {tile} in {name}, got {config.num_warps}")
    return reasons


def faster(problem: Problem) -> None:
    """None: no other backend is known to be faster."""


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """Plan a forward; see `evoattn.backends`."""
    from evoattn.backends.triton import forward_plan

    return _on_device(inputs.q, lambda: forward_plan.plan_forward(inputs, scale=scale, layout=layout, config=config))


def plan_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
    needs: Needs,
    deterministic: bool,
    config: Config,
    into: Sequence[Tensor | None] | None = None,
) -> Plan:
    """Plan a backward; see `evoattn.backends`."""
    from evoattn.backends.triton import backward_plan

    options: dict[str, Any] = {"scale": scale, "layout": layout, "config": config, "deterministic": deterministic}
    return _on_device(inputs.q, lambda: backward_plan.plan_backward(cotangents, inputs, outputs, needs=needs, **options))


def _on_device(tensor: Tensor, plan: Callable[[], Plan]) -> Plan:
    """Plan and run on a tensor's device, since Triton launches on the current one; compile the kernels before the first run."""
    from evoattn.backends.triton.ahead import compile_ahead

    with torch.cuda.device(tensor.device if tensor.is_cuda else -1):  # -1 changes nothing
        result = plan()
    return dataclasses.replace(result, run=on_device_of(tensor, result.run, first=compile_ahead))


@functools.cache
def interprets() -> bool:
    """Return whether Triton runs its kernels on the CPU; Triton too reads this once, when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
