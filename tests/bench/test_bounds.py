"""Bounds solve an easier problem than attention with a mask and a pair bias: each is right about its own."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import bounds
import pytest
import torch
from bounds import BOUNDS
from torch import Tensor

from evoattn.bench import attentions
from evoattn.bench.contender import RefusesError, Runner, check
from evoattn.workloads import WORKLOADS, Workload, workload

from .conftest import CPU

CUDNN, FLASH = BOUNDS
TRIANGLE = workload("tri20")
COLUMN = dataclasses.replace(workload("msa_column3"), n=3, lq=20, lk=20)


@pytest.mark.parametrize("case", WORKLOADS, ids=lambda case: case.name)
def test_flash_attention_solves_the_problem_without_biases(case: Workload) -> None:
    inputs = FLASH.part(attentions.inputs_of(case.shrunk(), torch.float32, CPU))
    assert inputs.mask is None and inputs.pair_bias is None
    errors = Runner(FLASH.contender, inputs).errors(attentions.truth(inputs))
    assert set(errors) == {"o", "dq", "dk", "dv"} and max(errors.values()) < 2e-6, errors


def test_bounds_are_timed_beside_evoattn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    options = ["--workloads", "tri16", "--dtype", "float32", "--device", "cpu", "--rounds", "2", "--json", str(path)]
    assert bounds.main(options) == 0
    assert "flash_unbiased" in capsys.readouterr().out
    (problem,) = json.loads(path.read_text())["problems"]
    times = {result["name"]: set(result.get("times", ())) for result in problem["results"]}
    passes = {"forward", "backward", "both"}
    assert times == {"evoattn": passes, "cudnn_unmasked": set(), "flash_unbiased": passes}


class FakeGraph:
    """A graph of cuDNN's frontend with one node: sdpa or its backward, in plain torch."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.node: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.built: list[str] = []
        for name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            setattr(self, name, lambda *arguments, name=name: self.built.append(name))

    def tensor_like(self, x: Tensor) -> "FakeTensor":
        return FakeTensor().set_dim(list(x.shape)).set_stride(list(x.stride()))

    def sdpa(self, *, name: str, generate_stats: bool, **args: Any) -> list["FakeTensor"]:
        assert generate_stats
        return self._node(args, "o", "lse")

    def sdpa_backward(self, *, name: str, dBias: "FakeTensor", **args: Any) -> list["FakeTensor"]:
        outs = self._node(args, "dq", "dk", "dv")
        assert self.node is not None
        self.node[1]["dbias"] = dBias
        return outs

    def _node(self, arguments: dict[str, Any], *names: str) -> list["FakeTensor"]:
        self.node = (arguments, {name: FakeTensor() for name in names})
        return list(self.node[1].values())

    def get_workspace_size(self) -> int:
        assert self.built[0] == "validate" and self.built[-1] == "build_plans"
        return 8

    def execute(self, buffers: dict["FakeTensor", Tensor], workspace: Tensor, handle: object) -> None:
        assert handle == "handle" and workspace.numel() == 8 and self.node is not None
        arguments, outs = self.node
        for tensor, x in buffers.items():
            assert (list(x.shape), list(x.stride())) == (tensor.dim, tensor.stride)
        scale = arguments["attn_scale"]
        x = {name: buffers[tensor].double() for name, tensor in arguments.items() if name != "attn_scale"}
        leaves = [x[name].requires_grad_() for name in ("q", "k", "v", "bias")]
        with torch.enable_grad():
            q, k, v, bias = leaves
            s = q @ k.transpose(-1, -2) * scale + bias
            o, lse = torch.softmax(s, -1) @ v, s.logsumexp(-1, keepdim=True)
        if "o" in outs:
            values = {"o": o, "lse": lse}
        else:
            torch.testing.assert_close(x["o"], o.detach(), rtol=0.02, atol=0.02)
            torch.testing.assert_close(x["stats"], lse.detach(), rtol=1e-5, atol=1e-5)
            gradients = torch.autograd.grad(o, leaves, x["dO"])
            values = dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=True))
        assert set(values) == set(outs)
        for name, value in values.items():
            assert outs[name].output
            buffers[outs[name]].copy_(value.detach())


class FakeTensor:
    output = False

    def set_dim(self, dim: list[int]) -> "FakeTensor":
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> "FakeTensor":
        self.stride = stride
        return self

    def set_output(self, output: bool) -> "FakeTensor":
        self.output = output
        return self

    def set_data_type(self, data_type: str) -> "FakeTensor":
        assert data_type == "float", "the statistics alone are not in the dtype of the graph"
        return self


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A frontend of cuDNN that computes on the CPU, and an adapter that lets it."""
    module: Any = types.ModuleType("cudnn")
    module.create_handle = lambda: "handle"
    module.set_stream = lambda handle, stream: None
    module.pygraph = FakeGraph
    module.data_type = types.SimpleNamespace(BFLOAT16="bfloat16", HALF="half", FLOAT="float")
    module.heur_mode = types.SimpleNamespace(A="a", FALLBACK="fallback")
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.delitem(sys.modules, "cudnn_graphs", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    yield module
    sys.modules.pop("cudnn_graphs", None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cudnn_solves_the_problem_without_a_mask(dtype: torch.dtype, cudnn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "refuse", lambda reasons: None)  # of the CPU
    inputs = CUDNN.part(attentions.inputs_of(TRIANGLE, dtype, CPU))
    assert inputs.mask is None and inputs.pair_bias is not None
    runner, expected = Runner(CUDNN.contender, inputs), attentions.truth(inputs)
    assert set(expected) == {"o", "dq", "dk", "dv", "dpair_bias"}
    check(runner.errors(expected), dtype)


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (TRIANGLE, torch.bfloat16, "takes tensors on a GPU alone"),
        (
            dataclasses.replace(COLUMN, b=2),
            torch.float32,
            "takes tensors on a GPU alone; takes float16 and bfloat16 alone; is measured for its bias gradient, and there is "
            "no pair bias; shares one pair bias among all rows, and here are several",
        ),
    ],
)
def test_cudnn_refuses(case: Workload, dtype: torch.dtype, reason: str, cudnn: Any) -> None:
    with pytest.raises(RefusesError) as refused:
        CUDNN.contender.prepare(attentions.inputs_of(case, dtype, CPU))
    assert str(refused.value) == reason
