"""Every layer of `evoattn.nn` against the same layer in dense torch: outputs, all gradients, and how it is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import evoattn.nn as evoattn_nn
from evoattn.nn import attention
from tests.nn.dense import Dense, leaves_of
from tests.nn.layer_cases import EACH, LAYERS, step, truth, worst

pytestmark = pytest.mark.usefixtures("poisoned")

OF_ATTENTION = [case for case in LAYERS if not case.name.startswith(("multiplication", "transition", "MSA module"))]
EACH_ATTENTION = pytest.mark.parametrize("case", OF_ATTENTION, ids=lambda case: case.name)


@EACH
@pytest.mark.parametrize("empty", [False, True])
def test_layer_in_float64_agrees_with_dense_torch(case: Dense, empty: bool) -> None:
    """As dense torch; -1e9 takes 7 digits of the scores of rows without a key, there."""
    layer = case.layer()
    inputs, mask = case.arguments(empty=empty)
    actual = step(layer, leaves_of(layer), inputs, mask)
    assert worst(actual, truth(case, layer, inputs, mask, swallowed=False)) < (1e-6 if empty else 1e-12)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layer_in_narrower_dtypes_agrees_with_float64(case: Dense, dtype: torch.dtype) -> None:
    """No worse than three times what dense torch of the dtype loses; rows without a key have the mean of v."""
    layer = case.layer(dtype)
    inputs, mask = case.arguments(dtype)
    expected = truth(case, layer, inputs, mask, swallowed=True)
    reference = case.reference(layer, dtype, swallowed=True)
    budget = 3 * worst(step(reference, reference.parameters, inputs, mask), expected)  # type: ignore[attr-defined]
    actual = step(layer, leaves_of(layer), inputs, mask)
    assert {x.dtype for x in actual} == {dtype}
    assert worst(actual, expected) < budget < 0.2


@EACH
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bool])
def test_layer_under_autocast_agrees_with_float64(case: Dense, mask_dtype: torch.dtype) -> None:
    """float32 parameters and inputs, bfloat16 products: the output is bfloat16, gradients are float32."""
    layer = case.layer(torch.float32)
    inputs, mask = case.arguments(torch.float32)
    mask = mask.to(mask_dtype)
    expected = truth(case, layer, inputs, mask, swallowed=True)
    reference = case.reference(layer, torch.float32, swallowed=True)

    def run(call: Any) -> Callable[..., Tensor]:
        def under_autocast(*inputs: Tensor, mask: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return call(*inputs, mask=mask)

        return under_autocast

    budget = 3 * worst(step(run(reference), reference.parameters, inputs, mask), expected)  # type: ignore[attr-defined]
    output, *gradients = step(run(layer), leaves_of(layer), inputs, mask)
    assert output.dtype == torch.bfloat16 and {x.dtype for x in gradients} == {torch.float32}
    assert worst([output, *gradients], expected) < budget < 0.2


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_to_the_other_16_bits_of_parameters(case: Dense, dtype: torch.dtype) -> None:
    layer = case.layer(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
    inputs, mask = case.arguments(torch.float32)
    with torch.autocast("cpu", dtype):
        output, *gradients = step(layer, leaves_of(layer), inputs, mask)
    assert output.dtype == dtype
    assert worst([output, *gradients], truth(case, layer, inputs, mask, swallowed=True)) < 0.05


@EACH
def test_without_a_mask(case: Dense) -> None:
    layer = case.layer()
    inputs, mask = case.arguments()
    nothing = torch.ones_like(mask)
    actual = step(lambda *inputs, mask: layer(*inputs), leaves_of(layer), inputs, nothing)
    assert worst(actual, truth(case, layer, inputs, nothing, swallowed=False)) < 1e-12


@EACH_ATTENTION
def test_native_rows_without_a_key_have_no_attention(case: Dense) -> None:
    """Every other row is as it was. A row without a key has the output product of 0."""
    layer = case.layer()
    inputs, mask = case.arguments()
    mean = layer(*inputs, mask=mask)
    for module in layer.modules():
        if hasattr(module, "empty_rows"):
            module.empty_rows = "native"
    native = layer(*inputs, mask=mask)
    out = next(module for name, module in layer.named_modules() if name.endswith("linear_o"))
    nothing = (native == (0 if out.bias is None else out.bias)).all(-1)
    assert nothing.any() and not nothing.all()
    assert torch.allclose(native[~nothing], mean[~nothing], atol=1e-12)


@pytest.mark.parametrize("empty_rows", ["mean", "native"])
@EACH_ATTENTION
def test_which_attentions_apply_the_gate(case: Dense, empty_rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose output is not turned around."""
    layer = case.layer()
    for module in layer.modules():
        if hasattr(module, "empty_rows"):
            module.empty_rows = empty_rows
    gates: list[bool] = []
    real = attention.evoformer_attention

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        gates.append(options.get("gate") is not None)
        return real(*tensors, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(attention, "evoformer_attention", spy)
    inputs, mask = case.arguments()
    layer(*inputs, mask=mask)
    assert gates == [case.name in ("triangle, start", "MSA rows") or isinstance(layer, evoattn_nn.AttentionPairBias)]


@EACH
def test_no_numbers(case: Dense) -> None:
    """Both passes on the meta device, for whoever counts operations or plans memory."""
    layer = case.layer(torch.float32)
    inputs, mask = case.arguments(torch.float32)
    expected = step(layer, leaves_of(layer), inputs, mask)
    shapes = [x.detach().to("meta").requires_grad_() for x in inputs]
    empty = copy.deepcopy(layer).to("meta")
    actual = step(empty, leaves_of(empty), shapes, mask.to("meta"))
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in expected]


@EACH
def test_checkpoint_is_bit_equal(case: Dense) -> None:
    layer = case.layer(torch.float32)
    inputs, mask = case.arguments(torch.float32)
    leaves = leaves_of(layer)

    def again(*inputs: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(layer, *inputs, mask=mask, use_reentrant=False)  # type: ignore[no-any-return]

    for x, y in zip(step(again, leaves, inputs, mask), step(layer, leaves, inputs, mask), strict=True):
        assert torch.equal(x, y)


@EACH
def test_only_what_needs_a_gradient(case: Dense) -> None:
    """Frozen parameters, or inputs without a gradient, change nothing in the gradients of the others."""
    layer = case.layer()
    inputs, mask = case.arguments()
    leaves = leaves_of(layer)
    output, *gradients = step(layer, leaves, inputs, mask)
    frozen = copy.deepcopy(layer).requires_grad_(False)
    for a, b in zip(step(frozen, [], inputs, mask)[1:], gradients[: len(inputs)], strict=True):
        assert torch.equal(a, b)
    fixed = [x.detach() for x in inputs]
    expected = layer(*fixed, mask=mask)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(expected, leaves, cotangent), gradients[len(inputs) :], strict=True):
        assert torch.equal(a, b)
