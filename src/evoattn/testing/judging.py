"""The verdict on one backend and one random problem: numbers, bits, shapes, and arguments left as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from evoattn.api import explain
from evoattn.core.numerics import accumulate_dtype
from evoattn.core.problem import GRADIENTS
from evoattn.testing.cases import Inputs
from evoattn.testing.dense import Results, heads_first
from evoattn.testing.oracle import excess, huge_queries, oracle, run
from evoattn.testing.random_problems import RandomProblem

Run = Callable[..., Results]
"""Runs a backend on inputs: `run_backend(inputs, backend, deterministic=...)`, as `testing.run`."""

_LARGE = 1e6
"""No LSE is larger in size unless a bias like -1e9 is part of it."""

_ARGUMENTS = ("q", "k", "v", "mask", "mask_bias", "pair_bias", "gate", "do", "dlse")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one problem on one backend.

    Args:
        status: whether the backend held, refused with its stated reasons, or failed.
        what: the reasons, or what went wrong, one line.
        kinds: the kinds of failure, such as "error of dq". Shrinking keeps one of them.
    """

    status: Literal["held", "refused", "failed"]
    what: str = ""
    kinds: tuple[str, ...] = ()


def judge(
    problem: RandomProblem, backend: str = "auto", device: torch.device | str = "cpu", *, run_backend: Run = run
) -> Outcome:
    """Run a problem forward and backward on a backend, and judge all results.

    Errors have to stay within their budgets, shapes and dtypes have to be right, values finite where the oracle's are, queries
    without a key exactly 0, and arguments have to keep their bits. A deterministic problem runs twice and gives equal bits.

    Args:
        problem: from `random_problem`, or the line that a failure printed.
        backend: what `evoformer_attention` takes. A refusal that `explain` states is no failure.
        device: where the problem runs; its numbers are drawn on the CPU.
        run_backend: runs the backend instead of the public call, for tests.

    Returns:
        An `Outcome`. An exception is a failure too.

    Example:
        >>> from evoattn.testing import judge, random_problem
        >>> judge(random_problem(1, largest=5000), "tiled").status
        'held'
    """

    def find() -> Outcome | list[tuple[str, str]]:
        inputs = problem.make(device)
        if backend != "auto" and (reasons := refusals(inputs, backend, deterministic=problem.deterministic)):
            return Outcome("refused", "; ".join(reasons))
        return _failures(inputs, lambda x: run_backend(x, backend, deterministic=problem.deterministic), problem.deterministic)

    return verdict(find)


def verdict(find: Callable[[], Outcome | list[tuple[str, str]]]) -> Outcome:
    """The outcome of `find`, which returns an outcome, or kinds of failure with texts, or raises."""
    try:
        failures = find()
    except Exception as error:  # whatever a broken backend raises is a finding
        text = " ".join(str(error).split()) or "no message"
        return Outcome("failed", f"{type(error).__name__}: {text[:600]}", (f"raised {type(error).__name__}",))
    if isinstance(failures, Outcome):
        return failures
    if not failures:
        return Outcome("held")
    return Outcome(
        "failed", "; ".join(f"{kind}: {what}" if what else kind for kind, what in failures), tuple(k for k, _ in failures)
    )


def refusals(inputs: Inputs, backend: str, *, deterministic: bool = False) -> list[str]:
    """The reasons of a backend to refuse a call, forward or backward."""
    tensors = {name: getattr(inputs, name) for name in GRADIENTS}
    tensors |= {name: x.detach().requires_grad_() for name, x in inputs.differentiable.items()}
    case = inputs.case
    options = {"scale": case.scale, "layout": case.layout, "return_lse": True, "deterministic": deterministic}
    explanation = explain(**tensors, mask=inputs.mask, backend=backend, **options)  # type: ignore[arg-type]
    return explanation.refused.get(backend, [])


def _failures(inputs: Inputs, attend: Callable[[Inputs], Results], deterministic: bool) -> list[tuple[str, str]]:
    before = {name: bits(x) for name in _ARGUMENTS if (x := getattr(inputs, name)) is not None}
    with poisoned():
        results = attend(inputs)
        again = attend(inputs) if deterministic else results
    failures = [(f"mutated {name}", "") for name, same in before.items() if not torch.equal(same, bits(getattr(inputs, name)))]
    failures += [
        (f"unequal bits of {name}", "two deterministic runs differ")
        for name, value in results.values.items()
        if not torch.equal(bits(value), bits(again.values[name]))
    ]
    expected = oracle(inputs)
    if wrong := _shapes(inputs, results, expected):
        return failures + wrong
    swallowed = huge_queries(inputs)
    for name, right in expected.values.items():
        if count := int((right.isfinite() & ~results.values[name].isfinite()).sum()):
            failures.append((f"not finite: {name}", f"{count} elements"))
    failures += _empty(inputs, results, expected)
    failures += _errors(excess(inputs, results, expected, swallowed=bool(swallowed.any())))
    failures += _small_lses(inputs, results, expected)
    if bool(swallowed.any()) and not bool(swallowed.all()):
        failures += _ordinary_queries(inputs, swallowed, attend)
    return failures


def _errors(beyond: list[tuple[str, float, float]], where: str = "") -> list[tuple[str, str]]:
    return [(f"error of {name}{where}", f"{error:.2e}, allowed {allowed:.2e}") for name, error, allowed in beyond]


def _small_lses(inputs: Inputs, results: Results, expected: Results) -> list[tuple[str, str]]:
    """Judge the LSEs without huge biases separately: a -1e9 in the norm would hide any error."""
    large = expected.values["lse"].isfinite() & (expected.values["lse"].abs() > _LARGE)
    if not bool(large.any()) or bool(large.all()):
        return []

    def small(results: Results) -> Results:
        return Results({**results.values, "lse": torch.where(large, 0, results.values["lse"])})

    part = Results({"lse": small(results).values["lse"]})
    return _errors(excess(inputs, part, small(expected), only=small), " without huge biases")


def _ordinary_queries(inputs: Inputs, swallowed: Tensor, attend: Callable[[Inputs], Results]) -> list[tuple[str, str]]:
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
    return _errors(excess(part, results, ordinary(oracle(part)), only=ordinary), " beside huge biases")


def _shapes(inputs: Inputs, results: Results, expected: Results) -> list[tuple[str, str]]:
    """Values of the wrong shape or dtype, and values that are missing."""
    failures = []
    for name, right in expected.values.items():
        if name not in results.values:
            failures.append((f"no {name}", ""))
            continue
        value = results.values[name]
        source = inputs.q if name == "o" else getattr(inputs, name[1:], None) if name.startswith("d") else None
        dtype = accumulate_dtype(inputs.q.dtype) if source is None else source.dtype
        if value.shape != right.shape or value.dtype != dtype:
            failures.append((f"shape of {name}", f"{value.dtype} {tuple(value.shape)}, expected {dtype} {tuple(right.shape)}"))
    return failures


def _empty(inputs: Inputs, results: Results, expected: Results) -> list[tuple[str, str]]:
    """Queries without a key: the output and their gradients are exactly 0, and the LSE is -inf."""
    empty = expected.values["lse"] == -torch.inf
    failures = []
    for name in ("o", "dq", "dgate"):
        if name in results.values and bool((heads_first(results.values[name], inputs)[empty] != 0).any()):
            failures.append((f"not 0 without a key: {name}", ""))
    if bool((results.values["lse"][empty] != -torch.inf).any()):
        failures.append(("not -inf without a key: lse", ""))
    return failures


def bits(x: Tensor) -> Tensor:
    """A copy of a tensor's bytes, so that NaN equals itself."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Let torch.empty give NaN, so that an element which is never written is seen."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
