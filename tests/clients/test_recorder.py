"""How a CUDA graph is recorded, with torch's part replaced: what a recording leaves behind, and when it asks for memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evoattn.clients.graphs import recorder

GIB = 1 << 30


class Graph:
    """A graph that notes what it is told."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[str] = []
        self._fails = fails

    def capture_begin(self, **options: Any) -> None:
        self._tell("begin")

    def capture_end(self) -> None:
        self._tell("end")

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what == self._fails:
            raise RuntimeError(f"no {what}")


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The states that a generator was given. It has state "before"."""
    states: list[str] = []
    generator = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(recorder.Recorder, "_broken", 0)
    yield states
    assert gc.isenabled()


SIDE: Any = SimpleNamespace(device=torch.device("cuda", 0))


def test_nothing_is_collected_while_a_graph_is_recorded(restored: list[str]) -> None:
    graph: Any = Graph()
    with recorder._capturing(graph, "pool", SIDE):
        assert not gc.isenabled()
    assert graph.told == ["begin", "end"] and not restored and recorder.Recorder._broken == 0
    gc.disable()
    try:
        with recorder._capturing(graph, "pool", SIDE):
            pass
        assert not gc.isenabled(), "as the program had it"
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", ["begin", "the body", "end"])
def test_a_recording_that_fails_raises_what_failed(restored: list[str], fails: str) -> None:
    """The generator has its state again, and all recordings from before are of no use."""
    graph: Any = Graph(fails)
    with pytest.raises(RuntimeError, match=f"no {fails}"), recorder._capturing(graph, "pool", SIDE):
        graph._tell("the body")
    assert graph.told[-1] == "end" and restored == ["before"] and recorder.Recorder._broken == 1


@pytest.mark.parametrize(
    ("free", "reserved", "fraction", "gives"),
    [(60, 10, 1.0, False), (9, 10, 1.0, True), (60, 10, 0.3, False), (60, 10, 0.2, True), (60, 0, 1.0, False)],
)
def test_memory_is_given_back_where_it_is_short(
    free: int, reserved: int, fraction: float, gives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a recording could not take as much as torch has already: of the device, or of what torch may take of 80 GiB."""
    given = list[bool]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    monkeypatch.setattr(recorder, "_reserved", lambda _: reserved * GIB)
    recorder._make_room(SIDE.device)
    assert bool(given) is gives


def test_a_pool_is_used_as_long_as_a_graph_in_it_exists() -> None:
    """torch takes the handle of a pool no more once its last graph is gone."""
    shared, handles = recorder.Shared(), iter(range(9))
    first, second = Graph(), Graph()
    assert shared.pool([first], lambda: next(handles)) == shared.pool([second], lambda: next(handles)) == 0
    del first
    assert shared.pool([], lambda: next(handles)) == 0
    del second
    third = Graph()
    assert shared.pool([third], lambda: next(handles)) == 1
    shared.leave_pool()
    assert shared.pool([], lambda: next(handles)) == 2, "a capture failed"


def test_a_recording_looks_unless_it_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(recorder.Recorder, "_beside", lambda self, run, *_: looked.append(run is not None))
    for options in ({}, {"looks": True}, {"looks": False}):
        recorder.Recorder().record(lambda: None, SIDE.device, **options)
    assert looked == [True, True, False]
