"""Workers that compile beside a program, as a new process finds them."""

import os

import pytest

from evoattn.compile import beside


def no_workers_yet(monkeypatch: pytest.MonkeyPatch, idle_s: float = 0.1) -> None:
    """No kernel asked for, two cores, so that there is one worker, and workers that end after these seconds without a task."""
    monkeypatch.delenv(beside.VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    monkeypatch.setattr(beside, "IDLE_S", idle_s)
    beside.forget()
    beside.tell.cache_clear()
