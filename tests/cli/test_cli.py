"""The command line: the demo end to end, the doctor on a healthy and on a broken machine, help, version, refusals."""

import dataclasses
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import evoattn
from evoattn import cli, testing
from evoattn.backends import Inputs, Outputs, Plan, tiled, triton
from evoattn.bench import attentions as attentions_of_bench
from evoattn.bench import plots
from evoattn.bench import record as records
from evoattn.bench.clock import WallClock
from evoattn.bench.memory import peak_bytes
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Problem as Measured
from evoattn.bench.record import Result, Timing
from evoattn.cli import demo, doctor, evoformer, sweep, terminal
from evoattn.cli.alignment import Alignment, read_alignment
from evoattn.cli.evoformer import attentions, embed
from evoattn.core.config import Config
from evoattn.core.problem import Problem
from evoattn.workloads import workload
from tests.helpers.scripts import load

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
NAMES = ("MSA row + pair bias", "MSA column", "triangle, start node", "triangle, end node")
BOTH = ("evoattn", "dense")
FLOAT32_ERROR = 2e-5


@pytest.fixture
def family(tmp_path: Path) -> Path:
    path = tmp_path / "family.a3m"
    path.write_text(FAMILY)
    return path


def table_rows(text: str, name: str) -> dict[str, list[float]]:
    """The numbers of an attention's rows in the demo's table, by implementation."""
    found = re.findall(rf"^\s*{re.escape(name)} +(evoattn|dense) +(.*)$", text, re.MULTILINE)
    return {by: [float(number) for number in numbers.split()] for by, numbers in found}


def test_demo(family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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

        def run(*given: Any) -> Any:
            of_biases = plan.run(*given)
            given[-1][1].mul_(1.001)
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
    with demo._default_alignment(None) as path:
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


def test_interrupt(family: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "four_attentions", interrupt)
    assert cli.main(["demo", str(family)]) == 130
    assert capsys.readouterr().err.endswith("evoattn demo: interrupted\n")


def test_sweep_stops_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    size = sweep.Size(sequences=1, columns=16, lengths=(16, 24), repeats=1, seconds=0.1, patience=None)
    steps: list[str] = []
    monkeypatch.setattr("evoattn.bench.machine.free_bytes", lambda device: 100 << 20)
    found = sweep.growth("MKV", size, 0, cpu, torch.float32, steps.append)
    assert timed(found, "evoattn") == timed(found, "dense") == [16, 24] and sweep.stops(found) == {}
    hurried = sweep.growth("MKV", dataclasses.replace(size, patience=1e-9), 0, cpu, torch.float32, steps.append)
    assert sweep.stops(hurried)["dense"] == "at L = 16: the time of the demo is over; --max-length gives it more"
    monkeypatch.setattr("evoattn.bench.machine.free_bytes", lambda device: 6_000_000)
    found = sweep.growth("MKV", size, 0, cpu, torch.float32, steps.append)
    assert timed(found, "dense") == [16]
    assert re.fullmatch(r"at L = 24: it would take about 0\.0 GiB; 0\.0 GiB are free", sweep.stops(found)["dense"])
    monkeypatch.setitem(sweep._PATIENCE_S, "evoattn", 0.0)
    found = sweep.growth("MKV", size, 0, cpu, torch.float32, steps.append)
    assert timed(found, "evoattn") == [16]
    assert "s a pass" in sweep.stops(found)["evoattn"]


def timed(problems: list[Measured], name: str) -> list[int]:
    """The lengths at which a contender has a time."""
    return [p.workload.length for p in problems if (result := p.result(name)) is not None and result.times]


def grown(*lengths: int, why: str = "") -> list[Measured]:
    """Growth over these lengths; with a reason both contenders stop after the last."""
    times = {"both": Timing(300.0)}
    found = [
        Measured(workload(f"tri{length}"), "float32", None, [Result(x, times=times, peak_bytes=1 << 20) for x in BOTH])
        for length in lengths
    ]
    stopped = Measured(workload("tri4096"), "float32", None, [Result(x, "left out", why) for x in BOTH])
    return [*found, stopped] if why else found


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
        demo._draw(grown(16, 32), torch.device("cpu"), picture)
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
    found = grown(16, 32, why=why)
    notes = "\n".join(f"{name} was not run {reason}" for name, reason in sweep.stops(found).items())
    figure = plots.growth(found, "a title", "a machine", notes, "dense")
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
    demo._print_report(about, [(Measured(shape, "float32", None, results), 1, [])], growth)


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


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """dev.py of a checkout in a folder of its own, called from another one."""
    module = load("dev.py", "evoattn_dev")
    (tmp_path / "checkout").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return module


def test_dev_runs_what_takes_files_where_it_is_called(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Path] = {}
    monkeypatch.setattr(dev, "set_up", lambda environment: environment)
    for command in dev.COMMANDS:
        monkeypatch.setattr(dev, "run", lambda given, folder, command=command: called.update({command: folder}))
        dev.main([command, "my.a3m"])
    assert {command for command, folder in called.items() if folder == Path.cwd()} == {"demo", "doctor", "bench", "proofs"}
    assert {folder for folder in called.values() if folder != Path.cwd()} == {dev.ROOT}


def test_dev_gives_a_half_made_environment_its_pip(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is in it stays."""
    for name in ("pyproject.toml", "constraints.txt"):
        (dev.ROOT / name).write_text("")
    monkeypatch.setattr(dev, "CONSTRAINTS", dev.ROOT / "constraints.txt")
    dev.venv.create(dev.ENVIRONMENT, with_pip=False)
    (dev.ENVIRONMENT / "mine").write_text("")
    python = str(dev.ENVIRONMENT / dev.SCRIPTS / "python")
    assert not dev.has_pip(python)
    run, commands = dev.run, []
    monkeypatch.setattr(dev, "run", lambda command, *_: run(command) if "ensurepip" in command else commands.append(command))
    dev.set_up(dev.ENVIRONMENT)
    assert dev.has_pip(python) and (dev.ENVIRONMENT / "mine").exists()
    assert len(commands) == 2 and all("install" in command for command in commands)


def test_dev_compares_every_client_in_an_environment_of_its_own(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that differs does not keep the others from running."""
    made, compared, modules = [], [], []

    def run(command: list[str], folder: Path) -> None:
        assert folder == dev.CLIENTS.parent
        compared.append(command[-1])
        modules.append(command[-2])
        if command[-1] == "boltz":
            sys.exit(1)

    monkeypatch.setattr(
        dev, "set_up", lambda environment, requirements: (made.append((environment, requirements)), environment)[1]
    )
    monkeypatch.setattr(dev, "run", run)
    with pytest.raises(SystemExit, match="not the same with and without the patch: boltz"):
        dev.main(["clients"])
    assert made == [(dev.ROOT / "build" / "clients" / name, dev.CLIENTS / f"{name}.txt") for name in compared]
    assert {"boltz", "esmfold"} <= set(compared)
    dev.main(["clients", "esmfold"])
    assert compared[-1] == "esmfold"
    with pytest.raises(SystemExit, match="unknown: bolz; the clients are .*boltz, "):
        dev.main(["clients", "bolz"])
    with pytest.raises(SystemExit, match="not the same with and without the patch: boltz"):
        dev.main(["clients", "--whole", "boltz"])
    assert made[-1] == (dev.ROOT / "build" / "clients" / "boltz-whole", dev.CLIENTS / "whole" / "boltz.txt")
    assert set(modules[:-1]) == {"clients"} and modules[-1] == "clients.whole"
    with pytest.raises(SystemExit, match="unknown: esmfold; the whole programs are boltz"):
        dev.main(["clients", "esmfold", "--whole"])


@pytest.mark.skipif(os.name == "nt", reason="needs signals of POSIX")
def test_dev_waits_for_what_ctrl_c_ends() -> None:
    """The command has its time to write what it has; then the status is 130, without a traceback."""
    child = (
        "import os, signal, sys, time\n"  # print may still be at "ready" when the signal comes
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), os.write(1, b'written\\n'), sys.exit(130)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    code = f"import sys, dev; dev.run([sys.executable, '-c', {child!r}])"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        printed = process.communicate(timeout=60)
    assert (process.returncode, *printed) == (130, "written\n", "")


def test_sweep_tiles_and_cuts() -> None:
    assert sweep.tiled("MKV", 7) == "MKVMKVM"
    assert sweep.tiled("MKV", 2) == "MK"


def test_peak_memory_is_what_was_held() -> None:
    """On the CPU: two tensors live at a time out of three, 3 MiB at the most; what lived before does not count."""
    before = torch.empty(10 << 20, dtype=torch.uint8)

    def call() -> None:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(2 << 20, dtype=torch.uint8)
        del a
        c = torch.empty(512 << 10, dtype=torch.uint8)
        del b, c

    assert peak_bytes(call, torch.device("cpu")) == 3 << 20
    assert peak_bytes(lambda: before.zero_(), torch.device("cpu")) == 0


def test_peak_memory_of_dense_is_its_scores() -> None:
    inputs = attentions(embed(("MQIFVKTLTGKTITLEVEPS" * 3,), 0, torch.device("cpu")), torch.float32)[2]
    size = dataclasses.replace(demo._QUICK, repeats=1, seconds=0.0)
    result = Result("dense")
    sweep.measure(PEERS["dense"], result, inputs, ("forward",), size, WallClock())
    peak = result.peak_bytes
    scores = 4 * 60 * 4 * 60 * 60
    assert peak is not None and 2 * scores < peak < PEERS["dense"].score_copies * scores + 8 * inputs.q.nbytes


def test_measuring_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.empty(1), torch.device("cpu"))
    assert capfd.readouterr().err == ""


def test_the_attentions_are_those_of_an_evoformer() -> None:
    """Shapes, masks from gaps, the transposed pair at the ending node, the permuted pair bias; the same numbers each time."""
    rows = ("MKVLA", "M-VL-", "MKX--")
    cpu = torch.device("cpu")
    embedding = embed(rows, 3, cpu)
    row, column, start, end = attentions(embedding, torch.float32)
    gaps = torch.tensor([[letter != "-" for letter in line] for line in rows])
    assert [inputs.case.name for inputs in (row, column, start, end)] == list(NAMES)
    assert row.q.shape == (1, 3, 5, 8, 32)
    assert row.pair_bias is not None and row.pair_bias.shape == (1, 1, 8, 5, 5) and row.pair_bias.stride(2) == 1
    assert row.mask is not None and torch.equal(row.mask[0], gaps)
    assert column.q.shape == (1, 5, 3, 8, 32) and column.pair_bias is None
    assert column.mask is not None and torch.equal(column.mask[0], gaps.T)
    assert start.q.shape == end.q.shape == (1, 5, 5, 4, 32)
    assert start.mask is not None and bool(start.mask.all())
    again = attentions(embed(rows, 3, cpu), torch.float32)
    assert all(torch.equal(a.q, b.q) and torch.equal(a.do, b.do) for a, b in zip(again, (row, column, start, end), strict=True))
    for other in (embed(rows, 4, cpu), dataclasses.replace(embedding, seed=4)):
        assert not torch.equal(attentions(other, torch.float32)[0].q, row.q)


def test_the_pair_representation_knows_how_far_apart_residues_are() -> None:
    z = embed(("AAAA",), 0, torch.device("cpu")).z
    assert torch.equal(z[0, 1], z[2, 3])
    assert not torch.allclose(z[0, 1], z[0, 2])
    assert not torch.allclose(z[0, 1], z[1, 0])


def test_the_ending_node_runs_on_the_transposed_pair() -> None:
    """With the weights of the starting node, the ending node's q is that of the transposed pair representation."""
    embedding = embed(("MKVLA",), 0, torch.device("cpu"))
    start = evoformer._triangle("same", embedding, embedding.z, torch.float32, 7)
    end = evoformer._triangle("same", embedding, embedding.z.transpose(0, 1), torch.float32, 7)
    torch.testing.assert_close(end.q, start.q.transpose(1, 2))
    ending = attentions(embedding, torch.float32)[3]
    expected = evoformer._triangle("end", embedding, embedding.z.transpose(0, 1), torch.float32, embedding.seed + 4)
    assert torch.equal(ending.q, expected.q)
    assert end.pair_bias is not None and start.pair_bias is not None
    torch.testing.assert_close(end.pair_bias, start.pair_bias.transpose(-1, -2))


def test_errors_over_a_part_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float64 has no room for all rows, both run on the same first rows, and their number is reported."""
    inputs = attentions(embed(("MKVLA", "M-VL-", "MKX--"), 0, torch.device("cpu")), torch.float32)[0]
    monkeypatch.setattr(sweep, "_ORACLE_SCORES", 2 * 8 * 5 * 5)
    ((problem, rows, beyond),) = sweep.four_attentions([inputs], demo._QUICK, lambda what: None)
    assert (rows, beyond) == (2, [])
    for result in problem.results:
        assert {"o", "dq", "dk", "dv", "dpair_bias"} <= set(result.errors)
        assert max(result.errors.values()) < FLOAT32_ERROR
    assert attentions_of_bench.first_rows(inputs, slice(0, 2)).q.shape[1] == 2


def test_the_demo_names_both_backends(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plan_forward", "plan_backward"):
        monkeypatch.setattr(triton, name, getattr(tiled, name))
    for name, function in (("availability", lambda: None), ("unsupported", lambda problem, config: [])):
        monkeypatch.setattr(triton, name, function)
    inputs = attentions(embed(read_alignment(family).rows, 0, torch.device("cpu")), torch.float32)[0]

    def backends() -> str:
        return attentions_of_bench.contenders(sweep.PLAN, inputs)[0][1].backends(", ")

    assert backends() == "triton"
    monkeypatch.setattr(triton, "unsupported", lambda problem, config: ["no gradients"] if any(problem.needs) else [])
    testing.forget()
    assert backends() == "triton, tiled"


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", 600.0)  # a busy machine may take longer than a person wants to wait
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for expected in ("versions", f"evoattn   {evoattn.__version__}", f"torch     {torch.__version__}", "devices", "backends"):
        assert expected in text
    for status in evoattn.backends():
        assert re.search(rf"^  {status.name} +(available|not available: .+)$", text, re.MULTILINE)
    assert re.search(rf"^  tiled +cpu +float32 +{len(doctor._CASES)} held$", text, re.MULTILINE)
    assert text.endswith("the self-check held\n")


def test_doctor_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", 600.0)
    monkeypatch.setattr(doctor, "_CASES", doctor._CASES[:2])
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert {status["name"] for status in report["backends"]} == {status.name for status in evoattn.backends()}
    assert report["auto"]["cpu"]["float64"]["backend"] == "tiled"
    held = {(check["backend"], check["dtype"]): check["held"] for check in report["checks"] if check["device"] == "cpu"}
    for backend in ("tiled", "reference"):
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            assert held[backend, dtype] == list(doctor._CASES)


def broken_numbers(*arguments: Any, **options: Any) -> Plan:
    plan = _right_forward(*arguments, **options)

    def run(inputs: Inputs, outputs: Outputs) -> None:
        plan.run(inputs, outputs)
        outputs.o.mul_(1.01)

    return dataclasses.replace(plan, run=run)


def broken_call(*_: object, **__: object) -> None:
    raise RuntimeError("the kernel\nfell over")


_right_forward = tiled.plan_forward


@pytest.mark.parametrize(
    ("broken", "message"),
    [(broken_numbers, r"o: relative error 1\.00e-02, allowed"), (broken_call, r"RuntimeError: the kernel fell over")],
)
def test_doctor_finds_a_broken_backend(
    broken: object, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "plan_forward", broken)
    monkeypatch.setattr(doctor, "_CASES", doctor._CASES[:2])
    monkeypatch.setattr(doctor, "_SECONDS", 600.0)  # a busy machine may take longer than a person wants to wait
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert re.search(rf"^    FAILED  case mask_and_both_biases: .*{message}", text, re.MULTILINE)
    assert re.search(r"^  tiled +cpu +float32 +.*2 FAILED$", text, re.MULTILINE)
    assert re.search(r"^  reference +cpu +float32 +2 held$", text, re.MULTILINE)
    assert "THE SELF-CHECK DID NOT HOLD" in text
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert any(check["failed"] for check in report["checks"] if check["backend"] == "tiled")


def test_doctor_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of time, every backend, device and dtype has still had the first case that it takes; the rest is not run."""
    right = tiled.unsupported

    def takes_no_mask_bias(problem: Problem, config: Config) -> list[str]:
        return ["takes no mask_bias"] if problem.mask_bias is not None else right(problem, config)

    monkeypatch.setattr(tiled, "unsupported", takes_no_mask_bias)
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    report = doctor.examine()
    assert report["ok"] is True
    for check in (check for check in report["checks"] if check["device"] == "cpu" and check["backend"] != "triton"):
        place = 1 if check["backend"] == "tiled" else 0
        assert check["held"] == [doctor._CASES[place]], check
        assert list(check["refused"]) == list(doctor._CASES[:place])
        assert check["not_run"] == list(doctor._CASES[place + 1 :])


def test_doctor_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(doctor, "_CASES", doctor._CASES[:1])
    assert cli.main(["doctor"]) == 0
    assert "the self-check held" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ("evoattn doctor", "evoattn demo", "exit status")),
        (["demo", "--help"], ("A3M", "examples:", "exit status", "--max-length", "triangle, start node")),
        (["doctor", "--help"], ("--json", "examples:", "exit status")),
    ],
)
def test_help(arguments: list[str], expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    for piece in expected:
        assert piece in text


def evoattn_run(*arguments: str, stdout: object, **environment: str) -> tuple[int, str]:
    """In a process of its own: exit status and stderr."""
    given = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-m", "evoattn", *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, env=given, check=False
    )  # type: ignore[call-overload]
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        found = evoattn_run("bench", "--list", stdout=full)
    assert found == (2, "evoattn bench: error: what it found cannot be written: No space left on device\n")


def test_letters_that_the_output_does_not_have(tmp_path: Path) -> None:
    times = {"forward": Timing.of([1.0, 2.0, 3.0])}
    problem = records.Problem(workload("tri16"), "float32", 1000, [records.Result("evoattn", times=times)])
    records.write(records.Record({"device": "a machine"}, {}, problems=[problem]), tmp_path / "a.json")
    with (tmp_path / "out").open("wb") as file:
        assert evoattn_run("bench", "--from", str(tmp_path / "a.json"), stdout=file, PYTHONIOENCODING="ascii") == (0, "")
    assert re.search(rb"^evoattn +2\.000 \?50%", (tmp_path / "out").read_bytes(), re.MULTILINE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"evoattn {evoattn.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_bad_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"evoattn.*: error: .*\n", printed.err)


@pytest.mark.parametrize(("command", "extra"), [("bench", "extra"), ("doctor", "--foo"), ("tune", "--foo")])
def test_a_bad_option_points_to_the_help_of_its_command(command: str, extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, extra]) == 2
    expected = f"evoattn {command}: error: unrecognized arguments: {extra} (see evoattn {command} --help)\n"
    assert capsys.readouterr() == ("", expected)


def test_as_a_module() -> None:
    """In a fresh process: a refusal without a traceback; no plotting library is imported by the command line alone."""
    refused = subprocess.run([sys.executable, "-m", "evoattn", "demo", "."], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "evoattn demo: error: '.': is a directory; expected an A3M or aligned FASTA file\n"
    code = "import sys, evoattn.cli; sys.exit(any(name in sys.modules for name in ('rich', 'matplotlib', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
