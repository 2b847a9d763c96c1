"""The script that times a directory of inputs: its inputs, its shares of the wall time, and a run of a narrow model."""

import json
import pathlib
import subprocess
import sys
from types import ModuleType

import pytest

from tests.helpers.scripts import ROOT, load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """benchmarks/directories.py, which is a script."""
    return load("benchmarks/directories.py")


def test_inputs_are_proteins_of_the_lengths(script: ModuleType, tmp_path: pathlib.Path) -> None:
    lengths = script.spread(5, 10, 30)
    assert sorted(lengths) == [10, 15, 20, 25, 30] and lengths == script.spread(5, 10, 30)
    script.write_inputs(tmp_path / "alone", lengths, rows=1)
    script.write_inputs(tmp_path / "aligned", lengths, rows=4)
    texts = [path.read_text() for path in sorted((tmp_path / "alone").iterdir())]
    assert [len(text.split("sequence: ")[1].split(",")[0]) for text in texts] == lengths
    assert all("msa: empty" in text for text in texts)
    rows = (tmp_path / "aligned-2.a3m").read_text().splitlines()[1::2]
    assert len(rows) == 4 and {len(row) for row in rows} == {lengths[2]}
    assert f"sequence: {rows[0]}," in (tmp_path / "aligned" / "p002.yaml").read_text()


MARKS = [
    ["imports", 11.0, 14.0, {}],
    ["inputs", 14.0, 15.0, {}],
    ["checkpoint", 15.0, 20.0, {}],
    ["loader", 22.0, 23.0, {}],
    ["transfer", 23.0, 23.5, {}],
    ["confidence", 26.0, 27.0, {}],
    ["prediction", 23.5, 27.5, {"tokens": 100}],
    ["writing", 27.5, 28.0, {}],
    ["prediction", 28.5, 32.0, {"tokens": 200}],
    ["writing", 32.0, 33.0, {}],
]


def test_stages_add_up_to_the_wall_time(script: ModuleType) -> None:
    found = script.parts(MARKS, 10.0, 35.0, [(20.0, 0.0), (29.0, 90.0), (31.0, 80.0), (34.0, 0.0)])
    stages = found["stages_s"]
    assert sum(stages.values()) == pytest.approx(found["wall_s"]) == 25.0
    assert (stages["start"], stages["set-up"], stages["other"], stages["end"]) == (1.0, 2.0, 0.5, 2.0)
    assert found["confidence_s"] == 1.0 and found["predictions"] == [[100, 4.0], [200, 3.5]]
    assert found["busy"] == pytest.approx(0.85) and found["predicting"] == pytest.approx(3.5 / 5)
    assert (found["first_structure_s"], found["a_structure_s"]) == (18.0, 5.0)
    record = found | {"way": "kept", "files": 2, "status": 0, "report": "evoattn run: 1 pair block"}
    assert [line.strip() for line in script.lines(record)][2:] == [
        "first structure after 18.0 s, then one each 5.00 s (busy 85%, predicting 70%); confidence 1.0 s of the predictions",
        "evoattn run: 1 pair block",
    ]


def test_a_command_that_fails_early_is_told(script: ModuleType) -> None:
    record = script.parts(MARKS[:2], 10.0, 16.0, []) | {
        "way": "bare",
        "files": 0,
        "status": 1,
        "report": "",
        "printed": ["why"],
    }
    first, *_, last = script.lines(record)
    assert (first, last.strip()) == ("bare: 6.0 s, 0 structures, status 1", "why")


@pytest.mark.slow
def test_a_directory_is_predicted(tmp_path: pathlib.Path) -> None:
    for module in ("boltz", "rdkit", "biotite", "pytorch_lightning"):
        pytest.importorskip(module)
    options = ["--narrow", "--device", "cpu", "--inputs", "2", "--lengths", "20", "24", "--steps", "2", "--recycles", "0"]
    written = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "directories.py"), *options, "--json", str(written)]
    subprocess.run([*command, "--ways", "as installed", "bare"], check=True)
    record = json.loads(written.read_text())
    plain, ours = record["cases"]
    assert record["machine"]["torch"] and (plain["way"], ours["inputs"]) == ("as installed", 2)
    assert (plain["files"], ours["files"]) == (2, 2) and "computed by evoattn" in ours["report"]
    assert sorted(tokens for tokens, _ in ours["predictions"]) == [20, 24]
