"""Records: a round trip loses nothing, what is no record is refused with the reason, tables say what is in it."""

import dataclasses
import json
import os
from pathlib import Path

import ceilings
import pytest
import record_tables

from evoattn.bench import record as records
from evoattn.bench import table
from evoattn.bench.record import Problem, Record, Result, Timing
from evoattn.workloads import WORKLOADS, workload

from .conftest import a_record

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def full_record() -> Record:
    record = a_record(evoattn=[1.0, 1.1, 0.9], dense=[3.0, 3.3, 3.1])
    record.problems += [Problem(w, "bfloat16", None, [Result("dense", "failed", "out of memory")]) for w in WORKLOADS]
    record.problems[0].results[0].backend, record.problems[0].results[0].backward_backend = "hopper", "triton"
    record.problems[0].results[0].host_us = {"forward": 30.5}
    record.problems[0].results[0].errors["dq"] = float("inf")
    return record


def test_a_written_record_reads_back_equal(tmp_path: Path) -> None:
    record = full_record()
    path = tmp_path / "a.json"
    records.write(record, path)
    assert records.read(path) == record
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(path.read_text())["schema"] == records.SCHEMA


def test_what_older_records_do_not_say(tmp_path: Path) -> None:
    """One of before the backward's backend was kept is read, and written as it was. What it said more is left out."""
    record = full_record()
    path = tmp_path / "a.json"
    records.write(record, path)
    old = json.loads(path.read_text())
    del old["problems"][0]["results"][0]["backward_backend"]
    path.write_text(
        json.dumps({**old, "seconds": 9.0, "problems": [{**old["problems"][0], "cut": True}, *old["problems"][1:]]})
    )
    older = records.read(path)
    result = older.problems[0].results[0]
    assert (result.backend, result.backward_backend) == ("hopper", "")
    records.write(older, path)
    assert json.loads(path.read_text()) == old


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        records.write(a_record(evoattn=[1.0]), path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no "schema"; expected a file that evoattn bench --json wrote'),
        ('{"schema": 99}', "has schema 99; this version of evoattn reads 1"),
        ('{"schema": 1}', "is damaged: KeyError: 'machine'"),
        (
            '{"schema": 1, "machine": {}, "finished": "complete", "problems": [{"workload": {"nam": 1}}]}',
            "is damaged: TypeError: .*unexpected keyword argument 'nam'",
        ),
        ('{"schema": 1, "machine": {}, "finished": "complete", "problems": 5}', "is damaged: TypeError"),
        (b"\xff\xfe\x00", "is not JSON"),
    ],
)
def test_what_is_no_record(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        records.read(path)


DAMAGE = {
    "ceilings": (("ceilings",), 5, "TypeError"),
    "errors": (("problems", 0, "results", 0, "errors"), {"o": "x"}, "could not convert string to float: 'x'"),
    "host": (("problems", 0, "results", 0, "host_us"), {"forward": None}, "TypeError"),
    "zero": (("problems", 0, "results", 0, "times", "forward", "samples_ms"), [0], "median_ms is 0.0; expected a number above"),
    "no time": (("problems", 0, "results", 0, "times", "forward"), {}, "KeyError: 'median_ms'"),
    "NaN": (("problems", 0, "results", 0, "times", "forward", "samples_ms"), [float("nan")], "median_ms is nan; expected"),
    "sample": (("problems", 0, "results", 0, "times", "forward", "samples_ms"), [1.0, "x"], "string to float: 'x'"),
    "field": (("problems", 0, "results", 0, "colour"), "red", "unexpected keyword argument 'colour'"),
}


@pytest.mark.parametrize(("place", "value", "message"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_named(place: tuple[str | int, ...], value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    records.write(full_record(), path)
    data = within = json.loads(path.read_text())
    for step in place[:-1]:
        within = within[step]
    within[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
        records.read(path)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_are_records(path: Path) -> None:
    record = records.read(path)
    assert record.machine["device"]
    for problem in record.problems:
        assert problem.result("evoattn") is not None
        for result in problem.results:
            assert result.times or result.reason, (
                f"{path.name}: {problem.workload.name}: {result.name} has neither time nor reason"
            )


@pytest.mark.parametrize("path", sorted(RESULTS.glob("sharded/*.json")), ids=lambda path: path.name)
def test_committed_results_of_several_gpus_are_records(path: Path) -> None:
    record = records.read(path)
    assert record.machine["device"] and record.settings["processes"] > 1 and record.finished == "complete"
    for problem in record.problems:
        for result in problem.results:
            assert result.is_evoattn and (result.times or result.errors or result.reason == "does not fit")


def test_a_timing_has_median_spread_and_range() -> None:
    timing = Timing((3.0, 1.0, 2.0))
    assert (timing.median_ms, timing.spread_ms, timing.range_ms) == (2.0, 2.0, (1.0, 3.0))
    assert Timing((1.0, 2.0, 3.0, 4.0, 100.0)).range_ms == (2.0, 4.0), "an outlier does not widen what is expected"
    assert (Timing((2.0,)).range_ms, Timing((2.0,)).spread_ms) == ((2.0, 2.0), None)


def test_the_table() -> None:
    record = full_record()
    record.problems = record.problems[:1]
    record.problems[0].results += [
        Result("flex", "refused", "wants L divisible by 128"),
        Result("sdpa", "wrong", "o is wrong", errors={"o": 0.5}),
    ]
    text = table.as_text(record)
    assert "a machine, torch 2" in text
    assert "tri16, float32: triangle attention; N 16, L 16, H 4, D 32, mask and pair bias" in text
    line = next(line for line in text.splitlines() if line.startswith("evoattn "))
    assert line.split()[:8] == ["evoattn", "1.000", "±10%", "0.0164", "30", "-", "1.0", "inf"]
    assert line.endswith("  backend hopper, backward triton")
    assert next(line for line in text.splitlines() if line.startswith("SDPA")).endswith("5.0e-01  wrong")
    below = "FlexAttention, compiled, all: refused: wants L divisible by 128\nSDPA, bias expanded, all: wrong: o is wrong"
    assert text.endswith(f"\n\n{below}")


def test_a_problem_that_nobody_was_measured_on_has_no_table() -> None:
    left = [Result(name, "left out", "would hold too much") for name in ("evoattn", "dense")]
    record = Record({"device": "x"}, {}, [Problem(workload("tri16"), "float32", None, left)])
    assert table.as_text(record).splitlines()[-4:] == [
        "tri16, float32: triangle attention; N 16, L 16, H 4, D 32, mask and pair bias",
        "",
        "evoattn, all: left out: would hold too much",
        "dense torch, all: left out: would hold too much",
    ]


def test_markdown_escapes() -> None:
    text = record_tables.markdown([["a", "b"], ["x|y", "<script>"]])
    assert text == "| a | b |\n| --- | --- |\n| x\\|y | &lt;script> |"


def test_roofs_of_a_pass() -> None:
    """Four operations a score and channel forward, ten backward; a backward moves twice as many bytes; one exponential each."""
    record = a_record(evoattn=[1.0])
    problem = record.problems[0]  # 16,384 scores of 32 channels, 1,000 bytes; 4e9 exp2/s, 2e10 bytes/s
    assert ceilings.roofs(record, problem, "forward") == pytest.approx({"exp2": 4.0, "memory": 16384 * 20 / 1000})
    assert ceilings.as_text(record) == "4.0 x 10⁹ exp2/s, 20.0 GB/s copied (by hand)"
    record.ceilings["product_flops_per_s"] = {"float32": 1.28e12, "bfloat16": 1.0}
    assert ceilings.roofs(record, problem, "forward") == pytest.approx({"exp2": 4.0, "products": 10.0, "memory": 327.68})
    assert ceilings.roofs(record, problem, "backward") == pytest.approx({"exp2": 4.0, "products": 4.0, "memory": 163.84})
    assert "1.28 Tflop/s of float32 products, 1e-12 Tflop/s of bfloat16 products (by hand)" in ceilings.as_text(record)
    assert ceilings.roofs(Record({}, {}), dataclasses.replace(problem, bytes=None), "forward") == {}


def test_a_table_of_times_has_the_memory_and_the_error_of_evoattn() -> None:
    record = a_record(evoattn=[1.0], dense=[2.0])
    own = record.problems[0].result("evoattn")
    own.peak_bytes, own.host_us, own.errors, own.backend = 3 << 20, {"forward": 12.4}, {"o": 1e-3, "dq": 2e-3}, "tiled"
    head, _, line = record_tables.times_table(record.problems).splitlines()
    assert head.endswith("| dense torch | evoattn, host µs | evoattn, MiB |")
    assert line.endswith("| 2.000 / - | 12 | 3.0 |")
    assert record_tables.own_line(record.problems) == "evoattn runs on tiled. Its largest error is 2.0e-03."
