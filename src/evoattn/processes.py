"""Worker processes that compile: each runs one function at a time, and one that dies fails its task alone.

A worker is a new interpreter. It imports this package and nothing of the caller's program, whose main module may have no guard.
It sees no GPU: compilers need none, and a CUDA context takes memory and time. Ctrl-C does not reach it; its caller ends it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["Pool", "Report", "Task", "Worker", "cores", "serve"]

_BOOT = """
import json, os, sys
if hasattr(os, "setpgid"):
    os.setpgid(0, 0)
sys.path[:], sys.pycache_prefix, sys.dont_write_bytecode = json.loads(sys.argv[1])
from evoattn.processes import serve
serve()
"""
"""A group of its own keeps Ctrl-C from it. A session of its own would too, but Linux may share cores among sessions first: a
low priority counts for nothing then. An isolated interpreter knows nothing of the folder in which its caller keeps compiled
modules, and would compile those of torch from their source."""

_SETTLED = {"CUDA_VISIBLE_DEVICES": "", "EVOATTN_COMPILERS": "0"}
"""A worker sees no GPU, and has no workers of its own."""

_ASSUMED = {"CUTE_DSL_ARCH": "sm_90a"}
"""Unless the caller's environment says otherwise. CuTe DSL 4.8 looks for an architecture before its first kernel, though ours
name their own. Where there is a driver, and no GPU to be seen, it asks 281 times: seconds."""


class Task(NamedTuple):
    """A call: "module:function", which the worker imports, and its arguments."""

    function: str
    arguments: tuple[Any, ...]


class Report(NamedTuple):
    """What became of a task.

    Args:
        task: it.
        result: what the function returned; None if it raised or its process died.
        error: what it raised, or how the process died, in one line; None if it returned.
        seconds: that it took, with the start of the process if it was the first.
    """

    task: Task
    result: Any
    error: str | None
    seconds: float


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A process that is started with its first task.

    Args:
        behind: how much nicer to others than its caller the system makes it.
        held: file descriptors that it has too, and so keeps open as long as it lives.
    """

    def __init__(self, behind: int = 0, held: tuple[int, ...] = ()) -> None:
        self._behind, self._held = behind, held
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: Task) -> Report:
        """Run a task and wait for it."""
        begun = time.monotonic()
        try:
            result, error = self._ask(task)
        except (OSError, EOFError, pickle.UnpicklingError):
            result, error = None, f"the worker process died: {self.end()}"
        return Report(task, result, error, time.monotonic() - begun)

    def _ask(self, task: Task) -> tuple[Any, str | None]:
        process = self._process = self._process or _start(self._behind, self._held)
        assert process.stdin is not None and process.stdout is not None  # they are pipes
        pickle.dump(task, process.stdin)
        process.stdin.flush()
        found: tuple[Any, str | None] = pickle.load(process.stdout)
        return found

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


def _start(behind: int, held: tuple[int, ...]) -> subprocess.Popen[bytes]:
    if not sys.executable or getattr(sys, "frozen", False):  # it is a program of its own
        raise OSError("this program has no Python to start")
    environment = {**_ASSUMED, **os.environ, **_SETTLED}
    modules = json.dumps([sys.path, sys.pycache_prefix, sys.dont_write_bytecode])
    command = [sys.executable, "-I", "-c", _BOOT, modules]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment, pass_fds=held)
    if behind:
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + behind)
    return process


class Pool:
    """So many workers, which live from their first task to the end of the block.

    Args:
        jobs: how many.
    """

    def __init__(self, jobs: int) -> None:
        self.workers = [Worker() for _ in range(jobs)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the workers, whatever they do. What tasks have written stays."""
        for worker in self.workers:
            worker.end()

    def run(self, tasks: Iterable[Task]) -> Iterator[Report]:
        """Reports of tasks as they come in."""
        waiting, reports = iter(list(tasks)), queue.SimpleQueue[Report | None]()
        lock = threading.Lock()

        def work(worker: Worker) -> None:
            while True:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    break
                reports.put(worker.run(task))
            reports.put(None)

        for worker in self.workers:
            threading.Thread(target=work, args=(worker,), daemon=True).start()
        left = len(self.workers)
        try:
            while left:
                report = reports.get()
                if report is None:
                    left -= 1
                else:
                    yield report
        finally:
            with lock:
                waiting = iter(())  # the caller wants no more: no thread begins another task


def serve() -> None:
    """The life of a worker: take a task, run it, report, until there is nobody to report to."""
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
        return getattr(importlib.import_module(module), name)(*task.arguments), None
    except Exception as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())
