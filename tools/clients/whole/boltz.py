"""Boltz-1 and Boltz-2. `boltz predict` fixes the depth of the trunk, 48 and 64 blocks, so the models are narrow."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
from typing import Any

import torch
from boltz.data.const import canonical_tokens
from boltz.main import (
    Boltz1,
    Boltz2,
    Boltz2DiffusionParams,
    BoltzDiffusionParams,
    BoltzSteeringParams,
    MSAModuleArgs,
    PairformerArgs,
    PairformerArgsV2,
)
from omegaconf import OmegaConf
from rdkit import Chem

from clients.weights import drawn_by, fill

_ATOMS = {"atom_encoder_depth": 1, "atom_encoder_heads": 4}
_BINS = {"num_plddt_bins": 50, "num_pde_bins": 64, "num_pae_bins": 64}

_TRAINING = OmegaConf.create({"max_lr": 0.0, "weight_decay": 0.0, "diffusion_multiplicity": 1, "recycling_steps": 0})
"""Boltz-2 reads these from a checkpoint."""

_BOTH: dict[str, Any] = {
    "atom_s": 32,
    "atom_z": 16,
    "token_s": 128,
    "token_z": 32,
    "num_bins": 64,
    "training_args": _TRAINING,
    "validation_args": {},
    "diffusion_loss_args": {},
    "alpha_pae": 1.0,
    "confidence_prediction": True,
    "score_model_args": {
        **_ATOMS,
        "sigma_data": 16,
        "dim_fourier": 32,
        "token_transformer_depth": 2,
        "token_transformer_heads": 4,
        "atom_decoder_depth": 1,
        "atom_decoder_heads": 4,
        "conditioning_transition_layers": 2,
    },
    "steering_args": dataclasses.asdict(BoltzSteeringParams()),
}

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "boltz1": (
        Boltz1,
        {
            **_BOTH,
            "atom_feature_dim": 389,
            "embedder_args": _ATOMS,
            "msa_args": dataclasses.asdict(MSAModuleArgs(use_paired_feature=False)),
            "pairformer_args": dataclasses.asdict(PairformerArgs()),
            "diffusion_process_args": dataclasses.asdict(BoltzDiffusionParams()),
            "confidence_imitate_trunk": True,
            "confidence_model_args": {
                "add_s_to_z_prod": True,
                "add_s_input_to_s": True,
                "use_s_diffusion": True,
                "add_z_input_to_z": True,
                "confidence_args": _BINS,
            },
        },
    ),
    "boltz2": (
        Boltz2,
        {
            **_BOTH,
            "atom_feature_dim": 388,
            "embedder_args": {
                **_ATOMS,
                "add_method_conditioning": True,
                "add_modified_flag": True,
                "add_cyclic_flag": True,
                "add_mol_type_feat": True,
            },
            "msa_args": dataclasses.asdict(MSAModuleArgs()),
            "pairformer_args": dataclasses.asdict(PairformerArgsV2()),
            "diffusion_process_args": dataclasses.asdict(Boltz2DiffusionParams()),
            "confidence_model_args": {
                "pairformer_args": {"num_blocks": 2, "num_heads": 16, "dropout": 0.0},
                "add_s_to_z_prod": True,
                "add_s_input_to_s": True,
                "add_z_input_to_z": True,
                "confidence_args": {**_BINS, "use_separate_heads": True},
            },
            "template_args": {"template_dim": 64, "template_blocks": 2},
            "use_templates": True,
            "use_templates_v2": True,
            "bond_type_feature": True,
            "validate_structure": False,
            "fix_sym_check": True,
            "cyclic_pos_enc": True,
            "predict_bfactor": True,
        },
    ),
}

_PREDICT = "predict input.yaml --cache . --accelerator cpu --seed 1 --recycling_steps 0 --sampling_steps 5 --num_workers 0"

COMMANDS = {
    "boltz1": f"boltz {_PREDICT} --model boltz1 --out_dir {{out}}",
    "boltz2": f"python -m clients.whole.boltz2_in_float32 {_PREDICT} --model boltz2 --out_dir {{out}}",
}
ENVIRONMENT: dict[str, str] = {}


def prepare(folder: pathlib.Path, sequence: str, alignment: pathlib.Path) -> None:
    """Write the components, both checkpoints and the input."""
    write_components(folder)
    for name, (model, arguments) in MODELS.items():
        made = fill(model(**arguments), drawn_by(torch.Generator().manual_seed(0)))
        write_checkpoint(folder / f"{name}_conf.ckpt", made, arguments)
    protein = f"{{id: A, sequence: {sequence}, msa: {alignment}}}"
    (folder / "input.yaml").write_text(f"version: 1\nsequences:\n  - protein: {protein}\n")


def write_components(folder: pathlib.Path) -> None:
    """Write the components of proteins and nucleic acids into a folder that `boltz predict` takes as its cache."""
    from clients.whole.components import molecule  # needs biotite, which `boltz predict` does not

    Chem.SetDefaultPickleProperties(Chem.PropertyPickleOptions.AllProps)
    molecules = {name: molecule(name) for name in canonical_tokens}
    (folder / "mols").mkdir()
    for name, mol in molecules.items():
        (folder / "mols" / f"{name}.pkl").write_bytes(pickle.dumps(mol))
    (folder / "ccd.pkl").write_bytes(pickle.dumps(molecules))
    for name in ("mols.tar", "boltz2_aff.ckpt"):  # Boltz downloads what is not there
        (folder / name).touch()


def write_checkpoint(path: pathlib.Path, model: torch.nn.Module, arguments: dict[str, Any]) -> None:
    """Write what `boltz predict` reads of a checkpoint: the weights of a model, and the arguments that made it."""
    kept = {"state_dict": model.state_dict(), "hyper_parameters": arguments, "pytorch-lightning_version": "2.5.0"}
    torch.save(kept, path)
