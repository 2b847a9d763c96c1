"""`evoattn bench` end to end: the table, every file it writes, exit statuses, refusals in one line."""

import csv
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from evoattn import cli
from evoattn.backends import tiled
from evoattn.bench import ceilings, plots
from evoattn.bench import record as records
from evoattn.bench.plan import Plan
from evoattn.bench.record import Ceilings, Result, Timing
from evoattn.cli import bench, terminal
from evoattn.core.inputs import Inputs, Outputs

from .conftest import a_record

SMALL = [
    "bench",
    "--device",
    "cpu",
    "--workloads",
    "tri16,single24",
    "--peers",
    "dense",
    "--rounds",
    "2",
    "--passes",
    "both",
    "forward",
]


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "COPIED", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "CACHED_NUMBERS", 1 << 10)
    monkeypatch.setattr(ceilings, "SIDE", {"cpu": 64})


def test_bench_command_writes_record_csv_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"a.{kind}" for kind in ("json", "csv", "png")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    assert cli.main([*SMALL, *options, "--commit", "abc123", "--note", "with a cold cache"]) == 0
    printed = capsys.readouterr()
    assert "tri16, float32: triangle attention; N 16, L 16, H 4, D 32, mask and pair bias" in printed.out
    assert "\nnote: with a cold cache\n" in printed.out
    assert re.search(r"^dense torch +[\d.]+ ±\d+% +[\d.]+ ±\d+% ", printed.out, re.MULTILINE)
    assert re.search(r"^evoattn +[\d.]+ .* backend tiled$", printed.out, re.MULTILINE)
    assert re.search(r"^\[2/2\] single24, float32 +\d+:\d\d left$", printed.err, re.MULTILINE)
    record = records.read(files["json"])
    assert record.finished == "complete"
    assert record.machine["commit"] == "abc123"
    assert record.machine["torch"] == torch.__version__
    assert record.settings["rounds"] == 2
    assert record.settings["note"] == "with a cold cache"
    assert record.ceilings.copy_bytes_per_s and record.ceilings.exp2_per_s
    assert [problem.workload.name for problem in record.problems] == ["tri16", "single24"]
    for problem in record.problems:
        fused = problem.result("evoattn")
        assert fused is not None and fused.status == "ok" and set(fused.times) == {"forward", "both"}
        assert len(fused.times["forward"].samples_ms) == 2
        assert fused.peak_bytes and fused.first_call_s is not None and problem.bytes
    with files["csv"].open(newline="") as file:
        assert {row["by"] for row in csv.DictReader(file)} >= {"evoattn", "evoattn/reference", "dense"}
    picture = files["png"].read_bytes()
    assert picture.startswith(b"\x89PNG") and picture.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 900 and height > 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.json", "a.png"]


def test_bench_from_a_record_prints_and_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records.write(a_record(evoattn=[1.0], dense=[2.0]), tmp_path / "a.json")
    assert cli.main(["bench", "--from", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]) == 0
    assert "a machine, torch 2" in capsys.readouterr().out
    assert "evoattn" in (tmp_path / "a.csv").read_text()


def test_the_picture_with_growth_is_higher(tmp_path: Path) -> None:
    short, three = a_record(evoattn=[1.0], dense=[2.0]), a_record(evoattn=[1.0], dense=[2.0])
    three.problems = [
        type(p)(p.workload.at(length), p.dtype, p.bytes, p.results) for p in short.problems for length in (16, 32, 64)
    ]
    sizes = []
    for record in (short, three):
        plots.write_png(record, tmp_path / "a.png")
        sizes.append(struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])[1])
    assert sizes[1] > sizes[0] + 300


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
    assert "interrupted: the results so far are above, and in the files" in printed.err
    assert "tri16, float32" in printed.out and "single24" not in printed.out
    record = records.read(path)
    assert record.finished == "interrupted" and len(record.problems) == 1


def test_a_budget_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Plan", lambda **options: Plan(**{**options, "budget_s": 1e-6}))
    assert cli.main(SMALL) == 0
    printed = capsys.readouterr()
    assert "the budget ended before all was measured" in printed.err
    assert "left out: the budget of 1e-06 s was over" in printed.out


def test_resume_completes_a_record_that_was_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    with monkeypatch.context() as short:
        short.setattr(bench, "Plan", lambda **options: Plan(**{**options, "budget_s": 1e-6}))
        assert cli.main([*SMALL, "--commit", "abc123", "--note", "cold", "--json", str(path)]) == 0
    assert "--resume FILE continues what --json wrote" in capsys.readouterr().err
    cut = records.read(path)
    assert [problem.cut for problem in cut.problems] == [True, True]
    sheet = tmp_path / "a.csv"
    assert cli.main(["bench", "--resume", str(path), "--commit", "abc123", "--budget", "600", "--csv", str(sheet)]) == 0
    assert re.search(r"^dense torch +[\d.]+ ±\d+% ", capsys.readouterr().out, re.MULTILINE)
    record = records.read(path)
    assert record.finished == "complete" and not any(problem.cut for problem in record.problems)
    assert record.machine == cut.machine and record.ceilings == cut.ceilings
    assert record.settings == cut.settings | {"budget_s": 600, "resumed": 1}
    assert "tri16" in sheet.read_text()


def test_a_record_that_is_complete_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert cli.main([*SMALL, "--commit", "abc123", "--json", str(path)]) == 0
    shown, written = capsys.readouterr().out, path.read_text()
    assert cli.main(["bench", "--resume", str(path), "--commit", "abc123", "--budget", "9"]) == 0
    assert capsys.readouterr().out == shown
    assert path.read_text() == written


def test_what_cannot_be_resumed_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, second, old, text = (tmp_path / name for name in ("a.json", "b.json", "c.json", "d.txt"))
    assert cli.main([*SMALL, "--commit", "abc123", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    text.write_text(json.dumps(data))
    del data["settings"]["peers"]
    second.write_text(json.dumps(data))
    old.write_text(json.dumps(data | {"finished": "interrupted", "problems": [{**data["problems"][0], "cut": None}]}))
    dirty = tmp_path / "dirty.json"
    dirty.write_text(path.read_text().replace("abc123", "abc123-dirty"))
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    capsys.readouterr()
    for arguments, message in (
        ([path, "--commit", "def456"], "was measured with commit abc123, here it is def456; --commit tells where git cannot"),
        ([path, "--peers"], "--resume goes on with what the record was begun with: leave out --peers"),
        ([path, "--device", "cuda"], "leave out --device"),
        ([path, "--from", path], "leave out --from"),
        ([path, "--compare", path, path], "leave out --compare"),
        ([second, "--commit", "abc123"], "the record does not say what was asked for: 'peers'"),
        ([old], "does not say what was cut short; an older version wrote it"),
        ([dirty, "--commit", "abc123-dirty"], "files differ from the commit"),
        ([text], "expected a name that ends in .json"),
    ):
        assert cli.main(["bench", "--resume", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files


REFUSED = {
    "workload": (["--workloads", "nonsense"], r"--workloads: no workload 'nonsense'; expected one of tri384, .*such as tri500"),
    "length": (["--lengths", "0"], r"--lengths: expected a whole number from 1 up, got '0'"),
    "dtype": (["--dtypes", "int8"], r"--dtypes: there is no 'int8'; expected any of bfloat16, float16, float32, float64"),
    "pass": (["--passes", "sideways"], r"--passes: there is no 'sideways'; expected any of forward, backward, both"),
    "backend": (["--backends", "cuda"], r"--backends: there is no 'cuda'; expected any of auto, .*reference"),
    "peer": (["--peers", "xformers"], r"--peers: there is no 'xformers'; expected any of flex, "),
    "empty": (["--dtypes", ","], r"--dtypes: expected any of"),
    "budget": (["--budget", "soon"], r"--budget: expected a whole number from 1 up, got 'soon'"),
    "threshold": (["--threshold", "-1"], r"--threshold: expected a percentage from 0 up, got '-1'"),
    "json": (["--json", "a.txt"], r"--json 'a\.txt': expected a name that ends in \.json"),
    "csv": (["--csv", "no/a.csv"], r"--csv 'no/a\.csv': there is no directory 'no'; expected one that exists"),
    "folder": (["--csv", "."], r"--csv '\.': is a directory; expected the name of a CSV file"),
    "resume": (["--resume", "none.json"], r"--resume 'none\.json': cannot be read: No such file or directory"),
    "from": (["--from", "none.json"], r"--from 'none\.json': cannot be read: No such file or directory"),
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


def test_png_needs_its_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--png", str(tmp_path / "a.png")]) == 2
    assert "needs matplotlib, which is not installed: run pip install '.[cli]' in a clone of evoattn" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "write", full)
    assert cli.main([*SMALL, "--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]) == 2
    printed = capsys.readouterr()
    assert printed.err.endswith("a.json': cannot be written: No space left on device\n")
    assert re.search(r"^evoattn +[\d.]+ .* backend tiled$", printed.out, re.MULTILINE), (
        "what was measured is shown all the same"
    )
    assert "single24, float32" in printed.out and "single24" in (tmp_path / "a.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "a.json", "a.json", "--csv", "c.csv"], "--compare measures and writes nothing: leave out --csv"),
        (["--compare", "a.json", "a.json", "--from", "a.json"], "--compare measures and writes nothing: leave out --from"),
        (["--compare", "a.json", "a.json", "--budget", "5"], "--compare measures and writes nothing: leave out --budget"),
        (["--from", "a.json", "--quick"], "--from measures nothing: leave out --quick"),
        (["--from", "a.json", "--workloads", "tri16"], "--from measures nothing: leave out --workloads"),
        (["--from", "a.json", "--peers"], "--from measures nothing: leave out --peers"),
        (["--from", "a.json", "--device", "cpu"], "--from measures nothing: leave out --device"),
        (["--threshold", "0"], "--threshold is for --compare: leave out --threshold"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records.write(a_record(evoattn=[1.0]), tmp_path / "a.json")
    assert cli.main(["bench", *arguments]) == 2
    assert capsys.readouterr() == ("", f"evoattn bench: error: {message}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_list_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    assert re.search(r"^tri397 +triangle attention, a length that divides by nothing$", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for piece in ("--quick", "--budget", "--compare", "examples:", "exit status"):
        assert piece in text


def test_the_picture_of_the_rates() -> None:
    """A bar for every workload up to its lowest ceiling, what evoattn has of that, and a mark for each of the others."""
    record = a_record(evoattn=[1.0], dense=[2.0], flash_unbiased=[0.1])
    figure = plots.rates(record, record.problems)
    (axes,) = figure.axes
    ceiling, fused = sorted(bar.get_width() for bar in axes.patches)[::-1]
    assert (ceiling, fused) == (pytest.approx(4.0), pytest.approx(0.016384))
    assert [text.get_text() for text in axes.texts] == ["0%"]
    (labels,) = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
    others = ["dense torch", "torch flash kernel, no bias"]
    assert labels == ["evoattn (% of the lowest ceiling)", *others, "lowest ceiling: exponentials"]
    marks = {line.get_label(): line for line in axes.lines}
    assert [marks[label].get_xdata()[0] for label in others] == pytest.approx([0.008192, 0.16384])
    for passes in ({}, {"both": Timing.of([1.0])}):
        record.problems[0].results = [Result("evoattn", times=passes)]
        assert len(plots.rates(record, record.problems).axes) == len(passes), "without a time there is no panel"


def test_ceilings_of_a_cpu() -> None:
    from evoattn.bench.clock import WallClock

    measured = ceilings.measure(torch.device("cpu"), WallClock(), ("float32", "bfloat16"))
    assert measured.exp2_per_s and 1e6 < measured.exp2_per_s < 1e13
    assert measured.copy_bytes_per_s and 1e7 < measured.copy_bytes_per_s < 1e13
    assert set(measured.product_flops_per_s) == {"float32", "bfloat16"}
    assert all(1e6 < flops < 1e15 for flops in measured.product_flops_per_s.values())
    assert Ceilings(**json.loads(json.dumps(measured.__dict__))) == measured
