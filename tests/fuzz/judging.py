"""The verdict on one backend and one random problem: that of `evoattn.testing`, with budgets for ill-conditioned calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.testing.cases import CaseInputs
from evoattn.testing.dense import Results, heads_first
from evoattn.testing.judging import (
    Failures,
    Outcome,
    errors_of,
    observe,
    poisoned,
    refusals,
    verdict,
    wrong_shapes,
    wrong_values,
)
from evoattn.testing.oracle import oracle, run
from tests.fuzz.conditioning import excess, huge_queries
from tests.fuzz.random_problems import RandomProblem

Run = Callable[..., Results]
"""Runs a backend on inputs: `run_backend(inputs, backend, deterministic=...)`, as `testing.run`."""

_LARGE = 1e6
"""No LSE is larger in size unless a bias like -1e9 is part of it."""


def judge(
    problem: RandomProblem, backend: str = "auto", device: torch.device | str = "cpu", *, run_backend: Run = run
) -> Outcome:
    """Run a problem forward and backward on a backend, and judge all results, as `evoattn.testing.judge` does.

    The budgets are those of `excess`, so that no backend fails where rounding alone leaves no digit. A deterministic problem
    runs twice and gives equal bits.

    Args:
        problem: from `random_problem`, or the line that a failure printed.
        backend: what `evoformer_attention` takes. A refusal that `explain` states is no failure.
        device: where the problem runs; its numbers are drawn on the CPU.
        run_backend: runs the backend instead of the public call, for tests.
    """

    def find() -> Outcome | Failures:
        inputs = problem.make(device)
        if reasons := refusals(inputs, backend, deterministic=problem.deterministic):
            return Outcome("refused", "; ".join(reasons))
        return _failures(inputs, lambda x: run_backend(x, backend, deterministic=problem.deterministic), problem.deterministic)

    return verdict(find)


def _failures(inputs: CaseInputs, attend: Callable[[CaseInputs], Results], deterministic: bool) -> Failures:
    results, failures = observe(inputs, attend, twice=deterministic)
    expected = oracle(inputs)
    if wrong := wrong_shapes(inputs, results, expected):
        return failures + wrong
    swallowed = huge_queries(inputs)
    failures += wrong_values(inputs, results, expected)
    failures += errors_of(excess(inputs, results, expected, swallowed=bool(swallowed.any())))
    failures += _small_lses(inputs, results, expected)
    if bool(swallowed.any()) and not bool(swallowed.all()):
        failures += _ordinary_queries(inputs, swallowed, attend)
    return failures


def _small_lses(inputs: CaseInputs, results: Results, expected: Results) -> Failures:
    """Judge the LSEs without huge biases separately: a -1e9 in the norm would hide any error."""
    large = expected.values["lse"].isfinite() & (expected.values["lse"].abs() > _LARGE)
    if not bool(large.any()) or bool(large.all()):
        return []

    def small(results: Results) -> Results:
        return Results({**results.values, "lse": torch.where(large, 0, results.values["lse"])})

    part = Results({"lse": small(results).values["lse"]})
    return errors_of(excess(inputs, part, small(expected), only=small), " without huge biases")


def _ordinary_queries(inputs: CaseInputs, swallowed: Tensor, attend: Callable[[CaseInputs], Results]) -> Failures:
    """Judge the same call without cotangents at queries whose scores a huge bias swallows: the other budgets stay tight."""

    def without(x: Tensor) -> Tensor:
        return heads_first(torch.where(swallowed.unsqueeze(-1), 0, heads_first(x, inputs)), inputs)

    def ordinary(results: Results) -> Results:
        o, lse = results.values["o"], results.values["lse"]
        return Results({**results.values, "o": without(o), "lse": torch.where(swallowed, 0, lse)})

    dlse = None if inputs.dlse is None else torch.where(swallowed, 0, inputs.dlse)
    part = dataclasses.replace(inputs, do=without(inputs.do), dlse=dlse)
    with poisoned():
        results = ordinary(attend(part))
    return errors_of(excess(part, results, ordinary(oracle(part)), only=ordinary), " beside huge biases")
