"""Time, peak memory and error of one attention, by evoattn and by dense PyTorch."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn import evoformer_attention, testing
from evoattn.bench.memory import peak_bytes
from evoattn.cli import machine
from evoattn.cli.evoformer import first_rows
from evoattn.testing import Inputs

__all__ = [
    "DENSE_SCORE_COPIES",
    "IMPLEMENTATIONS",
    "Accuracy",
    "Cost",
    "accuracy",
    "cost",
    "dense",
    "dense_bytes",
    "peak_bytes",
]

DENSE_SCORE_COPIES = 4
"""Dense forward + backward holds P, dP and dS beside what q, k, v take: 3.6 times the scores at L = 384, float32."""

_ORACLE_SCORES = 12 << 20
"""Scores of the float64 truth; 12 Mi of them take under a second and half a gigabyte on two CPU cores."""

Attention = Callable[[Inputs], Tensor]


def dense(inputs: Inputs) -> Tensor:
    """Attention as models write it in plain PyTorch, all n*h*q*k scores in memory; the additions are in place."""
    q, k, v = (x.transpose(-2, -3) for x in (inputs.q, inputs.k, inputs.v))  # [n,h,l,d]
    s = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))  # [n,h,q,k]
    if inputs.mask is not None:
        off = torch.zeros_like(inputs.mask, dtype=s.dtype).masked_fill(~inputs.mask, torch.finfo(s.dtype).min / 2)
        s += off[:, None, None, :]
    if inputs.pair_bias is not None:
        s += inputs.pair_bias
    return torch.matmul(torch.softmax(s, -1), v).transpose(-2, -3)


def _evoattn(inputs: Inputs) -> Tensor:
    return evoformer_attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias)


IMPLEMENTATIONS: dict[str, Attention] = {"evoattn": _evoattn, "dense": dense}


def dense_bytes(inputs: Inputs) -> int:
    """About what dense takes for forward + backward."""
    n, length, heads, _ = inputs.q.shape
    return DENSE_SCORE_COPIES * n * heads * length * length * inputs.q.element_size()


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one attention takes.

    Args:
        forward: seconds, median.
        backward: seconds, median.
        peak: bytes held at the most beyond the inputs, over forward and backward.
    """

    forward: float
    backward: float
    peak: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def cost(attention: Attention, inputs: Inputs, *, repeats: int, seconds: float) -> Cost:
    """Measure; the run that measures memory is the warm-up of those that measure time.

    Args:
        attention: one of `IMPLEMENTATIONS`.
        inputs: what to run it on.
        repeats: how often to measure time at the most.
        seconds: after this long no repeat beyond the third is begun, and after three times this long none at all.
    """
    leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in inputs.differentiable.items()}
    given = dataclasses.replace(inputs, **leaves)
    device = inputs.q.device

    def once() -> tuple[float, float]:
        machine.synchronize(device)
        start = time.perf_counter()
        o = attention(given)
        machine.synchronize(device)
        middle = time.perf_counter()
        torch.autograd.grad(o, list(leaves.values()), given.do)
        machine.synchronize(device)
        return middle - start, time.perf_counter() - middle

    peak = peak_bytes(once, device)
    begun = time.perf_counter()
    times = [once()]
    while len(times) < repeats and time.perf_counter() - begun < seconds * (3 if len(times) < 3 else 1):
        times.append(once())
    forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
    return Cost(forward, backward, peak)


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Relative errors against float64 by implementation.

    Args:
        rows: the rows n, from the first, that the float64 truth was computed on.
        output: error of the output.
        gradients: error of the worst gradient of q, k, v and pair bias.
        beyond: what of evoattn is further off than its budget; empty when all is well.
    """

    rows: int
    output: dict[str, float]
    gradients: dict[str, float]
    beyond: list[str]


def accuracy(inputs: Inputs) -> Accuracy:
    """Run both implementations and the float64 oracle on the same first rows, as many as the oracle has room for."""
    n, length, heads, _ = inputs.q.shape
    rows = max(1, min(n, _ORACLE_SCORES // (heads * length * length)))
    part = first_rows(inputs, rows)
    expected = testing.oracle(part)
    results = testing.run(part)
    of_evoattn = testing.errors(results, expected)
    of_dense = testing.errors(_run_dense(part), expected)
    allowed = testing.budgets(part, results, expected)
    beyond = [
        f"{inputs.case.name}: {value}: relative error {error:.1e}, allowed {allowed[value]:.1e}"
        for value, error in of_evoattn.items()
        if not error <= allowed[value]
    ]
    both = {"evoattn": of_evoattn, "dense": of_dense}
    return Accuracy(
        rows=rows,
        output={name: found["o"] for name, found in both.items()},
        gradients={name: max(error for value, error in found.items() if value.startswith("d")) for name, found in both.items()},
        beyond=beyond,
    )


def _run_dense(inputs: Inputs) -> testing.Results:
    leaves: dict[str, Any] = {name: x.detach().requires_grad_() for name, x in inputs.differentiable.items()}
    o = dense(dataclasses.replace(inputs, **leaves))
    gradients = torch.autograd.grad(o, list(leaves.values()), inputs.do)
    values = {"o": o.detach()}
    values.update({f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)})
    return testing.Results(values)
