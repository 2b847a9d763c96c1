#!/usr/bin/env python3
"""Milliseconds of a training step of a whole model: as installed, with cuEquivariance, and patched.

    PYTHONPATH=src python benchmarks/training_steps.py --tokens 384 640 --json training.json

Boltz-2 has full depth and random weights. A step is the forward of its structure training, with one recycle, 1,024 sequences
and 16 noised copies of the atoms, then the backward, clipping and AdamW, in bfloat16 autocast and with activation checkpoints,
as Boltz trains. Dropout is 0, which costs the same, so that all ways compute the same. The input is a crop of a committed
feature file, with random atoms and sequences. `loss`, `gradient norm` and `first block`, the gradient of the first block of
the trunk, are compared with those of the model as installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from prediction_features import unpacked
from prediction_programs import PROGRAMS, boltz2, tf32
from prediction_ways import WAYS, Case, Way, begun, each_way, keep, line, options, peak, used
from torch import Tensor

from evoattn.bench import machine

PROGRAM = PROGRAMS["boltz2"]
STAGES = ("forward", "backward", "optimizer")
BLOCKS, ROWS, COPIES, WINDOW = 64, 1024, 16, 32
SOURCE = 684
"""The residues of the features that crops come from."""
CLIP = 10.0
"""Boltz' largest norm of a gradient."""


def cropped(features: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The first tokens of a batch of Boltz-2, with their atoms in whole windows.

    Raises:
        ValueError: there are not so many tokens.
    """
    atoms, every = features["atom_to_token"].shape[1:]
    if tokens > every:
        raise ValueError(f"a crop of {tokens} tokens: the features have {every}")
    real = int(features["atom_to_token"][..., :tokens].sum())
    kept = {every: tokens, atoms: -(-real // WINDOW) * WINDOW}
    numbers = {}
    for name, x in features.items():
        for axis in range(1, x.ndim):
            x = x.narrow(axis, 0, kept.get(x.shape[axis], x.shape[axis]))
        numbers[name] = x.contiguous()
    there = numbers["atom_to_token"].sum(-1)  # 0: an atom of a token that is cut off
    return numbers | {name: numbers[name] * there.to(numbers[name].dtype) for name in ("atom_pad_mask", "atom_resolved_mask")}


def drawn(features: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Features with random atoms and a random alignment, the same for the same shapes."""
    generator = torch.Generator().manual_seed(0)
    outputs = {name: x.expand(-1, rows, -1) if _is_alignment(name) else x for name, x in features.items()}
    letters = torch.randint(2, 22, outputs["msa"].shape, generator=generator)  # the 20 amino acids
    coordinates = 10 * torch.randn(features["coords"].shape, generator=generator)
    device = features["msa"].device
    return outputs | {"msa": letters.to(device), "coords": coordinates.to(device)}


def _is_alignment(name: str) -> bool:
    return name in ("msa", "msa_paired", "msa_mask", "deletion_value", "has_deletion")


def build(device: torch.device, blocks: int) -> Any:
    """Boltz-2 as it trains its structure: with activation checkpoints; its confidence head is left alone."""
    saved: dict[str, Any] = {"activation_checkpointing": True}
    changes = {
        "pairformer_args": saved | {"num_blocks": blocks},
        "msa_args": saved | {"msa_blocks": min(blocks, 4)},
        "template_args": saved | {"dropout": 0.0},
        "score_model_args": saved | {"token_transformer_depth": min(blocks, 24)},
    }
    model = boltz2(device, changes).train()
    model.confidence_module.requires_grad_(False)
    return model


def loss_of(model: Any, features: Mapping[str, Tensor], copies: int = COPIES) -> Tensor:
    """The loss of Boltz-2's structure training. Its forward wants a sample and a confidence, which that training has not."""
    from boltz.model.loss.distogramv2 import distogram_loss

    batch = dict(features)  # the forward repeats the coordinates in it
    atoms = {"sample_atom_coords": batch["coords"][:, 0]}
    sample = patch.object(model.structure_module, "sample", return_value=atoms)
    with sample, patch.object(model.confidence_module, "forward", return_value={}):
        outputs = model(batch, recycling_steps=1, multiplicity_diffusion_train=copies)
    diffusion = model.structure_module.compute_loss(batch, outputs, multiplicity=copies, **model.diffusion_loss_args)
    distances, _ = distogram_loss(outputs, batch, aggregate_distogram=model.aggregate_distogram)
    weights = model.training_args
    loss: Tensor = weights.diffusion_loss_weight * diffusion["loss"] + weights.distogram_loss_weight * distances
    return loss


@dataclasses.dataclass(frozen=True)
class Training:
    """A model that is trained on a device."""

    model: Any
    device: torch.device
    steps: int
    blocks: int

    def measure(self, way: Way, features: Mapping[str, Tensor]) -> tuple[Case, dict[str, Tensor]]:
        """Measure one way, and return what it computes in its first step, which compiles.

        The weights stay what they are: the first rate of Boltz' schedule is 0.
        """
        [optimizer], _ = self.model.configure_optimizers()
        numbers: Case = {}
        with used(way, PROGRAM, self.model):
            try:
                outputs, _ = self.step(features, optimizer)
                with peak(self.device, numbers):
                    times = [self.step(features, optimizer)[1] for _ in range(self.steps)]
            finally:
                optimizer.zero_grad()
        numbers["ms"] = round(statistics.median(sum(x.values()) for x in times), 2)
        numbers["stages"] = {name: round(statistics.median(x[name] for x in times), 2) for name in STAGES}
        return numbers | {"loss": float(f"{outputs['loss']:.6g}")}, outputs

    def step(
        self, features: Mapping[str, Tensor], optimizer: Any, clock: Any = None
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Results and milliseconds of a step. clock: is told when the backward runs (`training_parts.Clock`)."""
        torch.manual_seed(1)
        optimizer.zero_grad()
        times: dict[str, float] = {}
        with self._timed("forward", times), torch.autocast(self.device.type, torch.bfloat16), tf32(False):
            loss = loss_of(self.model, features)
        with self._timed("backward", times), tf32(False):
            if clock is not None:
                clock.in_backward = True
            loss.backward()  # type: ignore[no-untyped-call]
            if clock is not None:
                clock.in_backward = False
        block = torch.cat([x.grad.flatten() for x in self.model.pairformer_module.layers[0].parameters() if x.grad is not None])
        outputs = {"loss": loss.detach().cpu(), "first block": block.float().cpu()}
        with self._timed("optimizer", times):
            outputs["gradient norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).cpu()
            optimizer.step()
        return outputs, times

    @contextlib.contextmanager
    def _timed(self, stage: str, times: dict[str, float]) -> Iterator[None]:
        machine.synchronize(self.device)
        start = time.perf_counter()
        yield
        machine.synchronize(self.device)
        times[stage] = 1e3 * (time.perf_counter() - start)


Measure = Callable[[Training, Way, Mapping[str, Tensor]], tuple[Case, dict[str, Tensor]]]
"""Measures a way: what to note, and what to compare with the program as installed."""


def measure(
    training: Training, features: Mapping[str, Tensor], chosen: list[str], measured: Measure = Training.measure
) -> Iterator[Case]:
    """A case for each way, in turn."""
    facts = {"program": PROGRAM.title, "tokens": features["token_index"].shape[1], "rows": features["msa"].shape[1]}
    facts["blocks"] = training.blocks
    return each_way(PROGRAM, chosen, facts, training.device, lambda way: measured(training, way, features))


def show(case: Case) -> str:
    """A line for the terminal."""
    stages = ", ".join(f"{name} {ms:.0f}" for name, ms in case.get("stages", {}).items())
    return line(case, f"{case['tokens']:5} tokens", f"{case.get('ms', 0):8.1f} ms ({stages})")


def main(about: str | None = __doc__, measured: Measure = Training.measure, show: Callable[[Case], str] = show) -> int:
    """Measure what the command line asks for. about: its description."""
    parser = options(about, [name for name, way in WAYS.items() if not way.runtime])
    parser.set_defaults(ways=[name for name, way in WAYS.items() if not (way.patch or {}).get("graphs")])
    parser.add_argument("--tokens", nargs="+", type=int, default=[384, 640], metavar="N", help="of a crop (default: 384 640)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of the alignment (default: {ROWS})")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"of the trunk (default: {BLOCKS})")
    parser.add_argument("--steps", type=int, default=3, help="that are timed after one that compiles (default: 3)")
    chosen = parser.parse_args()
    try:
        record = begun(chosen.json, chosen.device, chosen.commit)
        training = Training(build(chosen.device, chosen.blocks), chosen.device, chosen.steps, chosen.blocks)
        source = unpacked("boltz2", SOURCE, torch.device("cpu"))
        crops = [cropped(source, tokens) for tokens in chosen.tokens]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    failed = False
    for crop in crops:
        features = drawn({name: x.to(chosen.device) for name, x in crop.items()}, chosen.rows)
        cases = measure(training, features, chosen.ways, measured)
        failed |= keep(cases, record, ("program", "tokens", "rows", "blocks", "way"), chosen.json, show)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
