"""Kernels of a call that wants gradients are compiled in other processes too, each once, and whatever happens there."""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import subprocess
import threading
from collections.abc import Iterator
from subprocess import PIPE
from typing import Any

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

import evoattn
from evoattn.backends import Plan, hopper
from evoattn.backends.hopper import ahead, launch
from evoattn.cli.warm.cards import cards_of
from evoattn.compile import beside, cache, workers
from evoattn.compile.workers import Task, Worker
from evoattn.core.devices import planned_for
from tests.fuzz.trials import Workers
from tests.helpers.kept_kernels import kept, new_process
from tests.helpers.locks import locked_by_another
from tests.helpers.scripts import load
from tests.helpers.small_kernels import CHANNELS, kernels, until


def file_of(kernel: launch.KernelVariant) -> pathlib.Path:
    """Where a kernel is kept."""
    path = ahead.needed(lambda: (Plan(print, print, kernels=(kernel,)), ()))[0].path
    assert path is not None
    return path


@pytest.mark.slow
def test_helpers_write_what_this_process_reads(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.begin(kernels())
    until(lambda: folder.exists() and len(list((folder / "hopper").glob("*.o"))) == len(CHANNELS))
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail(f"{kernel.name} is compiled here"))
    assert all(callable(ahead.load_kernel(kernel)) for kernel in kernels())
    until(lambda: not beside._helpers.workers)


def test_helpers_begin_with_the_last_kernel(folder: pathlib.Path, begun: list[Any]) -> None:
    """Any of them, and this process, may come to a kernel first."""
    ahead.begin(kernels())
    assert [(task.arguments[0], jobs) for task, jobs in begun] == [(kernel, len(CHANNELS) - 1) for kernel in kernels()[::-1]]


@pytest.mark.parametrize("ends", ["writes the file", "is killed"])
def test_a_kernel_that_another_process_compiles_is_waited_for(
    ends: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    build = launch.build
    monkeypatch.setattr(launch, "build", lambda kernel: compiled.append(kernel.name) or build(kernel))
    kernel, path = kernels()[0], file_of(kernels()[0])
    ahead.load_kernel(kernel)
    code = path.read_bytes()
    path.unlink()
    new_process()
    with locked_by_another(path) as other:
        waits = threading.Thread(target=ahead.load_kernel, args=(kernel,))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive() and len(compiled) == 1
        if ends == "writes the file":
            cache.write(path, code)
        other.kill()
        waits.join(60)
    assert callable(ahead.functions[kernel.name])
    assert len(compiled) == (1 if ends == "writes the file" else 2)
    assert kept(folder) == [path]


def test_a_helper_leaves_a_kernel_that_another_process_compiles(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, path = kernels()[0], file_of(kernels()[0])
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail("compiled twice"))
    with locked_by_another(path):
        assert ahead.keep(kernel, path, wait=False) == 0


@pytest.mark.parametrize("died", [False, True])
def test_a_python_that_cannot_be_started_or_dies_is_done_without(
    died: bool, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if died:
        monkeypatch.setattr(workers, "start", lambda *_, **__: subprocess.Popen(["false"], stdin=PIPE, stdout=PIPE))
    else:
        monkeypatch.setattr("sys.executable", None)
    ahead.begin(kernels())
    assert all(callable(ahead.load_kernel(kernel)) for kernel in kernels())


def test_helpers_go_on_after_a_task_that_fails(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    beside.help_with([Task("os:mkdir", (str(tmp_path / "made"),)), Task("operator:truediv", (1, 0))], folder)
    until((tmp_path / "made").exists)


@pytest.mark.parametrize(
    "reason",
    [
        "one core",
        "three cores",
        "a process for each core",
        "nothing is kept",
        "read-only",
        "one kernel",
        "all are kept",
        "all are loaded",
    ],
)
def test_nobody_is_started_where_that_is_of_no_use(
    reason: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, begun: list[Any]
) -> None:
    if reason == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    elif reason == "three cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    elif reason == "a process for each core":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    elif reason == "nothing is kept":
        monkeypatch.setenv("EVOATTN_CACHE_DIR", "")
    elif reason == "read-only":  # a file in the place of the folder: that stops root too
        folder.write_text("")
    elif reason.startswith("all"):
        for kernel in kernels():
            ahead.load_kernel(kernel)
        if reason == "all are kept":
            new_process()
        else:
            for file in kept(folder):
                file.unlink()
    ahead.begin(kernels()[:1] if reason == "one kernel" else kernels())
    assert not begun


@pytest.mark.parametrize(("asked", "helpers"), [(None, 4), ("", 4), ("0", 0), ("2", 2), ("9", 4), ("off", 0)])
def test_the_environment_says_how_many_at_most(
    asked: str | None, helpers: int, folder: pathlib.Path, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked is not None:
        monkeypatch.setenv(beside.VARIABLE, asked)
    beside.start_helpers(ahead.__name__, hopper.folder())
    assert begun == [(Task(ahead.__name__), helpers)] * helpers


def test_who_asks_has_helpers_for_few_cores_too(
    folder: pathlib.Path, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no more than there are cores for, of which four processes have two each here."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    beside.start_helpers(ahead.__name__, hopper.folder())
    assert not begun
    monkeypatch.setenv(beside.VARIABLE, "4")
    beside.start_helpers(ahead.__name__, hopper.folder())
    assert begun == [(Task(ahead.__name__), 1)]


@pytest.mark.parametrize("empty", [True, False])
def test_helpers_start_early_if_nothing_is_kept(empty: bool, folder: pathlib.Path, begun: list[Any]) -> None:
    """They import the compiler, and get their kernels when these are known."""
    if not empty:
        ahead.load_kernel(kernels()[0])
    beside.start_helpers(ahead.__name__, hopper.folder())
    assert begun == ([(Task(ahead.__name__), beside.HELPERS)] * beside.HELPERS if empty else [])


class RunsError(Exception):
    """A forward has been planned, and runs."""


@contextlib.contextmanager
def never_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls of tensors on the CPU are planned for an H200, and end when the forward would run."""

    def run(*_: Any) -> None:
        raise RunsError

    real = hopper.plan_forward
    monkeypatch.setattr(hopper, "plan_forward", lambda *args, **options: dataclasses.replace(real(*args, **options), run=run))
    with planned_for(cards_of("sm_90a")[0]), pytest.raises(RunsError):
        yield


@pytest.mark.parametrize("records", [True, False])
def test_a_call_that_wants_gradients_begins_both_passes(
    records: bool, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[launch.KernelVariant] = []
    monkeypatch.setattr(ahead, "begin", begun.extend)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": records}
    q, pair = torch.empty(1, 40, 96, 4, 32, **options), torch.empty(1, 1, 4, 96, 96, **options)
    with never_run(monkeypatch):
        evoattn.evoformer_attention(q, q, q, mask=torch.ones(1, 40, 96, dtype=torch.bool), pair_bias=pair)
    kinds = [type(kernel).__name__ for kernel in begun]
    passes = ["PairBias", "KeyBias", "Forward", "KeyBias", "PairBias", "QueryGradients", "KeyGradients"]
    assert kinds == (passes if records else [])
    assert [pickle.loads(pickle.dumps(kernel)) for kernel in begun] == begun
    assert folder.exists() is False


def test_a_backward_that_cannot_be_planned_does_not_stop_a_forward(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("this device has no room for 2 blocks that work together")

    monkeypatch.setattr(hopper, "plan_backward", refuse)
    monkeypatch.setattr(ahead, "begin", lambda kernels: pytest.fail("begun"))
    q = torch.empty(1, 40, 96, 4, 32, dtype=torch.bfloat16, requires_grad=True)
    with never_run(monkeypatch):
        evoattn.evoformer_attention(q, q, q)


def test_a_worker_compiles_no_kernel_that_another_process_has_kept(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels()[0]
    ahead.load_kernel(kernel)
    (file,) = kept(folder)
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail("compiled again"))
    ahead.keep(kernel, file)


def test_the_script_of_first_calls_sees_what_is_compiled_and_awaited(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for of, name in ((cache, "locked"), (launch, "build")):
        monkeypatch.setattr(of, name, getattr(of, name))  # so that what the script puts there is undone
    watch = load("benchmarks/first_calls.py").Watch(0.0)
    watch.begin()
    kernel = kernels()[0]
    with locked_by_another(file_of(kernel)) as other:
        threading.Timer(0.3, other.kill).start()
        ahead.load_kernel(kernel)
    assert [name for name, _, _ in watch.lists["compiled"]] == [kernel.name]
    assert [name for name, _, _ in watch.lists["awaited"]] == [kernel.name]


def test_a_process_that_judges_random_problems_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many of them as cores, which they share. They see the GPU."""
    monkeypatch.setenv(beside.VARIABLE, "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    worker = Workers(4).pool.make()
    assert worker is not None
    try:
        assert worker.run(Task("os:getenv", (beside.VARIABLE,))).result == "0"
        assert worker.run(Task("os:getenv", ("CUDA_VISIBLE_DEVICES",))).result == "3"
        assert worker.run(Task("torch:get_num_threads")).result == 1
    finally:
        worker.end()


def test_a_worker_never_asks_the_driver_for_the_gpu_that_is_hidden_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuTe DSL asks again for each error that it reports, until Python stops it: seconds, where there is a driver."""
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    worker = Worker()
    try:
        assert worker.run(Task("tests.helpers.hidden_gpu:asked_of_the_driver", ()))[1:3] == (0, None)
    finally:
        worker.end()
