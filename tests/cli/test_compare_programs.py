"""`evoattn compare`: options, seeds, file names and scores of the programs that it knows."""

import json
import pathlib
import sys
import textwrap

import pytest

from evoattn.cli.compare import programs, report
from evoattn.cli.compare.programs import OURS, PLAIN, SEED, THREADS, with_options, with_settings
from evoattn.cli.terminal import RefusedError


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/bin/boltz predict a.yaml", "/bin/boltz predict a.yaml --out_dir OUT --seed 3"),
        ("boltz predict --seed=9 --out_dir x a.yaml", "boltz predict a.yaml --out_dir OUT --seed 3"),
        ("python -m boltz.main predict a.yaml", "python -m boltz.main predict a.yaml --out_dir OUT --seed 3"),
        ("python -m openfold3.run_openfold predict", "python -m openfold3.run_openfold predict --output-dir OUT"),
        ("protenix pred -s 7 -i a.json", "protenix pred -i a.json --out_dir OUT --seeds 3"),
        ("protenix pred -s7,8 -o./x --use_seeds_in_json True -i a", "protenix pred -i a --out_dir OUT --seeds 3"),
        ("run_openfold predict --num-model-seeds 5 --query_json q", "run_openfold predict --query_json q --output-dir OUT"),
        ("run_openfold predict --query_json q --output_dir x", "run_openfold predict --query_json q --output-dir OUT"),
        ("python fold.py {out}/x {seed}", "python fold.py OUT/x 3"),
        ("python fold.py boltz.fasta {out}", "python fold.py boltz.fasta OUT"),
        ("boltz predict a.yaml --out_dir {out}/y", "boltz predict a.yaml --out_dir OUT/y --seed 3"),
    ],
)
def test_a_program_gets_its_folder_and_seed(command: str, expected: str) -> None:
    assert " ".join(with_options(command.split(), "OUT", 3)) == expected


def test_an_unknown_program_has_to_say_where_its_results_go() -> None:
    with pytest.raises(RefusedError, match=r"python is none of boltz, protenix, run_openfold: .* \{out\}"):
        with_options(["python", "fold.py", "{seed}"], "OUT", 3)


def test_settings_get_the_seed(tmp_path: pathlib.Path) -> None:
    yaml = pytest.importorskip("yaml")
    given, copy = tmp_path / "runner.yml", tmp_path / "settings.yml"
    given.write_text("experiment_settings: {seeds: 5, num_seeds: 3, use_templates: false}\nmodel_update: {x: 1.0e-05}\n")
    names = ("--runner-yaml", "--runner_yaml")
    words = with_settings(["run_openfold", f"--runner_yaml={given}", "predict"], names, 3, copy)
    assert words == ["run_openfold", "predict", "--runner-yaml", str(copy)]
    assert yaml.safe_load(copy.read_text()) == {
        "experiment_settings": {"seeds": [3], "num_seeds": 3, "use_templates": False},
        "model_update": {"x": 1e-5},
    }
    for text in ("", "experiment_settings:\n"):
        given.write_text(text)
        with_settings(["--runner-yaml", str(given)], names, 4, copy)
        assert yaml.safe_load(copy.read_text()) == {"experiment_settings": {"seeds": [4]}}
    for text in ("a: [", "- a", "experiment_settings: 5"):
        given.write_text(text)
        with pytest.raises(RefusedError, match="--runner-yaml cannot be read: "):
            with_settings(["--runner-yaml", str(given)], names, 3, copy)
    with pytest.raises(RefusedError, match=r"--runner-yaml cannot be read: .*missing.yml"):
        with_settings(["--runner-yaml", str(tmp_path / "missing.yml")], names, 3, copy)


STAND_IN = """
import argparse, json, pathlib, random
options = argparse.ArgumentParser()
options.add_argument("command")
{reads}
columns = "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id auth_asym_id auth_seq_id".split()
columns += ["Cartn_x", "Cartn_y", "Cartn_z"]
for query in ("one", "se_cond_model"):
    for sample in (0, 1):
        draw = random.Random(f"{{seed}} {{query}} {{sample}}")
        names = {{"q": query, "s": seed, "n": sample + {first}}}
        places = [[f"{{draw.gauss(0, 9):.6f}}" for _ in range(3)] for _ in range(8)]
        rows = [f"ATOM {{i}} C CA . ALA A A {{i}} {{' '.join(place)}}" for i, place in enumerate(places, 1)]
        file = pathlib.Path(given.out, "{structure}".format(**names))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\\n".join(["data_x", "loop_", *(f"_atom_site.{{x}}" for x in columns), *rows, ""]))
        scores = {{"ptm": sample + len(query), "chain_ptm": {{"A": 0.5}}}}
        scores_file = pathlib.Path(given.out, "{scores}".format(**names))
        scores_file.with_name(scores_file.name.replace("_aggregated", "")).write_text(json.dumps({{"plddt": [0.5]}}))
        scores_file.write_text(json.dumps(scores))
"""
"""A program that writes the files of two inputs and two samples each, named as another program names them."""


@pytest.mark.parametrize(
    ("program", "reads", "structure", "scores", "first", "shown"),
    [
        pytest.param(
            "run_openfold",
            """
            options.add_argument("--output-dir", dest="out")
            options.add_argument("--runner-yaml", type=pathlib.Path)
            given = options.parse_args()
            (line,) = [x for x in given.runner_yaml.read_text().splitlines() if x.strip().startswith("- ")]
            seed = int(line.strip().removeprefix("- "))
            """,
            "{q}/seed_{s}/{q}_seed_{s}_sample_{n}_model.cif",
            "{q}/seed_{s}/{q}_seed_{s}_sample_{n}_confidences_aggregated.json",
            1,
            "one/seed_9/one_seed_9_sample_1_model.cif",
            id="openfold3",
        ),
        pytest.param(
            "protenix",
            """
            options.add_argument("--out_dir", dest="out")
            options.add_argument("--seeds", type=int)
            given = options.parse_args()
            seed = given.seeds
            """,
            "{q}/seed_{s}/predictions/{q}_sample_{n}.cif",
            "{q}/seed_{s}/predictions/{q}_summary_confidence_sample_{n}.json",
            0,
            "one/seed_9/predictions/one_sample_0.cif",
            id="protenix",
        ),
    ],
)
def test_files_of_a_program_belong_together(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    reads: str,
    structure: str,
    scores: str,
    first: int,
    shown: str,
) -> None:
    """Structures belong to those of another seed in folders of other names, and to their scores."""
    pytest.importorskip("gemmi")
    pytest.importorskip("yaml")
    text = STAND_IN.format(reads=textwrap.dedent(reads), structure=structure, scores=scores, first=first)
    (tmp_path / f"{program}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", program, "predict"]
    ways = {PLAIN: PLAIN, OURS: PLAIN, SEED: SEED, THREADS: THREADS}  # evoattn's run would compute nothing here
    runs = {way: programs.run_once(ran, command, 9, tmp_path / way) for way, ran in ways.items()}
    assert programs.seeds_of(runs[PLAIN]) == [9] and programs.seeds_of(runs[SEED]) == [10]
    runs = {way: programs.named_as(run, runs[PLAIN]) for way, run in runs.items()}
    found = report.compared(runs)
    assert found[0].name == shown and len(found) == 4 and len(runs[PLAIN].structures) == 4
    for each, ptm in zip(found, (3, 4, 13, 14), strict=True):
        assert each.within == "the same to 0.01 Å" and each.atoms == 8 and not each.sample
        seed = each.differences[SEED]
        assert seed is not None and seed.rmsd > 1
        lines = [x.split() for x in report.shown([each], runs) if "ptm" in x]
        assert len(lines) == 1 and lines[0][:3] == ["ptm", str(ptm), str(ptm)]
    json.dumps(report.as_json(found, runs), allow_nan=False)


def named(*paths: str) -> programs.Run:
    scores = {(path, "ptm"): float(number) for number, path in enumerate(paths)}
    return programs.Run(1.0, None, 1.0, {}, scores)


def test_seeds_of_another_run_take_the_names_of_the_first() -> None:
    first = named("x/seed_9/x_seed_9_sample_0.json", "x/seed_101/x_seed_101_sample_0.json", "x/y.json")
    other = named("x/seed_102/x_seed_102_sample_0.json", "x/seed_10/x_seed_10_sample_0.json", "x/y.json")
    assert [path for path, _ in programs.named_as(other, first).scores] == [
        "x/seed_101/x_seed_101_sample_0.json",
        "x/seed_9/x_seed_9_sample_0.json",
        "x/y.json",
    ]
    fewer = named("x/seed_101/x_seed_101_sample_0.json")  # one seed failed: the other keeps its name
    assert programs.named_as(fewer, first) == fewer


def test_other_threads() -> None:
    assert [programs.other_threads(x) for x in ("8", "1", "2")] == [4, 2, 1] and programs.other_threads("") >= 1


def test_a_program_that_fails_is_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit('no such input')")
    command = [sys.executable, str(tmp_path / "program.py"), "{out}"]
    with pytest.raises(RefusedError, match="as installed: the program ended with status 1 .*: no such input"):
        programs.run_once(PLAIN, command, 1, tmp_path / "run")
    (tmp_path / "program.py").write_text("print('done')")
    with pytest.raises(RefusedError, match=r"no .cif or .pdb with atoms below the folder of results .*: done"):
        programs.run_once(PLAIN, command, 1, tmp_path / "again")
