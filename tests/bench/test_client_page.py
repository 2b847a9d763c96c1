"""The measurements of clients' blocks: what the worker finds, how the command goes on if it dies, what the page shows."""

import argparse
import dataclasses
import gc
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import case_records
import client_blocks
import client_cases
import client_page
import client_worker
import pytest
import torch

from .conftest import CPU


def a_case(**changes: Any) -> dict[str, Any]:
    """A case of Protenix as it is installed."""
    case = {"client": "protenix", "residues": 256, "dtype": "float32", "pass": "inference", "switch": "torch", "patched": False}
    case |= {"status": "ok", "reference": "s float64", "errors": {"s": 1e-7, "z": 3e-7}, "median_ms": 8.0, "peak_bytes": 2**31}
    return case | changes


def a_record(*cases: dict[str, Any]) -> dict[str, Any]:
    return client_blocks.fresh(CPU, "abc") | {"cases": list(cases)}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A record of Protenix at three lengths, of which the original can do two."""
    cases = [a_case(), a_case(patched=True, median_ms=2.0, peak_bytes=2**30, calls=3, backends=["hopper"])]
    cases += [a_case(**(case | {"residues": 512, "median_ms": 4 * case["median_ms"]})) for case in cases]
    late = a_case(residues=1024, status="out of memory", reason="tried 9 GiB")
    del late["median_ms"]
    record = a_record(*cases, late, a_case(residues=1024, patched=True, errors={"s": 2e-7, "z": 4e-7}))
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "card.json").write_text(json.dumps(record))
    return tmp_path


def add(results: Path, name: str, date: str, *cases: dict[str, Any]) -> None:
    record = a_record(*cases)
    record["machine"]["date"] = date
    (results / "clients" / name).write_text(json.dumps(record))


def test_the_page_shows_times_memory_errors_and_what_ran_out_of_memory(results: Path) -> None:
    text = client_page.block(results)
    assert "inference | 512 | 32.0 / 2.00 | 8.0 / 1.00 | 4.00 | 50% |" in text
    assert "inference | 1024 | out of memory | 8.0 / 2.00 | - | - |" in text
    assert "| Protenix | float32 | 3.0e-07 | 4.0e-07 | - | - |" in text and "from `card.json`:" in text
    (results / "clients" / "card.json").unlink()
    assert client_page.block(results) == "Not measured yet."


def test_the_newest_records_are_shown(results: Path) -> None:
    add(results, "a.json", "2999-01-01", a_case(median_ms=6.0), a_case(patched=True, median_ms=1.0))
    add(results, "b.json", "1999-01-01", a_case(median_ms=5.0), a_case(patched=True, median_ms=1.0))
    text = client_page.block(results)
    assert "| 256 | 6.0 / 2.00 | 1.0 / 2.00 | 6.00 | 100% |" in text and "| 512 |" not in text, "older ones had another patch"
    assert "from `a.json`:" in text
    add(results, "c.json", "2999-01-01", a_case(residues=512), a_case(residues=512, patched=True))
    assert "| 256 | 6.0" in client_page.block(results) and "| 512 |" in client_page.block(results)


def test_lengths_between_have_no_row(results: Path) -> None:
    add(results, "a.json", "2999-01-01", *(a_case(residues=x, patched=y) for x in (256, 384, 512) for y in (False, True)))
    text = client_page.block(results)
    assert "| 256 |" in text and "| 512 |" in text and "| 384 |" not in text


def test_a_failure_and_a_setting_that_is_no_default_have_no_row(results: Path) -> None:
    failed = a_case(patched=True, status="failed", reason="RuntimeError: no kernel")
    del failed["median_ms"]
    other = [a_case(switch="another", residues=999), a_case(switch="another", residues=999, patched=True)]
    add(results, "card.json", "2026-11-28", a_case(), failed, *other)
    assert client_page.newest(results) == []


DYING = """
import json, os, sys
spec = json.loads(sys.argv[1])
file = open(spec["lines"], "a")
skip = {tuple(x) for x in spec["skip"]}
for residues in spec["lengths"]:
    for patched in (False, True):
        way = [residues, "float32", "torch", patched]
        if tuple(way) in skip:
            continue
        print(json.dumps({"begins": way}), file=file, flush=True)
        if way == [16, "float32", "torch", True]:
            print("the device is lost", file=sys.stderr, flush=True)
            os._exit(9)
        case = {"client": spec["client"], "residues": residues, "dtype": "float32", "switch": "torch", "patched": patched}
        for name in ("inference", "training"):
            print(json.dumps({"case": case | {"pass": name, "status": "ok"}}), file=file, flush=True)
"""


def a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str) -> client_blocks.Run:
    """A run whose worker is this program."""
    (tmp_path / "worker.py").write_text(textwrap.dedent(worker))
    monkeypatch.setattr(client_blocks, "WORKER", tmp_path / "worker.py")
    options = argparse.Namespace(seconds=60.0, device="cpu", lengths=[16, 24], dtypes=["float32"], cuequivariance=None)
    return client_blocks.Run(options, a_record())


def test_behind_the_way_that_killed_a_process_another_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, monkeypatch, DYING)
    run.measure(client_blocks.Job("protenix", "base"))
    statuses = {(case["residues"], case["patched"], case["pass"]): case["status"] for case in run.record["cases"]}
    died = {key: status for key, status in statuses.items() if key[:2] == (16, True)}
    assert died == {(16, True, "inference"): "failed", (16, True, "training"): "failed"}
    assert len(statuses) == 8 and set(statuses.values()) == {"ok", "failed"} and list(statuses.values()).count("ok") == 6
    [reason, _] = [case["reason"] for case in run.record["cases"] if case["status"] == "failed"]
    assert reason == "status 9: the device is lost"


def test_a_process_that_dies_before_its_first_way_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, monkeypatch, "raise SystemExit('no such module')")
    run.measure(client_blocks.Job("protenix", "base"))
    assert run.record["cases"] == [] and run.record["ended"] == ["protenix, base: status 1: no such module"]


def test_another_machines_record_is_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(a_record()))
    assert case_records.begun(path, client_blocks.fresh(CPU, "abc"))["cases"] == []
    with pytest.raises(ValueError, match="commit"):
        case_records.begun(path, client_blocks.fresh(CPU, "abd"))


def narrow(blocks: int) -> torch.nn.Module:
    """Blocks of ESMFold, 32 and 16 channels wide."""
    from transformers import EsmConfig
    from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

    config = EsmConfig(vocab_size=33, is_folding_model=True, esmfold_config={}, vocab_list=["<cls>"] * 33).esmfold_config.trunk
    config.sequence_state_dim, config.pairwise_state_dim = 32, 16
    config.sequence_head_width, config.pairwise_head_width = 8, 8
    return torch.nn.ModuleList([EsmFoldTriangularSelfAttentionBlock(config) for _ in range(blocks)])


@pytest.fixture
def esmfold(monkeypatch: pytest.MonkeyPatch) -> Iterator[client_cases.Client]:
    """Two narrow blocks of ESMFold."""
    pytest.importorskip("transformers.models.esm.modeling_esmfold")
    monkeypatch.setattr(client_worker, "SECONDS", 0.0)
    gc.freeze()  # each measurement collects garbage: .7 s with all that is imported
    yield dataclasses.replace(client_cases.CLIENTS["esmfold"], blocks=2, single=32, pair=16, make=narrow)
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_is_left_to_clients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own code computes small calls on a CPU as fast."""
    monkeypatch.setattr("evoattn.clients.calls.few_on_cpu", lambda _: 0)


def measured(client: client_cases.Client, dtypes: list[str]) -> list[dict[str, Any]]:
    """What the worker writes of 16 residues without chunks."""
    lines: list[Any] = []
    ways = [way for way in client.ways if way.switch == "no chunks"]
    client_worker.Worker(client, CPU, ways, set(), lines.append).length(16, dtypes)
    return [line["case"] for line in lines if "case" in line]


def test_the_worker_compares_and_times_a_real_block(esmfold: client_cases.Client) -> None:
    cases = measured(esmfold, ["bfloat16", "float32"])
    assert [(c["dtype"], c["patched"], c["pass"]) for c in cases] == [
        (dtype, patched, name) for dtype in ("bfloat16", "float32") for patched in (False, True) for name in client_cases.PASSES
    ]
    for case in cases:
        assert case["status"] == "ok" and case["reference"] == "s float64, z float64, dz float64"
        assert len(case["samples_ms"]) == 3 and case["median_ms"] > 0 and case["peak_bytes"] > 0
        assert set(case["errors"]) == ({"s", "z"} if case["pass"] == "inference" else {"s", "z", "dz"})
        bound = 1e-5 if case["dtype"] == "float32" else 0.05
        assert all(1e-9 < error < bound for error in case["errors"].values()), case["errors"]
        assert case.get("calls", 3) >= 3 and case.get("backends", ["tiled"]) == ["tiled"]


def test_a_patch_with_a_wrong_answer_gets_no_time(esmfold: client_cases.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from evoattn.clients import esmfold as sites

    right = sites.attention
    monkeypatch.setattr(sites, "attention", lambda *arguments, **options: right(*arguments, **options) * 1.001)
    wrong = [case for case in measured(esmfold, ["float32"]) if case["patched"]]
    assert [case["status"] for case in wrong] == ["wrong", "wrong"]
    assert all("median_ms" not in case and " is off by " in case["reason"] for case in wrong)


def test_what_runs_out_of_memory_is_recorded_and_the_rest_goes_on(
    esmfold: client_cases.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(self: Any, way: client_cases.Way) -> client_worker.Values:
        if not way.patched and way.switch == "no chunks":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        return real(self, way)

    real = client_worker.Blocks.training
    monkeypatch.setattr(client_worker.Blocks, "training", run_out)
    cases = {(case["patched"], case["pass"]): case for case in measured(esmfold, ["float32"])}
    assert cases[False, "training"]["status"] == "out of memory"
    assert cases[False, "training"]["reason"] == "CUDA out of memory. Tried to allocate 9 GiB"
    assert [case["status"] for key, case in cases.items() if key != (False, "training")] == ["ok"] * 3
