"""Structures that a program wrote: read, superposed, and compared atom by atom."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path

import torch
from torch import Tensor

from evoattn.cli.terminal import RefusedError

SUFFIXES = (".cif", ".pdb")

RADIUS = 15.0
"""Å up to which a distance counts in lDDT."""

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
"""Å by which a distance may differ in lDDT. Each counts a quarter."""

_ROWS = 1024
"""Atoms whose distances to all others are held at a time."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """The first model of a file.

    Args:
        atoms: the name of each, with chain and residue.
        residues: the number of the residue of each, `[N]`.
        places: float64 `[N, 3]`, in Å.
    """

    atoms: tuple[str, ...]
    residues: Tensor
    places: Tensor


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two structures of the same atoms: RMSD after superposition, in Å, and lDDT between the two, from 0 to 1."""

    rmsd: float
    lddt: float


def check_reader() -> None:
    """Refuse if there is nothing that reads structures."""
    if importlib.util.find_spec("gemmi") is None:
        raise RefusedError("gemmi is not installed, which reads structures: pip install gemmi")


def read(path: Path) -> Structure | None:
    """Read a file in mmCIF or PDB. None: it has no atoms, as a file of components.

    Raises:
        RefusedError: the file cannot be read.
    """
    import gemmi

    atoms, residues, places = [], [], []
    try:
        models = list(gemmi.read_structure(str(path)))
    except (RuntimeError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read: {error}") from error
    for chain in models[0] if models else ():
        for number, residue in enumerate(chain):
            for atom in residue:
                atoms.append(f"{chain.name} {number} {residue.name} {atom.name}{atom.altloc.strip(chr(0))}")
                residues.append((chain.name, number))
                places.append(atom.pos.tolist())
    if not atoms:
        return None
    numbers = {residue: number for number, residue in enumerate(dict.fromkeys(residues))}
    of_atoms = torch.tensor([numbers[x] for x in residues], dtype=torch.int64)
    return Structure(tuple(atoms), of_atoms, torch.tensor(places, dtype=torch.float64))


def compare(first: Structure, second: Structure) -> Difference:
    """Compare structures of the same atoms in the same order. A place that is not finite makes both numbers NaN."""
    distance = rmsd(first.places, second.places)
    return Difference(distance, distance if math.isnan(distance) else lddt(first, second))


def rmsd(x: Tensor, y: Tensor) -> float:
    """The root mean square distance of atoms `[N, 3]` after the best superposition, without a reflection (Kabsch 1976).

    NaN: a place is not finite.
    """
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.nan
    x, y = x - x.mean(0), y - y.mean(0)
    u, s, vt = torch.linalg.svd(x.T @ y)
    if torch.linalg.det(u @ vt) < 0:
        s[-1] = -s[-1]
    squares = x.square().sum() + y.square().sum() - 2 * s.sum()
    return float((squares.clamp(min=0) / len(x)).sqrt())


def lddt(first: Structure, second: Structure) -> float:
    """The share of distances up to 15 Å that are kept, over all atoms of different residues (Mariani et al. 2013).

    Distances count that are so short in the first structure. 1 if there is none.
    """
    kept = pairs = 0
    for begin in range(0, len(first.places), _ROWS):
        part = slice(begin, begin + _ROWS)
        before, after = (torch.cdist(x.places[part], x.places) for x in (first, second))
        near = (before < RADIUS) & (first.residues[part, None] != first.residues)
        change = (before - after).abs()[near]
        pairs += change.numel()
        kept += sum(int((change < threshold).sum()) for threshold in THRESHOLDS)
    return kept / (pairs * len(THRESHOLDS)) if pairs else 1.0
