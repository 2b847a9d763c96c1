"""The comparison of whole programs, on structures written here and on a program of a line. No client is needed."""

import pathlib
import sys
import types

import pytest

from clients.whole import __main__ as whole
from clients.whole.compare import compare, read

COLUMNS = ("group_PDB", "id", *(f"label_{x}_id" for x in ("atom", "comp", "seq", "asym")), *(f"Cartn_{x}" for x in "xyz"))
PLACES = [(0.0, 0.0, 0.0), (3.0, 4.0, 0.0), (-3.0, -4.0, 0.0)]
"""Their root mean square distance from the centre is sqrt(50 / 3) = 4.08 Å."""


def write(path: pathlib.Path, places: list[tuple[float, float, float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"ATOM {i} CA GLY {i} A {x} {y} {z}" for i, (x, y, z) in enumerate(places)]
    path.write_text("\n".join(["data_toy", "loop_", *(f"_atom_site.{x}" for x in COLUMNS), *rows, "#"]))


def moved(by: float) -> list[tuple[float, float, float]]:
    return [*PLACES[:2], (PLACES[2][0], PLACES[2][1], by)]


def test_structures_are_read(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.cif", PLACES)
    assert read(tmp_path / "a.cif") == {f"A {i} GLY CA": place for i, place in enumerate(PLACES)}


def test_atoms_may_move_by_rounding_alone(tmp_path: pathlib.Path) -> None:
    """The bound is a share of the structure's size: 2e-5 of 4.08 Å is 8.16e-5 Å."""
    write(tmp_path / "plain" / "a.cif", PLACES)
    write(tmp_path / "ours" / "a.cif", moved(8.1e-5))
    result = compare(tmp_path / "plain", tmp_path / "ours")
    assert (result.atoms, result.faults) == (3, [])
    assert result.size == pytest.approx((50 / 3) ** 0.5) and result.largest == pytest.approx(8.1e-5)
    write(tmp_path / "ours" / "a.cif", moved(8.3e-5))
    assert compare(tmp_path / "plain", tmp_path / "ours").faults == ["a.cif: an atom moves by 8.3e-05 Å, the bound is 8.2e-05"]


@pytest.mark.parametrize("structure", [moved(float("nan")), PLACES[:2], []], ids=["NaN", "an atom less", "no atom"])
def test_other_structures_are_reported(tmp_path: pathlib.Path, structure: list[tuple[float, float, float]]) -> None:
    write(tmp_path / "plain" / "a.cif", PLACES)
    write(tmp_path / "ours" / "a.cif", structure)
    assert len(compare(tmp_path / "plain", tmp_path / "ours").faults) == 1


def test_missing_structures_are_reported(tmp_path: pathlib.Path) -> None:
    assert compare(tmp_path / "plain", tmp_path / "ours").faults == [f"no structure in {tmp_path / 'plain'}"]
    write(tmp_path / "plain" / "deep" / "a.cif", PLACES)
    write(tmp_path / "plain" / "b.cif", PLACES)
    write(tmp_path / "ours" / "b.cif", PLACES)
    assert compare(tmp_path / "plain", tmp_path / "ours").faults == ["only one run wrote deep/a.cif"]


@pytest.fixture
def toy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A program that copies a structure, and calls no attention."""
    code = "import pathlib, shutil, sys\npathlib.Path(sys.argv[1]).mkdir()\nshutil.copy('a.cif', sys.argv[1])"

    def prepare(folder: pathlib.Path, sequence: str, alignment: pathlib.Path) -> None:
        assert len(sequence) == 76 and alignment.exists()
        write(folder / "a.cif", PLACES)
        (folder / "toy.py").write_text(code)

    program = types.SimpleNamespace(prepare=prepare, COMMANDS={"toy": "python toy.py {out}"}, ENVIRONMENT={})
    monkeypatch.setitem(sys.modules, "clients.whole.toy", program)
    monkeypatch.setattr(whole, "BUILD", tmp_path)
    return program


def test_a_program_without_our_calls_fails(toy: types.SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    """It runs under `evoattn run`, and its structures are the same."""
    assert whole.main(["toy"]) == 1
    printed = capfd.readouterr().out.splitlines()
    assert printed[1].split() == ["toy", "3", "4.08", "0.0e+00", "0"]
    assert printed[2:] == ["toy: evoattn run replaced no call"]


def test_a_program_that_fails_is_shown(toy: types.SimpleNamespace) -> None:
    toy.COMMANDS["toy"] = "python gone.py {out}"
    with pytest.raises(
        SystemExit, match=r"(?s)can't open file .*gone\.py.*status 2; all that it printed is in .*toy-plain\.log"
    ):
        whole.main(["toy"])


@pytest.mark.parametrize(
    ("printed", "calls"),
    [
        (
            "a\nevoattn run: 1,754 attention calls and 1 pair block of boltz 2.2.1 computed by evoattn on tiled; 2 transitions "
            "by the original: x",
            "1,754 attention calls and 1 pair block",
        ),
        ("evoattn run: 1 attention call of boltz 2.2.1 computed by evoattn on tiled", "1 attention call"),
        ("evoattn run: boltz 2.2.1 patched, but no attention was called", ""),
        ("evoattn run: boltz 2.2.1 patched, but no attention was called; 3 attention calls by the original: x", ""),
        ("", ""),
    ],
)
def test_calls_are_read_from_the_report(printed: str, calls: str) -> None:
    assert whole.calls_of(printed) == calls
