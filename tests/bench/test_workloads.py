"""Workloads at other lengths, and with fewer rows."""

import dataclasses

import pytest
import torch

from evoattn import testing
from evoattn.workloads import workload


def test_workloads_at_other_lengths() -> None:
    assert workload("tri500") == dataclasses.replace(workload("tri384"), name="tri500", n=500, lq=500, lk=500)
    column = workload("msa_column100")
    assert (column.n, column.lq, column.length, column.family) == (100, 512, 100, "msa_column")
    assert workload("tri384").with_rows(10).name == "tri384n10"
    assert workload("single768").with_rows(5) is workload("single768")
    assert testing.from_workload(workload("msa_global"), torch.float32).kv_heads == 1
    rows = workload("msa_row128n64")
    assert (rows.name, rows.n, rows.lq) == ("msa_row128n64", 64, 128)
    assert workload("msa_columnn9").n == 9
    for name, length, expected, n in (
        ("tri384n64", 500, "tri500n64", 64),
        ("tri384n64", 32, "tri32", 32),
        ("msa_row200n64", 300, "msa_row300n64", 64),
        ("diffusion128n8", 256, "diffusion256n8", 8),
    ):
        other = workload(name).at(length)
        assert (other.name, other.n, other.length) == (expected, n, length)
        assert workload(expected) == other
    for wrong in ("tri0", "tri", "nonsense5", "tri1234567", "nonsense5n3", "n5", "trin5"):
        with pytest.raises(ValueError, match="no workload"):
            workload(wrong)
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        workload("tri384").at(0)
