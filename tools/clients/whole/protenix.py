"""Protenix' smallest published model, with eight blocks in the trunk and in the diffusion transformer."""

from __future__ import annotations

import json
import os
import pathlib
import pickle

import numpy as np
import torch
from biotite.structure.info.ccd import get_from_ccd
from biotite.structure.io import pdbx
from rdkit import Chem

from clients.weights import drawn_by, fill
from clients.whole.components import molecule

MODEL = "protenix_tiny_default_v0.5.0"

_OPTIONS = "--seeds 101 --cycle 1 --step 5 --sample 1 --dtype fp32 --use_msa false --trimul_kernel torch --triatt_kernel torch"

COMMANDS = {"protenix": f"protenix pred --input input.json --model_name {MODEL} {_OPTIONS} --out_dir {{out}}"}
ENVIRONMENT = {"PROTENIX_ROOT_DIR": ".", "LAYERNORM_TYPE": "torch"}


def prepare(folder: pathlib.Path, sequence: str, alignment: pathlib.Path) -> None:
    """Write the components, the checkpoint and the input, which has no alignment."""
    os.environ.update(ENVIRONMENT)
    from configs.configs_base import configs as base
    from configs.configs_data import data_configs
    from configs.configs_inference import inference_configs
    from configs.configs_model_type import model_configs
    from ml_collections.config_dict import ConfigDict
    from protenix.config.config import parse_configs
    from protenix.data.constants import PRO_STD_RESIDUES
    from protenix.model.protenix import Protenix

    _components(folder / "common", list(PRO_STD_RESIDUES))
    inference_configs["model_name"] = MODEL
    configs = parse_configs(configs={**base, "data": data_configs, **inference_configs}, fill_required_with_null=True)
    configs.update(ConfigDict(model_configs[MODEL]))
    model = Protenix(configs)
    fill(model, drawn_by(torch.Generator().manual_seed(0)))
    (folder / "checkpoint").mkdir()
    torch.save({"model": model.state_dict()}, folder / "checkpoint" / f"{MODEL}.pt")
    chain = {"proteinChain": {"sequence": sequence, "count": 1}}
    (folder / "input.json").write_text(json.dumps([{"name": "input", "sequences": [chain]}]))


def _components(folder: pathlib.Path, names: list[str]) -> None:
    """Write the components as mmCIF and as molecules, and empty tables of the PDB, which Protenix would download."""
    folder.mkdir()
    file = pdbx.CIFFile()
    molecules = {}
    for name in names:
        file[name] = pdbx.CIFBlock()
        for key in ("chem_comp", "chem_comp_atom", "chem_comp_bond"):
            columns = {x: np.atleast_1d(column.as_array(str)) for x, column in get_from_ccd(key, name).items()}
            file[name][key] = pdbx.CIFCategory({x: pdbx.CIFColumn(pdbx.CIFData(values, str)) for x, values in columns.items()})
        mol = molecule(name)
        mol.atom_map, mol.name = {atom.GetProp("name"): atom.GetIdx() for atom in mol.GetAtoms()}, name
        mol.ref_conf_id, mol.ref_conf_type, mol.ref_mask = 0, "rdkit", np.ones(mol.GetNumAtoms(), dtype=bool)
        molecules[name] = mol
    file.write(folder / "components.cif")
    Chem.SetDefaultPickleProperties(Chem.PropertyPickleOptions.AllProps)
    (folder / "components.cif.rdkit_mol.pkl").write_bytes(pickle.dumps(molecules))
    (folder / "clusters-by-entity-40.txt").touch()
    (folder / "obsolete_release_date.csv").write_text("entry_id,date\n")
    for name in ("obsolete_to_successor", "release_date_cache"):
        (folder / f"{name}.json").write_text("{}")
