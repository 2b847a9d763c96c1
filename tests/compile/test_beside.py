"""Workers that compile beside a program. Their kernels are folders that they make."""

import os
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

import pytest

from evoattn.compile import beside
from evoattn.compile.workers import Task


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Why calls wait. There are six cores, and nothing was asked for yet."""
    monkeypatch.delenv(beside.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(beside, "IDLE_S", 0.1)
    beside.forget()
    reasons: list[str] = []
    monkeypatch.setattr(beside, "listeners", [reasons.append])
    beside.tell.cache_clear()
    yield reasons
    beside.tell.cache_clear()


def ask(folder: pathlib.Path, task: Task | None = None) -> beside.Future[beside.Report] | None:
    return beside.compilation(str(folder), task or Task("os:mkdir", (str(folder),)), folder.exists)


def test_a_kernel_is_compiled_once_and_found(tmp_path: pathlib.Path, told: list[str]) -> None:
    folder = tmp_path / "kernel"
    first, second = ask(folder), ask(folder)
    assert first is not None and first is second
    assert first.result(60).error is None
    assert folder.exists() and ask(folder) is None
    assert not told


def test_what_is_kept_is_not_compiled(tmp_path: pathlib.Path, told: list[str]) -> None:
    assert ask(tmp_path) is None
    assert not beside._submitted and not told


def test_several_workers_compile_at_once(tmp_path: pathlib.Path) -> None:
    """Not more than there are cores to spare. They end if there is nothing to do, and begin again."""
    tasks = [ask(tmp_path / f"{i}.o", Task(f"{__name__}:meet", (str(tmp_path), 3))) for i in range(3)]
    assert len(beside._pool.workers) == 3
    assert all(task is not None and task.result(60).error is None for task in tasks)
    begun = time.monotonic()
    while beside._pool.workers:
        assert time.monotonic() - begun < 60
        time.sleep(0.01)
    again = ask(tmp_path / "again")
    assert again is not None and again.result(60).error is None


def meet(folder: str, count: int) -> None:
    """Wait until so many processes are here."""
    (pathlib.Path(folder) / str(os.getpid())).touch()
    end = time.monotonic() + 50
    while len(os.listdir(folder)) < count and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir(folder)) == count


def test_workers_leave_the_cores_to_the_program(tmp_path: pathlib.Path) -> None:
    task = ask(tmp_path / "kernel", Task("os:nice", (0,)))
    assert task is not None and task.result(60).result == os.nice(0) + 10


@pytest.mark.parametrize(
    ("task", "why"),
    [
        pytest.param(Task("os:_exit", (3,)), "the worker process died: exit status 3", marks=pytest.mark.slow),
        pytest.param(Task("os:rmdir", ("/no/such/folder",)), "FileNotFoundError", marks=pytest.mark.slow),
        (Task("os:getpid"), "it is not where it is looked for"),
    ],
)
def test_a_kernel_is_tried_once(task: Task, why: str, tmp_path: pathlib.Path, told: list[str]) -> None:
    """Whoever asks again has to wait, and is told why. Other kernels are compiled all the same."""
    failed = ask(tmp_path / "failed", task)
    assert failed is not None and failed.result(60)
    assert not told
    assert ask(tmp_path / "failed", task) is None
    assert ask(tmp_path / "failed", task) is None
    assert len(told) == 1 and why in told[0]
    other = ask(tmp_path / "other")
    assert other is not None and other.result(60).error is None


@pytest.mark.parametrize(
    ("variable", "cores", "why"),
    [("0", 4, "EVOATTN_COMPILERS is 0"), ("off", 4, "EVOATTN_COMPILERS is off"), ("", 1, "no core to spare")],
)
def test_without_workers_calls_wait(
    variable: str, cores: int, why: str, tmp_path: pathlib.Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(beside.VARIABLE, variable)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert ask(tmp_path / "kernel") is None
    assert len(told) == 1 and why in told[0]


@pytest.mark.parametrize(
    ("variable", "cores", "workers"),
    [("", 64, 16), ("", 16, 8), ("", 2, 1), ("2", 64, 2), ("12", 16, 12), ("40", 64, 16)],
)
def test_the_user_says_how_many(variable: str, cores: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(beside.VARIABLE, variable)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert beside.most() == workers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores // 2))
    assert beside.most() == 1


def test_somebody_hears_of_it_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "listeners", [])
    with pytest.warns(UserWarning, match="calls wait for their kernels to be compiled: the moon is full"):
        beside.tell("the moon is full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        beside.tell("the moon is full")


PROGRAM = """
import sys, time
from evoattn.compile import beside
from evoattn.compile.workers import Task
task = beside.compilation("a", Task("tests.compile.test_beside:linger", (sys.argv[1],)), lambda: False)
while not task.done() and not __import__("os").path.exists(sys.argv[1]):
    time.sleep(0.01)
print(task.done())
"""


def linger(path: str) -> None:
    """Leave the process id in a file, and take a while."""
    unfinished = pathlib.Path(path).with_suffix(".part")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(path)
    time.sleep(2)


def test_a_program_ends_while_its_kernels_are_compiled(tmp_path: pathlib.Path) -> None:
    """It does not wait for its workers. Each finishes its kernel, and ends."""
    path = tmp_path / "worker"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False" and time.monotonic() - begun < 2 + 20
    worker = int(path.read_text())
    while pathlib.Path(f"/proc/{worker}").exists():
        assert time.monotonic() - begun < 60
        time.sleep(0.05)


def test_a_forked_process_has_workers_of_its_own(tmp_path: pathlib.Path) -> None:
    assert ask(tmp_path / "kernel", Task("time:sleep", (0.5,))) is not None
    if (child := os.fork()) == 0:
        mine = ask(tmp_path / "kernel")
        os._exit(0 if mine is not None and mine.result(60).error is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "kernel").exists()
