#!/usr/bin/env python3
"""Seconds of whole predictions: as installed, with cuEquivariance, patched, and as `evoattn run` runs them.

    PYTHONPATH=src python benchmarks/predictions.py --programs boltz2 --lengths 152 304 --json predictions.json

The models have full depth and random weights, 3 recycles and 200 steps; the inputs are those of real sequences. Each way
first runs a short prediction that compiles, then the one that is timed, as a whole and by stage; the host waits for the GPU
around each stage. Up to `--exact` residues, a float32 prediction comes first: the table says how far each way is from it. A
way that runs out of memory is recorded as such, and the next one is measured. A record of the same machine and commit is
added to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from prediction_programs import PROGRAMS, RECYCLES, Program, tf32
from prediction_ways import Case, Way, begun, each_way, keep, line, options, peak, used
from torch import Tensor, nn

from evoattn.bench import machine

SHORT = 8
"""Steps of the prediction that compiles: a denoiser's graph is recorded at the second and used from the fourth on."""


class Clock:
    """Seconds by stage of a model.

    Args:
        model: its parts are timed inside the `with` block.
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
        def call(*arguments: Any, **named: Any) -> Any:
            with self._stage(name):  # the method of the class now, which a patch may have replaced
                return getattr(type(part), method)(part, *arguments, **named)

        return call

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
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
    recycles: int = RECYCLES

    def predict(self, inputs: Any, steps: int, exact: bool = False) -> dict[str, Tensor]:
        """The compared tensors, in float32 on the CPU."""
        torch.manual_seed(1)
        low = torch.autocast(self.device.type, torch.bfloat16, enabled=self.program.autocast and not exact)
        with torch.no_grad(), low, tf32(self.program.tf32 and not exact):
            outputs = self.program.predict(self.model, inputs, steps, self.recycles)
        return {name: x.float().cpu() for name, x in outputs.items()}

    def exact(self, inputs: Any) -> dict[str, Tensor]:
        """A prediction in float32 by the program as it is installed."""
        with used(Way(None), self.program, self.model):
            return self.predict(inputs, self.steps, exact=True)

    def measure(self, way: Way, inputs: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Measure one way, and return what it predicts."""
        with used(way, self.program, self.model):
            self.predict(inputs, SHORT)
            numbers: dict[str, Any] = {}
            with peak(self.device, numbers), Clock(self.model, self.program.stages, self.device) as clock:
                start = time.perf_counter()
                outputs = self.predict(inputs, self.steps)
                numbers["seconds"] = round(time.perf_counter() - start, 3)
        return numbers | {"stages": {name: round(x, 3) for name, x in clock.seconds.items()}}, outputs


def measure(run: Run, residues: int, chosen: list[str], exact: bool) -> Iterator[Case]:
    """A case for each way, in turn."""
    inputs = run.program.inputs(residues, run.device)
    true = run.exact(inputs) if exact else None
    steps = run.steps if "denoiser" in run.program.stages else None
    facts = {"program": run.program.title, "residues": residues, "steps": steps, "recycles": run.recycles}
    return each_way(run.program, chosen, facts, run.device, lambda way: run.measure(way, inputs), true)


def show(case: Case) -> str:
    """A line for the terminal."""
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in case.get("stages", {}).items())
    return line(case, f"{case['residues']:5} residues", f"{case.get('seconds', 0):7.2f} s ({stages})")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="residues (default: those of each program)")
    parser.add_argument("--steps", type=int, default=200, help="of the denoiser (default: 200)")
    parser.add_argument("--recycles", type=int, default=RECYCLES, help=f"of the trunk (default: {RECYCLES})")
    parser.add_argument(
        "--exact", type=int, default=304, metavar="N", help="compare with float32 up to N residues (default: 304)"
    )
    chosen = parser.parse_args()
    try:
        record = begun(chosen.json, chosen.device, chosen.commit)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    failed = False
    for name in chosen.programs:
        program = PROGRAMS[name]
        run = Run(program, program.build(chosen.device), chosen.device, chosen.steps, chosen.recycles)
        for residues in chosen.lengths or program.lengths:
            cases = measure(run, residues, chosen.ways, residues <= chosen.exact)
            failed |= keep(cases, record, ("program", "residues", "steps", "recycles", "way"), chosen.json, show)
        del run
        gc.collect()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
