#!/usr/bin/env python3
"""Milliseconds of a training step of a whole model: as installed, with cuEquivariance, and patched.

    PYTHONPATH=src python benchmarks/training_steps.py --programs boltz2 --tokens 384 640 --json training.json

The models have full depth and random weights. A step is a program's own forward and loss, with one recycle, 1,024 sequences and
16 noised copies of the atoms in Boltz-2, 48 in OpenFold-3 and Protenix. Then come the backward, clipping and the program's own
optimizer. It runs in bfloat16 autocast and with activation checkpoints (`training_programs.py`). Dropout is 0, which costs the
same, so that all ways compute the same. The input is a crop of a committed feature file, with random atoms and sequences.
`loss`, `gradient norm` and `first block`, the gradient of the first block of the trunk, are compared with those of the model as
installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from prediction_features import moved
from prediction_programs import tf32
from prediction_ways import WAYS, Case, Way, begun, each_way, keep, line, options, peak, used
from torch import Tensor
from training_programs import TRAINED, Trained

from evoattn.bench import machine

Step = tuple[dict[str, Tensor], dict[str, float]]
"""Results of a step, and its milliseconds by stage."""

ROWS = 1024
CLIP = 10.0
"""The largest norm of a gradient, in all programs."""

_RECORDING = 3
"""Steps after the first until a part that is called once in a step is replayed."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A model that is trained on a device."""

    trained: Trained
    model: Any
    device: torch.device
    steps: int
    blocks: int

    def measure(self, way: Way, features: Mapping[str, Any]) -> tuple[Case, dict[str, Tensor]]:
        """Measure one way, and return what it computes in its first step, which compiles.

        The weights stay what they are: the first rate of all schedules is 0.
        """
        optimizer = self.trained.optimizer(self.model)
        try:
            return self.timed(way, lambda: self.step(features, optimizer))
        finally:
            optimizer.zero_grad()

    def timed(self, way: Way, step: Callable[[], Step]) -> tuple[Case, dict[str, Tensor]]:
        """Measure steps in one way, and return the results of the first."""
        numbers: Case = {}
        with used(way, self.trained.program, self.model):
            outputs = warmed_up(way, step)
            with peak(self.device, numbers):
                times = [step()[1] for _ in range(self.steps)]
        numbers["ms"] = round(statistics.median(sum(x.values()) for x in times), 2)
        numbers["stages"] = {name: round(statistics.median(x[name] for x in times), 2) for name in times[0]}
        return numbers | {"loss": float(f"{outputs['loss']:.6g}")}, outputs

    def step(self, features: Mapping[str, Any], optimizer: Any, clock: Any = None) -> Step:
        """A step. clock: is told when the backward runs (`training_parts.Clock`)."""
        optimizer.zero_grad()
        loss, times = self.passes(features, clock)
        first = self.trained.first_block(self.model)
        block = torch.cat([x.grad.flatten() for x in first.parameters() if x.grad is not None])
        outputs = {"loss": loss, "first block": block.float().cpu()}
        with self._timed("optimizer", times):
            outputs["gradient norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).cpu()
            optimizer.step()
        return outputs, times

    def passes(self, features: Mapping[str, Any], clock: Any = None) -> tuple[Tensor, dict[str, float]]:
        """The loss on the CPU after forward and backward, and milliseconds of both."""
        torch.manual_seed(1)
        times: dict[str, float] = {}
        with self._timed("forward", times), torch.autocast(self.device.type, torch.bfloat16), tf32(False):
            loss = self.trained.loss(self.model, features, self.trained.copies)
        with self._timed("backward", times), tf32(False):
            if clock is not None:
                clock.in_backward = True
            loss.backward()  # type: ignore[no-untyped-call]
            if clock is not None:
                clock.in_backward = False
        return loss.detach().cpu(), times

    @contextlib.contextmanager
    def _timed(self, stage: str, times: dict[str, float]) -> Iterator[None]:
        machine.synchronize(self.device)
        start = time.perf_counter()
        yield
        machine.synchronize(self.device)
        times[stage] = 1e3 * (time.perf_counter() - start)


def warmed_up(way: Way, step: Callable[[], Step]) -> dict[str, Tensor]:
    """The results of the first step, which compiles. If the program is patched, the next ones record, and are run too."""
    outputs, _ = step()
    for _ in range(0 if way.patch is None else _RECORDING):
        step()
    return outputs


Measure = Callable[[Training, Way, Mapping[str, Any]], tuple[Case, dict[str, Tensor]]]
"""Measures a way: what to note, and what to compare with the program as installed."""


def measure(
    training: Training, features: Mapping[str, Any], chosen: list[str], measured: Measure = Training.measure
) -> Iterator[Case]:
    """A case for each way, in turn."""
    program, (rows, tokens) = training.trained.program, features["has_deletion"].shape[-2:]
    facts = {"program": program.title, "tokens": tokens, "rows": rows, "blocks": training.blocks}
    return each_way(program, chosen, facts, training.device, lambda way: measured(training, way, features))


def show(case: Case) -> str:
    """A line for the terminal."""
    stages = ", ".join(f"{name} {ms:.0f}" for name, ms in case.get("stages", {}).items())
    return line(case, f"{case['tokens']:5} tokens", f"{case.get('ms', 0):8.1f} ms ({stages})")


def main(about: str | None = __doc__, measured: Measure = Training.measure, show: Callable[[Case], str] = show) -> int:
    """Measure what the command line asks for. about: its description."""
    parser = options(about, [name for name, way in WAYS.items() if not way.runtime])
    parser.set_defaults(ways=[name for name, way in WAYS.items() if not (way.patch or {}).get("graphs")])
    parser.add_argument("--programs", nargs="+", default=["boltz2"], choices=list(TRAINED), help="(default: boltz2)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[384, 640], metavar="N", help="of a crop (default: 384 640)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the alignment (default: {ROWS})")
    parser.add_argument("--blocks", type=int, help="of the trunk (default: the published number)")
    parser.add_argument("--steps", type=int, default=3, help="that are timed after one that compiles (default: 3)")
    chosen = parser.parse_args()
    failed = False
    try:
        record = begun(chosen.json, chosen.device, chosen.commit)
        crops = {name: [TRAINED[name].crops(tokens, chosen.rows) for tokens in chosen.tokens] for name in chosen.programs}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name, batches in crops.items():
        trained, blocks = TRAINED[name], chosen.blocks or TRAINED[name].blocks
        training = Training(trained, trained.build(chosen.device, blocks), chosen.device, chosen.steps, blocks)
        for batch in batches:
            cases = measure(training, moved(batch, chosen.device), chosen.ways, measured)
            failed |= keep(cases, record, ("program", "tokens", "rows", "blocks", "way"), chosen.json, show)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
