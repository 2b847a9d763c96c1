"""Trials of random problems: worker processes that judge them, counts by backend and dtype, and failures."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from evoattn.compile import workers as processes
from evoattn.core.problem import dtype_name
from evoattn.testing import Outcome
from tests.fuzz.random_layers import RandomLayer
from tests.fuzz.random_problems import RandomProblem

JUDGE = "tests.fuzz.judging:judge"
LAYERS = "tests.fuzz.judging_layers:judge_layer"

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
        self.pool = processes.Pool(jobs, lambda: _Worker(threads, limit_s))

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
    """A worker that starts a new process after an error of CUDA, which loses the context, and after `limit_s`."""

    def __init__(self, environment: Mapping[str, str], limit_s: float) -> None:
        super().__init__(environment, first=processes.Task("tests.fuzz.judging"))
        self.limit_s = limit_s

    def run(self, task: processes.Task) -> processes.Report:
        watch = threading.Timer(self.limit_s, self.kill)
        watch.start()
        report = super().run(task)
        watch.cancel()
        if report.seconds >= self.limit_s:
            self.end()
            return report._replace(result=None, error=f"took longer than {self.limit_s:g} s")
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
