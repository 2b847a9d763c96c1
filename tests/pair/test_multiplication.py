"""Triangle multiplication on the CPU, in plain torch: against float64, and how it is called."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from evoattn.compat.cuequivariance import triangle_multiplicative_update
from evoattn.nn import TriangleMultiplication
from evoattn.pair import triangle_multiplication
from evoattn.pair.checking import cast
from evoattn.pair.multiplication import call as multiplication
from evoattn.pair.multiplication import products
from evoattn.pair.transitions import call as transitions
from evoattn.pair.values import MultiplicationOptions as Options
from evoattn.pair.values import MultiplicationWeights as Weights
from evoattn.testing import relative_error
from tests.helpers import dense_layers
from tests.pair.problems import call, differentiated, inputs, truth, weights, worst

pytestmark = pytest.mark.usefixtures("poisoned")

DIRECTIONS = pytest.mark.parametrize("direction", ["outgoing", "incoming"])


@DIRECTIONS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(), (1,), (2, 3)], ids=str)
def test_multiplication_in_float64_agrees_with_dense_torch(direction: str, bias: bool, lead: tuple[int, ...]) -> None:
    parameters, (z, mask, do) = weights(6, 10, bias=bias), inputs(lead, 5, 6)
    options = Options(direction == "outgoing", 1e-5, residual=bias)
    actual = differentiated(call(z, mask if bias else None, parameters, options), z, parameters, do)
    assert worst(actual, truth(z, mask if bias else None, parameters, options, do)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@DIRECTIONS
def test_multiplication_in_narrower_dtypes_agrees_with_float64(direction: str, dtype: torch.dtype) -> None:
    parameters, (z, mask, do) = weights(16, 16, bias=True, dtype=dtype), inputs((1,), 9, 16, dtype)
    options = Options(direction == "outgoing", 1e-5, residual=True)
    actual = differentiated(call(z, mask, parameters, options), z, parameters, do)
    assert {x.dtype for x in actual} == {dtype}
    assert (
        worst(actual, truth(z, mask, parameters, options, do))
        < {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    )


@pytest.mark.parametrize(("shape", "dtype"), [((2, 5, 5), torch.bool), ((2, 1, 5), torch.float32), ((1, 5, 1), torch.int64)])
def test_masks_of_all_kinds(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameters, (z, _, do) = weights(6, 4, bias=True), inputs((2,), 5, 6)
    mask = (3 * torch.rand(shape, generator=torch.Generator().manual_seed(4))).to(dtype)
    options = Options(True, 1e-5, residual=False)
    actual = differentiated(call(z, mask, parameters, options), z, parameters, do)
    assert worst(actual, truth(z, mask, parameters, options, do)) < 1e-12


def test_the_gradient_of_a_mask() -> None:
    parameters, (z, mask, _) = weights(6, 4, bias=True), inputs((1,), 4, 6)
    mask = mask.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda mask: call(z, mask, parameters, Options(True, 1e-5, False)), [mask])


@pytest.mark.parametrize("frozen", ["weights", "z", "all but one"])
def test_only_what_is_wanted_has_a_gradient(frozen: str) -> None:
    parameters, (z, mask, do) = weights(6, 4, bias=True), inputs((1,), 5, 6)
    expected = dict(
        zip(("out", "z", *Weights._fields), truth(z, mask, parameters, Options(True, 1e-5, False), do), strict=True)
    )
    wanted = {"weights": ["z"], "z": list(Weights._fields), "all but one": ["g_in_weight"]}[frozen]
    for name, x in (("z", z), *parameters._asdict().items()):
        x.requires_grad_(name in wanted)
    call(z, mask, parameters, Options(True, 1e-5, False)).backward(do)
    for name, x in (("z", z), *parameters._asdict().items()):
        assert (x.grad is not None) == (name in wanted), name
        assert x.grad is None or relative_error(x.grad, expected[name]) < 1e-12, name


def test_a_sum_past_the_range_of_float16() -> None:
    """The product t reaches 3e5 here. The norm after it makes that ordinary again."""
    parameters = weights(16, 16, bias=False, dtype=torch.float16)
    with torch.no_grad():
        parameters.p_in_weight.mul_(64)
    z, _, do = inputs((1,), 33, 16, torch.float16)
    actual = differentiated(call(z, None, parameters, Options(True, 1e-5, False)), z, parameters, do)
    assert worst(actual, truth(z, None, parameters, Options(True, 1e-5, False), do)) < 5e-3


@DIRECTIONS
def test_gradients_of_halves_whose_product_leaves_float16(direction: str) -> None:
    """The product is about 1e6 there, and its gradient about 1e-7, for which float16 has one digit."""
    torch.manual_seed(0)
    ab = (100 * torch.randn(6, 2, 8, 8)).half()
    dt = 1e-7 * torch.randn(3, 2, 8, 8)
    dt[1] *= 1e-6
    dt[2] = 0
    a, b = ab.double().chunk(2)
    wanted = (dt.double() @ b, dt.double().mT @ a) if direction == "outgoing" else (b @ dt.double().mT, a @ dt.double())
    dab = products.backward(dt, [ab], None, outgoing=direction == "outgoing")
    assert dab.dtype == torch.float16
    for actual, right in zip(dab.chunk(2), wanted, strict=True):
        assert relative_error(actual[0], right[0]) < 1e-3 and not actual[2].any()


@pytest.mark.parametrize("call_of", [multiplication, transitions])
def test_torch_compile_asks_for_kernels_while_it_traces(call_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed and which card there is are no code that it can trace."""
    monkeypatch.setattr(call_of._steps(), "takes", lambda device, dtype, channels, hidden: importlib.util.find_spec("torch"))

    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if call_of._takes(torch.device("cuda"), torch.float32, 16, x.shape[0]) else x

    x = torch.zeros(3)
    torch.compiler.reset()
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(x), x + 1)


def test_multiplication_under_autocast_agrees_with_float64() -> None:
    parameters, (z, mask, do) = weights(16, 16, bias=True, dtype=torch.float32), inputs((1,), 6, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        update = call(z, mask, parameters, Options(True, 1e-5, False))
        assert update.dtype == torch.bfloat16
        out = call(z, mask, parameters, Options(True, 1e-5, True))
    assert out.dtype == torch.float32
    actual = differentiated(out, z, parameters, do)
    assert {x.dtype for x in actual} == {torch.float32}
    assert worst(actual, truth(z, mask, parameters, Options(True, 1e-5, True), do)) < 2e-2


@pytest.mark.parametrize("length", [0, 1])
def test_multiplication_of_few_residues_is_finite(length: int) -> None:
    parameters, (z, mask, do) = weights(6, 4, bias=True), inputs((2,), length, 6)
    out = call(z, mask, parameters, Options(False, 1e-5, True))
    assert out.shape == z.shape
    assert all(x.isfinite().all() for x in differentiated(out, z, parameters, do))


def test_a_transposed_z_and_an_output_changed_in_place() -> None:
    parameters, (z, mask, do) = weights(6, 4, bias=True), inputs((1,), 5, 6)
    options = Options(True, 1e-5, False)
    turned = z.detach().transpose(1, 2).contiguous().requires_grad_()
    out = call(turned.transpose(1, 2), mask, parameters, options)
    out *= 2
    (dz,) = torch.autograd.grad(out, turned, do)
    assert relative_error(dz.transpose(1, 2), 2 * truth(z, mask, parameters, options, do)[1]) < 1e-12


def test_weights_of_any_strides() -> None:
    """The kernels want rows one after the other; they get copies."""
    parameters, (z, mask, do) = weights(6, 4, bias=True), inputs((1,), 5, 6)
    turned: Any = [x if x is None or x.ndim == 1 else x.detach().t().contiguous().t().requires_grad_() for x in parameters]
    assert all(x.is_contiguous() for x in cast(z, Weights(*turned), turned[2]) if x is not None)
    options = Options(True, 1e-5, False)
    actual = differentiated(call(z, mask, Weights(*turned), options), z, Weights(*turned), do)
    assert worst(actual, truth(z, mask, parameters, options, do)) < 1e-12


def test_multiplication_under_vmap_and_grad_agrees_with_float64() -> None:
    parameters, (z, mask, do) = weights(6, 4, bias=True), inputs((3,), 5, 6)
    options = Options(True, 1e-5, False)
    expected = truth(z, mask, parameters, options, do)
    by_row = torch.func.vmap(lambda z, mask: call(z, mask, parameters, options))(z, mask)
    assert relative_error(by_row, expected[0]) < 1e-12
    dz = torch.func.grad(lambda z: (call(z, mask, parameters, options) * do).sum())(z)
    assert relative_error(dz, expected[1]) < 1e-12


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"direction": "both"}, ValueError, "direction must be 'outgoing' or 'incoming', got 'both'"),
    ({"z": torch.ones(2, 5, 6)}, ValueError, "z must be \\[\\*, L, L, C\\], got shape \\[2, 5, 6\\]"),
    ({"z": torch.ones(5, 5, 6, dtype=torch.int32)}, TypeError, "z must be of a floating-point dtype, got torch.int32"),
    ({"z": None}, TypeError, "z must be a torch.Tensor, got NoneType"),
    ({"mask": torch.ones(5)}, ValueError, "mask must broadcast to \\[2, 5, 5\\] and have as many axes, got shape \\[5\\]"),
    ({"mask": [1]}, TypeError, "mask must be a torch.Tensor or None, got list"),
    (
        {"p_in_weight": torch.ones(7, 6)},
        ValueError,
        "p_in_weight must be \\[8, 6\\] .*D = 4 .*, got shape \\[7, 6\\]",
    ),
    ({"g_out_bias": torch.ones(5)}, ValueError, "g_out_bias must be \\[6\\] .*, got shape \\[5\\]"),
    ({"p_out_weight": torch.ones(6)}, ValueError, "p_out_weight must be \\[C, D\\], got shape \\[6\\]"),
    ({"norm_in_weight": 1.0}, TypeError, "norm_in_weight must be a torch.Tensor, got float"),
    ({"g_in_weight": torch.ones(8, 6, device="meta")}, ValueError, "g_in_weight must be on cpu, as z is, got meta"),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_what_does_not_fit_is_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    parameters: Any = {**weights(6, 4, bias=True)._asdict(), "z": torch.ones(2, 5, 5, 6), "mask": None, **changed}
    with pytest.raises(error, match=message):
        triangle_multiplication(parameters.pop("z"), parameters.pop("mask"), **parameters)


@DIRECTIONS
def test_cuequivariance_calls_it(direction: str) -> None:
    """With three axes, and a mask of fewer."""
    parameters, (z, mask, _) = weights(6, 4, bias=True), inputs((), 5, 6)
    named: Any = parameters._asdict()
    actual = triangle_multiplicative_update(z, direction, mask[0], eps=1e-3, **named)
    expected = call(z, mask[0].expand(5, 5), parameters, Options(direction == "outgoing", 1e-3, False))
    assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="x must be"):
        triangle_multiplicative_update(z[0], direction, **named)
    with pytest.raises(ValueError, match="p_in_weight must be given"):
        triangle_multiplicative_update(z, direction)
    with pytest.raises(ValueError, match="precision must be None"):
        triangle_multiplicative_update(z, direction, precision="tf32", **named)


def test_dropout_drops_the_same_entries_of_all_rows() -> None:
    layer = TriangleMultiplication(8, 8, dropout=0.5).double()
    torch.nn.init.normal_(layer.linear_z.weight)
    z = torch.randn(1, 6, 6, 8, dtype=torch.float64)
    dropped = layer(z) == 0
    assert dropped.any() and not dropped.all()
    assert (dropped == dropped[:, :1]).all()
    layer.residual = True
    assert (layer(z) == z).any() and not (layer.eval()(z) == z).any()


@pytest.mark.parametrize("change", ["eps", "one bias"])
def test_modules_that_cannot_be_joined_are_called(change: str) -> None:
    layer = TriangleMultiplication(8, 8).double()
    torch.nn.init.normal_(layer.linear_z.weight)
    if change == "eps":
        layer.layer_norm_out.eps = 0.1
    else:
        layer.linear_a_p.bias = None
    z = torch.randn(1, 6, 6, 8, dtype=torch.float64)
    weights = dense_layers.MaskedSoftmax()
    assert relative_error(layer(z), dense_layers.multiplication(layer, z, mask=None, weights=weights)) < 1e-12


def test_a_z_that_is_not_square() -> None:
    with pytest.raises(ValueError, match=r"z must be \[\*, L, L, 8\], the same L twice, got shape \[1, 4, 6, 8\]"):
        TriangleMultiplication(8, 8)(torch.ones(1, 4, 6, 8))


def test_a_result_written_into_z() -> None:
    parameters, (z, mask, _) = weights(6, 4, bias=True), inputs((1,), 4, 6)
    frozen: Any = {name: x.detach() for name, x in parameters._asdict().items()}
    z = z.detach()
    right, other = triangle_multiplication(z, mask, residual=True, **frozen), torch.empty_like(z)
    assert triangle_multiplication(z, mask, residual=True, out=other, **frozen) is other and torch.equal(other, right)
    assert triangle_multiplication(z, mask, residual=True, out=z, **frozen) is z and torch.equal(z, right)


@pytest.mark.parametrize(
    ("out", "word"),
    [
        (torch.empty(1, 4, 4, 5).double(), r"out must be \[1, 4, 4, 6\] of torch.float64 on cpu, as the result is, got"),
        (torch.empty(1, 4, 4, 6), "of torch.float32 on cpu"),
        (torch.empty(1, 4, 4, 6, device="meta").double(), "on meta"),
        (torch.empty(1, 4, 4, 6).double(), "out takes no result with a gradient"),
    ],
)
def test_what_a_result_is_not_written_into(out: torch.Tensor, word: str) -> None:
    parameters, (z, mask, _) = weights(6, 4, bias=True), inputs((1,), 4, 6)
    named: Any = parameters._asdict()
    with pytest.raises(ValueError, match=word):
        triangle_multiplication(z, mask, out=out, **named)


@pytest.mark.parametrize("trained", [(), ("p_out_weight",), ("p_in_weight",)])
def test_a_split_product_exchanges_gradients_whatever_wants_them(
    trained: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without rows computes in plain torch. Its backward exchanges as often as that of a process with kernels."""
    from evoattn.pair.multiplication import call as module

    wants: list[bool] = []

    def product(a: torch.Tensor, b: torch.Tensor, split: object, *, outgoing: bool) -> torch.Tensor:
        wants.append(a.requires_grad and b.requires_grad)
        return a + b

    monkeypatch.setattr(module, "product", product)
    parameters = Weights(*(None if x is None else x.detach() for x in weights(6, 10, bias=True)))
    z, mask, _ = inputs((1,), 5, 6)
    for name in trained:
        getattr(parameters, name).requires_grad_()
    output = module.reference(z.detach(), mask, parameters, Options(True, 1e-5, False), object())  # type: ignore[arg-type]
    assert wants == [bool(trained)] and output.requires_grad == bool(trained)
