"""A run over random problems: worker processes that judge them, counts by backend and dtype, and failures that are shrunk."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from evoattn.compile import workers as processes
from evoattn.core.problem import dtype_name
from evoattn.testing.cases import Case
from evoattn.testing.judging import Outcome
from evoattn.testing.random_layers import RandomLayer
from evoattn.testing.random_problems import RandomProblem

JUDGE = "evoattn.testing.judging:judge"
LAYERS = "evoattn.testing.judging_layers:judge_layer"

Problem = RandomProblem | RandomLayer

_LOST = ("CUDA error", "AcceleratorError", "HIP error")
"""Words of an outcome after which a process can use its GPU no more."""


class Trial(NamedTuple):
    """One problem for one backend on one device, by its name."""

    problem: Problem
    backend: str
    device: str = "cpu"


class Workers:
    """A fixed number of processes that see the GPU, each with one trial at a time; use it as a context manager.

    Args:
        jobs: how many processes.
        judge: "module:function" of (problem, backend, device), imported in each process.
        limit_s: seconds that a trial may take, with what it compiles. Then its process is killed.
    """

    def __init__(self, jobs: int, judge: str = JUDGE, limit_s: float = 120.0) -> None:
        self.judge = judge
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, (os.cpu_count() or 1) // jobs)))
        first = processes.Task("evoattn.testing.judging")
        self.pool = processes.Pool(jobs, lambda: _Worker(threads, limit_s=limit_s), first)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *raised: object) -> None:
        self.pool.__exit__(*raised)

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Yield the outcomes of trials as they come in. The next one is drawn when a worker is free."""
        for report in self.pool.run(processes.Task(self.judge, tuple(trial)) for trial in trials):
            outcome = report.result
            if report.error is not None:
                outcome = Outcome("failed", report.error, ("took longer" if "took longer" in report.error else "died",))
            yield Trial(*report.task.arguments), outcome


class _Worker(processes.Worker):
    """A worker that starts a new process after an error of CUDA, which loses the context."""

    def run(self, task: processes.Task) -> processes.Report:
        report = super().run(task)
        if isinstance(report.result, Outcome) and any(word in report.result.what for word in _LOST):
            self.end()
        return report


@dataclasses.dataclass(frozen=True)
class Failure:
    """A problem that failed, and the smallest one found that fails in the same way."""

    trial: Trial
    outcome: Outcome
    smallest: Problem
    shrunk: bool = False

    @property
    def line(self) -> str:
        """A command that judges the smallest problem again."""
        return self.smallest.command(self.trial.backend, self.trial.device)

    def as_json(self) -> dict[str, Any]:
        """The failure in types that JSON has."""
        return {
            "seed": self.trial.problem.seed,
            "backend": self.trial.backend,
            "device": self.trial.device,
            "what": self.outcome.what,
            "kinds": list(self.outcome.kinds),
            "problem": repr(self.trial.problem),
            "smallest": repr(self.smallest),
            "line": self.line,
        }


@dataclasses.dataclass
class Findings:
    """The results so far: counts of trials by backend, dtype and outcome, and failures in the order of seeds."""

    counts: dict[tuple[str, str], dict[str, int]] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def add(self, trial: Trial, outcome: Outcome) -> None:
        """Count one more outcome."""
        place = (trial.backend, dtype_name(trial.problem.dtype))
        counts = self.counts.setdefault(place, {"held": 0, "refused": 0, "failed": 0})
        counts[outcome.status] += 1
        if outcome.status == "failed":
            self.failures.append(Failure(trial, outcome, trial.problem))
            self.failures.sort(key=lambda failure: failure.trial.problem.seed)

    def total(self, *statuses: str) -> int:
        """The number of trials with one of these outcomes, or of all."""
        return sum(counts[status] for counts in self.counts.values() for status in statuses or counts)

    def __str__(self) -> str:
        return ", ".join(f"{self.total(status)} {status}" for status in ("held", "refused", "failed"))


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
