"""Shrinking: the smallest problem found that fails in the same way as another one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evoattn.testing import Case
from tests.fuzz.random_problems import RandomProblem
from tests.fuzz.trials import Failure, Workers


def shrunk(failure: Failure, workers: Workers) -> Failure:
    """The failure with the smallest problem found that has one of its kinds of failure, and what goes wrong there.

    Layers stay as they are.
    """
    if not isinstance(failure.trial.problem, RandomProblem):
        return failure
    latest = failure.outcome

    def first_failing(problems: Sequence[RandomProblem]) -> int | None:
        nonlocal latest
        candidates = [failure.trial._replace(problem=problem) for problem in problems]
        outcomes = {
            candidates.index(trial): outcome
            for trial, outcome in workers.run(candidates)
            if set(outcome.kinds) & set(failure.outcome.kinds)
        }
        place = min(outcomes, default=None)
        latest = latest if place is None else outcomes[place]
        return place

    smallest = shrink(failure.trial.problem, first_failing)
    return dataclasses.replace(failure, smallest=smallest, outcome=latest, shrunk=True)


FirstFailing = Callable[[Sequence[RandomProblem]], "int | None"]
"""Given problems to try, the place of the first that still fails, or None."""

_AT_ONCE = 4
"""Candidates tried at once: a caller with several workers runs them side by side."""


def shrink(problem: RandomProblem, first_failing: FirstFailing, *, trials: int = 200, seconds: float = 60.0) -> RandomProblem:
    """Return the smallest problem found that still fails, by taking the first smaller one that does until none does.

    `first_failing` tries problems in order. At most `trials` problems are tried, and none after so many `seconds`.
    """
    end = time.monotonic() + seconds
    tried = {problem}
    candidates = list(smaller(problem))
    while candidates and time.monotonic() <= end:
        part, candidates = candidates[:_AT_ONCE][: trials + 1 - len(tried)], candidates[_AT_ONCE:]
        if not part:
            break
        tried.update(part)
        place = first_failing(part)
        if place is not None:
            problem = part[place]
            candidates = [candidate for candidate in smaller(problem) if candidate not in tried]
    return problem


_PLAIN: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Case)}

_PARTS = {
    "pair_bias": ("pair_fill", "pair_bias_dtype"),
    "mask_bias": ("mask_bias_axes",),
    "mask": ("mask_axes",),
    "gate": ("gate_strides",),
}
"""Optional tensors of a problem, and the fields that describe them."""

_SIZES = ("n", "h", "lq", "lk", "d")

_OPTIONS = (
    *("kv_heads", "strides", "bias_strides", "cotangent", "scale", "spread", "lse_gradient", "layout", "gate_strides"),
    *("pair_fill", "pair_bias_dtype", "bias_dtype"),
)
"""Fields whose default is the plain choice."""

_PLAINER = {"gate": "random", "mask_bias": "finite"}
"""The plainest values of tensors that are there."""


def smaller(problem: RandomProblem) -> Iterator[RandomProblem]:
    """Yield problems that are one step smaller or plainer, the largest steps first."""
    case = problem.case
    for words in _steps(case):
        changed = dataclasses.replace(case, **words)
        if changed != case:
            yield dataclasses.replace(problem, case=changed)
    if problem.deterministic:
        yield dataclasses.replace(problem, deterministic=False)


def _steps(case: Case) -> Iterator[dict[str, Any]]:
    for name, described_by in _PARTS.items():
        yield {x: _PLAIN[x] for x in (name, *described_by)}
    yield from _lead(case)
    for name in _SIZES:
        size = getattr(case, name)
        yield from ({name: least} for least in dict.fromkeys((1, size // 2, size - 1)) if 1 <= least < size)
    yield from ({"c": c} for c in (None, case.c and case.c // 2) if c != 0)
    yield from ({name: _PLAIN[name]} for name in _OPTIONS)
    yield from ({name: plainest} for name, plainest in _PLAINER.items() if getattr(case, name) is not None)
    if isinstance(case.pair_fill, str):
        yield {"pair_fill": case.pair_fill.removesuffix("_rows")}
    for place, axis in enumerate((case.pair_bias or "")[:-2]):
        if axis != "1":
            yield {"pair_bias": f"{case.pair_bias[:place]}1{case.pair_bias[place + 1 :]}"}  # type: ignore[index]
    if len(case.gradients) > 1:
        yield from ({"gradients": (name,)} for name in case.gradients)
        yield from ({"gradients": tuple(other for other in case.gradients if other != name)} for name in case.gradients)
    yield {"gradients": ()}


def _lead(case: Case) -> Iterator[dict[str, Any]]:
    """Leading axes of 1, and fewer of them if no bias names one."""
    for axis in range(len(case.lead)):
        yield {"lead": (*case.lead[:axis], 1, *case.lead[axis + 1 :])}
    if not case.lead or (case.pair_bias is not None and len(case.pair_bias) >= len(case.lead) + 4):
        return
    masks = (case.mask and case.mask_axes, case.mask_bias and case.mask_bias_axes)
    if not any(set(axes or "") & set("b1xyz") for axes in (case.pair_bias, *masks)):
        yield {"lead": case.lead[1:]}
