"""The time of a block part by part: what is measured on a CPU, and what the page makes of it."""

import json
from pathlib import Path
from typing import Any

import block_page
import block_parts
import pytest
import torch

from .conftest import CPU

CASE = {"length": 1024, "dtype": "bfloat16", "way": "evoattn.nn", "part": "whole block", "pass": "inference"}


@pytest.mark.parametrize("way", [block_parts.EVOATTN, block_parts.PLAIN])
def test_the_layers_one_after_the_other_are_the_block(way: str) -> None:
    example = block_parts.Example(12, CPU)
    calls = example.calls(way)
    s, z = example.s, example.z
    for name in block_parts.PAIR:
        z = calls[name][0](z)
    s = calls["single_transition"][0](calls["attn_pair_bias"][0](s, z))
    torch.testing.assert_close((s, z), calls[block_parts.BLOCK][0](example.s, example.z))


def test_both_ways_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_parts.VERIFIED, "cpu", 12)
    errors = block_parts.errors("float32", CPU)
    assert all(error < 1e-5 for of in errors.values() for error in of.values())
    assert set(errors["evoattn.nn"]) == {"s", "z", "ds", "dz"}


def test_a_wrong_block_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"evoattn.nn": {"z": 1e-2}, "plain torch": {"z": 1e-6}}
    monkeypatch.setattr(block_parts, "errors", lambda kind, device: wrong)
    monkeypatch.setattr("sys.argv", ["block_parts.py", "--device", "cpu", "--json", str(tmp_path / "x.json")])
    assert block_parts.main() == 1
    assert "further from float64" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_the_floor_counts_bytes_and_products() -> None:
    transition = max(2 * 512 / 3e12, 3 * 2 * 128 * 512 / 660e12) * 1e3
    assert block_page.floor("pair_transition", 100) == pytest.approx(transition * 100**2)
    layers = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "pair_transition", "attn_pair_bias")
    assert block_page.floor("whole block", 64) == pytest.approx(sum(block_page.floor(name, 64) for name in layers))
    assert block_page.floor("tri_mul_out", 2048) > 4 * block_page.floor("tri_mul_out", 1024), "its product grows as L^3"


def test_the_page_has_a_row_for_each_part_and_each_other_way(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        CASE | {"part": "tri_mul_out", "ms": 1.5, "host_ms": 0.31},
        CASE | {"ms": 13.6, "host_ms": 4.3, "peak_gib": 2.0},
        CASE | {"pass": "training", "ms": 48.5, "host_ms": 20.0, "peak_gib": 8.0},
        CASE | {"way": "plain torch", "failed": "out of memory"},
        CASE | {"dtype": "tf32", "ms": 70.0, "peak_gib": 3.0},
    ]
    (tmp_path / "blocks").mkdir()
    record = {"machine": {"device": "a card", "commit": "abc"}, "errors": {}, "cases": cases}
    (tmp_path / "blocks" / "card.json").write_text(json.dumps(record))
    text = block_page.block(block_page.records(tmp_path))
    assert "| `tri_mul_out` | 1.50 | 1.22 | - | - | - | 0.3 / - |" in text
    assert "| whole block | 13.60 | 7.80 | out of memory | 48.50 | - | 4.3 / 20.0 |" in text
    assert "| 1,024 | evoattn.nn | float32 with TF32 products | 70.00 / 3.0 | - |" in text
    assert block_page.block({}) == "Not measured yet."
