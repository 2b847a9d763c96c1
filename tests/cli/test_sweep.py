"""The demo's measurements: lengths, errors over a part of the rows, and the reasons to stop."""

import dataclasses
import re

import pytest
import torch

from evoattn.bench import attentions as attentions_of_bench
from evoattn.bench.memory import peak_bytes
from evoattn.bench.record import Problem as Measured
from evoattn.cli import demo, sweep
from evoattn.cli.evoformer import attentions, embed

from .conftest import FLOAT32_ERROR


def test_sweep_stops_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    size = sweep.Size(sequences=1, columns=16, lengths=(16, 24), repeats=1, seconds=0.1, patience=None)
    steps: list[str] = []
    monkeypatch.setattr("evoattn.bench.machine.free_bytes", lambda device: 100 << 20)
    result = sweep.growth("MKV", size, 0, cpu, torch.float32, steps.append)
    assert timed(result, "evoattn") == timed(result, "dense") == [16, 24] and sweep.stops(result) == {}
    hurried = sweep.growth("MKV", dataclasses.replace(size, patience=1e-9), 0, cpu, torch.float32, steps.append)
    assert sweep.stops(hurried)["dense"] == "at L = 16: the time of the demo is over; --max-length gives it more"
    monkeypatch.setattr("evoattn.bench.machine.free_bytes", lambda device: 6_000_000)
    result = sweep.growth("MKV", size, 0, cpu, torch.float32, steps.append)
    assert timed(result, "dense") == [16]
    assert re.fullmatch(r"at L = 24: it would take about 0\.0 GiB; 0\.0 GiB are free", sweep.stops(result)["dense"])
    monkeypatch.setitem(sweep.PATIENCE_S, "evoattn", 0.0)
    result = sweep.growth("MKV", size, 0, cpu, torch.float32, steps.append)
    assert timed(result, "evoattn") == [16]
    assert "s a pass" in sweep.stops(result)["evoattn"]


def timed(problems: list[Measured], name: str) -> list[int]:
    """The lengths at which a contender has a time."""
    return [p.workload.length for p in problems if (result := p.result(name)) is not None and result.times]


def test_sweep_tiles_and_cuts() -> None:
    assert sweep.tiled("MKV", 7) == "MKVMKVM"
    assert sweep.tiled("MKV", 2) == "MK"


def test_measuring_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.empty(1), torch.device("cpu"))
    assert capfd.readouterr().err == ""


def test_errors_over_a_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float64 has no room for all rows, both run on the same first rows, and their number is reported."""
    inputs = attentions(embed(("MKVLA", "M-VL-", "MKX--"), 0, torch.device("cpu")), torch.float32)[0]
    monkeypatch.setattr(sweep, "ORACLE_SCORES", 2 * 8 * 5 * 5)
    ((problem, rows, beyond),) = sweep.four_attentions([inputs], demo.QUICK, lambda what: None)
    assert (rows, beyond) == (2, [])
    for result in problem.results:
        assert {"o", "dq", "dk", "dv", "dpair_bias"} <= set(result.errors)
        assert max(result.errors.values()) < FLOAT32_ERROR
    assert attentions_of_bench.first_rows(inputs, slice(0, 2)).q.shape[1] == 2
