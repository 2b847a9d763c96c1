"""The clock of a GPU, on a machine that may have none: what it does, in order. What it measures is in test_bench_gpu.py."""

import contextlib
import time

import pytest
import torch

from evoattn.bench.clock import CudaClock


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is done to the device, in order, in place of doing it."""
    done: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("end")

        def elapsed_time(self, other: "Event") -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append(("rest", seconds)))
    return done


def test_an_idle_device_rests_and_the_first_call_is_not_counted(done: list[object]) -> None:
    clock = CudaClock(torch.device("cuda", 0))
    assert clock.calls(done.append, 3) == 1.5e-3
    assert done == ["idle", ("rest", clock.rest_s), 0, "event", 1, 2, 3, "event", "end"]
    assert clock.rest_s > clock.target_s  # what a round heats may cool before the next
