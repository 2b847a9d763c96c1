"""The demo: end to end, its refusals, its report and its picture."""

import dataclasses
import os
import re
import struct
from pathlib import Path
from typing import Any

import plots
import pytest
import torch

from evoattn import cli, testing
from evoattn.backends import Plan, tiled, triton
from evoattn.bench import attentions as attentions_of_bench
from evoattn.bench.record import Problem as Measured
from evoattn.bench.record import Result, Timing
from evoattn.cli import demo, sweep, terminal
from evoattn.cli.alignment import Alignment, read_alignment
from evoattn.cli.evoformer import attentions, embed
from evoattn.workloads import workload

from .conftest import FLOAT32_ERROR, NAMES, evoattn_run

FAMILY = """\
>query
MQIFVKTLTGKTITLEVEPS
>second
MQIFVKTLTGKTiaITLEVEAS
>third
MLI-VKTLTGK-ITLDVE--
>fourth
----VRTLDGRTQTLEVEPS
"""
BOTH = ("evoattn", "dense")


@pytest.fixture
def family(tmp_path: Path) -> Path:
    path = tmp_path / "family.a3m"
    path.write_text(FAMILY)
    return path


def table_rows(text: str, name: str) -> dict[str, list[float]]:
    """The numbers of an attention's rows in the demo's table, by implementation."""
    rows = re.findall(rf"^\s*{re.escape(name)} +(evoattn|dense) +(.*)$", text, re.MULTILINE)
    return {by: [float(number) for number in numbers.split()] for by, numbers in rows}


def test_demo_prints_a_table_and_saves_a_picture(family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    arguments = ["demo", str(family), "--quick", "--max-length", "40", "--device", "cpu", "--output", str(picture)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "family.a3m: 4 sequences x 20 columns; query query" in printed.out
    for name in NAMES:
        rows = table_rows(printed.out, name)
        assert set(rows) == {"evoattn", "dense"}, name
        for forward, backward, peak, output_error, gradient_error in rows.values():
            assert 0 < forward < 1e5
            assert 0 < backward < 1e5
            assert 0.05 < peak < 1e3
            assert 0 < output_error < FLOAT32_ERROR
            assert 0 < gradient_error < FLOAT32_ERROR
    assert re.search(r"^ *32 +[\d.]+ +[\d.]+ +[\d.]+ x +[\d.]+ +[\d.]+ +\d+ %$", printed.out, re.MULTILINE)
    assert re.search(r"^ *40 ", printed.out, re.MULTILINE)
    assert "over all rows." in printed.out
    assert printed.out.rstrip().endswith(f"picture    {picture}")
    assert re.search(r"^\[1/\d+\] MSA row \+ pair bias, evoattn$", printed.err, re.MULTILINE)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1600, 800)
    assert len(data) > 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["family.a3m", "picture.png"]


def test_demo_fails_on_wrong_numbers(
    family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward that is off by a part in a thousand gives exit status 1 and is named."""
    right = tiled.plan_backward

    def wrong(*arguments: Any, **options: Any) -> Plan:
        plan = right(*arguments, **options)

        def run(*args: Any) -> Any:
            of_biases = plan.run(*args)
            args[-1][1].mul_(1.001)
            return of_biases

        return dataclasses.replace(plan, run=run)

    monkeypatch.setattr(tiled, "plan_backward", wrong)
    arguments = ["demo", str(family), "--quick", "--max-length", "16", "--device", "cpu", "--output", str(tmp_path / "a.png")]
    assert cli.main(arguments) == 1
    assert re.search(r"BEYOND ITS BUDGET  MSA column: dk: relative error 1\.0e-03, allowed", capsys.readouterr().out)


def test_demo_of_one_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The gradients of q and k are zero then, but for rounding."""
    path = tmp_path / "one.a3m"
    path.write_text(">one\nMQIFVKTLTGKTITLEVEPS\n")
    arguments = ["demo", str(path), "--quick", "--max-length", "16", "--device", "cpu", "--output", str(tmp_path / "a.png")]
    assert cli.main(arguments) == 0
    assert "BEYOND" not in capsys.readouterr().out


def test_a_reader_of_the_demo_may_leave(family: Path, tmp_path: Path) -> None:
    """As `head -1` does. The picture is kept."""
    reader, writer = os.pipe()
    os.close(reader)
    picture = tmp_path / "a.png"
    arguments = ("demo", str(family), "--quick", "--max-length", "16", "--device", "cpu", "--output", str(picture))
    status, errors = evoattn_run(*arguments, stdout=writer)
    os.close(writer)
    assert (status, "Traceback" in errors) == (0, False)
    assert picture.exists()


def test_demo_has_an_alignment_of_its_own() -> None:
    with demo.default_alignment(None) as path:
        alignment = demo.read_alignment(path)
    assert alignment.rows[0].startswith("MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG")
    assert len(alignment.rows) > 50


REFUSED = {
    "missing file": (["nothing.a3m"], r"'nothing\.a3m': there is no such file; expected"),
    "missing directory": (["family.a3m", "--output", "no/where.png"], r"--output 'no/where\.png': there is no directory 'no'"),
    "output is a directory": (["family.a3m", "--output", "."], r"--output '\.': is a directory"),
    "output is no png": (["family.a3m", "--output", "a.pdf"], r"--output 'a\.pdf': expected a name that ends in \.png"),
    "length": (["family.a3m", "--max-length", "0"], r"--max-length: expected a whole number from 16 up, got '0'"),
    "seed": (["family.a3m", "--seed", "x"], r"--seed: expected a whole number from 0 up, got 'x'"),
    "dtype": (["family.a3m", "--dtype", "int8"], r"--dtype: invalid choice: 'int8'"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_demo_refuses_in_one_line(
    arguments: list[str],
    message: str,
    family: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(family.parent)
    assert cli.main(["demo", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"evoattn demo: error: .*{message}.*\n", printed.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_demo_without_a_gpu(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", str(family), "--device", "cuda"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err


def test_demo_without_the_extra(family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo", str(family)]) == 2
    expected = "evoattn demo: error: needs matplotlib, which is not installed: run pip install '.[cli]' in a clone of evoattn\n"
    assert capsys.readouterr().err == expected


def test_ctrl_c_in_demo_exits_with_130(
    family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "four_attentions", interrupt)
    assert cli.main(["demo", str(family)]) == 130
    assert capsys.readouterr().err.endswith("evoattn demo: interrupted\n")


def grown(*lengths: int, why: str = "") -> list[Measured]:
    """Growth over these lengths; with a reason both contenders stop after the last."""
    times = {"both": Timing(300.0)}
    steps = [
        Measured(workload(f"tri{length}"), "float32", None, [Result(x, times=times, peak_bytes=1 << 20) for x in BOTH])
        for length in lengths
    ]
    stopped = Measured(workload("tri4096"), "float32", None, [Result(x, "left out", why) for x in BOTH])
    return [*steps, stopped] if why else steps


def test_the_curve_begins_where_the_library_is_meant_for() -> None:
    cpu, gpu = (demo._size(torch.device(kind), False, None).lengths for kind in ("cpu", "cuda"))
    assert (cpu[0], cpu[-1]) == (128, 384) and (gpu[0], gpu[-1]) == (64, 1024)
    assert demo._size(torch.device("cpu"), False, 200).lengths == (128, 192, 200)
    assert demo._size(torch.device("cpu"), False, 40).lengths == (40,)


def test_the_picture_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "a.png"
    picture.write_text("the one from before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        demo.draw(grown(16, 32), torch.device("cpu"), picture)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert picture.read_text() == "the one from before"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write in")
def test_a_folder_that_only_seems_writable(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", str(family), "--output", "/proc/x.png"]) == 2
    expected = "evoattn demo: error: --output '/proc/x.png': the directory '/proc' is not writable\n"
    assert capsys.readouterr() == ("", expected)


def test_the_report_is_printed_though_the_picture_cannot_be_written(
    family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    arguments = ["demo", str(family), "--quick", "--max-length", "16", "--device", "cpu", "--output", str(tmp_path / "a.png")]
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert set(table_rows(printed.out, NAMES[0])) == {"evoattn", "dense"} and "picture" not in printed.out
    assert printed.err.endswith("a.png': cannot be written: No space left on device\n")


def test_the_notes_of_the_picture_fit() -> None:
    """Those of both implementations, as long as they get, lie within the picture and below the axes' labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    why = "it would take about 1234.5 GiB of the 1000.2 GiB that are free"
    steps = grown(16, 32, why=why)
    notes = "\n".join(f"{name} was not run {reason}" for name, reason in sweep.stops(steps).items())
    figure = plots.growth(steps, "a title", "a machine", notes, "dense")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert figure.get_supxlabel() == notes and notes.count(why) == 2
    box = figure._supxlabel.get_window_extent(canvas.get_renderer())
    labels = [axes.xaxis.label.get_window_extent(canvas.get_renderer()) for axes in figure.axes]
    assert box.x0 > 0 and box.y0 > 0 and box.x1 < figure.bbox.width
    assert box.y1 < min(label.y0 for label in labels)


def a_report(busy: str | None = None) -> None:
    """Print the demo's report of something large."""
    times = {"forward": Timing(12345.6), "backward": Timing(23456.7), "both": Timing(34567.8)}
    results = [Result(x, backend="tiled", errors={"o": 1e-7, "dq": 1e-6}, peak_bytes=12345 << 20, times=times) for x in BOTH]
    shape = dataclasses.replace(workload("tri3"), name=NAMES[0])
    growth = [Measured(workload("tri4096"), "float32", None, results)]
    about = demo._about(Alignment("a.a3m", "query", ("MKV",)), ("MKV",), torch.device("cpu"), busy)
    demo.print_report(about, [(Measured(shape, "float32", None, results), 1, [])], growth)


def test_no_number_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal is: it wraps the lines."""
    monkeypatch.setenv("COLUMNS", "40")
    a_report()
    text = capsys.readouterr().out
    assert text.count("12345.6") == 2 and text.count("23456.7") == 2 and text.count("12345.0") == 4
    head, rule, first = text.splitlines()[6:9]
    assert rule == "\u2500" * len(rule) and len(head) <= len(rule) <= 100 and first.startswith(NAMES[0])


@pytest.mark.parametrize(("load", "told"), [(1.0, False), (1.1, True), (None, False)])
def test_the_demo_says_that_others_use_the_cores(
    load: float | None, told: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def average() -> tuple[float, float, float]:
        if load is None:
            raise OSError("not known")
        return load, 0.0, 0.0

    monkeypatch.setattr(demo.os, "getloadavg", average, raising=False)
    monkeypatch.setattr(demo.os, "cpu_count", lambda: 2)
    a_report(demo._busy())
    expected = "busy       load 1.1 on 2 cores before this began: read the times with care"
    assert (expected in capsys.readouterr().out) == told


def test_the_demo_names_both_backends(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plan_forward", "plan_backward"):
        monkeypatch.setattr(triton, name, getattr(tiled, name))
    for name, function in (("availability", lambda: None), ("unsupported", lambda problem, config: [])):
        monkeypatch.setattr(triton, name, function)
    inputs = attentions(embed(read_alignment(family).rows, 0, torch.device("cpu")), torch.float32)[0]

    def backends() -> str:
        return attentions_of_bench.contenders(inputs, ("auto",), ("dense",))[0][1].backends(", ")

    assert backends() == "triton"
    monkeypatch.setattr(triton, "unsupported", lambda problem, config: ["no gradients"] if any(problem.needs) else [])
    testing.forget()
    assert backends() == "triton, tiled"
