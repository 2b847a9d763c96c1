"""Calls on a CPU beside dense torch: both compute the same, the record has both times, and the committed one is complete."""

import itertools
import json
from pathlib import Path

import cpu_calls
import pytest
import torch

RECORD = Path(cpu_calls.__file__).parent / "results" / "cpu" / "calls.json"


def test_a_small_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_calls, "LEAST_S", 0.0)
    monkeypatch.setattr(cpu_calls, "ROUNDS", 1)
    path = tmp_path / "a.json"
    arguments = ["--names", "tri16", "msa_column4", "--dtypes", "float32", "--threads", "1", "--json", str(path)]
    monkeypatch.setattr(cpu_calls, "WORKLOADS", tuple(w.shrunk() for w in cpu_calls.WORKLOADS))
    cpu_calls.main(arguments)
    calls = json.loads(path.read_text())["calls"]
    assert [(call["workload"], call["biases"]) for call in calls] == [
        *itertools.product(["tri16"], cpu_calls.BIASES),
        *itertools.product(["msa_column4"], ["none", "mask"]),
    ]
    assert all(len(ms) == 2 and min(ms) > 0 for call in calls for ms in call["ms"].values())
    assert "tri16                float32   none            1 threads  forward" in capsys.readouterr().out


@pytest.mark.parametrize("w", cpu_calls.WORKLOADS, ids=lambda w: w.name)
def test_dense_computes_the_same(w: cpu_calls.Workload) -> None:
    found = [cpu_calls.passes(attend, w.shrunk(), torch.float32) for attend in (cpu_calls.own, cpu_calls.dense)]
    torch.testing.assert_close(found[0]["forward"](), found[1]["forward"](), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[0]["both"](), found[1]["both"](), atol=1e-5, rtol=1e-4)


def test_the_committed_record_has_every_call() -> None:
    record = json.loads(RECORD.read_text())
    assert {call["workload"] for call in record["calls"]} == {w.name for w in cpu_calls.WORKLOADS}
    assert record["machine"]["commit"] and not record["machine"]["commit"].endswith("-dirty")
