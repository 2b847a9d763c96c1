"""The benchmark's layers: every way computes the same layer, and a wrong one gets no time."""

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contenders
import cuda_graphs
import layer_times
import layer_ways
import pytest
import torch
import torch.nn.functional as F
from layer_ways import WAYS, Layer, inputs_of, truth
from layer_workloads import LAYERS, workload
from torch import Tensor, nn

from evoattn.bench import compare, table
from evoattn.bench import record as records
from evoattn.bench.clock import Clock
from evoattn.bench.contender import Contender, Prepared, RefusesError, Runner
from evoattn.bench.record import Problem, Result, Timing

from .conftest import CPU, FakeClock, a_record

SMALL = ("layer24", "layer_msa_row24n5", "layer_msa_column12", "layer_diffusion16n3", "layer_single20")
PEERS = {way.name: way for way in WAYS if way.name in ("openfold3", "cuequivariance")}
EAGER = tuple(way for way in WAYS if not way.compiles and way.name not in PEERS)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x == "layer_msa_column12" else []) for x in SMALL])
def test_every_way_computes_the_same_layer(name: str) -> None:
    check(inputs_of(workload(name), torch.float32, CPU), *EAGER)


def check(layer: Layer, *ways: Contender) -> None:
    """Output and gradients of inputs and parameters."""
    expected = truth(layer)
    for way in ways:
        runner = Runner(way, layer)
        errors = runner.errors(expected)
        assert set(errors) == {"o", *(f"d{name}" for name in layer.inputs), "dparameters"}
        assert max(errors.values()) < 1e-5, (way.name, errors)


class _Linear(nn.Linear):
    """Without a bias, as OpenFold-3 has it for most products."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__(c_in, c_out, bias=False)


class _Triangle(nn.Module):
    """What `openfold3` asks of OpenFold-3's class, in plain torch."""

    def __init__(self, c_in: int, c_hidden: int, no_heads: int, *, inf: float) -> None:
        super().__init__()
        self.no_heads, self.inf = no_heads, inf
        self.layer_norm, self.linear_z = nn.LayerNorm(c_in), _Linear(c_in, no_heads)
        self.mha = nn.ModuleDict({f"linear_{x}": _Linear(c_in, no_heads * c_hidden) for x in "qkvg"})
        self.mha["linear_o"] = _Linear(no_heads * c_hidden, c_in)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layer_norm(x)
        q, k, v, g = (self.mha[f"linear_{y}"](x).unflatten(-1, (self.no_heads, -1)) for y in "qkvg")
        bias = self.linear_z(x).movedim(-1, -3).unsqueeze(-4) + self.inf * (mask - 1)[..., None, None, :]
        o = layer_ways._dense(q, k, v, torch.ones_like(mask, dtype=torch.bool), bias)
        output: Tensor = self.mha["linear_o"]((torch.sigmoid(g) * o).flatten(-2))
        return output


def test_openfold3_computes_with_our_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    room = types.ModuleType("openfold3.core.model.layers.triangular_attention")
    room.TriangleAttention = _Triangle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, room.__name__, room)
    check(inputs_of(workload("layer20"), torch.float32, CPU), PEERS["openfold3"])


def test_cuequivariance_gets_a_single_track_and_refuses_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = inputs_of(workload("layer_single20"), torch.float32, CPU)

    def attention_pair_bias(a: Tensor, z: Tensor, mask: Tensor, *, num_heads: int, inf: float, **w: Any) -> tuple[Tensor, None]:
        x, z = (F.layer_norm(y, y.shape[-1:], w[f"w_ln_{n}"], w[f"b_ln_{n}"]) for y, n in ((a, "a"), (z, "z")))
        q, k, v, g = (F.linear(x, w[f"w_proj_{n}"], w.get(f"b_proj_{n}")).unflatten(-1, (num_heads, -1)) for n in "qkvg")
        bias = F.linear(z, w["w_proj_z"]).movedim(-1, -3) + inf * (mask - 1)[:, None, None, :]
        o = layer_ways._dense(q, k, v, torch.ones_like(mask, dtype=torch.bool), bias)
        return F.linear((torch.sigmoid(g) * o).flatten(-2), w["w_proj_o"]), None

    package = types.ModuleType("cuequivariance_ops_torch")
    package.attention_pair_bias = attention_pair_bias  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    check(layer, PEERS["cuequivariance"])
    with pytest.raises(RefusesError, match="without a condition"):
        PEERS["cuequivariance"].prepare(inputs_of(workload("layer_diffusion16n3"), torch.float32, CPU))


def test_a_library_that_is_absent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openfold3", None)
    first, second = measured(monkeypatch, tuple(PEERS.values())).results
    assert (first.status, second.status) == ("absent", "refused")
    assert not first.times and not second.times


def test_a_joined_product_is_read_as_it_lies() -> None:
    """Else the peer under torch.compile would pay for copies that nobody needs."""
    layer = inputs_of(workload("layer16"), torch.float32, CPU)
    mha = layer.module.mha
    parts = layer_ways.one_product(layer.inputs["z"], [*mha.inputs, layer.module.linear])
    assert [part.shape[-1] for part in parts] == [128, 128, 128, 128, 4]
    assert all(part.stride(-2) % 8 == 0 and part.storage_offset() % 8 == 0 for part in parts)


def test_times_in_graphs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = (a_record(evoattn=[1.0, 1.01, 1.02, 1.03, 1.04]) for _ in range(2))
    for record, ms in ((before, 1.0), (after, 2.0)):
        record.problems[0].results[0].times["graph_both"] = Timing((ms,) * 5)
    changes = compare.compare(before, after)
    assert changes is not None and [change.what for change in changes if change.is_regression] == ["graph_both"]


def test_layers_have_names_that_read_back() -> None:
    for layer in LAYERS:
        assert workload(layer.name) == layer
    assert workload("layer500").n == 500


def measured(monkeypatch: pytest.MonkeyPatch, ways: tuple[Contender, ...]) -> Problem:
    monkeypatch.setattr(layer_times, "WAYS", ways)
    problem = Problem(workload("layer16"), "float32", None)
    layer_times.measure(problem, CPU, Clock(), 2, lambda what: None)
    return problem


def test_layers_command_writes_a_record_and_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_times, "WAYS", EAGER[:1])
    path = tmp_path / "a.json"
    options = ["--workloads", "layer16", "--dtype", "float32", "--device", "cpu", "--rounds", "2", "--note", "cold"]
    assert layer_times.main([*options, "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert "note: cold" in printed.out and "layer16, float32" in printed.out and "layer16: evoattn" in printed.err
    record = records.read(path)
    assert record.settings["note"] == "cold" and set(record.problems[0].results[0].times) == {"forward", "both"}


def test_a_layer_is_verified_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = measured(monkeypatch, EAGER)
    for result in problem.results:
        assert (result.status, set(result.times)) == ("ok", {"forward", "both"})
        assert set(result.errors) == {"o", "dz", "dparameters"}
        assert result.peak_bytes
    assert "written" in str(table.problem_table(problem)) and contenders.title("written").startswith("as models write it")


def test_a_wrong_layer_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(layer: Layer) -> Prepared:
        right = EAGER[0].prepare(layer)
        return right._replace(compute=lambda: 1.1 * right.compute())

    wrong = dataclasses.replace(EAGER[0], prepare=prepare)
    (result,) = measured(monkeypatch, (wrong,)).results
    assert result.status == "wrong"
    assert not result.times
    assert "against float64" in result.reason


def test_a_pass_that_no_graph_takes_keeps_its_eager_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph that only calls again, and one that cannot be captured."""

    def captured(call: Callable[[int], object]) -> tuple[Callable[[int], object], object]:
        if call.__name__ == "both":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return call, None

    monkeypatch.setattr(cuda_graphs, "captured", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    result, runner = Result("written"), Runner(EAGER[0], inputs_of(workload("layer16"), torch.float32, CPU))
    cuda_graphs.time_graphs(result, runner, ("forward", "both"), 3, FakeClock())
    assert (result.status, set(result.times)) == ("ok", {"graph_forward"})
    assert len(result.times["graph_forward"].samples_ms) == 3
    assert result.reason == "graph of both: RuntimeError: operation not permitted"
