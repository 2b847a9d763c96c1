"""OpenFold-3, of the published widths, with two blocks of MSA, pairformer and diffusion transformer each."""

from __future__ import annotations

import json
import pathlib

import torch
from openfold3.projects.of3_all_atom.project_entry import ModelUpdate, OF3ProjectEntry
from openfold3.projects.of3_all_atom.runner import OpenFold3AllAtom

from clients.weights import drawn_by, fill

MODEL = {
    "presets": ["predict"],
    "custom": {
        "settings": {"memory": {"eval": {"use_triton_triangle_kernels": False}}},  # OpenFold-3's own fail on a CPU
        "architecture": {
            "shared": {"num_recycles": 0, "diffusion": {"no_full_rollout_steps": 5, "no_full_rollout_samples": 1}},
            "msa": {"msa_module": {"no_blocks": 2}},
            "pairformer": {"no_blocks": 2},
            "diffusion_module": {"diffusion_transformer": {"no_blocks": 2}},
        },
    },
}

_FILES = "--query-json query.json --runner-yaml runner.yml --inference-ckpt-path checkpoint.pt"

COMMANDS = {"openfold3": f"python -m clients.whole.openfold3_seeded predict {_FILES} --output-dir {{out}}"}
ENVIRONMENT = {"OPENFOLD_CACHE": "."}


def prepare(folder: pathlib.Path, sequence: str, alignment: pathlib.Path) -> None:
    """Write the checkpoint, the settings and the input, which has no alignment. The components are biotite's."""
    model = OpenFold3AllAtom(OF3ProjectEntry().get_model_config_with_update(ModelUpdate(**MODEL)), log_dir=None)
    fill(model, drawn_by(torch.Generator().manual_seed(0)))
    torch.save(model.model.state_dict(), folder / "checkpoint.pt")
    settings = {
        "experiment_settings": {"seeds": [1], "use_msa_server": False, "use_templates": False},
        "model_update": MODEL,
        "pl_trainer_args": {"accelerator": "cpu"},
        "data_module_args": {"num_workers": 0},
    }
    (folder / "runner.yml").write_text(json.dumps(settings))  # YAML has JSON in it
    chain = {"molecule_type": "protein", "chain_ids": ["A"], "sequence": sequence}
    (folder / "query.json").write_text(json.dumps({"queries": {"input": {"chains": [chain]}}}))
