"""All processes of a machine share its slots for workers, and a worker has its slot until it ends."""

import os
import pathlib
import warnings

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn.backends.hopper import ahead
from evoattn.compile import first_calls
from evoattn.compile.workers import Task
from tests.helpers.first_calls import CHANNELS, Hand, all_places, free_places, kernels, slot, until


@pytest.mark.parametrize(("asked", "workers"), [(None, 4), ("", 4), ("0", 0), ("2", 2), ("9", 4), ("off", 0)])
def test_the_environment_says_how_many_at_most(
    asked: str | None, workers: int, folder: pathlib.Path, hand: type[Hand], monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked is not None:
        monkeypatch.setenv(first_calls.VARIABLE, asked)
    first_calls.prestart("hopper")
    assert len(first_calls.helpers.workers) == workers


def test_who_asks_has_workers_for_few_cores_too(
    folder: pathlib.Path, hand: type[Hand], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no more than there are cores for, of which four processes have two each here."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    first_calls.prestart("hopper")
    assert not first_calls.helpers.workers
    monkeypatch.setenv(first_calls.VARIABLE, "4")
    first_calls.prestart("hopper")
    assert len(first_calls.helpers.workers) == 1


def test_all_processes_of_a_machine_share_its_places(
    folder: pathlib.Path, hand: type[Hand], request: pytest.FixtureRequest
) -> None:
    """Whoever has a slot, this process or another, nobody else gets it."""
    for _ in range(3):
        taken = slot()
        assert taken is not None
        request.addfinalizer(taken.close)
    first_calls.prestart("hopper")
    assert len(first_calls.helpers.workers) == 1


def test_processes_on_other_cores_have_other_places(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with all_places() as count:
        assert (count, free_places()) == (4, 0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8, 16)))
        assert free_places() == 4


def test_a_worker_has_its_place_until_it_ends(folder: pathlib.Path) -> None:
    """Not its caller, which may be killed while the worker compiles."""
    worker = first_calls.helper()
    assert worker is not None
    assert worker.run(Task("os:getpid")).error is None
    worker.sockets[0].close()
    assert free_places() == 3
    worker.end()
    assert free_places() == 4


def test_a_forked_process_holds_no_slot(folder: pathlib.Path, hand: type[Hand]) -> None:
    hand.go.set()
    ahead.begin(kernels())
    until(lambda: len(hand.taken) == len(CHANNELS))
    over, end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(end)
        os.read(over, 1)  # it lives longer than the workers
        os._exit(0)
    until(lambda: not first_calls.helpers.workers)
    try:
        until(lambda: free_places() == 4)
    finally:
        os.close(end)
        os.waitpid(child, 0)
