"""Calls go straight to a plan when nothing special is going on, and through the operators when anything is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import evoattn
from evoattn import testing
from tests.dispatch.calls import FORWARD, attend, in_a_function_mode, leaves, step
from tests.helpers.operators import Operators
from tests.helpers.planner import Planner


@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_eager_call_of_awkward_case_agrees_with_float64(case: testing.Case, planner: Planner) -> None:
    """Both ways give what the oracle gives, twice: when the call is worked out, and when it is known."""
    inputs = case.make(seed=1)
    for _ in range(2):
        testing.check(testing.run(inputs, "reference"), inputs)


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
@pytest.mark.parametrize("lead", [(), (1,), (2,), (2, 3)])
@pytest.mark.parametrize("pair_bias", ["11hqk", "b1hqk", None])
@pytest.mark.parametrize("gate", [None, "random"])
def test_plain_calls_go_straight_to_the_plan(
    planner: Planner, operators: Operators, lead: tuple[int, ...], layout: str, pair_bias: str | None, gate: str | None
) -> None:
    if not lead and pair_bias:
        pair_bias = pair_bias[1:]
    inputs = testing.Case("plain", lead=lead, layout=layout, mask="random", pair_bias=pair_bias, gate=gate).make(seed=2)  # type: ignore
    testing.check(testing.run(inputs, "reference"), inputs)
    assert operators.called() == []
    assert (planner.forwards, planner.backwards) == (1, 1)


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
@pytest.mark.parametrize("pair_bias", [None, (4, 1, 6), (1, 6)])
def test_global_attention_goes_straight_to_a_plan(
    planner: Planner, operators: Operators, pair_bias: tuple[int, ...] | None, layout: str
) -> None:
    """One query of heads that share their keys: the plan has the heads as queries of one head, and the tensors stay."""
    q, k, v = torch.randn(2, 3, 1, 4, 8), torch.randn(2, 3, 6, 1, 8), torch.randn(2, 3, 6, 1, 8)
    tensors = [x if layout == "bnlhd" else x.transpose(2, 3).contiguous() for x in (q, k, v)]
    biases = [] if pair_bias is None else [torch.randn(pair_bias)]
    arguments = [x.requires_grad_() for x in (*tensors, *biases)]
    for _ in range(2):
        output = attend(*arguments[:3], None, *(arguments[3:] or [None]), layout=layout)
        torch.autograd.grad(output.sum(), arguments)
    assert output.is_contiguous()
    assert operators.called() == []
    assert (planner.forwards, planner.backwards) == (2, 2)
    assert (planner.planned_forwards, planner.planned_backwards) == (1, 1)
    assert planner.shapes == {(2, 3, 1, 4, 8)}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("lead", [(1,), (2, 3)])
def test_explain_describes_the_plan_that_runs(planner: Planner, lead: tuple[int, ...], return_lse: bool) -> None:
    """It makes the plans of both passes, and the call finds them."""
    arguments = leaves(lead=lead)
    q, k, v, mask_bias, pair_bias = arguments
    options: dict[str, Any] = {"backend": "reference", "return_lse": return_lse}
    told = evoattn.explain(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, **options)
    assert told.backend == "reference"
    planned = planner.planned_forwards, planner.planned_backwards
    assert planned == (1, 1) and planner.forwards == planner.backwards == 0
    output = evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, **options)
    outputs = output if return_lse else (output,)
    torch.autograd.grad(outputs, arguments, [torch.randn_like(x) for x in outputs])
    assert (planner.planned_forwards, planner.planned_backwards) == planned
    assert (planner.forwards, planner.backwards) == (1, 1)


def test_operators_and_calls_share_their_plans(planner: Planner, operators: Operators) -> None:
    """The same canonical tensors, here seen by a function mode."""
    tensors = [x.detach() for x in leaves()]
    attend(*tensors)
    in_a_function_mode(tensors)
    assert operators.called() == ["forward"]
    assert planner.forwards == 2 and planner.planned_forwards == 1


def test_the_same_graph_of_autograd(planner: Planner, operators: Operators) -> None:
    """Only what requires a gradient is recorded, and nothing is where gradients are off."""
    tensors = leaves()
    assert not attend(*(x.detach() for x in tensors)).requires_grad
    with torch.no_grad():
        assert not attend(*tensors).requires_grad
    assert attend(*tensors).requires_grad
    with torch.inference_mode():
        assert attend(*tensors).is_inference()
    q, k, v, mask_bias, pair_bias = (x.detach() for x in tensors)
    output = attend(q, k, v, mask_bias, pair_bias.requires_grad_())
    (gradient,) = torch.autograd.grad(output.sum(), pair_bias)
    assert gradient.shape == pair_bias.shape
    assert operators.called() == []


def test_an_expanded_bias_has_its_gradient_in_the_expanded_shape(planner: Planner, operators: Operators) -> None:
    *others, pair_bias = leaves(lead=(2,), pair_bias="11hqk")
    expected = step([*others, pair_bias])
    expanded = pair_bias.detach().expand(2, -1, -1, -1, -1).requires_grad_()
    assert expanded.stride(0) == 0
    actual = step([*others, expanded])
    assert actual[-1].shape == expanded.shape
    torch.testing.assert_close(actual[-1].sum(0, keepdim=True), expected[-1])
    assert operators.called() == []


def test_an_input_changed_before_the_backward_is_noticed(planner: Planner) -> None:
    tensors = leaves()
    output = attend(*tensors)
    with torch.no_grad():
        tensors[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_nothing_is_recorded_in_inference_mode(planner: Planner, operators: Operators) -> None:
    """Not even where gradients are switched on inside of it."""
    tensors = leaves()
    with torch.inference_mode(), torch.enable_grad():
        output = attend(*tensors)
    assert output.is_inference() and not output.requires_grad
    assert operators.called() == []


def test_compiled_code_sees_one_operator(planner: Planner) -> None:
    """After eager calls that look the same, and with a module's parameters."""
    torch._dynamo.reset()
    arguments = leaves()
    expected = step(arguments)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: list) -> Callable:
        graphs.append(copy.deepcopy(graph))
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*arguments), expected[0])
    assert FORWARD in {node.target for node in graphs[0].graph.nodes}


def test_a_backward_under_compiled_autograd(planner: Planner) -> None:
    torch._dynamo.reset()
    arguments = leaves()
    expected = step(arguments)
    output = attend(*arguments)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        output.backward(cotangent)
    for x, y in zip(arguments, expected[1:], strict=True):
        torch.testing.assert_close(x.grad, y)
