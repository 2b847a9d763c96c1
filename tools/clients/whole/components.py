"""Parts of the Chemical Component Dictionary, from the copy that biotite has, as molecules of RDKit."""

from __future__ import annotations

from biotite.structure.info.ccd import get_from_ccd
from rdkit import Chem
from rdkit.Geometry import Point3D

__all__ = ["molecule"]

_BONDS = {"SING": Chem.BondType.SINGLE, "DOUB": Chem.BondType.DOUBLE}


def molecule(name: str) -> Chem.Mol:
    """A component with its hydrogens and ideal coordinates.

    Args:
        name: its three letters.

    Returns:
        The molecule. An atom has the properties `name` and `leaving_atom`, the conformer is named `Ideal`.
    """
    atoms, bonds = get_from_ccd("chem_comp_atom", name), get_from_ccd("chem_comp_bond", name)
    made = Chem.RWMol()
    conformer = Chem.Conformer(atoms.row_count)
    places: dict[str, int] = {}
    columns = ("atom_id", "type_symbol", "charge", "pdbx_leaving_atom_flag", *(f"pdbx_model_Cartn_{x}_ideal" for x in "xyz"))
    for atom_id, element, charge, leaves, *xyz in zip(*(atoms[x].as_array(str) for x in columns), strict=True):
        atom = Chem.Atom(element.capitalize())
        atom.SetFormalCharge(int(charge))
        atom.SetProp("name", str(atom_id))
        atom.SetProp("leaving_atom", "1" if leaves == "Y" else "0")
        places[str(atom_id)] = made.AddAtom(atom)
        conformer.SetAtomPosition(places[str(atom_id)], Point3D(*map(float, xyz)))
    for first, second, order in zip(*(bonds[x].as_array(str) for x in ("atom_id_1", "atom_id_2", "value_order")), strict=True):
        made.AddBond(places[str(first)], places[str(second)], _BONDS[str(order)])
    conformer.SetProp("name", "Ideal")
    result = made.GetMol()
    result.AddConformer(conformer, assignId=True)
    Chem.SanitizeMol(result)
    Chem.AssignStereochemistryFrom3D(result)
    return result
