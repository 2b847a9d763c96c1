"""The comparison of loss curves, without a client; and short ones of small models where their client is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import convergence
import pytest
import torch
from training_programs import TRAINED, Trained


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
    monkeypatch.setattr(convergence, "curve", lambda trained, run, features, dtype, steps: [factors[run]] * steps)
    monkeypatch.setattr(Trained, "crops", lambda *_: {"token_index": torch.zeros(1, 16)})
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
        with convergence.computed(run, "openfold3"):
            pass
    assert calls == [(("openfold3",), {"wait": True})]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("program", "needs"), [("boltz2", "pytorch_lightning"), ("openfold3", "ml_collections")])
def test_a_small_model_learns_as_it_does_without_evoattn(program: str, needs: str, dtype: torch.dtype) -> None:
    trained = TRAINED[program]
    for package in (trained.program.client, needs):
        pytest.importorskip(package, reason=f"{package} is not installed")
    found = convergence.compared(trained, trained.crops(12, 4), dtype, 40)
    assert found["holds"] and found["last"]["as installed"] < found["first"], found["away"]
