"""The transition on the CPU, in plain torch: against float64, and how it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evoattn.pair import transition
from evoattn.pair.checking import cast
from evoattn.pair.transitions import call as transition_call
from evoattn.pair.values import TransitionOptions as Options
from evoattn.pair.values import TransitionWeights as Weights
from evoattn.testing import relative_error
from tests.pair.problems import differentiated, worst
from tests.pair.transitions import call, inputs, truth, weights

pytestmark = pytest.mark.usefixtures("poisoned")

ACTIVATIONS = pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@ACTIVATIONS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)], ids=str)
def test_transition_in_float64_agrees_with_dense_torch(gated: bool, bias: bool, shape: tuple[int, ...]) -> None:
    parameters, (x, mask, do) = weights(6, 10, gated=gated, bias=bias), inputs(shape, 6)
    options = Options(1e-5, residual=bias)
    actual = differentiated(call(x, mask if bias else None, parameters, options), x, parameters, do)
    assert worst(actual, truth(x, mask if bias else None, parameters, options, do)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@ACTIVATIONS
def test_transition_in_narrower_dtypes_agrees_with_float64(gated: bool, dtype: torch.dtype) -> None:
    parameters, (x, mask, do) = weights(16, 32, gated=gated, bias=True, dtype=dtype), inputs((2, 9), 16, dtype)
    options = Options(1e-5, residual=True)
    actual = differentiated(call(x, mask, parameters, options), x, parameters, do)
    assert {y.dtype for y in actual} == {dtype}
    assert worst(actual, truth(x, mask, parameters, options, do)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("shape", "dtype"), [((2, 1), torch.bool), ((1, 5), torch.float32), ((2, 5), torch.int64)])
def test_masks_of_all_kinds(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The output's bias is masked, too, as OpenFold does."""
    parameters, (x, _, do) = weights(6, 4, gated=True, bias=True), inputs((2, 5), 6)
    mask = (3 * torch.rand(shape, generator=torch.Generator().manual_seed(4))).to(dtype)
    options = Options(1e-5, residual=False)
    actual = differentiated(call(x, mask, parameters, options), x, parameters, do)
    assert worst(actual, truth(x, mask, parameters, options, do)) < 1e-12


def test_the_gradient_of_a_mask() -> None:
    parameters, (x, mask, _) = weights(6, 4, gated=True, bias=True), inputs((5,), 6)
    mask = mask.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda mask: call(x, mask, parameters, Options(1e-5, False)), [mask])


@pytest.mark.parametrize("frozen", ["weights", "x", "all but one"])
def test_only_what_is_wanted_has_a_gradient(frozen: str) -> None:
    parameters, (x, mask, do) = weights(6, 4, gated=True, bias=True), inputs((5,), 6)
    options = Options(1e-5, False)
    expected = dict(zip(("out", "x", *Weights._fields), truth(x, mask, parameters, options, do), strict=True))
    wanted = {"weights": ["x"], "x": list(Weights._fields), "all but one": ["b_weight"]}[frozen]
    named = {"x": x, **parameters._asdict()}
    for name, y in named.items():
        y.requires_grad_(name in wanted)
    call(x, mask, parameters, options).backward(do)
    for name, y in named.items():
        assert (y.grad is not None) == (name in wanted), name
        assert y.grad is None or relative_error(y.grad, expected[name]) < 1e-12, name


def test_transition_under_autocast_agrees_with_float64() -> None:
    parameters, (x, mask, do) = weights(16, 32, gated=True, bias=True, dtype=torch.float32), inputs((9,), 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x, mask, parameters, Options(1e-5, False)).dtype == torch.bfloat16
        out = call(x, mask, parameters, Options(1e-5, True))
    assert out.dtype == torch.float32
    actual = differentiated(out, x, parameters, do)
    assert {y.dtype for y in actual} == {torch.float32}
    assert worst(actual, truth(x, mask, parameters, Options(1e-5, True), do)) < 2e-2


def test_transition_of_no_rows_is_empty() -> None:
    parameters, (x, mask, do) = weights(6, 4, gated=True, bias=True), inputs((2, 0), 6)
    out = call(x, mask, parameters, Options(1e-5, True))
    assert out.shape == x.shape
    assert all(y.isfinite().all() for y in differentiated(out, x, parameters, do))


def test_a_transposed_x_and_an_output_changed_in_place() -> None:
    parameters, (x, mask, do) = weights(6, 4, gated=True, bias=True), inputs((3, 5), 6)
    options = Options(1e-5, False)
    turned = x.detach().transpose(0, 1).contiguous().requires_grad_()
    out = call(turned.transpose(0, 1), mask, parameters, options)
    out *= 2
    (dx,) = torch.autograd.grad(out, turned, do)
    assert relative_error(dx.transpose(0, 1), 2 * truth(x, mask, parameters, options, do)[1]) < 1e-12


def test_weights_of_any_strides() -> None:
    """The kernels want rows one after the other; they get copies."""
    parameters, (x, mask, do) = weights(6, 4, gated=True, bias=True), inputs((5,), 6)
    turned: Any = [y if y.ndim == 1 else y.detach().t().contiguous().t().requires_grad_() for y in parameters]
    assert all(y.is_contiguous() for y in cast(x, Weights(*turned), turned[2]) if y is not None)
    options = Options(1e-5, False)
    actual = differentiated(call(x, mask, Weights(*turned), options), x, Weights(*turned), do)
    assert worst(actual, truth(x, mask, parameters, options, do)) < 1e-12


def test_transition_under_vmap_and_grad_agrees_with_float64() -> None:
    parameters, (x, mask, do) = weights(6, 4, gated=True, bias=True), inputs((3, 5), 6)
    options = Options(1e-5, False)
    expected = truth(x, mask, parameters, options, do)
    by_row = torch.func.vmap(lambda x, mask: call(x, mask, parameters, options))(x, mask)
    assert relative_error(by_row, expected[0]) < 1e-12
    dx = torch.func.grad(lambda x: (call(x, mask, parameters, options) * do).sum())(x)
    assert relative_error(dx, expected[1]) < 1e-12


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"activation": "gelu"}, ValueError, "activation must be 'swiglu' or 'relu', got 'gelu'"),
    ({"activation": "relu"}, ValueError, "b_weight and b_bias must be None with activation='relu'"),
    ({"b_weight": None}, ValueError, "b_weight must be given with activation='swiglu', got None"),
    ({"x": torch.tensor(1.0)}, ValueError, "x must be \\[\\*, C\\], got a scalar"),
    ({"x": torch.ones(5, 6, dtype=torch.int32)}, TypeError, "x must be of a floating-point dtype, got torch.int32"),
    ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    ({"mask": torch.ones(5)}, ValueError, "mask must broadcast to \\[2, 5\\] and have as many axes, got shape \\[5\\]"),
    ({"mask": [1]}, TypeError, "mask must be a torch.Tensor or None, got list"),
    ({"mask": torch.ones(2, 5, device="meta")}, ValueError, "mask must be on cpu, as x is, got meta"),
    ({"a_weight": torch.ones(7, 6)}, ValueError, "a_weight must be \\[4, 6\\] .*H = 4 .*, got shape \\[7, 6\\]"),
    ({"b_bias": torch.ones(5)}, ValueError, "b_bias must be \\[4\\] .*, got shape \\[5\\]"),
    ({"out_weight": torch.ones(6)}, ValueError, "out_weight must be \\[C, H\\], got shape \\[6\\]"),
    ({"norm_weight": 1.0}, TypeError, "norm_weight must be a torch.Tensor, got float"),
    ({"a_bias": torch.ones(4, device="meta")}, ValueError, "a_bias must be on cpu, as x is, got meta"),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_what_does_not_fit_is_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    parameters: Any = {**weights(6, 4, gated=True, bias=True)._asdict(), "x": torch.ones(2, 5, 6), "mask": None, **changed}
    with pytest.raises(error, match=message):
        transition(parameters.pop("x"), parameters.pop("mask"), **parameters)


def test_a_result_written_into_x() -> None:
    parameters, (x, mask, _) = weights(6, 4, gated=True, bias=True), inputs((3, 5), 6)
    frozen: Any = {name: y.detach() for name, y in parameters._asdict().items()}
    x = x.detach()
    right, other = transition(x, mask, residual=True, **frozen), torch.empty_like(x)
    assert transition(x, mask, residual=True, out=other, **frozen) is other and torch.equal(other, right)
    assert transition(x, mask, residual=True, out=x, **frozen) is x and torch.equal(x, right)


@pytest.mark.parametrize(
    ("out", "word"),
    [
        (torch.empty(5, 5).double(), r"out must be \[5, 6\] of torch.float64 on cpu, as the result is, got"),
        (torch.empty(5, 6), "of torch.float32 on cpu"),
        (torch.empty(5, 6).double(), "out takes no result with a gradient"),
    ],
)
def test_what_a_result_is_not_written_into(out: torch.Tensor, word: str) -> None:
    parameters, (x, mask, _) = weights(6, 4, gated=True, bias=True), inputs((5,), 6)
    named: Any = parameters._asdict()
    with pytest.raises(ValueError, match=word):
        transition(x, mask, out=out, **named)


@pytest.mark.parametrize("masked", [False, True])
def test_inference_takes_some_rows_at_a_time(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gradient, which keeps all of them, it takes all at once."""
    parameters, (x, mask, _) = weights(6, 10, gated=True, bias=True), inputs((3, 5), 6)
    options, rows = Options(1e-5, residual=True), list[int]()
    right = call(x, mask if masked else None, parameters, options).detach()
    dense = transition_call.dense

    def watched(x: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(x.numel() // 6)
        return dense(x, *args)

    monkeypatch.setattr(transition_call, "dense", watched)
    monkeypatch.setattr(transition_call, "CHUNK", 4)
    with torch.no_grad():
        torch.testing.assert_close(call(x, mask if masked else None, parameters, options), right)
    assert rows == [4, 4, 4, 3]
    call(x, mask if masked else None, parameters, options)
    assert rows[4:] == [15]
