"""Whole models as their programs train them: what `training_steps.py`, `training_parts.py` and `convergence.py` run.

Models have random weights and no dropout, so that all ways compute the same. Features are crops of committed files. What those
lack is drawn at random: the alignment and the true coordinates. Random coordinates have no symmetric chains or atoms, so that
none are matched with the prediction.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import torch
from prediction_features import Features, check_crop, cropped, narrowed, unpacked
from prediction_programs import PROGRAMS, Program, boltz2, merged, openfold3, protenix, published
from torch import Tensor, nn

__all__ = ["TRAINED", "Trained", "attribute"]

SOURCE = 684
"""The residues of the features that crops come from."""
LETTERS = 20


@dataclasses.dataclass(frozen=True)
class Trained:
    """A program that is trained.

    Args:
        program: the one that predicts.
        folder: of its features.
        blocks: the published number of blocks in the trunk.
        copies: noised copies of the atoms in a step.
        build: the model with so many blocks in its trunk, on a device.
        narrow: a narrow and shallow model.
        crop: the first tokens of its features.
        draw: features with random labels and so many random sequences.
        loss: of a model, features and so many copies, with one recycle.
        optimizer: the program's own at its first step, whose rate is 0: the weights stay what they are.
        sequence: the feature with the sequence as numbers for each letter.
        parts: by name, a module and the list inside of it whose modules checkpoints compute again. One is "trunk".
    """

    program: Program
    folder: str
    blocks: int
    copies: int
    build: Callable[[torch.device, int], Any]
    narrow: Callable[[torch.device], Any]
    crop: Callable[[Features, int], dict[str, Any]]
    draw: Callable[[Features, int], dict[str, Any]]
    loss: Callable[[Any, Features, int], Tensor]
    optimizer: Callable[[Any], Any]
    sequence: str
    parts: Mapping[str, tuple[str, str]]

    def crops(self, tokens: int, rows: int) -> dict[str, Any]:
        """Features of a crop, on the CPU.

        Raises:
            ValueError: there are not so many tokens.
        """
        return self.draw(self.crop(unpacked(self.folder, SOURCE, torch.device("cpu")), tokens), rows)

    def first_block(self, model: nn.Module) -> nn.Module:
        """The first block of a model's trunk."""
        block: nn.Module = attribute(model, ".".join(self.parts["trunk"]))[0]
        return block


def attribute(of: Any, path: str) -> Any:
    """An attribute by a dotted path, or None."""
    for name in path.split("."):
        of = getattr(of, name, None)
    return of


def _coordinates(like: Tensor) -> Tensor:
    """Random coordinates, the same for the same shape."""
    return 10 * torch.randn(like.shape, generator=torch.Generator().manual_seed(0))


def _sequences(shape: tuple[int, ...]) -> Tensor:
    """Random amino acids as numbers, the same for the same shape."""
    return torch.randint(LETTERS, shape, generator=torch.Generator().manual_seed(0))


def _rows(features: Features, rows: int, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Features of an alignment of one sequence, for so many. Axes: [...,rows,tokens]."""
    return {name: features[name].expand(*features[name].shape[:-2], rows, -1) for name in names}


def _boltz2_draw(features: Features, rows: int) -> dict[str, Any]:
    alignment = _rows(features, rows, ("msa", "msa_paired", "msa_mask", "deletion_value", "has_deletion"))
    letters = 2 + _sequences(alignment["msa"].shape)
    return {**features, **alignment, "msa": letters, "coords": _coordinates(features["coords"])}


def _boltz2(device: torch.device, blocks: int) -> Any:
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


def _boltz2_narrow(device: torch.device) -> Any:
    return boltz2(device, published("boltz2", "narrow")).train()


def _boltz2_loss(model: Any, features: Features, copies: int) -> Tensor:
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


def _training(program: str, changes: Mapping[str, Any], everywhere: Mapping[str, Any]) -> dict[str, Any]:
    """The published arguments as training changes them, with changes, and with other values of names at any depth."""

    def replaced(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: replaced(x) if isinstance(x, Mapping) else everywhere.get(name, x) for name, x in arguments.items()}

    return replaced(merged(merged(published(program), published(program, "training")), changes))


def _without_dropout(model: nn.Module) -> Any:
    """The model, which is trained."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _depths(blocks: int) -> dict[str, Any]:
    """Changes of OpenFold-3."""
    diffusion = {"diffusion_transformer": {"no_blocks": min(blocks, 24)}}
    msa = {"msa_module": {"no_blocks": min(blocks, 4)}}
    return {"architecture": {"pairformer": {"no_blocks": blocks}, "msa": msa, "diffusion_module": diffusion}}


def _openfold3(device: torch.device, blocks: int) -> Any:
    return _without_dropout(openfold3(device, _training("openfold3", _depths(blocks), {})))


def _openfold3_narrow(device: torch.device) -> Any:
    return _without_dropout(openfold3(device, _training("openfold3", {}, published("openfold3", "narrow"))))


def _openfold3_crop(features: Features, tokens: int) -> dict[str, Any]:
    owners, every = features["atom_to_token_index"], features["token_index"].shape[1]
    check_crop(tokens, every)
    return narrowed(features, 1, {every: tokens, owners.shape[1]: int((owners < tokens).sum())})


_OPENFOLD3_WEIGHTS = {"bond": 0.0, "smooth_lddt": 4.0, "mse": 4.0, "distogram": 3e-2} | dict.fromkeys(
    ("experimentally_resolved", "plddt", "pae", "pde"), 1e-4
)
"""Of the losses, for a structure of the data bank."""


def _openfold3_draw(features: Features, rows: int) -> dict[str, Any]:
    alignment = _rows(features, rows, ("msa_mask", "deletion_value", "has_deletion"))
    letters = nn.functional.one_hot(_sequences(alignment["msa_mask"].shape), features["msa"].shape[-1])
    truth = {"atom_positions": _coordinates(features["ref_pos"]), "atom_resolved_mask": features["atom_mask"]}
    weights = {name: torch.tensor([x]) for name, x in _OPENFOLD3_WEIGHTS.items()}
    labels = {"ground_truth": truth, "loss_weights": weights}
    return {**features, **alignment, **labels, "msa": letters.to(features["msa"].dtype)}


def _openfold3_loss(model: Any, features: Features, copies: int) -> Tensor:
    from openfold3.core.loss.loss_module import OpenFold3Loss

    model.shared.diffusion.no_samples = copies
    model.synced_generator = SimpleNamespace(integers=lambda low, high: 1)  # recycles
    with patch("openfold3.projects.of3_all_atom.model.safe_multi_chain_permutation_alignment"):
        batch, outputs = model(dict(features))
    with torch.autocast(features["ref_pos"].device.type, enabled=False):
        loss: Tensor = OpenFold3Loss(model.config.architecture.loss_module)(batch, outputs)
    return loss


def _protenix(device: torch.device, blocks: int) -> Any:
    trunk = {"pairformer": {"n_blocks": blocks}, "msa_module": {"n_blocks": min(blocks, 4)}}
    changes = {"model": {**trunk, "diffusion_module": {"transformer": {"n_blocks": min(blocks, 24)}}}}
    return _without_dropout(protenix(device, _training("protenix", changes, {})))


def _protenix_narrow(device: torch.device) -> Any:
    return _without_dropout(protenix(device, _training("protenix", {}, published("protenix", "narrow"))))


def _protenix_crop(features: Features, tokens: int) -> dict[str, Any]:
    owners, every = features["atom_to_token_idx"], len(features["token_index"])
    check_crop(tokens, every)
    return narrowed(features, 0, {every: tokens, len(owners): int((owners < tokens).sum())})


def _protenix_draw(features: Features, rows: int) -> dict[str, Any]:
    alignment = _rows(features, rows, ("msa", "has_deletion", "deletion_value"))
    atoms = features["ref_pos"]
    truth = {"coordinate": _coordinates(atoms), "coordinate_mask": torch.ones(len(atoms))}
    labels = {"ground_truth": truth, "bond_mask": torch.zeros(len(atoms), len(atoms)), "resolution": torch.tensor([2.0])}
    return {**features, **alignment, **labels, "msa": _sequences(alignment["msa"].shape)}


class _AsTheyAre:
    """Protenix' match of symmetric chains and atoms, where there are none."""

    def permute_label_to_match_mini_rollout(self, coordinates: Any, features: Any, labels: Any, whole: Any) -> Any:
        return labels, {}

    def permute_diffusion_sample_to_match_label(self, features: Any, outputs: Any, labels: Any, stage: str) -> Any:
        return outputs, {}, None, None


def _protenix_loss(model: Any, features: Features, copies: int) -> Tensor:
    from protenix.model.loss import ProtenixLoss

    model.diffusion_batch_size = copies
    numpy.random.seed(torch.initial_seed() % 2**32)  # Protenix draws rotations with it
    batch = dict(features)  # the model writes into the mapping
    labels = dict(batch.pop("ground_truth"))
    cycles = (numpy.random.RandomState(step).randint(1, model.N_cycle + 1) for step in itertools.count())
    step = next(i for i, x in enumerate(cycles) if x == 2)  # a step for which Protenix draws one recycle
    outputs, labels, _ = model(batch, None, labels, mode="train", current_step=step, symmetric_permutation=_AsTheyAre())
    with torch.autocast(features["ref_pos"].device.type, enabled=False):
        loss, _ = ProtenixLoss(model.configs)(batch, outputs, labels)
    total: Tensor = loss
    return total


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.95))


_AF3_PARTS = {
    "MSA module": ("msa_module", "blocks"),
    "templates": ("template_embedder", ""),
    "trunk": ("pairformer_stack", "blocks"),
    "condition": ("diffusion_module.diffusion_conditioning", ""),
    "denoiser": ("diffusion_module.diffusion_transformer", "blocks"),
}

TRAINED = {
    "boltz2": Trained(
        PROGRAMS["boltz2"],
        "boltz2",
        64,
        16,
        _boltz2,
        _boltz2_narrow,
        cropped,
        _boltz2_draw,
        _boltz2_loss,
        lambda model: model.configure_optimizers()[0][0],
        "res_type",
        {
            "MSA module": ("msa_module", "layers"),
            "templates": ("template_module", ""),
            "trunk": ("pairformer_module", "layers"),
            "condition": ("diffusion_conditioning", ""),
            "denoiser": ("structure_module.score_model", "token_transformer.layers"),
        },
    ),
    "openfold3": Trained(
        PROGRAMS["openfold3"],
        "openfold3",
        48,
        48,
        _openfold3,
        _openfold3_narrow,
        _openfold3_crop,
        _openfold3_draw,
        _openfold3_loss,
        _adam,
        "restype",
        _AF3_PARTS | {"confidence": ("aux_heads", "")},
    ),
    "protenix": Trained(
        PROGRAMS["protenix"],
        "protenix",
        48,
        48,
        _protenix,
        _protenix_narrow,
        _protenix_crop,
        _protenix_draw,
        _protenix_loss,
        _adam,
        "restype",
        _AF3_PARTS | {"confidence": ("confidence_head", "")},
    ),
}
