"""Kernels of a call that wants gradients are compiled in other processes too, each once, and whatever happens there."""

import os
import pathlib
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install 'evoattn[hopper]'")

import cutlass

from evoattn.backends import hopper
from evoattn.backends.hopper.backward.statistics import Statistics
from evoattn.backends.hopper.host import launch, together
from evoattn.call.validation import Wishes
from evoattn.devices import planned_for
from evoattn.inputs import Inputs
from evoattn.processes import Report, Task
from evoattn.run import calls
from evoattn.warming.cards import cards_of
from tests.hopper.test_kept_kernels import kept, new_process

CHANNELS = (8, 16, 24, 32)


def kernels() -> list[launch.Kernel]:
    """Four that compile in 0.2 s each."""
    return [Statistics(cutlass.BFloat16, c, dlse=False) for c in CHANNELS]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A cache folder that does not exist yet, no kernel in memory, eight cores, and workers that are asked for."""
    monkeypatch.setenv(together.VARIABLE, "4")
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(together, "cores", lambda: 8)
    monkeypatch.setattr(together, "_workers", together._Workers())
    monkeypatch.setattr(together, "_IDLE_S", 0.5)
    new_process()
    yield tmp_path / "cache"
    new_process()
    until(lambda: together._workers.threads == 0)


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Hand:
    """Stands for a worker: takes a task, and does it when it is let go."""

    taken: ClassVar[list[str]] = []
    go: ClassVar[threading.Event] = threading.Event()
    do: Callable[[Task], Any] = staticmethod(lambda task: None)

    def run(self, task: Task) -> Report:
        if task.function.endswith("keep_compiled"):
            Hand.taken.append(task.arguments[0].name)
            Hand.go.wait(60)
            Hand.do(task)
        return Report(task, None, None, 0.0)

    def end(self) -> None: ...


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> type[Hand]:
    monkeypatch.setattr(together, "Worker", Hand)
    monkeypatch.setattr(Hand, "taken", [])
    monkeypatch.setattr(Hand, "go", threading.Event())
    return Hand


@pytest.mark.slow
def test_workers_write_what_this_process_reads(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.begin(kernels())
    until(lambda: folder.exists() and len(list((folder / "hopper").glob("*.o"))) == len(CHANNELS))
    monkeypatch.setattr(launch, "build", lambda kernel: pytest.fail(f"{kernel.name} is compiled here"))
    assert all(callable(launch.compiled(kernel)) for kernel in kernels())


def test_each_kernel_is_compiled_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, hand: type[Hand]) -> None:
    """The worker takes the last one first. This process takes the others, and waits for that one."""
    monkeypatch.setattr(together, "_MOST", 1)
    here: list[str] = []
    build = launch.build
    monkeypatch.setattr(launch, "build", lambda kernel: here.append(kernel.name) or build(kernel))
    monkeypatch.setattr(hand, "do", staticmethod(lambda task: launch.keep_compiled(*task.arguments)))
    launch.begin(kernels())
    until(lambda: hand.taken)
    *first, last = kernels()
    assert all(callable(launch.compiled(kernel)) for kernel in first)
    assert here == [kernel.name for kernel in first]
    waits = threading.Thread(target=launch.compiled, args=(last,))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    hand.go.set()
    waits.join(60)
    until(lambda: not together._workers.running)
    assert hand.taken == [last.name] and here == [kernel.name for kernel in (*first, last)]
    assert len(kept(folder)) == len(CHANNELS)


def test_what_a_worker_cannot_compile_is_compiled_here(folder: pathlib.Path, hand: type[Hand]) -> None:
    hand.go.set()
    launch.begin(kernels())
    until(lambda: len(hand.taken) == len(CHANNELS))
    assert all(callable(launch.compiled(kernel)) for kernel in kernels())
    assert len(kept(folder)) == len(CHANNELS)


def test_a_python_that_cannot_be_started_is_done_without(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", None)
    launch.begin(kernels())
    assert all(callable(launch.compiled(kernel)) for kernel in kernels())


@pytest.mark.parametrize(
    "reason",
    ["one core", "a process for each core", "nothing is kept", "read-only", "one kernel", "all are kept", "all are loaded"],
)
def test_nobody_is_started_where_that_is_of_no_use(
    reason: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, hand: type[Hand]
) -> None:
    if reason == "one core":
        monkeypatch.setattr(together, "cores", lambda: 1)
    elif reason == "a process for each core":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    elif reason == "nothing is kept":
        monkeypatch.setenv("EVOATTN_CACHE_DIR", "")
    elif reason == "read-only":  # a file in the place of the folder: that stops root too
        folder.write_text("")
    elif reason.startswith("all"):
        for kernel in kernels():
            launch.compiled(kernel)
        if reason == "all are kept":
            new_process()
        else:
            for file in kept(folder):
                file.unlink()
    launch.begin(kernels()[:1] if reason == "one kernel" else kernels())
    assert together._workers.threads == 0 and not together._workers.waiting


@pytest.mark.parametrize("empty", [True, False])
def test_workers_start_early_if_nothing_is_kept(empty: bool, folder: pathlib.Path, hand: type[Hand]) -> None:
    if not empty:
        launch.compiled(kernels()[0])
    together.expect()
    assert together._workers.threads == (together._MOST if empty else 0)


def test_a_forked_process_has_workers_of_its_own(folder: pathlib.Path, hand: type[Hand]) -> None:
    """Those of its parent would never finish: a thread does not survive a fork."""
    launch.begin(kernels())
    until(lambda: together._workers.running)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads, which is the point
        child = os.fork()
    if not child:
        os._exit(together._workers.threads + len(together._workers.running))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hand.go.set()


@pytest.mark.parametrize("records", [True, False])
def test_a_call_that_wants_gradients_begins_both_passes(
    records: bool, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[launch.Kernel] = []
    monkeypatch.setattr(launch, "begin", begun.extend)
    made: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": records}
    q, pair = torch.empty(1, 40, 96, 4, 32, **made), torch.empty(1, 1, 4, 96, 96, **made)
    with planned_for(cards_of("sm_90a")[0]):
        calls._straight(Inputs(q, q, q, torch.ones(1, 40, 96, dtype=torch.bool), None, pair), Wishes().options(), False)
    kinds = [type(kernel).__name__ for kernel in begun]
    assert kinds == (["Pairs", "Rows", "Forward", "Rows", "Pairs", "QueryGradients", "KeyGradients"] if records else [])
    assert [pickle.loads(pickle.dumps(kernel)) for kernel in begun] == begun
    assert folder.exists() is False


def test_a_backward_that_cannot_be_planned_does_not_stop_a_forward(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("this device has no room for 2 blocks that work together")

    monkeypatch.setattr(hopper, "plan_backward", refuse)
    monkeypatch.setattr(launch, "begin", lambda kernels: pytest.fail("begun"))
    q = torch.empty(1, 40, 96, 4, 32, dtype=torch.bfloat16, requires_grad=True)
    with planned_for(cards_of("sm_90a")[0]):
        assert calls._straight(Inputs(q, q, q), Wishes().options(), False) is not None


@pytest.mark.parametrize("asked", [None, "", "0", "many"])
def test_no_worker_unless_it_is_asked_for(
    asked: str | None, folder: pathlib.Path, hand: type[Hand], monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked is None:
        monkeypatch.delenv(together.VARIABLE)
    else:
        monkeypatch.setenv(together.VARIABLE, asked)
    together.expect()
    together.begin({name: Task("nowhere:nothing", ()) for name in "ab"})
    assert together._workers.threads == 0 and not together._workers.waiting
