"""Calls with a gate, planned and launched without a GPU, with nothing in the place of the Hopper kernels."""

import dataclasses
import os
from typing import Any

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn.backends import GATED_AFTER, GATED_BACKWARD, Cotangents, hopper
from evoattn.backends.hopper import head_groups
from evoattn.core.config import Config
from evoattn.core.layouts import empty_gradients, empty_outputs
from tests.helpers.gates import ALL, ONLY_GATE, Gated

CALL = Gated("call", n=4, lq=100, lk=70, d=32, c=32, dtype=torch.bfloat16, pair_bias=torch.bfloat16)
CALLS = (
    CALL,
    dataclasses.replace(CALL, name="sliced", gate="sliced", layout="bnhld"),
    dataclasses.replace(CALL, name="expanded", gate="expanded", dlse=True, mask_bias=True),
    dataclasses.replace(CALL, name="odd", gate="odd"),
    dataclasses.replace(CALL, name="one_kernel", n=66, pair_bias=None),
    dataclasses.replace(CALL, name="only_keys", needs=(False, True, True, False, False, True)),
    dataclasses.replace(CALL, name="without_dgate", needs=(*ALL[:5], False), deterministic=True),
)
STAGES = {
    "one_kernel": ["FusedGradients"],
    "only_keys": ["Statistics", "KeyGradients"],
    "without_dgate": ["QueryGradients", "KeyGradients", "PanelSum"],
}
LAID_OUT = {"KeyBias", "PairBias", "PairBiasTiles"}


def run_backward(case: Gated) -> tuple[Any, ...]:
    """The cotangents, inputs, outputs and gradients of a call whose backward was launched."""
    inputs = case.inputs("cpu", seed=1)
    outputs = empty_outputs(inputs, case.layout)
    needs = tuple(need and x is not None for need, x in zip(case.needs, inputs.differentiable, strict=True))
    cotangents = Cotangents(torch.randn_like(outputs.o) if case.do else None, outputs.lse if case.dlse else None)
    options: dict[str, Any] = {"scale": 0.2, "layout": case.layout, "config": Config()}
    gradients = empty_gradients(inputs, case.layout, needs)
    plan = hopper.plan_backward(cotangents, inputs, outputs, needs=needs, deterministic=case.deterministic, **options)
    plan.run(cotangents, inputs, outputs, gradients)
    return cotangents, inputs, outputs, gradients, plan.describe()


def run_forward(case: Gated) -> tuple[Any, ...]:
    """The inputs and outputs of a call whose forward was launched."""
    inputs = case.inputs("cpu", seed=1)
    outputs = empty_outputs(inputs, case.layout)
    plan = hopper.plan_forward(inputs, scale=0.2, layout=case.layout, config=Config())
    plan.run(inputs, outputs)
    return inputs, outputs, plan.describe()


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_a_forward_is_multiplied_by_the_gate_when_it_is_complete(case: Gated, launched: list[Any]) -> None:
    inputs, outputs, told = run_forward(case)
    names = [name for name, _ in launched]
    assert names[-2:] == ["Forward", "GateProduct"] and names.count("GateProduct") == 1
    assert all(outputs.o.data_ptr() in arguments for _, arguments in launched[-2:])
    copied = case.gate in ("odd", "expanded")
    assert (inputs.gate.data_ptr() in launched[-1][1]) != copied
    assert any(text.startswith("gate: copied") for text in told.copies) == copied
    assert told.gate == GATED_AFTER


def test_heads_in_turns(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of the gate are for the heads of all turns."""
    monkeypatch.setattr(head_groups, "divisor", lambda *_: 1)
    case = dataclasses.replace(CALL, n=2, h=4, lq=640, lk=640, d=64, c=64, gate="sliced")
    run_forward(case)
    assert [name for name, _ in launched][-5:] == ["Forward"] * 4 + ["GateProduct"]
    launched.clear()
    run_backward(case)
    assert [name for name, _ in launched].count("GatePass") == 1
    assert [name for name, _ in launched].count("KeyGradients") == 4


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_a_backward_reads_what_the_pass_of_the_gate_makes(case: Gated, launched: list[Any], kernels: list[Any]) -> None:
    (do, _), _, outputs, gradients, told = run_backward(case)
    names = [name for name, _ in launched]
    assert names[0] == "GatePass", "all other kernels may start when it is complete, or wait for one that has waited"
    assert [name for name in names[1:] if name not in LAID_OUT] == STAGES.get(case.name, ["QueryGradients", "KeyGradients"])
    assert {do.data_ptr(), outputs.o.data_ptr()} <= set(launched[0][1])
    for name, arguments in launched[1:]:
        assert not {do.data_ptr(), outputs.o.data_ptr()} & set(arguments), name
    assert (gradients[3] is not None) == case.needs[5]
    if gradients[3] is not None:
        assert gradients[3].data_ptr() in launched[0][1]
    assert {x.data_ptr() for x in gradients[:3] if x is not None} <= {x for _, addresses in launched for x in addresses}
    gated = [kernel for kernel in kernels if type(kernel).__name__ in ("QueryGradients", "FusedGradients", "Statistics")]
    assert all(kernel.gate and kernel.dlse for kernel in gated) and gated
    assert told.gate == GATED_BACKWARD


def test_only_the_gradient_of_the_gate_is_one_launch(launched: list[Any]) -> None:
    *_, told = run_backward(dataclasses.replace(CALL, needs=ONLY_GATE))
    assert [name for name, _ in launched] == ["GatePass"]
    assert told.kernels == {} and told.gate == GATED_BACKWARD


@pytest.mark.parametrize("needs", [ALL, ONLY_GATE], ids=str)
def test_a_gate_has_no_part_in_the_gradient_of_the_lse(needs: tuple[bool, ...], launched: list[Any]) -> None:
    *_, gradients, told = run_backward(dataclasses.replace(CALL, do=False, dlse=True, needs=needs))
    assert "GatePass" not in [name for name, _ in launched]
    assert (len(launched) > 0) == any(needs[:5])
    assert gradients[3].eq(0).all()
    assert told.gate is None
