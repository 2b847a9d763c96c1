"""The comparison of loss curves, without a client; and a short one of a small Boltz-2 where that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import convergence
import pytest
import torch
from torch import Tensor


def test_curves_are_compared_in_means() -> None:
    losses = [float(x) for x in range(1, 26)]
    assert convergence.means(losses) == [5.5, 15.5, 23.0]
    other = [x + (0.31 if i == 12 else 0.0) for i, x in enumerate(losses)]
    assert convergence.farthest(other, losses) == pytest.approx(0.031 / 15.5)
    assert convergence.farthest(losses, losses) == 0


@pytest.mark.parametrize(("away", "status"), [(0.029, 0), (0.031, 1)])
def test_evoattn_may_be_three_times_as_far_as_rounding(
    away: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    factors = {"as installed": 1.0, "rounded": 0.99, "evoattn": 1 + away}
    monkeypatch.setattr(convergence, "curve", lambda run, features, dtype, steps: [factors[run]] * steps)
    monkeypatch.setattr(convergence, "toy", lambda *_: {"token_index": torch.zeros(1, 16)})
    out = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["convergence.py", "--steps", "20", "--device", "cpu", "--json", str(out)])
    assert convergence.main() == status
    [first, second] = json.loads(out.read_text())["cases"]
    assert (first["dtype"], second["dtype"], first["holds"]) == ("float32", "bfloat16", not status)
    assert first["away"]["rounded"] == 1e-2 and len(first["losses"]["evoattn"]) == 20
    assert ("does not hold" in capsys.readouterr().out) == bool(status)


def test_a_run_may_be_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the run of evoattn patches the client, and computes small calls too."""
    calls: list[Any] = []
    monkeypatch.setattr("evoattn.patch", lambda *args, **named: calls.append((args, named)) or torch.no_grad())
    for run in convergence.RUNS:
        with convergence.computed(run):
            pass
    assert calls == [(("boltz",), {"wait": True})]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_boltz_2_learns_as_it_does_without_evoattn(dtype: torch.dtype) -> None:
    pytest.importorskip("boltz", reason="Boltz is not installed")
    pytest.importorskip("pytorch_lightning", reason="Boltz' model needs it")
    features: dict[str, Tensor] = convergence.toy(12, 4, torch.device("cpu"))
    found = convergence.compared(features, dtype, 40)
    assert found["holds"] and found["last"]["as installed"] < found["first"], found["away"]
