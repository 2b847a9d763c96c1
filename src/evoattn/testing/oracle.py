"""The float64 oracle, and error budgets: a small multiple of the loss of a dense computation in the same dtype."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from evoattn.api import evoformer_attention
from evoattn.core.config import Config
from evoattn.core.numerics import accumulate_dtype
from evoattn.core.problem import GRADIENTS
from evoattn.testing.cases import CaseInputs
from evoattn.testing.dense import Results, dense, differentiate, plain_biases, shifted_biases

MULTIPLE = 4.0
FLOOR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
CEILING = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def run(inputs: CaseInputs, backend: str = "auto", *, deterministic: bool = False, config: Config | None = None) -> Results:
    """Forward and backward through the public call."""

    case = inputs.case
    options: dict[str, Any] = {"scale": case.scale, "layout": case.layout, "deterministic": deterministic, "config": config}

    def call(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        named: dict[str, Any] = dict(zip(GRADIENTS, tensors, strict=True))
        return evoformer_attention(**named, mask=inputs.mask, return_lse=True, backend=backend, **options)

    return differentiate(call, inputs, None)


def oracle(inputs: CaseInputs) -> Results:
    """The same in float64, dense, by plain autograd.

    The largest bias of each query is taken off first: at -1e9 even float64 loses digits.
    """
    return differentiate(dense(inputs, shifted_biases), inputs, torch.float64)


def low_precision(inputs: CaseInputs) -> Results:
    """The same, dense, with every intermediate in q's dtype, as a model in plain torch computes it."""
    return differentiate(dense(inputs, plain_biases), inputs, inputs.q.dtype)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected, in float64.

    Equal infinities differ by nothing; NaN is infinitely wrong.
    """
    value, expected = value.detach().double(), expected.detach().double()
    if value.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(expected.shape)}")
    difference = torch.where(value == expected, 0.0, value - expected)
    norm: float = torch.where(expected.isfinite(), expected, 0.0).norm().item()
    error: float = difference.norm().item()
    if math.isnan(error):
        return math.inf
    return error if norm == 0 else error / norm


def errors(results: Results, expected: Results) -> dict[str, float]:
    """The relative error of every value."""
    return {name: relative_error(value, expected.values[name]) for name, value in results.values.items()}


def budgets(inputs: CaseInputs, results: Results, expected: Results, lost: dict[str, float] | None = None) -> dict[str, float]:
    """The error allowed for every value: four times what the dense low-precision computation loses, within the dtype's bounds.

    The LSE is held to the bounds of its own dtype, the others to those of the coarser of q's and their own. If scores of size
    x are rounded to eps x, exp(S) changes by a share of eps x, whoever computes it. That is the least budget of large LSEs.

    Args:
        inputs, results, expected: the call, a backend's results, and the float64 results.
        lost: the errors of the dense low-precision computation, if they are known.
    """
    lost = errors(low_precision(inputs), expected) if lost is None else lost
    allowed = {}
    lse = expected.values["lse"]
    size = lse[lse.isfinite()].square().mean().sqrt().item() if lse.isfinite().any() else 0.0
    least = size * torch.finfo(accumulate_dtype(inputs.q.dtype)).eps
    for name in results.values:
        dtype = coarser(name, inputs, results)
        allowed[name] = min(max(MULTIPLE * lost[name], FLOOR[dtype], least), CEILING[dtype])
    return allowed


def coarser(name: str, inputs: CaseInputs, results: Results) -> torch.dtype:
    """The dtype whose bounds apply to a value."""
    dtype = results.values[name].dtype
    return inputs.q.dtype if name != "lse" and torch.finfo(inputs.q.dtype).eps > torch.finfo(dtype).eps else dtype


def beyond(found: dict[str, float], allowed: dict[str, float]) -> list[tuple[str, float, float]]:
    """The errors beyond their budgets: (name, error, allowed)."""
    return [(name, error, allowed[name]) for name, error in found.items() if not error <= allowed[name]]


def check(results: Results, inputs: CaseInputs) -> None:
    """Raise AssertionError if a value has the wrong shape or dtype, or is further from the oracle than its budget.

    Values that `results` does not have, such as the LSE of a kernel that returns none, are not checked.
    """
    expected = oracle(inputs)
    failures = []
    for name, value in results.values.items():
        source = getattr(inputs, name[1:], None) if name.startswith("d") else None
        if source is not None and (value.shape != source.shape or value.dtype != source.dtype):
            failures.append(f"{name}: {value.dtype} {tuple(value.shape)} for an input {source.dtype} {tuple(source.shape)}")
    for name, error, allowed in beyond(errors(results, expected), budgets(inputs, results, expected)):
        failures.append(f"{name}: relative error {error:.2e}, allowed {allowed:.2e}")
    if failures:
        raise AssertionError(f"case {inputs.case.name}: " + "; ".join(failures))
