"""Worker processes that judge problems: one that dies is the failure of its problem, and another takes its place."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from evoattn.testing.judging import Outcome
from evoattn.testing.random_layers import RandomLayer
from evoattn.testing.random_problems import RandomProblem

__all__ = ["JUDGE", "LAYERS", "Problem", "Report", "Task", "Workers", "without_ctrl_c"]

JUDGE = "evoattn.testing.judging:judge"
LAYERS = "evoattn.testing.judging_layers:judge_layer"

Problem = RandomProblem | RandomLayer


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem for one backend on one device, by its name."""

    problem: Problem
    backend: str
    device: str = "cpu"


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a task, and the seconds that it took."""

    task: Task
    outcome: Outcome
    seconds: float


class Workers:
    """A fixed number of processes, each with one task at a time.

    They are spawned, because CUDA does not survive a fork. A worker that saw an error of CUDA ends itself: the context is lost.

    Args:
        jobs: how many processes.
        judge: "module:function" of (problem, backend, device), imported in each process.
        limit_s: seconds that a task may take, with what it compiles; then its process is killed.
    """

    def __init__(self, jobs: int, judge: str = JUDGE, limit_s: float = 120.0) -> None:
        self.judge, self.limit_s, self.jobs = judge, limit_s, jobs
        self.free: list[_Worker] = []
        self.busy: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self.free, *self.busy):
            worker.end()
        self.free, self.busy = [], []

    def run(self, tasks: Iterable[Task]) -> Iterator[Report]:
        """The reports of tasks, as they come in; the next task is drawn when a worker is free."""
        waiting = iter(tasks)
        more = True
        while more or self.busy:
            while more and len(self.busy) < self.jobs:
                task = next(waiting, None)
                if task is None:
                    more = False
                    break
                worker = self.free.pop() if self.free else _Worker(self.judge, max(1, (os.cpu_count() or 1) // self.jobs))
                self.busy.append(worker)
                worker.begin(task)
            yield from self._finished()

    def _finished(self) -> Iterator[Report]:
        """Wait until a worker reports, dies or takes too long."""
        if not self.busy:
            return
        left = min(worker.since + self.limit_s for worker in self.busy) - time.monotonic()
        multiprocessing.connection.wait([worker.connection for worker in self.busy], max(0.0, left))
        for worker in list(self.busy):
            outcome = worker.outcome(self.limit_s)
            if outcome is None:
                continue
            self.busy.remove(worker)
            if worker.usable:
                self.free.append(worker)
            else:
                worker.end()
            yield Report(cast(Task, worker.task), outcome, time.monotonic() - worker.since)


class _Worker:
    """One process, and the task that it has."""

    def __init__(self, judge: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, judge, threads), daemon=True)
        with without_ctrl_c():
            self.process.start()
        there.close()  # so that the end of the process is the end of the pipe
        self.task: Task | None = None
        self.since = 0.0
        self.usable = True

    def begin(self, task: Task) -> None:
        self.task, self.since = task, time.monotonic()
        with contextlib.suppress(OSError):  # it died while it had nothing to do: found when its outcome is asked for
            self.connection.send(task)

    def outcome(self, limit_s: float) -> Outcome | None:
        """What it reports, or what its end means; None while it works."""
        try:
            if self.connection.poll():
                outcome, self.usable = self.connection.recv()
                return cast(Outcome, outcome)
        except (EOFError, OSError):
            self.usable = False
            self.process.join(10)
            return Outcome("failed", f"the worker process died: {_death(self.process.exitcode)}", ("died",))
        if time.monotonic() - self.since < limit_s:
            return None
        self.usable = False
        return Outcome("failed", f"took longer than {limit_s:g} s", ("took longer",))

    def end(self) -> None:
        """Kill it: what it does is of no use to anyone."""
        self.connection.close()
        self.process.kill()
        self.process.join(10)


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


def _death(code: int | None) -> str:
    if code is None:
        return "no exit status"
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _serve(connection: Any, judge: str, threads: int) -> None:
    """The life of a worker: take a task, judge it, report, until there is nobody to report to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends this process
    torch.set_num_threads(threads)
    os.environ["EVOATTN_COMPILERS"] = "0"  # there are many processes already: `hopper` starts no compilers beside them
    module, _, name = judge.partition(":")
    call: Callable[[Problem, str, str], Outcome] = getattr(importlib.import_module(module), name)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            outcome = call(task.problem, task.backend, task.device)
            lost = "CUDA error" in outcome.what or "AcceleratorError" in outcome.what or "HIP error" in outcome.what
            connection.send((outcome, not lost))
            if lost:
                return
