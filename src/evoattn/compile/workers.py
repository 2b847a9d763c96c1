"""Worker processes: each runs one function at a time, and one that dies fails its task alone.

A worker is a new interpreter. It imports this package and nothing of the caller's program, whose main module may have no guard.
Ctrl-C does not reach it; its caller ends it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

_BOOT = """
import json, os, sys
if hasattr(os, "setpgid"):
    os.setpgid(0, 0)
sys.path[:], sys.pycache_prefix, sys.dont_write_bytecode = json.loads(sys.argv[1])
from evoattn.compile.workers import serve
serve()
"""
"""A process group of its own keeps Ctrl-C away. A session of its own would too, but Linux may share cores among sessions first;
a low priority then counts for nothing. An isolated interpreter does not know the caller's folder of compiled Python modules. It
would compile those of torch from their source."""


class Task(NamedTuple):
    """A call: "module:function", which the worker imports, and its arguments. "module" alone is only imported."""

    function: str
    arguments: tuple[Any, ...] = ()


class Report(NamedTuple):
    """The outcome of a task.

    Args:
        task: the task.
        result: the function's result; None if it raised or its process died.
        error: what the function raised, or how the process died, in one line; None if it returned.
        seconds: how long the task took, with the start of its process if that was not running.
    """

    task: Task
    result: Any
    error: str | None
    seconds: float


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A process that starts with its first task, and starts again with the next one if it has died.

    Args:
        environment: variables of its own beside the caller's. None: it compiles. Then it sees no GPU, since a CUDA context
            takes memory and time, and drops what compilers write to stderr.
        niceness: how much nicer than its caller it is.
        sockets: of the caller, which it inherits. They stay open as long as it lives.
        limit_s: seconds that a task may take. Then the process is killed.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        niceness: int = 0,
        sockets: tuple[socket.socket, ...] = (),
        limit_s: float | None = None,
    ) -> None:
        self.environment, self.niceness, self.sockets, self.limit_s = environment, niceness, sockets, limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: Task) -> Report:
        """Run a task and wait for it."""
        begun = time.monotonic()
        try:
            result, error = self._ask(task)
        except (OSError, EOFError, pickle.UnpicklingError):
            result, error = None, f"the worker process died: {self.end()}"
        except Exception as failure:  # the task or its result cannot be pickled: the process may be waiting for the rest
            self.end()
            result, error = None, f"{type(failure).__name__}: {failure}"
        seconds = time.monotonic() - begun
        if self.limit_s is not None and seconds >= self.limit_s:
            self.end()
            result, error = None, f"took longer than {self.limit_s:g} s"
        return Report(task, result, error, seconds)

    def _ask(self, task: Task) -> tuple[Any, str | None]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None  # they are pipes
        watch = None if self.limit_s is None else threading.Timer(self.limit_s, process.kill)
        if watch is not None:
            watch.start()
        try:
            pickle.dump(task, process.stdin)
            process.stdin.flush()
            found: tuple[Any, str | None] = pickle.load(process.stdout)
        finally:
            if watch is not None:
                watch.cancel()
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        if not sys.executable or getattr(sys, "frozen", False):  # it is a program of its own
            raise OSError("this program has no Python to start")
        own = self.environment
        if own is None:
            # CuTe DSL 4.8 looks for an architecture before its first kernel, even if kernels name their own. If there is a
            # driver and no visible GPU, it asks 281 times: seconds.
            own = {"CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": os.environ.get("CUTE_DSL_ARCH", "sm_90a")}
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, json.dumps([sys.path, sys.pycache_prefix, sys.dont_write_bytecode])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self.environment is None else None,
            env={**os.environ, "EVOATTN_COMPILERS": "0", **own},  # a worker has no workers of its own
            pass_fds=[one.fileno() for one in self.sockets],
        )
        if self.niceness:
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + self.niceness)
        return process

    def kill(self) -> None:
        """Kill the process, if there is one. This is for another thread than that of `run`, whose task then fails."""
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> str:
        """Kill the process, if there is one, and say how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # one that died has an exit status of its own
        process.kill()
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what it has not read is lost
                pipe.close()  # type: ignore[union-attr]
        return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


class Pool:
    """Workers that share tasks. A thread of this process hands each of them one task after the other.

    Args:
        jobs: workers at most.
        make: makes a worker; returns None if there is no room for one more.
        first: a worker's first task. It takes others when it is done with this one.
        idle_s: seconds without a task after which a worker ends. None: it lives to the end of the block.
    """

    def __init__(
        self,
        jobs: int,
        make: Callable[[], Worker | None] = Worker,
        first: Task = Task("os"),  # noqa: B008 (a constant)
        idle_s: float | None = None,
    ) -> None:
        self.jobs, self.make, self.first, self.idle_s = jobs, make, first, idle_s
        self.workers: dict[Worker, threading.Thread] = {}
        self._waiting: deque[tuple[Task, Future[Report]]] = deque()
        self._unfinished: list[Future[Report]] = []
        self._changed, self._closed = threading.Condition(), False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the workers, whatever they do. What tasks have written stays."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            threads = dict(self.workers)
        for worker, thread in threads.items():
            while thread.is_alive():
                worker.kill()
                thread.join(0.1)

    def submit(self, task: Task) -> Future[Report]:
        """Have a worker run a task. A task that no worker has begun can be cancelled."""
        future: Future[Report] = Future()
        with self._changed:
            self._unfinished = [one for one in self._unfinished if not one.done()] + [future]
            self._waiting.append((task, future))
            self.grow(len(self._unfinished))
            self._changed.notify()
        return future

    def grow(self, count: int) -> None:
        """Start workers until there are `count` of them, or as many as there may be."""
        with self._changed:
            while len(self.workers) < min(count, self.jobs) and (worker := self.make()) is not None:
                self.workers[worker] = threading.Thread(target=self._work, args=(worker,), daemon=True)
                self.workers[worker].start()

    def run(self, tasks: Iterable[Task]) -> Iterator[Report]:
        """Yield the reports of tasks as they come in. The next task is drawn when a worker is free."""
        left, running = iter(tasks), set[Future[Report]]()
        try:
            while True:
                running |= {self.submit(task) for task in itertools.islice(left, self.jobs - len(running))}
                if not running:
                    return
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in running:
                future.cancel()

    def _work(self, worker: Worker) -> None:
        worker.run(self.first)
        while (item := self._take(worker)) is not None:
            task, future = item
            if future.set_running_or_notify_cancel():
                future.set_result(worker.run(task))
        worker.end()
        for inherited in worker.sockets:
            inherited.close()

    def _take(self, worker: Worker) -> tuple[Task, Future[Report]] | None:
        """Wait for a task. Return None if the worker is to end; the pool has then dropped it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, self.idle_s)
            if self._waiting:
                return self._waiting.popleft()
            del self.workers[worker]
            return None


def serve() -> None:
    """Live as a worker: take a task, run it, report, until there is nobody to report to."""
    with open(os.dup(0), "rb") as tasks, open(os.dup(1), "wb") as reports:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)  # what a compiler prints is no report
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                pickle.dump(_done(pickle.load(tasks)), reports)
                reports.flush()


def _done(task: Task) -> tuple[Any, str | None]:
    """The result of a task, or what it raised."""
    module, _, name = task.function.partition(":")
    try:
        found = importlib.import_module(module)
        return (getattr(found, name)(*task.arguments) if name else None), None
    except Exception as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())
