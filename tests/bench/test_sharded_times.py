"""`dev.py bench sharded`: two processes on a CPU, what it refuses, processes that die, and its records."""

from __future__ import annotations

import copy
import dataclasses
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

from evoattn.bench import record as records
from evoattn.bench.record import Problem, Result, Timing

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo, which these processes talk through", allow_module_level=True)

import sharded_block
import sharded_table
import sharded_times
from sharded_block import LAYERS, Job, Plan
from sharded_table import ON_ONE, VERIFIED, WAYS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "sharded"
TWO = ["--gpus", "2", "--device", "cpu", "--lengths", "5", "--rounds", "2"]
MACHINE = {"device": "a machine", "kind": "gpu", "torch": "2"}
MISSING = Result("", "left out", "does not fit")


def errors(largest: float, ratio: float) -> Problem:
    """The verified block, whose errors are 0.2 on one process."""
    of_all = Result(VERIFIED, errors={"largest": largest, "largest ratio": ratio})
    return sharded_block.problem(24, "", Result(VERIFIED + ON_ONE, errors={"largest": 0.2}), of_all)


def times(length: int, way: str, single: Result = MISSING) -> Problem:
    """The result of one process, and one of 5 ms of both."""
    measured = WAYS[way][0]
    both = Result("", host_us={measured: 3e3}, peak_bytes=int(0.9 * 2**30), times={measured: Timing((5.0,))})
    single, both = (dataclasses.replace(x, name=f"evoattn/{way}{end}") for x, end in ((single, ON_ONE), (both, "")))
    return sharded_block.problem(length, "", single, both)


ERRORS = errors(0.25, 1.25)
TIMES = times(1024, "inference", Result("", host_us={"forward": 2e3}, peak_bytes=3 << 29, times={"forward": Timing((8.0,))}))


@pytest.mark.slow
def test_two_processes_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert sharded_times.main([*TWO, "--parts", "--json", str(path), "--commit", "abc123", "--note", "a test"]) == 0
    printed = capsys.readouterr()
    assert "commit abc123" in printed.out and "; 2 processes\n" in printed.out
    assert re.search(r"at 24 residues: 0\.\d+ of one process, 0\.\d+ of 2 processes; each at most 1\.\d\d times", printed.out)
    assert re.search(r"^5 +inference +[\d.]+ +[\d.]+ +- +[\d.]+ +[\d.]+ +- +\d+%  -$", printed.out, re.MULTILINE)
    assert re.search(r"^5 +tri_mul_out, training step +[\d.]+ ", printed.out, re.MULTILINE)
    assert "5 residues, inference\n5 residues, training\n5 residues, tri_mul_out, " in printed.err
    record = records.read(path)
    assert record.finished == "complete" and record.machine["kind"] == "cpu" and record.settings["note"] == "a test"
    timed = [(problem, result) for problem in record.problems for result in problem.results if result.times]
    jobs = [
        Job(problem.workload.length, problem.workload.layer.replace("block", ""), result.name.removeprefix("evoattn/"))
        for problem, result in timed
        if not result.name.endswith(ON_ONE)
    ]
    assert jobs == Plan(2, "cpu", (5,), 2, parts=True).jobs and {job.layer for job in jobs} == {"", *LAYERS}
    assert len(timed) == 2 * len(jobs)
    for _, result in timed:
        ((measured, time),) = result.times.items()
        assert 0 < result.host_us[measured] / 1e3 <= time.median_ms < 1e5
    assert sharded_table.as_text(record) == printed.out.rstrip("\n")


def killed(rank: int, plan: Plan, commit: str | None, port: int, sender: Connection) -> None:
    """A process that sends something and then waits, and one that is killed."""
    if rank == 0:
        sender.send({"device": commit})
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
    monkeypatch.setattr(sharded_block, "work", work)
    start, messages = time.monotonic(), []
    with pytest.raises(sharded_block.ProcessDiedError) as caught:
        messages.extend(sharded_block.run(Plan(2, "cpu", (5,), 2), "abc123"))
    assert str(caught.value) == message
    assert time.monotonic() - start < 60


def pretend(monkeypatch: pytest.MonkeyPatch, *parts: dict[str, str] | Problem, end: BaseException | None = None) -> None:
    """Let no process start, and these parts of a record come."""

    def run(plan: Plan, commit: str | None) -> Iterator[dict[str, str] | Problem]:
        yield from copy.deepcopy(parts)
        if end is not None:
            raise end

    monkeypatch.setattr(sharded_block, "run", run)


def test_sharded_table_shows_times_memory_and_scaling(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, MACHINE, ERRORS, TIMES, times(2048, "training"))
    assert sharded_times.main(TWO) == 0
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "a machine, torch 2; 2 GPUs"
    assert lines[2].endswith("at 24 residues: 0.200 of one GPU, 0.250 of 2 GPUs; each at most 1.25 times that of one GPU")
    assert lines[4] == "residues pass one GPU, ms host ms GiB 2 GPUs, ms host ms GiB of linear memory"
    assert lines[5] == "1,024 inference 8.0 2.0 1.5 5.0 3.0 0.9 80% 1.20"
    assert lines[6] == "2,048 training step does not fit - - 5.0 3.0 0.9 - -"


ENDS: dict[str, tuple[Problem, BaseException | None, int, str, str]] = {
    "died": (
        ERRORS,
        sharded_block.ProcessDiedError("process 2 of 2 ended by signal SIGKILL"),
        1,
        "error: process 2 of 2 ended by signal SIGKILL; the results so far are above",
        "a process died",
    ),
    "interrupted": (ERRORS, KeyboardInterrupt(), 130, "interrupted: the results so far are above", "interrupted"),
    "wrong": (
        errors(float("inf"), float("inf")),
        None,
        1,
        "WRONG: the processes together are less exact than one of them, so nothing was timed",
        "wrong",
    ),
}


@pytest.mark.parametrize(("verified", "end", "status", "message", "finished"), ENDS.values(), ids=ENDS)
def test_how_it_ends(
    verified: Problem,
    end: BaseException | None,
    status: int,
    message: str,
    finished: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The results so far are shown and written."""
    pretend(monkeypatch, MACHINE, verified, TIMES, end=end)
    assert sharded_times.main([*TWO, "--json", str(tmp_path / "a.json")]) == status
    printed = capsys.readouterr()
    assert printed.err.endswith(f"sharded_times: {message}\n")
    timed = finished != "wrong"
    assert ("1,024" in printed.out, "no time was measured" in printed.out) == (timed, not timed)
    record = records.read(tmp_path / "a.json")
    assert (record.finished, record.problems) == (finished, [verified, TIMES][: 1 + timed])


REFUSED = {
    "too few": (["--gpus", "2"], "--gpus 2: torch finds 1 GPUs here; --device cpu is a trial without them"),
    "one": (["--gpus", "1"], "expected --gpus from 2 up and --lengths from 1 up"),
    "length": (["--device", "cpu", "--lengths", "0"], "expected --gpus from 2 up and --lengths from 1 up"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, end=AssertionError("it began"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as ended:
        sharded_times.main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and printed.err.endswith(f"error: {message}\n")


def test_refused_without_a_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    with pytest.raises(SystemExit):
        sharded_times.main(TWO)
    assert capsys.readouterr().err.endswith("this torch was built without gloo; expected one with it\n")


def test_records() -> None:
    """A committed record is shown as the command shows one."""
    record = records.read(RESULTS / "h100-x2.json")
    assert "at 256 residues: 0.226 of one GPU" in sharded_table.about(record)[2]
    row = ["3,072", "training step", "does not fit", "-", "-", "618.0", "54.4", "43.1", "-", "-"]
    assert sharded_table.rows(record)[-1] == row
