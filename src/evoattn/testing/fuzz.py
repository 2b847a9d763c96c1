"""What a run over random problems found: counts by backend and dtype, and each failure with a line that reproduces it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evoattn.testing.judging import Outcome
from evoattn.testing.random_problems import RandomProblem
from evoattn.testing.shrink import shrink
from evoattn.testing.workers import Problem, Report, Task, Workers

__all__ = ["Failure", "Findings", "shrunk", "tasks"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A problem that failed, and the smallest one found that fails in the same way."""

    task: Task
    outcome: Outcome
    smallest: Problem
    shrunk: bool = False

    @property
    def line(self) -> str:
        """A command that judges the smallest problem again."""
        return self.smallest.command(self.task.backend, self.task.device)

    def as_json(self) -> dict[str, Any]:
        """The failure in types that JSON has."""
        return {
            "seed": self.task.problem.seed,
            "backend": self.task.backend,
            "device": self.task.device,
            "what": self.outcome.what,
            "kinds": list(self.outcome.kinds),
            "problem": repr(self.task.problem),
            "smallest": repr(self.smallest),
            "line": self.line,
        }


@dataclasses.dataclass
class Findings:
    """What is known so far.

    Args:
        counts: of held, refused and failed tasks, by backend and dtype.
        failures: in the order of their seeds.
    """

    counts: dict[tuple[str, str], dict[str, int]] = dataclasses.field(default_factory=dict)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def add(self, report: Report) -> None:
        """Count one more report."""
        task, outcome = report.task, report.outcome
        place = (task.backend, str(task.problem.dtype).removeprefix("torch."))
        counts = self.counts.setdefault(place, {"held": 0, "refused": 0, "failed": 0})
        counts[outcome.status] += 1
        if outcome.status == "failed":
            self.failures.append(Failure(task, outcome, task.problem))
            self.failures.sort(key=lambda failure: failure.task.problem.seed)

    def total(self, status: str) -> int:
        """How many tasks ended so."""
        return sum(counts[status] for counts in self.counts.values())


def tasks(seeds: Iterator[int], draw: Callable[[int], Problem], backends: Sequence[str], device: str) -> Iterator[Task]:
    """Every problem of the seeds for every backend."""
    for seed in seeds:
        problem = draw(seed)
        for backend in backends:
            yield Task(problem, backend, device)


def shrunk(failure: Failure, workers: Workers, trials: int = 200, seconds: float = 60.0) -> Failure:
    """The failure with the smallest problem found that has one of its kinds of failure, and what goes wrong there.

    Layers stay as they are.
    """
    if not isinstance(failure.task.problem, RandomProblem):
        return failure
    latest = failure.outcome

    def first_failing(problems: Sequence[RandomProblem]) -> int | None:
        nonlocal latest
        places: dict[Problem, int] = {problem: place for place, problem in enumerate(problems)}
        given = [Task(problem, failure.task.backend, failure.task.device) for problem in problems]
        found = {
            places[report.task.problem]: report.outcome
            for report in workers.run(given)
            if set(report.outcome.kinds) & set(failure.outcome.kinds)
        }
        if not found:
            return None
        latest = found[min(found)]
        return min(found)

    smallest = shrink(failure.task.problem, first_failing, trials=trials, seconds=seconds)
    return dataclasses.replace(failure, smallest=smallest, outcome=latest, shrunk=True)
