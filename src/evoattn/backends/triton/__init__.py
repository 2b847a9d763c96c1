"""The Triton backend: one portable set of kernels for NVIDIA GPUs from Ampere on and AMD's CDNA.

Importing this package does not import Triton: the kernels are imported when a call reaches them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.devices import installed, on_device_of
from evoattn.problem import Problem
from evoattn.tuning.config import Config
from evoattn.tuning.validity import most_warps

__all__ = [
    "NAME",
    "availability",
    "copies",
    "plan_backward",
    "plan_forward",
    "resolve",
    "resolve_backward",
    "unsupported",
]

NAME = "triton"

_MAX_CHANNELS = 256
_OLDEST_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INTERPRETED = (torch.float16, torch.float32)
_SMALLEST_TILE = 16
_LARGEST_TILE = {"block_q": 256, "block_k": 128}


@functools.cache
def availability() -> str | None:
    """None where Triton kernels can run, else why not and what to do about it."""
    if not installed("triton"):
        return "Triton is not installed: pip install triton (or triton-rocm for AMD)"
    if _interprets() or torch.cuda.is_available():
        return None
    return "no GPU that torch can use; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly, for tests"


def unsupported(problem: Problem, config: Config) -> list[str]:
    """Every reason why this backend does not take the problem; empty when it does."""
    reasons = []
    if problem.device != "cuda" and not _interprets():
        reasons.append(f"needs tensors on a GPU, got device {problem.device}")
    if problem.capability is not None and problem.capability < _OLDEST_CAPABILITY:
        major, minor = problem.capability
        reasons.append(f"needs compute capability 8.0 or newer (Ampere), this card has {major}.{minor}")
    if problem.device == "cpu" and _interprets():
        dtypes = {x for x in (problem.dtype, problem.mask_bias, problem.pair_bias) if x in _DTYPES}
        reasons += [f"Triton's interpreter computes {dtype} wrongly" for dtype in dtypes if dtype not in _INTERPRETED]
    if problem.dtype not in _DTYPES:
        reasons.append(f"takes float16, bfloat16 and float32, got {problem.dtype}")
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
    """Why the tile that the user gave cannot hold the warps that the user gave; what is not given fits itself to the rest."""
    reasons = []
    for kernel, name, rows, runs in (
        ("forward", "the forward and dQ", config.block_q, True),
        ("dkdv", "dK and dV", config.block_k, any(problem.needs[1:4])),
    ):
        if not runs or rows is None or config.num_warps is None:
            continue
        block_q, block_k = (config.block_q or _LARGEST_TILE["block_q"]), (config.block_k or _LARGEST_TILE["block_k"])
        most = most_warps(kernel, block_q, block_k, problem.dtype, problem.capability)
        if config.num_warps > most:
            given = " and ".join(f"config.{field}={size}" for field in _LARGEST_TILE if (size := getattr(config, field)))
            reasons.append(f"config.num_warps must be at most {most} with {given} in {name}, got {config.num_warps}")
    return reasons


def resolve(problem: Problem, config: Config) -> Config:
    """The forward's tiles for this problem on the current device: the table's choice under what `config` sets."""
    from evoattn.backends.triton.launch import shared_memory_limit
    from evoattn.tuning.heuristics import forward_tiles
    from evoattn.tuning.heuristics_few import few_tiles

    few = few_tiles("forward", problem, config)
    if few is not None:
        return Config(num_warps=few.num_warps)
    tiles = forward_tiles(problem, config, shared_memory_limit(_device_for(problem)))
    return Config(block_q=tiles.block_q, block_k=tiles.block_k, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def resolve_backward(problem: Problem, config: Config) -> dict[str, dict[str, int]]:
    """The tiles of the backward's kernels: those of its gradients that are wanted."""
    from evoattn.backends.triton.launch import capability, shared_memory_limit
    from evoattn.tuning.heuristics_backward import backward_tiles
    from evoattn.tuning.heuristics_few import few_tiles

    few = few_tiles("backward", problem, config)
    if few is not None:
        return {"few": dataclasses.asdict(few)}
    device = _device_for(problem)
    tiles = backward_tiles(problem, config, shared_memory_limit(device), capability(device))
    of_q, of_k, of_v, of_mask_bias, of_pair_bias = problem.needs
    wanted = {
        "dq": (of_q or (of_pair_bias and not problem.deterministic), tiles.dq),
        "dkdv": (of_k or of_v or of_mask_bias, tiles.dkdv),
        "dpair_bias": (of_pair_bias and problem.deterministic, tiles.pair),
    }
    return {name: tile.given() for name, (runs, tile) in wanted.items() if runs}


def copies(problem: Problem, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> list[str]:
    """The pair bias, where its rows do not load 16 bytes at a time and enough rows n share the copy."""
    from evoattn.backends.triton.launch import strided
    from evoattn.backends.triton.prepare import needs_copy

    if pair_bias is None or not needs_copy(strided(pair_bias), problem.n):
        return []
    return ["pair_bias: its rows are not 16-byte aligned with stride 1, so it is laid out anew once a call"]


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    *,
    scale: float,
    layout: str,
    config: Config,
) -> Callable[..., None]:
    """The forward of all tensors that lie in memory like these; see `evoattn.backends.Plans`."""
    from evoattn.backends.triton import fwd
    from evoattn.backends.triton.compile_ahead import compile_ahead

    with _device_of(q):
        plan = fwd.plan_forward(q, k, v, mask, mask_bias, pair_bias, scale=scale, layout=layout, config=config)
    return on_device_of(q, plan, first=compile_ahead)


def plan_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    reference: Tensor,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, bool, bool, bool, bool],
    deterministic: bool,
    config: Config,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """The backward of all tensors that lie in memory like these; see `evoattn.backends.Plans`."""
    from evoattn.backends.triton import bwd
    from evoattn.backends.triton.compile_ahead import compile_ahead

    with _device_of(q):
        plan = bwd.plan_backward(
            do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference,
            scale=scale, layout=layout, needs=needs, deterministic=deterministic, config=config,
        )  # fmt: skip
    return on_device_of(q, plan, first=compile_ahead)


def _device_of(tensor: Tensor) -> torch.cuda.device:
    """Triton launches on the current device: make it the tensor's own (a device of -1 changes nothing, for CPU tensors)."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


def _device_for(problem: Problem) -> torch.device:
    """The device that a problem would run on: the current one of its type."""
    return torch.device("cuda", torch.cuda.current_device()) if problem.device == "cuda" else torch.device(problem.device)


@functools.cache
def _interprets() -> bool:
    """Whether Triton runs its kernels on the CPU; Triton too reads this once, when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
