"""`evoattn bench --gpus N`: two processes on a CPU, what it refuses, processes that die, and its records."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evoattn import cli
from evoattn.bench import record as records

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo, which these processes talk through", allow_module_level=True)

from evoattn.bench import sharded, sharded_table
from evoattn.bench.sharded import LAYERS, Job, Plan

ROOT = Path(__file__).resolve().parents[2]
TWO = ["bench", "--gpus", "2", "--device", "cpu", "--lengths", "5", "--rounds", "2"]
MACHINE = {"device": "a machine", "kind": "gpu", "torch": "2"}
ERRORS = {"residues": 24, "one": 0.2, "all": 0.25, "largest ratio": 1.25}
NUMBERS = {"ms": 8.0, "host_ms": 2.0, "gib": 1.5}
FASTER = {"ms": 5.0, "host_ms": 3.0, "gib": 0.9}
TIMES = {"length": 1024, "way": "inference", "one": NUMBERS, "all": FASTER}


@pytest.mark.slow
def test_two_processes_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert cli.main([*TWO, "--parts", "--json", str(path), "--commit", "abc123", "--note", "a test"]) == 0
    printed = capsys.readouterr()
    assert "commit abc123" in printed.out and "; 2 processes\n" in printed.out
    assert re.search(r"at 24 residues: 0\.\d+ of one process, 0\.\d+ of 2 processes; each at most 1\.\d\d times", printed.out)
    assert re.search(r"^5 +inference +[\d.]+ +[\d.]+ +- +[\d.]+ +[\d.]+ +- +\d+%  -$", printed.out, re.MULTILINE)
    assert re.search(r"^5 +tri_mul_out, training step +[\d.]+ ", printed.out, re.MULTILINE)
    assert "[2/13] 5 residues, inference\n[3/13] 5 residues, training\n[4/13] 5 residues, tri_mul_out, " in printed.err
    record = sharded_table.read(path)
    assert record["finished"] == "complete" and record["machine"]["kind"] == "cpu" and record["settings"]["note"] == "a test"
    jobs = [Job(found["length"], found.get("layer", ""), found["way"]) for found in record["times"]]
    assert jobs == Plan(2, "cpu", (5,), 2, parts=True).jobs and {job.layer for job in jobs} == {"", *LAYERS}
    for found in record["times"]:
        for numbers in (found["one"], found["all"]):
            assert 0 < numbers["host_ms"] <= numbers["ms"] < 1e5


def killed(rank: int, plan: Plan, commit: str | None, port: int, sender: Connection) -> None:
    """A process that sends something and then waits, and one that is killed."""
    if rank == 0:
        sender.send(("machine", {"device": commit}))
    else:
        dist.TCPStore("127.0.0.1", port)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def fails(rank: int, *_: object) -> None:
    """A process without memory, and one that waits."""
    if rank == 1:
        raise torch.OutOfMemoryError("no memory\nat all")
    time.sleep(100)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (killed, "process 2 of 2 ended by signal SIGKILL"),
        pytest.param(fails, "process 2 of 2 failed: at all", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_ends_the_others(work: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "work", work)
    start, found = time.monotonic(), []
    with pytest.raises(sharded.ProcessDiedError) as caught:
        found.extend(sharded.run(Plan(2, "cpu", (5,), 2), "abc123"))
    assert str(caught.value) == message
    assert time.monotonic() - start < 60


def pretend(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, dict[str, Any]], end: BaseException | None = None) -> None:
    """Let no process start, and these things be found."""

    def run(plan: Plan, commit: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from found
        if end is not None:
            raise end

    monkeypatch.setattr(sharded, "run", run)


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"length": 2048, "way": "training", "one": None, "all": FASTER}
    pretend(monkeypatch, ("machine", MACHINE), ("errors", ERRORS), ("times", TIMES), ("times", missing))
    assert cli.main(TWO) == 0
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "a machine, torch 2; 2 GPUs"
    assert lines[2].endswith("at 24 residues: 0.200 of one GPU, 0.250 of 2 GPUs; each at most 1.25 times that of one GPU")
    assert lines[4] == "residues pass one GPU, ms host ms GiB 2 GPUs, ms host ms GiB of linear memory"
    assert lines[5] == "1,024 inference 8.0 2.0 1.5 5.0 3.0 0.9 80% 1.20"
    assert lines[6] == "2,048 training step does not fit - - 5.0 3.0 0.9 - -"


ENDS: dict[str, tuple[dict[str, Any], BaseException | None, int, str, str]] = {
    "died": (
        ERRORS,
        sharded.ProcessDiedError("process 2 of 2 ended by signal SIGKILL"),
        1,
        "error: process 2 of 2 ended by signal SIGKILL; the results so far are above",
        "a process died",
    ),
    "interrupted": (ERRORS, KeyboardInterrupt(), 130, "interrupted: the results so far are above", "interrupted"),
    "wrong": (
        {**ERRORS, "all": float("inf"), "largest ratio": float("inf")},
        None,
        1,
        "WRONG: the processes together are less exact than one of them, so nothing was timed",
        "wrong",
    ),
}


@pytest.mark.parametrize(("errors", "end", "status", "message", "finished"), ENDS.values(), ids=ENDS)
def test_how_it_ends(
    errors: dict[str, Any],
    end: BaseException | None,
    status: int,
    message: str,
    finished: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results so far are shown and written."""
    pretend(monkeypatch, ("machine", MACHINE), ("errors", errors), ("times", TIMES), end=end)
    assert cli.main([*TWO, "--json", str(tmp_path / "a.json")]) == status
    printed = capsys.readouterr()
    assert printed.err.endswith(f"\nevoattn bench: {message}\n")
    timed = finished != "wrong"
    assert ("1,024" in printed.out, "no time was measured" in printed.out) == (timed, not timed)
    record = sharded_table.read(tmp_path / "a.json")
    assert (record["finished"], len(record["times"])) == (finished, int(timed))
    assert json.dumps(record, allow_nan=False) and float(record["errors"][0]["all"]) == errors["all"]


def test_a_record_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    pretend(monkeypatch, ("machine", MACHINE), ("errors", ERRORS), ("times", TIMES))
    monkeypatch.setattr(records, "write_text", full)
    assert cli.main([*TWO, "--json", str(tmp_path / "a.json")]) == 2
    printed = capsys.readouterr()
    assert "1,024" in printed.out and printed.err.endswith("a.json': cannot be written: No space left on device\n")


OTHERS = (
    *("list", "workloads tri16", "dtypes float32", "passes both", "backends auto", "peers", "budget 9", "csv a.csv"),
    *("html a.html", "png a.png", "resume a.json", "from a.json", "compare a.json b.json", "threshold 1"),
)
"""Options of `evoattn bench` that do not go with --gpus, and values for them."""

REFUSED = {
    "too few": ([], "--gpus 2: torch finds 1 GPU here; expected 2 or more, or --device cpu"),
    "one": (["--gpus", "1"], r"argument --gpus: expected a whole number from 2 up, got '1' \(see evoattn bench --help\)"),
    "length": (["--device", "cpu", "--lengths", "0"], "--lengths: expected a whole number from 1 up, got '0'"),
    "json": (["--device", "cpu", "--json", "a.txt"], r"--json 'a\.txt': expected a name that ends in \.json"),
    **{
        option: ([f"--{option}", *values], f"--gpus measures a pair block: leave out --{option}")
        for option, *values in map(str.split, OTHERS)
    },
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, end=AssertionError("it began"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["bench", "--gpus", "2", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and re.fullmatch(rf"evoattn bench: error: {message}\n", printed.err)


def test_refused_without_gpus_or_a_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--gpus", "2"]) == 2
    assert "--gpus 2: torch finds no GPU here; expected 2 or more, or --device cpu\n" in capsys.readouterr().err
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    assert cli.main(TWO) == 2
    assert "--gpus 2: this torch was built without gloo; expected one with it\n" in capsys.readouterr().err
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert cli.main(TWO) == 2
    assert "--gpus: this torch was built without torch.distributed; expected one with it\n" in capsys.readouterr().err
    assert cli.main(["bench", "--parts"]) == 2
    assert capsys.readouterr().err == "evoattn bench: error: --parts is for --gpus: leave out --parts\n"


def test_records(tmp_path: Path) -> None:
    """One from before the command is still read and shown; another file is refused."""
    old = sharded_table.as_markdown(sharded_table.read(ROOT / "benchmarks" / "results" / "sharded" / "h100-x2.json"))
    assert "at 256 residues: 0.226 of one GPU" in old
    assert "| 3,072 | training step | does not fit | - | - | 618.0 | 54.4 | 43.1 | - | - |" in old
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="is no record of several GPUs; expected a file that evoattn bench --gpus N"):
        sharded_table.read(tmp_path / "a.json")
