"""Compare the structures that two runs of a program wrote."""

from __future__ import annotations

import dataclasses
import math
import pathlib

__all__ = ["BOUND", "Comparison", "compare", "read"]

BOUND = 2e-5
"""The most that an atom may move, as a share of the structure's size. float32 rounding moves it by 4e-6 at most, measured;
scores that are wrong by 0.1% by 7e-5 at least."""

Point = tuple[float, float, float]


@dataclasses.dataclass
class Comparison:
    """What the structures of two runs have in common.

    Attributes:
        atoms: how many atoms were compared.
        size: the root mean square distance of the atoms from their centre, in Å, of the largest structure.
        largest: the longest way between the two places of an atom, in Å.
        faults: what differs, in words.
    """

    atoms: int = 0
    size: float = 0.0
    largest: float = 0.0
    faults: list[str] = dataclasses.field(default_factory=list)


def compare(plain: pathlib.Path, ours: pathlib.Path, bound: float = BOUND) -> Comparison:
    """Compare all mmCIF files below two folders.

    Args:
        plain: the folder that the program wrote.
        ours: the folder that it wrote under `evoattn run`.
        bound: the most that an atom may move, as a share of the structure's size.

    Returns:
        The sizes and differences, with a fault for each file that is missing, has other atoms, or is beyond the bound.
    """
    result = Comparison()
    names, others = ({path.relative_to(folder) for path in folder.rglob("*.cif")} for folder in (plain, ours))
    if not names:
        result.faults.append(f"no structure in {plain}")
    result.faults += [f"only one run wrote {name}" for name in sorted(names ^ others)]
    for name in sorted(names & others):
        first, second = read(plain / name), read(ours / name)
        if not first or first.keys() != second.keys():
            result.faults.append(f"{name}: the atoms are not the same, {len(first)} and {len(second)}")
            continue
        size = _size(list(first.values()))
        ways = [math.dist(place, second[atom]) for atom, place in first.items()]
        moved = max(ways, key=lambda x: (math.isnan(x), x))  # max() alone overlooks NaN
        if not moved <= bound * size:
            result.faults.append(f"{name}: an atom moves by {moved:.2g} Å, the bound is {bound * size:.2g}")
        result.atoms += len(first)
        result.size, result.largest = max(result.size, size), max(result.largest, moved)
    return result


def read(path: pathlib.Path) -> dict[str, Point]:
    """The coordinates of a file's atoms, by chain, residue and name. The values of proteins have no spaces."""
    columns: list[str] = []
    atoms: dict[str, Point] = {}
    for line in path.read_text().splitlines():
        if line.startswith("_atom_site."):
            columns.append(line.split()[0].removeprefix("_atom_site."))
        elif line.startswith(("ATOM", "HETATM")):
            row = dict(zip(columns, line.split(), strict=True))
            atom = " ".join(row[f"label_{x}_id"] for x in ("asym", "seq", "comp", "atom"))
            atoms[atom] = (float(row["Cartn_x"]), float(row["Cartn_y"]), float(row["Cartn_z"]))
    return atoms


def _size(places: list[Point]) -> float:
    """The root mean square distance from the centre."""
    centre = [math.fsum(x) / len(places) for x in zip(*places, strict=True)]
    return math.sqrt(math.fsum(math.dist(x, centre) ** 2 for x in places) / len(places))
