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
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

_BOOT = f"""
import json, os, sys
if hasattr(os, "setpgid"):
    os.setpgid(0, 0)
sys.path[:], sys.pycache_prefix, sys.dont_write_bytecode = json.loads(sys.argv[1])
from {__name__} import serve
serve()
"""
"""A process group of its own keeps Ctrl-C away. A session of its own would too, but Linux may share cores among sessions first;
a busy program in another session would then take nothing from it. An isolated interpreter does not know the caller's folder of
compiled Python modules. It would compile those of torch from their source."""


class Task(NamedTuple):
    """A call: "module:function", which the worker imports, and its arguments. "module" alone is only imported."""

    function: str
    arguments: tuple[Any, ...] = ()

    def run(self) -> Any:
        """Return the function's result, in this process."""
        module, _, name = self.function.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name)(*self.arguments) if name else None


class Report(NamedTuple):
    """The outcome of a task: its result, or in one line what it raised or how its process died.

    The seconds are those that it took, with the start of its process if that was not running.
    """

    task: Task
    result: Any
    error: str | None
    seconds: float


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a new interpreter that takes tasks from its input and reports to its output.

    Args:
        environment: variables of its own beside the caller's. None: it compiles. Then it sees no GPU, since a CUDA context
            takes memory and time, and drops what compilers write to stderr.

    Raises:
        OSError: there is no Python to start, or no room for a process.
    """
    if not sys.executable or getattr(sys, "frozen", False):  # it is a program of its own
        raise OSError("this program has no Python to start")
    stderr = None
    if environment is None:
        # CuTe DSL 4.8 looks for an architecture before its first kernel, even if kernels name their own. If there is a
        # driver and no visible GPU, it asks 281 times: seconds.
        environment = {"CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": os.environ.get("CUTE_DSL_ARCH", "sm_90a")}
        stderr = subprocess.DEVNULL
    python = sys.path, sys.pycache_prefix, sys.dont_write_bytecode
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, json.dumps(python)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "EVOATTN_COMPILERS": "0", **environment},  # a worker has no workers of its own
    )


class Worker:
    """A process that starts with its first task, and starts again with the next one if it has died.

    first: a task that each process does before all others.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, first: Task | None = None) -> None:
        self.environment, self.first = environment, first
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
        return Report(task, result, error, time.monotonic() - begun)

    def _ask(self, task: Task) -> tuple[Any, str | None]:
        tasks = [task]
        if self._process is None:
            self._process = start(self.environment)
            tasks[:0] = [] if self.first is None else [self.first]
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # they are pipes
        for each in tasks:
            pickle.dump(each, process.stdin)
            process.stdin.flush()
            reply = pickle.load(process.stdout)
        return reply  # type: ignore[no-any-return]

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
    """Threads, each of which has a worker of its own. They do not keep the process from ending, and workers end with it.

    The workers of a `with` block end with the block.

    Args:
        jobs: how many workers there are at most. A worker starts with a task for which the others have no time.
        make: makes a worker.
        idle_s: seconds after which a worker without tasks ends. None: never.
    """

    def __init__(self, jobs: int, make: Callable[[], Worker] = Worker, *, idle_s: float | None = None) -> None:
        self.jobs, self.make, self.idle_s = jobs, make, idle_s
        self.workers: dict[Worker, threading.Thread] = {}
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[Task, Future[Report]] | None] = queue.SimpleQueue()  # None: there are no more
        self._unfinished: set[Future[Report]] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: object) -> None:
        """Kill the workers, whatever they do. What tasks have written stays."""
        for future in self._unfinished:
            future.cancel()
        for _ in self.workers:
            self._tasks.put(None)
        for worker, thread in self.workers.items():
            while thread.is_alive():
                worker.kill()
                thread.join(0.1)

    def submit(self, task: Task, jobs: int | None = None) -> Future[Report]:
        """Have a worker run a task. There are so many of them at most, if that is less than the pool's own number."""
        future: Future[Report] = Future()
        with self._lock:
            self._unfinished = {x for x in self._unfinished if not x.done()} | {future}
            self._tasks.put((task, future))
            if len(self.workers) < min(self.jobs if jobs is None else jobs, len(self._unfinished)):
                self._start_worker()
        return future

    def _start_worker(self) -> None:
        """Start a worker. If there may be no more threads, the tasks that wait for the first one have failed."""
        worker = self.make()
        thread = threading.Thread(target=self._work, args=(worker,), name="evoattn-worker", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            while not self.workers and not self._tasks.empty():
                given = self._tasks.get()
                if given is not None and given[1].set_running_or_notify_cancel():
                    given[1].set_result(Report(given[0], None, f"no worker could be started: {error}", 0.0))
        else:
            self.workers[worker] = thread

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
        """Give tasks to a worker, until there is none for too long."""
        while True:
            try:
                given = self._tasks.get(timeout=self.idle_s)
            except queue.Empty:
                with self._lock:
                    if not self._tasks.empty():
                        continue
                    del self.workers[worker]
                break
            if given is None:
                break
            task, future = given
            if future.set_running_or_notify_cancel():
                future.set_result(worker.run(task))
        worker.end()


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
    try:
        return task.run(), None
    except Exception as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())
