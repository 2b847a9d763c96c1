"""Kernels of a call that wants gradients are compiled in other processes too, each once, and whatever happens there."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

import evoattn
from evoattn.backends import hopper
from evoattn.backends.hopper import ahead, launch
from evoattn.cli.warm.cards import cards_of
from evoattn.compile import first_calls
from evoattn.compile.workers import Task, Worker
from evoattn.core.devices import planned_for
from tests.fuzz.trials import Workers
from tests.helpers.first_calls import CHANNELS, Hand, held_by_workers, kernels, until, waiting
from tests.helpers.kept_kernels import kept, new_process
from tests.helpers.scripts import load


@pytest.mark.slow
def test_workers_write_what_this_process_reads(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.begin(kernels())
    until(lambda: folder.exists() and len(list((folder / "hopper").glob("*.o"))) == len(CHANNELS))
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail(f"{kernel.name} is compiled here"))
    assert all(callable(ahead.load_kernel(kernel)) for kernel in kernels())


def test_each_kernel_is_compiled_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, hand: type[Hand]) -> None:
    """The worker takes the last one first. This process takes the others, and waits for that one."""
    monkeypatch.setattr(first_calls, "MOST", 1)
    compiled: list[str] = []
    build = launch.build
    monkeypatch.setattr(launch, "build", lambda kernel: compiled.append(kernel.name) or build(kernel))
    monkeypatch.setattr(hand, "do", staticmethod(lambda task: ahead.keep(*task.arguments)))
    ahead.begin(kernels())
    until(lambda: hand.taken)
    *first, last = kernels()
    assert all(callable(ahead.load_kernel(kernel)) for kernel in first)
    assert compiled == [kernel.name for kernel in first]
    waits = threading.Thread(target=ahead.load_kernel, args=(last,))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    hand.go.set()
    waits.join(60)
    until(lambda: not held_by_workers())
    assert hand.taken == [last.name] and compiled == [kernel.name for kernel in (*first, last)]
    assert len(kept(folder)) == len(CHANNELS)


def test_what_a_worker_cannot_compile_is_compiled_here(folder: pathlib.Path, hand: type[Hand]) -> None:
    hand.go.set()
    ahead.begin(kernels())
    until(lambda: len(hand.taken) == len(CHANNELS))
    assert all(callable(ahead.load_kernel(kernel)) for kernel in kernels())
    assert len(kept(folder)) == len(CHANNELS)


def test_a_python_that_cannot_be_started_is_done_without(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", None)
    ahead.begin(kernels())
    assert all(callable(ahead.load_kernel(kernel)) for kernel in kernels())


@pytest.mark.parametrize(
    "reason",
    [
        "one core",
        "three cores",
        "a process for each core",
        "all places are taken",
        "nothing is kept",
        "read-only",
        "one kernel",
        "all are kept",
        "all are loaded",
    ],
)
def test_nobody_is_started_where_that_is_of_no_use(
    reason: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, hand: type[Hand], request: pytest.FixtureRequest
) -> None:
    if reason == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    elif reason == "three cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    elif reason == "a process for each core":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    elif reason == "all places are taken":
        request.getfixturevalue("no_place_left")
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
    assert not first_calls.helpers.workers and not waiting()


@pytest.mark.parametrize("empty", [True, False])
def test_workers_start_early_if_nothing_is_kept(empty: bool, folder: pathlib.Path, hand: type[Hand]) -> None:
    if not empty:
        ahead.load_kernel(kernels()[0])
    first_calls.prestart("hopper")
    assert len(first_calls.helpers.workers) == (first_calls.MOST if empty else 0)


def test_a_forked_process_has_workers_of_its_own(folder: pathlib.Path, hand: type[Hand]) -> None:
    """Those of its parent would never finish: a thread does not survive a fork."""
    ahead.begin(kernels())
    until(held_by_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads, which is the point
        child = os.fork()
    if not child:
        os._exit(len(first_calls.helpers.workers) + len(held_by_workers()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hand.go.set()


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


def test_a_slow_worker_is_waited_for_once(folder: pathlib.Path, hand: type[Hand], monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels are with workers that never finish. This process compiles them itself, and begins no others."""
    monkeypatch.setattr(first_calls, "PATIENCE_S", 0.3)
    ahead.begin(kernels())
    until(lambda: len(hand.taken) == len(CHANNELS))
    waits: list[float] = []
    wait = concurrent.futures.wait

    def watched(futures: Any, limit: float) -> Any:
        waits.append(limit)
        return wait(futures, limit)

    monkeypatch.setattr(concurrent.futures, "wait", watched)
    assert all(callable(ahead.load_kernel(kernel)) for kernel in kernels())
    assert waits == [0.3]
    first_calls.begin("hopper", {name: Task("nowhere:nothing") for name in "ab"})
    assert not waiting()
    hand.go.set()


def test_nobody_waits_for_a_worker_that_is_still_starting(
    folder: pathlib.Path, hand: type[Hand], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    run = hand.run
    monkeypatch.setattr(hand, "run", lambda self, task: run(self, task) if task.arguments else started.wait(60))
    monkeypatch.setattr(first_calls, "PATIENCE_S", 0.0)
    ahead.begin(kernels())
    assert all(callable(ahead.load_kernel(kernel)) for kernel in kernels())
    assert first_calls.helpers.useful and not hand.taken
    started.set()


def test_a_worker_compiles_no_kernel_that_another_process_has_kept(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels()[0]
    ahead.load_kernel(kernel)
    (file,) = kept(folder)
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail("compiled again"))
    ahead.keep(kernel, file)


def test_the_script_of_first_calls_sees_what_compiles_where(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(first_calls.VARIABLE, "1")
    for of, name in ((first_calls, "take_over"), (first_calls.Worker, "run"), (launch, "build")):
        monkeypatch.setattr(of, name, getattr(of, name))  # so that what the script puts there is undone
    watch = load("benchmarks/first_calls.py").Watch(0.0)
    watch.begin()
    first, *_, last = kernels()
    ahead.begin([first, last])
    ahead.load_kernel(first)
    assert [name for name, _, _ in watch.lists["compiled"]] == [first.name]
    until(lambda: watch.lists["by_workers"])
    assert watch.lists["by_workers"][0][0] == "start"


def test_a_process_that_judges_random_problems_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many of them as cores, which they share. They see the GPU."""
    monkeypatch.setenv(first_calls.VARIABLE, "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    worker = Workers(4).pool.make()
    assert worker is not None
    try:
        assert worker.run(Task("os:getenv", (first_calls.VARIABLE,))).result == "0"
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
