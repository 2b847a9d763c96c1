"""`evoattn bench` end to end: the table, the record that it writes, exit statuses, refusals in one line."""

import argparse
import re
from pathlib import Path
from typing import Any

import ceilings
import plots
import pytest
import torch

from evoattn import cli
from evoattn.backends import tiled
from evoattn.bench import machine
from evoattn.bench import record as records
from evoattn.cli import bench
from evoattn.core.inputs import Inputs, Outputs
from evoattn.workloads import WORKLOADS

from .conftest import CPU, a_record

SMALL = [
    "bench",
    "--device",
    "cpu",
    "--workloads",
    "tri16",
    "single24",
    "--peers",
    "dense",
    "--rounds",
    "2",
    "--passes",
    "both",
    "forward",
]


def test_bench_command_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert cli.main([*SMALL, "--json", str(path), "--commit", "abc123", "--note", "with a cold cache"]) == 0
    printed = capsys.readouterr()
    assert "tri16, float32: triangle attention; N 16, L 16, H 4, D 32, mask and pair bias" in printed.out
    assert "\nnote: with a cold cache\n" in printed.out
    assert re.search(r"^dense torch +[\d.]+ ±\d+% +[\d.]+ ±\d+% ", printed.out, re.MULTILINE)
    assert re.search(r"^evoattn +[\d.]+ .* backend tiled$", printed.out, re.MULTILINE)
    record = records.read(path)
    assert record.finished == "complete"
    assert record.machine["commit"] == "abc123"
    assert record.machine["torch"] == torch.__version__
    assert record.settings["rounds"] == 2
    assert record.settings["note"] == "with a cold cache"
    assert [problem.workload.name for problem in record.problems] == ["tri16", "single24"]
    for problem in record.problems:
        fused = problem.result("evoattn")
        assert fused is not None and fused.status == "ok" and set(fused.times) == {"forward", "both"}
        assert len(fused.times["forward"].samples_ms) == 2
        assert fused.peak_bytes and fused.first_call_s is not None and problem.bytes
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_wrong_numbers_are_exit_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = tiled._forward

    def wrong(inputs: Inputs, outputs: Outputs, *more: Any) -> None:
        right(inputs, outputs, *more)
        outputs.o.mul_(1.01)

    monkeypatch.setattr(tiled, "_forward", wrong)
    monkeypatch.setattr(tiled.dense, "fits", lambda problem: False)
    assert cli.main(SMALL) == 1
    printed = capsys.readouterr()
    assert "evoattn bench: WRONG: tri16, float32, evoattn: o is wrong: relative error 1.0e-02" in printed.err
    assert re.search(r"^dense torch +[\d.]+ ", printed.out, re.MULTILINE), "the others still have their times"


def test_ctrl_c_shows_and_writes_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    after, written = bench.write, []

    def write_then_stop(record: records.Record, path: Path) -> None:
        after(record, path)
        written.append(record.finished)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench, "write", write_then_stop)
    path = tmp_path / "a.json"
    assert cli.main([*SMALL, "--json", str(path)]) == 130
    printed = capsys.readouterr()
    assert "interrupted: the problems so far are above, and in the file" in printed.err
    assert "tri16, float32" in printed.out and "single24" not in printed.out
    record = records.read(path)
    assert record.finished == "interrupted" and len(record.problems) == 1


REFUSED = {
    "workload": (["--workloads", "nonsense"], r"--workloads: no workload 'nonsense'; expected one of tri384, .*such as tri500"),
    "dtype": (["--dtypes", "int8"], r"argument --dtypes: invalid choice: 'int8' \(choose from .*float64'?\)"),
    "pass": (["--passes", "sideways"], r"argument --passes: invalid choice: 'sideways'"),
    "backend": (["--backends", "cuda"], r"argument --backends: invalid choice: 'cuda' \(choose from .*reference"),
    "peer": (["--peers", "xformers"], r"argument --peers: invalid choice: 'xformers'"),
    "empty": (["--dtypes"], r"argument --dtypes: expected at least one argument"),
    "layer": (["--workloads", "layer384"], r"--workloads: no workload 'layer384'; expected one of tri384, "),
    "rounds": (["--rounds", "1"], r"--rounds: expected a whole number from 2 up, got '1'"),
    "place": (["--json", "no/a.json"], r"--json 'no/a\.json': there is no directory 'no'; expected one that exists"),
    "folder": (["--json", "."], r"--json '\.': expected the name of a file that ends in \.json"),
    "json": (["--json", "a.txt"], r"--json 'a\.txt': expected the name of a file that ends in \.json"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"evoattn bench: error: .*{message}.*\n", printed.err)


def test_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "write", full)
    assert cli.main([*SMALL, "--json", str(tmp_path / "a.json")]) == 2
    printed = capsys.readouterr()
    assert printed.err.endswith("a.json': cannot be written: No space left on device\n")
    assert re.search(r"^evoattn +[\d.]+ .* backend tiled$", printed.out, re.MULTILINE), (
        "what was measured is shown all the same"
    )
    assert "single24, float32" in printed.out


@pytest.mark.parametrize("option", ["--list", "--json c.json", "--peers", "--rounds 9", "--device cpu", "--note cold"])
def test_compare_takes_no_other_option(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    records.write(a_record(evoattn=[1.0]), path)
    assert cli.main(["bench", "--compare", str(path), str(path), *option.split()]) == 2
    message = f"--compare measures and writes nothing: leave out {option.split()[0]}"
    assert capsys.readouterr() == ("", f"evoattn bench: error: {message}\n")


def test_all_workloads_and_the_usual_ones() -> None:
    asked = argparse.Namespace(device="cpu", workloads=["tri16", "all"], dtypes=None)
    assert bench.problems_of(asked, bench._USUAL) == (CPU, WORKLOADS, ("float32",))
    for names in bench._USUAL.values():
        asked.workloads = None
        assert [w.name for w in bench.problems_of(asked, {"cpu": names})[1]] == list(names)


def test_the_list_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    assert re.search(r"^tri397 +triangle attention, a length that divides by nothing$", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for piece in ("--workloads", "--json", "--compare", "examples:", "exit status"):
        assert piece in text


def test_the_picture_of_the_ceilings() -> None:
    """A bar for every workload and pass: the share that evoattn has of the lowest ceiling."""
    record = a_record(evoattn=[4e-3], dense=[2.0])
    figure = plots.ceilings(record, record.problems)
    (axes,) = figure.axes
    share = 100 * 16**3 * 4 / 4e-6 / 4e9
    assert axes.patches[0].get_width() == pytest.approx(share)
    assert [text.get_text() for text in axes.texts] == [f"{share:.0f}%"]
    (labels,) = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
    assert labels == ["exponentials"]


def test_ceilings_are_written_into_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "COPIED", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "CACHED_NUMBERS", 1 << 10)
    monkeypatch.setattr(ceilings, "SIDE", {"cpu": 64})
    path = tmp_path / "a.json"
    record = a_record(evoattn=[1.0])
    records.write(record, path)
    with pytest.raises(SystemExit):
        ceilings.main([str(path)])
    assert "was measured on a machine; this is" in capsys.readouterr().err
    record.machine = machine.facts(torch.device("cpu"))
    records.write(record, path)
    assert ceilings.main([str(path)]) == 0
    measured = records.read(path).ceilings
    assert 1e6 < measured["exp2_per_s"] < 1e13
    assert 1e7 < measured["copy_bytes_per_s"] < 1e13
    assert set(measured["product_flops_per_s"]) == {"float32"}
    assert 1e6 < measured["product_flops_per_s"]["float32"] < 1e15
    assert ceilings.as_text(records.read(path)) in capsys.readouterr().out
