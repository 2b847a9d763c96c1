#!/usr/bin/env python3
"""Loss curves of a small model that trains on toy data, as installed and patched, beside what rounding alone does.

    PYTHONPATH=src python benchmarks/convergence.py --program boltz2 --dtypes float32 bfloat16 --json convergence.json

The model is narrow, with random weights. Its loss is that of its program's training (`training_programs.py`). The toy data is a
crop of a committed feature file with random atoms and sequences, the same in each step. Noise differs from step to step and is
the same in all runs. Runs are "as installed"; "rounded", as installed from initial weights that are moved by a rounding of
float32 or bfloat16; and "evoattn". On a CPU evoattn computes calls of all sizes here, which it would leave to the client.

Curves are compared in means over ten steps, which differ by as much as the noise of training lets rounding grow. A run of
evoattn that is further from the one as installed than three times the rounded one, at any such mean, gives status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import case_records
import torch
from prediction_features import moved
from prediction_programs import tf32
from training_programs import TRAINED, Trained

import evoattn
from evoattn.bench import machine
from evoattn.core.devices import installed_version

RUNS = ("as installed", "rounded", "evoattn")
WINDOW = 10
"""Steps whose losses are averaged."""
TIMES = 3.0
"""How many times as far as the rounded run evoattn may be."""
RATE, COPIES = 1e-3, 4


def build(trained: Trained, device: torch.device, run: str, dtype: torch.dtype) -> Any:
    """The model of a run, with the same weights but for a rounding."""
    model = trained.narrow(device)
    if run == "rounded":
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for x in model.parameters():
                x *= 1 + torch.finfo(dtype).eps * torch.randn(x.shape, generator=generator).to(device)
    return model


@contextlib.contextmanager
def computed(run: str, client: str) -> Iterator[None]:
    """Compute as a run does."""
    if run != "evoattn":
        yield
        return
    with mock.patch("evoattn.clients.calls.few_on_cpu", return_value=0), evoattn.patch(client, wait=True):
        yield


def curve(trained: Trained, run: str, features: dict[str, Any], dtype: torch.dtype, steps: int) -> list[float]:
    """The loss of each step."""
    device = features["msa"].device
    losses = []
    with computed(run, trained.program.client), tf32(False):
        model = build(trained, device, run, dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = trained.loss(model, features, COPIES)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            losses.append(loss.item())
            _tell(f"{run}, {str(dtype).removeprefix('torch.')}: step {step + 1} of {steps}, loss {losses[-1]:.4f}")
    return losses


def means(losses: list[float]) -> list[float]:
    """The mean of every ten losses."""
    return [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def farthest(losses: list[float], installed: list[float]) -> float:
    """The largest difference of two curves, relative to the one as installed."""
    return max(abs(x - y) / abs(y) for x, y in zip(means(losses), means(installed), strict=True))


def _tell(text: str) -> None:
    """Show how far it is, on a line that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def compared(trained: Trained, features: dict[str, Any], dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """The curves of all runs, and how far each is from the one as installed."""
    curves = {run: curve(trained, run, features, dtype, steps) for run in RUNS}
    away = {run: farthest(x, curves["as installed"]) for run, x in curves.items()}
    _tell("")
    return {
        "program": trained.program.title,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": steps,
        "tokens": features["token_index"].shape[-1],
        "first": means(curves["as installed"])[0],
        "last": {run: means(x)[-1] for run, x in curves.items()},
        "away": {run: float(f"{x:.2e}") for run, x in away.items()},
        "holds": away["evoattn"] <= TIMES * away["rounded"],
        "losses": {run: [float(f"{x:.6g}") for x in losses] for run, losses in curves.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="boltz2", choices=list(TRAINED), help="(default: boltz2)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--tokens", type=int, default=16, help="of the crop (default: 16)")
    parser.add_argument("--rows", type=int, default=8, help="of the alignment (default: 8)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    parser.add_argument("--json", type=Path, metavar="OUT", help="add to this record")
    parser.add_argument("--commit", metavar="HASH", help="the commit that the record names (default: that of the checkout)")
    options = parser.parse_args()
    facts = {key: x for key, x in machine.facts(options.device, options.commit).items() if x is not None}
    trained = TRAINED[options.program]
    name = trained.program.distribution
    fresh = {"schema": 1, "machine": facts, "programs": {name: installed_version(name)}, "cases": []}
    record = case_records.begun(options.json, fresh)
    features = moved(trained.crops(options.tokens, options.rows), options.device)
    failed = False
    for dtype in options.dtypes:
        case = compared(trained, features, getattr(torch, dtype), options.steps)
        last, away = case["last"], case["away"]
        print(
            f"{case['dtype']}: loss {case['first']:.3f}, after {case['steps']} steps {last['as installed']:.4f} as installed, "
            f"{last['evoattn']:.4f} with evoattn; away {away['evoattn']:.1e}, rounding alone {away['rounded']:.1e}: "
            f"{'holds' if case['holds'] else 'does not hold'}",
            flush=True,
        )
        failed |= not case["holds"]
        case_records.add(case, record, ("program", "dtype", "steps", "tokens"), options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
