"""Fixtures of the tests of first calls and of slots."""

import itertools
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

_TESTS = itertools.count()


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A cache folder that does not exist yet, no kernel in memory, eight cores, and slots that nobody else takes."""
    from evoattn.compile import first_calls
    from tests.helpers.first_calls import until
    from tests.helpers.kept_kernels import new_process

    monkeypatch.delenv(first_calls.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    # A worker of the test before gives its slot back a moment after the pool has dropped it.
    monkeypatch.setattr(first_calls, "SLOT", f"evoattn-test-{os.getpid()}-{next(_TESTS)}-")
    monkeypatch.setattr(first_calls, "IDLE_S", 0.5)
    monkeypatch.setattr(first_calls, "helpers", first_calls.Helpers())
    new_process()
    yield tmp_path / "cache"
    new_process()
    until(lambda: not first_calls.helpers.workers)


@pytest.fixture
def no_place_left(folder: pathlib.Path) -> Iterator[None]:
    """Every slot of the machine is taken."""
    from tests.helpers.first_calls import all_places

    with all_places():
        yield


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The stand-in for a worker, in the place of the class of workers."""
    from evoattn.compile import first_calls
    from tests.helpers.first_calls import Hand

    monkeypatch.setattr(first_calls, "Worker", Hand)
    monkeypatch.setattr(Hand, "taken", [])
    monkeypatch.setattr(Hand, "go", threading.Event())
    return Hand
