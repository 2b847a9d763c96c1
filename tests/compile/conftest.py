"""Fixtures of the tests of first calls."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A cache folder that does not exist yet, no kernel in memory, eight cores, and no helper that runs."""
    from evoattn.compile import first_calls
    from tests.helpers.kept_kernels import new_process

    monkeypatch.delenv(first_calls.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(first_calls, "running", [])
    new_process()
    yield tmp_path / "cache"
    new_process()
    for helper in first_calls.running:
        if hasattr(helper, "wait"):
            helper.kill()
            helper.wait()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The stand-in for a helper, in the place of a process."""
    from evoattn.compile import first_calls
    from tests.helpers.first_calls import Helper

    monkeypatch.setattr(first_calls, "start", Helper)
    return Helper
