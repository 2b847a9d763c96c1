"""The comparison of `python3 dev.py clients`: on ESMFold's block, and that it finds what is wrong."""

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn.clients import esmfold as patches

pytest.importorskip("transformers")

from clients import __main__ as command
from clients.blocks import Block, Problem
from clients.compare import LIMITS, Result, Watch, compare
from clients.esmfold import BLOCKS

(TRUNK,) = BLOCKS


pytestmark = pytest.mark.usefixtures("one_thread")  # the blocks are small, and workers share the cores


@pytest.mark.parametrize("residues", [16, 33, 64, pytest.param(97, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", LIMITS)
def test_esmfolds_block_gives_the_same(dtype: torch.dtype, residues: int) -> None:
    result = compare("esmfold", TRUNK, dtype, [residues])
    assert not result.faults
    assert result.outputs > 0, "the original's own arithmetic is another"
    reached = (result.sites[str(site)] for site in patches.CLIENTS["esmfold"].sites if site.replace)
    assert all(reached), "a branch that ours never reached"


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_wrong_answer_is_a_fault(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by ten times the bound, at one residue."""
    real = patches.attention
    off = 10 * LIMITS[dtype][0]

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        o = real(*arguments, **options)
        return o * (1 + off * (torch.arange(o.shape[-2]) == 3).to(o.dtype)[:, None])

    monkeypatch.setattr(patches, "attention", wrong)
    first, *_ = compare("esmfold", TRUNK, dtype, [16]).faults
    assert first.startswith(f"trunk in {str(dtype).removeprefix('torch.')} at 16 residues: outputs are off by ")


def test_a_wrong_gradient_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = patches.attention
    monkeypatch.setattr(patches, "attention", lambda q, *args, **options: real(q.detach(), *args, **options))
    faults = compare("esmfold", TRUNK, torch.float64, [16]).faults
    assert len(faults) == 2 * len(TRUNK.ways) and all("gradients are off by" in fault for fault in faults)


def test_nan_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "attention", lambda q, *_, **__: q * torch.nan)
    result = compare("esmfold", TRUNK, torch.float32, [16])
    assert result.faults and result.outputs == result.gradients == math.inf


def test_a_call_that_is_not_ours_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evoattn, "patch", lambda _, **__: evoattn.Patch())
    faults = compare("esmfold", TRUNK, torch.float32, [16]).faults
    assert "trunk in float32 at 16 residues: no call was ours" in faults
    file = sys.modules["transformers.models.esm.modeling_esmfold"].__file__
    assert f"trunk in float32 at 16 residues: the client took 3 softmaxes itself, in {file}" in faults


def test_what_is_passed_on_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    real = evoattn.patch

    def patch(name: str, **options: Any) -> evoattn.Patch:
        block = real(name, **options)
        next(iter(block._counts.values())).count_passed_on("too long")
        return block

    monkeypatch.setattr(evoattn, "patch", patch)
    assert "trunk in float32 at 16 residues: 1 calls went to the original: too long" in compare(
        "esmfold", TRUNK, torch.float32, [16]
    ).faults  # fmt: skip


@pytest.mark.parametrize("fault", ["", "outputs are off by 1"])
def test_the_table_and_the_exit_status(fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reached = {str(site): 4 for site in patches.CLIENTS["esmfold"].sites}
    result = Result(1e-6, 2e-6, 8, command.collections.Counter(reached), [fault] if fault else [])
    monkeypatch.setattr(command, "compare", lambda *_, **__: result)
    assert command.main(["esmfold"]) == (1 if fault else 0)
    lines = capsys.readouterr().out.splitlines()
    beyond = ["beyond"] if fault else []
    assert lines[1].split() == [*["esmfold", "trunk", "float64", "16", "33", "64", "97", "1e-06", "2e-06", "8"], *beyond]
    assert [line for line in lines if line.startswith("esmfold: ")] == ([f"esmfold: {fault}"] * 2 if fault else [])
    layers = [line.split() for line in lines if line.startswith("esmfold   ")][2:]
    assert [line[1:4] for line in layers] == [["trunk,", "14", "layers"]] * 2, "blocks and their layers, by evoattn.nn.replace"


def test_a_site_that_no_block_reaches_is_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "compare", lambda *_, **__: Result())
    assert command.main(["esmfold"]) == 1
    assert (
        "esmfold: no block calls transformers.models.esm.modeling_esmfold:EsmFoldAttention.forward" in capsys.readouterr().out
    )


CLIENT = """
import torch

def single(x):
    return [x.float(), x.to(torch.float32), x.to(dtype=torch.float32)]

class PairWeightedAveraging:
    def forward(self, x):
        return weights(x)

def weights(x):
    return torch.softmax(x, -1)
"""


@pytest.mark.parametrize("dtype", LIMITS)
def test_a_clients_casts_stay_in_float64_and_its_softmaxes_are_counted(dtype: torch.dtype) -> None:
    """A softmax of averaging is no attention; what evoattn casts and computes is its own."""
    toy: dict[str, Any] = {"__name__": "toy"}
    exec(compile(CLIENT, "toy.py", "exec"), toy)
    namespace: dict[str, Any] = {"__name__": "evoattn.toy"}
    exec(compile(CLIENT, "ours.py", "exec"), namespace)
    x = torch.randn(3, 4, dtype=dtype)
    with Watch(dtype) as watch:
        assert {y.dtype for y in toy["single"](x)} == {dtype}
        assert {y.dtype for y in namespace["single"](x)} == {torch.float32}
        toy["PairWeightedAveraging"]().forward(x)
        namespace["weights"](x)
        assert not watch.theirs
        toy["weights"](x)
    assert watch.theirs == {"toy.py": 1}


def test_parameters_are_far_from_zero_and_the_same_in_every_dtype() -> None:
    double, single = (TRUNK.call(Problem(16, dtype)) for dtype in LIMITS)
    for a, b in zip(double.module.parameters(), single.module.parameters(), strict=True):
        assert (a != 0).all() and torch.equal(a.float(), b)
    assert Block("", TRUNK.call).ways == ({},)
