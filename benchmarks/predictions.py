#!/usr/bin/env python3
"""Seconds of whole predictions: as installed, with cuEquivariance, patched, and as `evoattn run` runs them.

    PYTHONPATH=src python benchmarks/predictions.py --programs boltz2 --lengths 152 304 --json predictions.json

The models have full depth and random weights, 3 recycles and 200 steps; the inputs are those of real sequences. Each way
first runs a short prediction that compiles, then the one that is timed, as a whole and by stage; the host waits for the GPU
around each stage. Up to `--exact` residues, a float32 prediction comes first: the table says how far each way is from it. A
record of the same machine and commit is added to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import case_records
import torch
from prediction_programs import PROGRAMS, Program
from torch import Tensor, nn

import evoattn
from evoattn.bench import machine

SCHEMA = 1
SHORT = 8
"""Steps of the prediction that compiles: a denoiser's graph is recorded at the second and used from the fourth on."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a program is run: the arguments of `evoattn.patch`, None for none, and whether cuEquivariance is used."""

    patch: Mapping[str, bool] | None
    kernels: bool = False


INSTALLED = "as installed"
WAYS = {
    INSTALLED: Way(None),
    "cuEquivariance": Way(None, kernels=True),
    "evoattn.patch": Way({}),
    "evoattn run": Way({"graphs": True}),
}


class Clock:
    """Seconds by stage of a model.

    Args:
        model: whose parts are timed while the clock is entered.
        stages: by name, the path of a part and its method.
        device: that is waited for around each call.
    """

    def __init__(self, model: nn.Module, stages: Mapping[str, tuple[str, str]], device: torch.device) -> None:
        self.seconds = dict.fromkeys(stages, 0.0)
        self._model, self._stages, self._device = model, stages, device

    def __enter__(self) -> Clock:
        for name, (path, method) in self._stages.items():
            part = self._model.get_submodule(path)
            setattr(part, method, self._timed(name, part, method))
        return self

    def __exit__(self, *_: object) -> None:
        for path, method in self._stages.values():
            vars(self._model.get_submodule(path)).pop(method, None)

    def _timed(self, name: str, part: nn.Module, method: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            with self._taken(name):  # the method of the class now, which a patch may have replaced
                return getattr(type(part), method)(part, *given, **named)

        return call

    @contextlib.contextmanager
    def _taken(self, name: str) -> Iterator[None]:
        machine.synchronize(self._device)
        start = time.perf_counter()
        yield
        machine.synchronize(self._device)
        self.seconds[name] += time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Run:
    """One program on one device."""

    program: Program
    model: nn.Module
    device: torch.device
    steps: int

    def predict(self, inputs: Any, steps: int, exact: bool = False) -> dict[str, Tensor]:
        """What is compared, in float32 on the CPU."""
        torch.manual_seed(1)
        low = torch.autocast(self.device.type, torch.bfloat16, enabled=self.program.autocast and not exact)
        with torch.no_grad(), low:
            made = self.program.predict(self.model, inputs, steps)
        return {name: x.float().cpu() for name, x in made.items()}

    def exact(self, inputs: Any) -> dict[str, Tensor]:
        """A prediction in float32 by the program as it is installed."""
        self._use_kernels(False)
        return self.predict(inputs, self.steps, exact=True)

    def measure(self, way: Way, inputs: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What one way takes, and what it predicts."""
        self._use_kernels(way.kernels)
        patched = evoattn.patch(self.program.client, **way.patch) if way.patch is not None else contextlib.nullcontext()
        with patched:
            self.predict(inputs, SHORT)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            with Clock(self.model, self.program.stages, self.device) as clock:
                start = time.perf_counter()
                made = self.predict(inputs, self.steps)
                found: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 3)}
            if self.device.type == "cuda":
                found["peak_gib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)
        return found | {"stages": {name: round(x, 3) for name, x in clock.seconds.items()}}, made

    def _use_kernels(self, on: bool) -> None:
        if self.program.kernels is not None:
            self.program.kernels(self.model, on)


def ways(program: Program) -> dict[str, Way]:
    """The ways of a program here: with cuEquivariance only if it is installed."""
    possible = program.kernels is not None and importlib.util.find_spec("cuequivariance_torch") is not None
    return {name: way for name, way in WAYS.items() if possible or not way.kernels}


def difference(made: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float | None]:
    """The relative difference of each output, by the L2 norm. None: it is no number."""
    found = {name: ((x - other[name]).norm() / other[name].norm()).item() for name, x in made.items()}
    return {name: float(f"{x:.2e}") if math.isfinite(x) else None for name, x in found.items()}


def measure(run: Run, residues: int, chosen: list[str], exact: bool) -> Iterator[dict[str, Any]]:
    """A case for each way, in turn."""
    inputs = run.program.inputs(residues, run.device)
    true = run.exact(inputs) if exact else None
    installed: dict[str, Tensor] | None = None
    for name, way in ways(run.program).items():
        if name not in chosen:
            continue
        case: dict[str, Any] = {"program": run.program.title, "residues": residues, "way": name}
        case["steps"] = run.steps if "denoiser" in run.program.stages else None
        try:
            found, made = run.measure(way, inputs)
        except Exception as error:  # memory, most of all: the next way may need less
            yield case | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            continue
        installed = made if name == INSTALLED else installed
        case |= found
        for key, other in (("from_installed", installed), ("from_float32", true)):
            if other is not None:
                case[key] = difference(made, other)
        yield case


def begun(path: Path | None, device: torch.device, commit: str | None) -> dict[str, Any]:
    """The record in a file, if there is one; else a fresh one.

    Raises:
        ValueError: the file holds the record of another machine or commit.
    """
    facts = {key: value for key, value in machine.facts(device, commit).items() if value is not None}
    versions = {x.distribution: found for x in PROGRAMS.values() if (found := machine.version_of(x.distribution))}
    return case_records.begun(path, {"schema": SCHEMA, "machine": facts, "programs": versions, "cases": []})


def show(case: Mapping[str, Any]) -> str:
    """A line for the terminal."""
    words = f"{case['program']:8} {case['residues']:5} residues, {case['way']:15}"
    if "failed" in case:
        return f"{words} {case['failed']}"
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in case["stages"].items())
    words_of = {"from_float32": "float32", "from_installed": "installed"}
    away = [f"from {words_of[key]}: {_differs(case[key])}" for key in words_of if key in case][:1]
    peak = f"{case['peak_gib']:5.1f} GiB " if "peak_gib" in case else ""
    return "; ".join([f"{words} {case['seconds']:7.2f} s, {peak}({stages})", *away])


def _differs(found: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'nan' if x is None else f'{x:.1e}'}" for name, x in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="residues (default: those of each program)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--steps", type=int, default=200, help="of the denoiser (default: 200)")
    parser.add_argument(
        "--exact", type=int, default=304, metavar="N", help="compare with float32 up to N residues (default: 304)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what to record if git cannot tell")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record, or add to it")
    options = parser.parse_args()
    device = torch.device(options.device)
    try:
        record = begun(options.json, device, options.commit)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    failed = False
    for name in options.programs:
        program = PROGRAMS[name]
        run = Run(program, program.build(device), device, options.steps)
        for residues in options.lengths or program.lengths:
            for case in measure(run, residues, options.ways, residues <= options.exact):
                failed |= "failed" in case
                print(show(case), flush=True)
                case_records.add(case, record, ("program", "residues", "steps", "way"), options.json)
        del run
        gc.collect()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
