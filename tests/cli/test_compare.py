"""`evoattn compare`: structures, what the report says, and a small model once, for real."""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

from evoattn.cli import compare
from evoattn.cli.compare import report, structures
from evoattn.cli.compare.programs import OURS, PLAIN, SEED, THREADS, Run
from evoattn.cli.compare.structures import Structure
from evoattn.cli.terminal import RefusedError


def drawn(seed: int, atoms: int = 40) -> Structure:
    places = 8 * torch.randn(atoms, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Structure(tuple(f"A {i} ALA CA" for i in range(atoms)), torch.arange(atoms), places)


def moved(structure: Structure, by: torch.Tensor) -> Structure:
    return Structure(structure.atoms, structure.residues, structure.places + by)


def test_rmsd_knows_rotations_but_no_reflection() -> None:
    x = drawn(0).places
    rotation = torch.linalg.qr(drawn(1, 3).places)[0]
    rotation = rotation * torch.linalg.det(rotation).sign()
    assert structures.rmsd(x, x @ rotation + 7) < 1e-6
    assert structures.rmsd(x, -x @ rotation) > 1
    pair = torch.tensor([[0.0, 0, 0], [2, 0, 0]], dtype=torch.float64)
    assert structures.rmsd(pair, 2 * pair) == pytest.approx(1)


def test_lddt_counts_kept_distances() -> None:
    line = torch.tensor([[0.0, 0, 0], [3, 0, 0], [40, 0, 0], [3, 1, 0]], dtype=torch.float64)
    first = Structure(("a", "b", "c", "d"), torch.tensor([0, 1, 2, 1]), line)
    assert structures.lddt(first, first) == 1
    changed = line.clone()
    changed[1, 0] += 1.5  # a - b: by 1.5 Å, of the pairs a - b and a - d, each twice; b - d is one residue, c is far away
    assert structures.lddt(first, moved(first, changed - line)) == pytest.approx((0.5 + 1) / 2)
    alone = Structure(("a",), torch.tensor([0]), line[:1])
    assert structures.lddt(alone, alone) == 1


def test_lddt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = drawn(0), moved(drawn(0), 0.7 * drawn(2).places / 8)
    whole = structures.lddt(first, second)
    monkeypatch.setattr(structures, "_ROWS", 7)
    assert structures.lddt(first, second) == whole and 0.2 < whole < 1


PDB = "ATOM      1  CA  ALA A   1      {:6.3f}   2.000   3.000  1.00 50.00           C\n"


def test_files_are_read(tmp_path: pathlib.Path) -> None:
    gemmi = pytest.importorskip("gemmi")
    (tmp_path / "a.pdb").write_text(PDB.format(1.5) + PDB.format(2.5).replace("CA ", "CB ") + "END\n")
    gemmi.read_structure(str(tmp_path / "a.pdb")).make_mmcif_document().write_file(str(tmp_path / "a.cif"))
    for name in ("a.pdb", "a.cif"):
        found = structures.read(tmp_path / name)
        assert found is not None and len(found.atoms) == 2 and found.residues.tolist() == [0, 0]
        assert found.places.tolist() == [[1.5, 2, 3], [2.5, 2, 3]]
    (tmp_path / "empty.pdb").write_text("")
    assert structures.read(tmp_path / "empty.pdb") is None
    (tmp_path / "damaged.cif").write_text("data_x\n_a.b 'no end\n")
    with pytest.raises(RefusedError, match="damaged.cif"):
        structures.read(tmp_path / "damaged.cif")


def runs(**structures_of: dict[str, Structure]) -> dict[str, Run]:
    names = {"plain": PLAIN, "ours": OURS, "seed": SEED, "threads": THREADS}
    scores = {(f"confidence_m_{i}.json", "ptm"): i / 4 for i in (2, 1, 0)}
    return {names[way]: Run(1.0, None, 2.0, of, scores, "n calls") for way, of in structures_of.items()}


@pytest.mark.parametrize(
    ("by", "within"),
    [
        (0.001, "the same to 0.01 Å"),
        (0.5, "within what another number of threads changes"),
        (3.0, "within what another seed changes"),
    ],
)
def test_a_difference_is_within_a_spread(by: float, within: str) -> None:
    x, noise = drawn(0), drawn(5).places / 8
    found = runs(
        plain={"m_0.pdb": x},
        ours={"m_0.pdb": moved(x, by * noise)},
        seed={"m_0.pdb": drawn(9)},
        threads={"m_0.pdb": moved(x, noise)},
    )
    (one,) = report.compared(found)
    assert one.within == one.verdict == within
    text = "\n".join(report.shown([one], found))
    assert "m_0.pdb, 40 atoms" in text and text.count("ptm") == 1 and "peak memory of a process, GiB" in text
    assert text.endswith(f"n calls\n1 of 1 structures: {within}")


def test_what_differs_is_told() -> None:
    x = drawn(0)
    far, lost = drawn(9), Structure(x.atoms, x.residues, x.places * math.nan)
    for ours in (far, lost):
        (one,) = report.compared(runs(plain={"m.pdb": x}, ours={"m.pdb": ours}, seed={"m.pdb": x}, threads={"m.pdb": x}))
        assert not one.within and one.verdict.startswith("DIFFERS")
    (one,) = report.compared(runs(plain={"m.pdb": x}, ours={"m.pdb": far}))
    assert not one.within and "is not known" in one.verdict
    fewer = drawn(0, 39)
    for plain, ours in (({"m.pdb": x}, {}), ({}, {"m.pdb": x}), ({"m.pdb": x}, {"m.pdb": fewer})):
        (one,) = report.compared(runs(plain=plain, ours=ours))
        assert not one.within and one.verdict.startswith("not compared")


def test_samples_in_another_order_are_found() -> None:
    samples = [drawn(seed) for seed in range(3)]
    plain = {f"m_{i}.pdb": x for i, x in enumerate(samples)}
    ours = {f"m_{i}.pdb": samples[j] for i, j in enumerate((2, 0, 1))}
    found = report.compared(runs(plain=plain, ours=ours, seed=ours, threads=plain))
    assert [x.sample for x in found] == ["m_2.pdb", "m_0.pdb", "m_1.pdb"] and all(x.within for x in found)
    shown = [x.split() for x in report.shown(found, runs(plain=plain, ours=ours)) if "ptm" in x]
    assert shown == [["ptm", "0.5", "0"], ["ptm", "0", "0.25"], ["ptm", "0.25", "0.5"]]
    twice = report.compared(runs(plain=plain, ours=dict.fromkeys(plain, samples[0])))
    assert sum(bool(x.within) for x in twice) == 1, "a sample stands for one"


def test_scores_belong_to_a_structure_with_all_words_of_its_name() -> None:
    scores = {(f"confidence_prot_1_model_{i}.json", "ptm"): float(i) for i in (0, 1)}
    assert report._scores_of("prot_1_model_1.cif", scores) == [("ptm", 1.0)]
    assert report._scores_of("prot_1_model_2.cif", scores) == []


def test_json_has_no_nan() -> None:
    x = drawn(0)
    lost = Structure(x.atoms, x.residues, x.places * math.nan)
    found = runs(plain={"m.pdb": x}, ours={"m.pdb": lost})
    text = json.dumps(report.as_json(report.compared(found), found), allow_nan=False)
    assert json.loads(text)["structures"][0]["differences"] == {OURS: {"rmsd": None, "lddt": None}}


def test_without_a_reader_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = argparse.Namespace(program=[sys.executable, "x.py", "{out}"], module=False, seed=1)
    with pytest.raises(RefusedError, match="gemmi is not installed"):
        compare.run(arguments)


def test_a_folder_of_results_is_a_new_one(tmp_path: pathlib.Path) -> None:
    compare.check_out(tmp_path)
    compare.check_out(tmp_path / "new")
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(RefusedError, match="empty or not there yet"):
            compare.check_out(place)


@pytest.mark.slow
def test_an_attention_of_esmfold(tmp_path: pathlib.Path) -> None:
    """The program draws before it could take a seed, and its small calls are not left to it."""
    pytest.importorskip("transformers")
    pytest.importorskip("gemmi")
    (tmp_path / "fold.py").write_text(
        textwrap.dedent("""
        import json, pathlib, random, sys
        import evoattn.clients.calls, numpy, torch
        from transformers.models.esm.modeling_esmfold import EsmFoldAttention
        evoattn.clients.calls.few_on_cpu = lambda x: 0
        x = torch.randn(1, 3, 5, 16) + random.random() + numpy.random.uniform()
        torch.manual_seed(0)
        layer = EsmFoldAttention(16, 16, 16, 4, 2)
        y = 5 * (x + layer(x, x, [torch.randn(1, 3, 1, 1, 5)])[0])
        out = pathlib.Path(sys.argv[1])
        out.mkdir(parents=True)
        line = "ATOM  {0:5}  CA  ALA A{0:4}    {1:8.3f}{2:8.3f}{3:8.3f}  1.00 50.00           C"
        rows = [line.format(i, *row) for i, row in enumerate(y.reshape(-1, 16)[:, :3].tolist(), 1)]
        (out / "m.pdb").write_text("\\n".join([*rows, "END", ""]))
        (out / "confidence_m.json").write_text(json.dumps({"ptm": float(y.mean()), "name": "x", "done": True}))
        """)
    )
    command = [
        sys.executable,
        "-m",
        "evoattn",
        "compare",
        "--out",
        "kept",
        "--json",
        "found.json",
        "python",
        "fold.py",
        "{out}",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    (structure,) = found["structures"]
    assert structure["within"] == "the same to 0.01 Å" and structure["differences"][SEED]["rmsd"] > 0.1
    assert list(found["ways"]) == [PLAIN, OURS, SEED, THREADS] and found["report"].startswith("1 attention call of esmfold")
    assert found["ways"][PLAIN]["scores"] == {
        "confidence_m.json: ptm": pytest.approx(found["ways"][OURS]["scores"]["confidence_m.json: ptm"], abs=1e-5)
    }
    assert {x.name for x in (tmp_path / "kept").iterdir()} == {"as-installed", "evoattn", "another-seed", "other-threads"}
    assert "1 of 1 structures: the same to 0.01 Å" in done.stdout


def test_a_program_of_which_nothing_is_computed_is_refused(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("gemmi")
    lines = ["import pathlib, sys", "out = pathlib.Path(sys.argv[1])", "out.mkdir()"]
    (tmp_path / "program.py").write_text("\n".join([*lines, f"(out / 'a.pdb').write_text({PDB.format(1.0)!r})"]))
    command = [sys.executable, str(tmp_path / "program.py"), "{out}"]
    arguments = argparse.Namespace(program=command, module=False, seed=1, out=None, json=None, quick=True, precision="exact")
    with pytest.raises(RefusedError, match="evoattn computed nothing, so there is nothing to compare: nothing was patched"):
        compare.run(arguments)
