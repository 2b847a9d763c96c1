"""The problems of the benchmark: the inputs of a workload, the float64 truth about them, and who computes them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.bench.contender import Contender
from evoattn.bench.memory import too_much
from evoattn.bench.peers import PEERS, backend_peer
from evoattn.bench.record import Result
from evoattn.testing import CaseInputs
from evoattn.workloads import Workload

SCORES = {"cpu": 6 << 20, "cuda": 48 << 20}
"""Scores of the truth at a time: it holds about eight float64 tensors of them."""


def inputs_of(workload: Workload, dtype: torch.dtype, device: torch.device, seed: int = 0) -> CaseInputs:
    """Random inputs, made on the device: on one CPU core those of N = L = 2048 would take half a minute."""
    rng = torch.Generator(device=device).manual_seed(seed)
    w = workload

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng, dtype=torch.float32, device=device).to(dtype)

    mask = None
    if w.key_mask:
        mask = random_keys((w.b, w.n, w.lk), rng)
        mask[..., 0] = True
    kv_heads = w.kv_heads or w.h
    return CaseInputs(
        case=testing.from_workload(w, dtype),
        q=normal(w.b, w.n, w.lq, w.h, w.d),
        k=normal(w.b, w.n, w.lk, kv_heads, w.d),
        v=normal(w.b, w.n, w.lk, kv_heads, w.d),
        mask=mask,
        mask_bias=None,
        pair_bias=normal(w.b, 1, w.h, w.lq, w.lk) if w.pair_bias else None,
        do=normal(w.b, w.n, w.lq, w.h, w.d),
        dlse=None,
    )


def random_keys(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """A random mask that keeps seven keys of ten."""
    return torch.rand(shape, generator=rng, dtype=torch.float32, device=rng.device) < 0.7


def held_bytes(workload: Workload, dtype: torch.dtype, device: torch.device) -> int:
    """Estimate the peak bytes of the inputs, the float64 truth and one output with its gradients, before any exists."""
    w = workload
    scores = w.b * w.h * w.lq * w.lk
    elements = 2 * w.b * w.n * w.d * (w.lq * w.h + w.lk * (w.kv_heads or w.h)) + (scores if w.pair_bias else 0)
    rows = min(w.n, _rows_at_a_time(scores, device))
    spread = 0 if w.kv_heads in (None, w.h) else 4 * w.b * rows * w.h * w.lk * w.d  # k, v and their gradients for every head
    values = 2 * elements * (dtype.itemsize + torch.float64.itemsize)  # of the truth its parts and all of them
    return values + (8 * rows * scores + spread) * torch.float64.itemsize


def too_large(workload: Workload, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say so if that is more than the free memory allows."""
    reason = too_much(held_bytes(workload, dtype, device), device)
    return f"inputs, float64 truth and gradients would hold {reason}" if reason else None


def io_bytes(inputs: CaseInputs) -> int:
    """Bytes of the inputs and the output, each once: the least a forward can move."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.mask, inputs.pair_bias)
    return sum(x.nbytes for x in tensors if x is not None) + inputs.do.nbytes


def first_rows(inputs: CaseInputs, rows: slice) -> CaseInputs:
    """The same attention on some of its rows n."""
    cut = {name: getattr(inputs, name)[:, rows] for name in ("q", "k", "v", "do")}
    return dataclasses.replace(inputs, mask=None if inputs.mask is None else inputs.mask[:, rows], **cut)


def _rows_at_a_time(scores: int, device: torch.device) -> int:
    """The number of rows whose truth is computed at once, if one row has so many scores."""
    return max(1, SCORES[device.type] // max(1, scores))


def truth(inputs: CaseInputs) -> dict[str, Tensor]:
    """o and all gradients in float64: the dense oracle of `evoattn.testing`, some rows n at a time."""
    by_rows: dict[str, list[Tensor]] = {name: [] for name in ("o", "dq", "dk", "dv")}
    dpair_bias: Tensor | None = None
    b, n, lq, h, _ = inputs.q.shape
    rows = _rows_at_a_time(b * h * lq * inputs.k.shape[2], inputs.q.device)
    for start in range(0, n, rows):
        part = testing.oracle(first_rows(inputs, slice(start, start + rows))).values
        for name, parts in by_rows.items():
            parts.append(part[name])
        if "dpair_bias" in part:
            dpair_bias = part["dpair_bias"] if dpair_bias is None else dpair_bias + part["dpair_bias"]
    values = {name: torch.cat(parts, 1) for name, parts in by_rows.items()}
    return values if dpair_bias is None else {**values, "dpair_bias": dpair_bias}


def explanation(inputs: CaseInputs, backend: str = "auto") -> evoattn.Explanation:
    """Explain a training step on these inputs."""
    q, k, v, pair_bias = (
        None if x is None else x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.pair_bias)
    )
    return evoattn.explain(q, k, v, mask=inputs.mask, pair_bias=pair_bias, backend=backend)  # type: ignore[arg-type]


def contenders(
    inputs: CaseInputs, backends: tuple[str, ...], peers: tuple[str, ...], *, backward: bool = True
) -> list[tuple[Contender, Result]]:
    """The contenders for a problem, each with an empty result, evoattn first.

    Args:
        inputs: of the problem.
        backends: names of evoattn's backends; "auto" is what a plain call takes. What it takes is not measured twice.
        peers: names of `PEERS`.
        backward: whether gradients are measured too.
    """
    chosen = explanation(inputs)
    backward_backend = chosen.backward_backend if backward else None
    contestants: list[tuple[Contender, Result]] = []
    for backend in backends:
        peer = backend_peer(backend)
        if backend == "auto":
            result = Result(peer.name, backend=chosen.backend or "none", backward_backend=backward_backend or "")
            contestants.insert(0, (peer, result))
        elif "auto" not in backends or backend != chosen.backend or backward_backend is not None:
            contestants.append((peer, Result(peer.name, backend=backend)))
    return [*contestants, *((PEERS[name], Result(name)) for name in peers)]
