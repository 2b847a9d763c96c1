"""Fixtures of the tests of helpers."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from evoattn.compile import beside


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A cache folder that does not exist yet, no kernel in memory, eight cores, and no helper that runs."""
    from tests.helpers.kept_kernels import new_process

    monkeypatch.delenv(beside.VARIABLE, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(beside, "IDLE_S", 0.1)
    beside.forget()
    new_process()
    yield tmp_path / "cache"
    new_process()


@pytest.fixture
def begun(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The tasks of helpers that would run, and how many helpers each may have."""
    tasks: list[tuple[Any, int]] = []
    monkeypatch.setattr(beside._helpers, "submit", lambda task, jobs: tasks.append((task, jobs)))
    return tasks
