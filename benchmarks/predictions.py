#!/usr/bin/env python3
"""Seconds of whole predictions: as installed, with cuEquivariance, patched, as `evoattn run` runs them, and by bionemo-ir.

    PYTHONPATH=src python benchmarks/predictions.py --programs boltz2 --lengths 152 304 --json predictions.json
    PYTHONPATH=src python benchmarks/predictions.py --programs boltz2 --samples 1 5 --precision tf32 bf16

The models have full depth and random weights, 3 recycles and 200 steps; the inputs are those of real sequences. Each way
first runs a short prediction that compiles and records, then the one that is timed as a whole, then one whose stages are
timed: the host waits for the GPU around each, so they may be longer in sum. Up to `--exact` residues, a float32 prediction
comes first: the table says how far each way is from it. A way that runs out of memory is recorded as such, and the next one
is measured. A record of the same machine and commit is added to. Cases of Boltz-2 up to `--exact` residues also say how far
one step of the denoiser is from float64, in Å.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import prediction_steps
import torch
from prediction_programs import PROGRAMS, RECYCLES, Program, tf32
from prediction_ways import WAYS, Case, Way, begun, each_way, keep, left_out, line, options, peak, used
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evoattn.bench import machine
from evoattn.core.precisions import PRECISIONS

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
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Clock:
        for name, (path, method) in self._stages.items():
            part = self._model.get_submodule(path)
            if method == "forward":  # by hooks: a part with a forward of its own would be another one to whoever records it
                self._hooks += [
                    part.register_forward_pre_hook(functools.partial(self._begin, name)),
                    part.register_forward_hook(functools.partial(self._end, name)),
                ]
            else:
                setattr(part, method, self._timed(name, part, method))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for path, method in self._stages.values():
            vars(self._model.get_submodule(path)).pop(method, None)

    def _timed(self, name: str, part: nn.Module, method: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self._begin(name)
            result = getattr(type(part), method)(part, *arguments, **named)  # that of the class now, which a patch may replace
            self._end(name)
            return result

        return call

    def _begin(self, name: str, *_: Any) -> None:
        machine.synchronize(self._device)
        self.seconds[name] -= time.perf_counter()

    def _end(self, name: str, *_: Any) -> None:
        machine.synchronize(self._device)
        self.seconds[name] += time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Run:
    """One program on one device."""

    program: Program
    model: nn.Module
    device: torch.device
    steps: int
    recycles: int = RECYCLES
    samples: int = 1

    def predict(self, inputs: Any, steps: int, exact: bool = False) -> dict[str, Tensor]:
        """The compared tensors, in float32 on the CPU."""
        torch.manual_seed(1)
        low = torch.autocast(self.device.type, torch.bfloat16, enabled=self.program.autocast and not exact)
        with torch.no_grad(), low, tf32(self.program.tf32 and not exact):
            outputs = self.program.predict(self.model, inputs, steps, self.recycles, self.samples)
        return {name: x.float().cpu() for name, x in outputs.items()}

    def exact(self, inputs: Any) -> dict[str, Tensor]:
        """A prediction in float32 by the program as it is installed."""
        with used(Way(None), self.program, self.model):
            return self.predict(inputs, self.steps, exact=True)

    def measure(self, way: Way, inputs: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Measure one way, and return what it predicts."""
        if way.runtime:
            return self._by_runtime(inputs)
        with used(way, self.program, self.model):
            self.predict(inputs, SHORT)
            numbers: dict[str, Any] = {}
            with peak(self.device, numbers):
                start = time.perf_counter()
                outputs = self.predict(inputs, self.steps)
                numbers["seconds"] = round(time.perf_counter() - start, 3)
            with Clock(self.model, self.program.stages, self.device) as clock:
                self.predict(inputs, self.steps)
        return numbers | {"stages": {name: round(x, 3) for name, x in clock.seconds.items()}}, outputs

    def _by_runtime(self, inputs: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Measure the other program that runs this model, whose own weights lie on the CPU meanwhile."""
        runtime = self.program.runtime
        assert runtime is not None
        model = runtime.build(self.model, self.device)
        program = dataclasses.replace(self.program, autocast=False, predict=runtime.predict, kernels=None)
        program = dataclasses.replace(program, stages=runtime.stages(model))
        self.model.cpu()
        try:
            return dataclasses.replace(self, program=program, model=model).measure(Way(None), runtime.inputs(inputs))
        finally:
            self.model.to(self.device)


def measure(run: Run, residues: int, chosen: list[str], exact: bool) -> Iterator[Case]:
    """A case for each way, in turn. exact: whether they are compared with float32, and a step of a denoiser with float64."""
    inputs = run.program.inputs(residues, run.device)
    true = run.exact(inputs) if exact else None
    denoises = "denoiser" in run.program.stages
    facts = {"program": run.program.title, "residues": residues, "steps": run.steps if denoises else None}
    facts |= {"recycles": run.recycles, "samples": run.samples if denoises else None}
    compared = prediction_steps.Step(run, inputs) if exact and run.program.denoiser is not None else None

    def measured(way: Way) -> tuple[dict[str, Any], dict[str, Tensor]]:
        numbers, outputs = run.measure(way, inputs)
        numbers["precision"] = run.program.runtime.precision if way.runtime and run.program.runtime else way.named
        if compared is not None and not way.runtime:
            numbers["step_from_float64"] = compared.distance(way)
        return numbers, outputs

    return each_way(run.program, chosen, facts, run.device, measured, true)


def show(case: Case) -> str:
    """A line for the terminal."""
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in case.get("stages", {}).items())
    several = f", {case['samples']} samples" if (case["samples"] or 1) > 1 else ""
    step = f", a step {case['step_from_float64']:.1e} Å from float64" if "step_from_float64" in case else ""
    return line(case, f"{case['residues']:5} residues{several}", f"{case.get('seconds', 0):7.2f} s ({stages}){step}")


def main() -> int:
    parser = options(__doc__, WAYS)
    parser.set_defaults(ways=[name for name, way in WAYS.items() if way.named in (None, "exact")])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="residues (default: those of each program)")
    parser.add_argument("--steps", type=int, default=200, help="of the denoiser (default: 200)")
    parser.add_argument("--samples", nargs="+", type=int, default=[1], metavar="N", help="of a prediction (default: 1)")
    parser.add_argument(
        "--precision", nargs="+", default=[], choices=PRECISIONS[1:], help="more ways: `evoattn run` in these precisions"
    )
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
    names = ("program", "residues", "steps", "recycles", "samples", "way")
    ways = [*chosen.ways, *(f"evoattn run {x}" for x in chosen.precision)]
    for name in chosen.programs:
        program = PROGRAMS[name]
        for way, why in left_out(program, ways).items():
            print(f"{program.title}: {way} is left out, because {why}", file=sys.stderr)
        run = Run(program, program.build(chosen.device), chosen.device, chosen.steps, chosen.recycles)
        for samples in chosen.samples if "denoiser" in program.stages else chosen.samples[:1]:
            run = dataclasses.replace(run, samples=samples)
            for residues in chosen.lengths or program.lengths:
                cases = measure(run, residues, ways, residues <= chosen.exact)
                failed |= keep(cases, record, names, chosen.json, show)
        del run
        gc.collect()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
