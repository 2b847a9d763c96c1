"""The plan of a run: its workloads, and the order of its problems."""

import dataclasses

import pytest
import torch

from evoattn import testing
from evoattn.bench.contender import Contender
from evoattn.bench.peers import PEERS
from evoattn.bench.plan import default_plan, remaining, select_workloads
from evoattn.bench.record import Record
from evoattn.workloads import workload

from .conftest import FakeClock, a_plan, a_record


def test_a_workload_is_known_by_its_name(fakes: dict[str, Contender], clock: FakeClock) -> None:
    """Another length of a workload is told in other words than the one of that length."""
    plan = a_plan(workloads=select_workloads(None, [100], ()))
    record = Record({}, {}, problems=[dataclasses.replace(a_record(evoattn=[1.0]).problems[0], workload=workload("tri100"))])
    assert record.problems[0].workload != plan.workloads[0]
    assert remaining(plan, record) == []


def test_problems_come_with_the_most_telling_first() -> None:
    plan = a_plan(workloads=tuple(workload(name) for name in ("tri1", "tri2", "tri3")), dtypes=("bfloat16", "float16"))
    order = [(w.name, dtype) for w, dtype in plan.problems]
    assert len(order) == len(set(order)) == 6
    assert order[0] == ("tri1", "bfloat16")
    assert order.index(("tri2", "bfloat16")) < order.index(("tri2", "float16"))
    assert order.index(("tri1", "float16")) < order.index(("tri3", "bfloat16"))


def test_workloads_are_selected_by_name_and_length() -> None:
    default = default_plan("cpu", quick=False)
    assert select_workloads(None, None, default.workloads) == default.workloads
    assert [w.name for w in select_workloads(None, [100, 397], default.workloads)] == ["tri100", "tri397"]
    picked = select_workloads(["msa_row", "tri384", "tri500"], [64], default.workloads)
    assert [(w.name, w.n, w.lq) for w in picked] == [("msa_row64", 512, 64), ("tri64", 64, 64)]
    with pytest.raises(ValueError, match="no workload 'nonsense'; expected one of tri384, "):
        select_workloads(["nonsense"], None, default.workloads)
    for device in ("cpu", "cuda"):
        for quick in (False, True):
            plan = default_plan(device, quick)
            assert len({w.name for w in plan.workloads}) == len(plan.workloads)
            assert not quick or not any(PEERS[name].compiles for name in plan.peers)


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
