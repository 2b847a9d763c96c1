"""Worker processes that judge problems: one that dies is the failure of its problem, and another takes its place."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterable, Iterator

from evoattn.compile import workers
from evoattn.testing.judging import Outcome
from evoattn.testing.random_layers import RandomLayer
from evoattn.testing.random_problems import RandomProblem

__all__ = ["JUDGE", "LAYERS", "Problem", "Report", "Task", "Workers", "without_ctrl_c"]

JUDGE = "evoattn.testing.judging:judge"
LAYERS = "evoattn.testing.judging_layers:judge_layer"

Problem = RandomProblem | RandomLayer

_LOST = ("CUDA error", "AcceleratorError", "HIP error")
"""Words of an outcome after which a process can use its GPU no more."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem for one backend on one device, by its name."""

    problem: Problem
    backend: str
    device: str = "cpu"


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a task, and the seconds that it took."""

    task: Task
    outcome: Outcome
    seconds: float


class Workers:
    """A fixed number of processes that see the GPU, each with one task at a time; use it as a context manager.

    Args:
        jobs: how many processes.
        judge: "module:function" of (problem, backend, device), imported in each process.
        limit_s: seconds that a task may take, with what it compiles. Then its process is killed.
    """

    def __init__(self, jobs: int, judge: str = JUDGE, limit_s: float = 120.0) -> None:
        self.judge, self.limit_s, self.jobs = judge, limit_s, jobs
        self.pool = workers.Pool(jobs, self._worker, workers.Task("evoattn.testing.judging"))

    def _worker(self) -> workers.Worker:
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        return _Worker({"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}, limit_s=self.limit_s)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *raised: object) -> None:
        self.pool.__exit__(*raised)

    def run(self, tasks: Iterable[Task]) -> Iterator[Report]:
        """Yield the reports of tasks as they come in. The next task is drawn when a worker is free."""
        for report in self.pool.run(workers.Task(self.judge, (x.problem, x.backend, x.device)) for x in tasks):
            outcome = report.result
            if report.error is not None:
                outcome = Outcome("failed", report.error, ("took longer" if "took longer" in report.error else "died",))
            yield Report(Task(*report.task.arguments), outcome, report.seconds)


class _Worker(workers.Worker):
    """A worker that starts a new process after an error of CUDA, which loses the context."""

    def run(self, task: workers.Task) -> workers.Report:
        report = super().run(task)
        if isinstance(report.result, Outcome) and any(word in report.result.what for word in _LOST):
            self.end()
        return report


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Keep Ctrl-C from a process that is started meanwhile, even before it runs its first line. This one sees it after."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
