"""The benchmark's layers: every way computes the same layer, and a wrong one gets no time."""

import dataclasses

import pytest
import torch

from evoattn import testing
from evoattn.bench import compare, layer_run, layers, table
from evoattn.bench.budget import Budget
from evoattn.bench.clock import WallClock
from evoattn.bench.layers import WAYS, Way, layer_of, layer_truth
from evoattn.bench.plan import Plan
from evoattn.bench.record import Problem, Timing
from evoattn.workloads import LAYERS, workload

from .conftest import a_record

SMALL = ("layer24", "layer_msa_row24n5", "layer_msa_column12", "layer_diffusion16n3")
EAGER = tuple(way for way in WAYS if not way.compiles)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SMALL)
def test_every_way_computes_the_same_layer(name: str) -> None:
    layer = layer_of(workload(name), CPU)
    expected = layer_truth(layer)
    for way in EAGER:
        o = way.of(layer, torch.float32)()
        gradients = torch.autograd.grad(o, layer.leaves, layer.do)
        assert testing.relative_error(o, expected["o"]) < 1e-5, way.name
        for name, gradient in zip(layer.inputs, gradients, strict=False):
            assert testing.relative_error(gradient, expected[f"d{name}"]) < 1e-5, (way.name, name)


def test_a_joined_product_is_read_as_it_lies() -> None:
    """Else the peer under torch.compile would pay for copies that nobody needs."""
    layer = layer_of(workload("layer16"), CPU)
    mha = layer.module.mha
    parts = layers._one_product(layer.inputs["z"], [*mha.inputs, layer.module.linear])
    assert [part.shape[-1] for part in parts] == [128, 128, 128, 128, 4]
    assert all(part.stride(-2) % 8 == 0 and part.storage_offset() % 8 == 0 for part in parts)


def test_times_in_graphs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (a_record(evoattn=[1.0, 1.01, 1.02, 1.03, 1.04]) for _ in range(2))
    for record, ms in ((before, 1.0), (after, 2.0)):
        record.problems[0].results[0].times["graph_both"] = Timing.of([ms] * 5)
    assert [change.what for change in compare.compare(before, after, 0.05).regressions] == ["graph_both"]


def test_layers_have_names_that_read_back() -> None:
    for layer in LAYERS:
        assert workload(layer.name) == layer
    assert workload("layer500").n == 500


def measured(monkeypatch: pytest.MonkeyPatch, ways: tuple[Way, ...]) -> Problem:
    monkeypatch.setattr(layer_run, "WAYS", ways)
    problem = Problem(workload("layer16"), "float32", None)
    plan = Plan((problem.workload,), ("float32",), ("forward", "both"), ("auto",), (), rounds=2)
    clock = WallClock()
    layer_run.measure_layer(problem, plan, CPU, clock, Budget(None, 1, clock), lambda what: None)
    return problem


def test_a_layer_is_verified_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = measured(monkeypatch, EAGER)
    for result in problem.results:
        assert (result.status, set(result.times)) == ("ok", {"forward", "both"})
        assert set(result.errors) == {"o", "dz", "dparameters"}
        assert result.peak_bytes
    assert table.title("written") in str(table.problem_table(problem))


def test_a_wrong_layer_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(EAGER[0], call=lambda layer: 1.1 * EAGER[0].call(layer))
    (result,) = measured(monkeypatch, (wrong,)).results
    assert result.status == "wrong"
    assert not result.times
    assert "against float64" in result.reason
