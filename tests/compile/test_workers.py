"""Workers run functions in processes of their own: what they return or raise comes back, and one that dies fails one task."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from evoattn.compile.workers import Pool, Report, Task, Worker


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    """One worker for tests that need no new one: a start takes more than a second."""
    with pytest.MonkeyPatch.context() as patch, Pool(1) as pool:
        patch.delenv("CUTE_DSL_ARCH", raising=False)
        pool.submit(Task("os:getpid")).result(60)
        yield pool


def reports(*tasks: Task, pool: Pool | None = None) -> list[Report]:
    """The reports of a pool, or of a new worker, which ends."""
    if pool is not None:
        return list(pool.run(tasks))
    with Pool(1) as pool:
        return list(pool.run(tasks))


def test_results_come_back(shared: Pool) -> None:
    results = reports(*(Task("operator:mul", (i, i)) for i in range(5)), pool=shared)
    assert sorted(report.result for report in results) == [0, 1, 4, 9, 16]
    assert all(report.error is None and report.seconds > 0 for report in results)


def test_an_error_is_one_line_and_the_worker_goes_on(shared: Pool) -> None:
    before, first, second = reports(Task("os:getpid"), Task("operator:truediv", (1, 0)), Task("os:getpid"), pool=shared)
    assert first.result is None and first.error == "ZeroDivisionError: division by zero"
    assert second.error is None and second.result == before.result != os.getpid()


def test_a_worker_that_dies_fails_its_task_alone_and_each_process_does_the_first_task() -> None:
    with Pool(1, make=lambda: Worker(first=Task("os:nice", (3,)))) as pool:
        dies = Task("os:kill", (0, signal.SIGKILL))  # 0: all of its group, which is its own
        first, dead, second = pool.run([Task("os:nice", (0,)), dies, Task("os:nice", (0,))])
    assert first.result == second.result == os.nice(0) + 3
    assert dead.result is None and dead.error == "the worker process died: signal SIGKILL"


def test_tasks_fail_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller goes on, and a later task has a worker."""
    with Pool(1) as pool:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
            failed = pool.submit(Task("os:getpid"))
        assert failed.done() and failed.result().error == "no worker could be started: can't start new thread"
        assert pool.submit(Task("operator:add", (1, 2))).result(60).result == 3


def test_a_task_that_cannot_be_sent_fails_alone() -> None:
    first, second = reports(Task("operator:not_", (lambda: None,)), Task("operator:add", (1, 2)))
    assert first.result is None and first.error is not None and "pickle" in first.error.lower()
    assert second.result == 3


def test_what_a_worker_prints_is_no_report(shared: Pool) -> None:
    (report,) = reports(Task("os:write", (1, b"Hello")), pool=shared)
    assert report.error is None and report.result == 5


def test_workers_see_no_gpu_and_end_with_the_block() -> None:
    with Pool(1) as pool:
        (report,) = pool.run([Task("os:getenv", ("CUDA_VISIBLE_DEVICES",))])
        (process,) = pool.run([Task("os:getpid", ())])
    assert report.result == ""
    with pytest.raises(ProcessLookupError):
        os.kill(process.result, 0)


def test_a_worker_starts_no_compilers_of_its_own(shared: Pool) -> None:
    (report,) = reports(Task("os:getenv", ("EVOATTN_COMPILERS",)), pool=shared)
    assert report.result == "0"


def test_a_worker_knows_an_architecture_but_believes_its_caller(shared: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = Task("os:getenv", ("CUTE_DSL_ARCH",))
    assert reports(asks, pool=shared)[0].result == "sm_90a"
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert reports(asks)[0].result == "sm_100a"


@pytest.mark.slow  # it compiles all modules of torch
def test_a_worker_finds_compiled_modules_where_its_caller_does(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (report,) = reports(Task("importlib.util:cache_from_source", (__file__,)))
    assert report.result == importlib.util.cache_from_source(__file__)
    assert report.result.startswith(str(tmp_path)) and any(tmp_path.rglob("workers.*.pyc"))


def test_a_worker_is_out_of_reach_of_ctrl_c_but_shares_cores_with_its_caller(shared: Pool) -> None:
    """Linux may share cores among sessions first, whatever the priorities of their processes."""
    group, session = reports(Task("os:getpgid", (0,)), Task("os:getsid", (0,)), pool=shared)
    assert group.result != os.getpgid(0) and session.result == os.getsid(0)


def test_a_caller_that_stops_early_kills_what_runs() -> None:
    begun = time.monotonic()
    with Pool(2) as pool:
        for report in pool.run([Task("os:getpid", ()), *[Task("time:sleep", (60,))] * 3]):
            assert report.error is None
            break
    assert time.monotonic() - begun < 30


def test_a_script_without_a_guard_starts_workers(tmp_path: pathlib.Path) -> None:
    """Its main module is not imported again in them, as multiprocessing would do."""
    script = tmp_path / "script.py"
    script.write_text(
        "from evoattn.compile.workers import Pool, Task\n"
        "print('once')\n"
        "with Pool(1) as pool:\n"
        "    print([report.result for report in pool.run([Task('operator:add', (1, 2))])])\n"
    )
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert ran.stdout == "once\n[3]\n"
