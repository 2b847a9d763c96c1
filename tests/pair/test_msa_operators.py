"""Outer product mean and pair-weighted averaging, in slices of any size, against float64 and against torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evoattn.pair import averaging, outer_product, outer_product_mean, pair_weighted_averaging, slices
from evoattn.testing import relative_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

Run = Callable[..., Tensor]


def _product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return outer_product_mean(a, b, weight, bias, counts=counts)


def _divided(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return outer_product_mean(a, b, weight, bias, counts=counts, divides_bias=True)


def _dense_divided(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return outer_product.reference(a, b, weight, bias, counts, True)


def _average(m: Tensor, p: Tensor, v: Tensor, g: Tensor, out: Tensor) -> Tensor:
    return pair_weighted_averaging(m, p, v_weight=v, g_weight=g, out_weight=out)


def _dense_average(m: Tensor, p: Tensor, v: Tensor, g: Tensor, out: Tensor) -> Tensor:
    return averaging.reference(m, p, averaging._Weights(v, g, out))


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=rng, dtype=torch.float64) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)
        for shape in shapes
    ]


def of_product(b: int, s: int, i: int, j: int, c: int, d: int, e: int) -> list[Tensor]:
    tensors = drawn((b, s, i, c), (b, s, j, d), (e, c * d), (e,))
    return [*tensors, torch.rand(b, i, j, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * s + 1]


def of_averaging(b: int, s: int, length: int, c: int, h: int, d: int, e: int) -> list[Tensor]:
    m, p, *weights = drawn((b, s, length, c), (b, h, length, length), (h * d, c), (h * d, c), (e, h * d))
    return [m, p.softmax(-1), *weights]


PROBLEMS: dict[str, tuple[Run, Run, list[Tensor]]] = {
    "product": (_product, outer_product.reference, of_product(2, 5, 7, 6, 3, 4, 9)),
    "product, whose bias is divided": (_divided, _dense_divided, of_product(2, 5, 7, 6, 3, 4, 9)),
    "product of one sequence": (_product, outer_product.reference, of_product(1, 1, 16, 16, 8, 8, 12)),
    "product of many": (_product, outer_product.reference, of_product(1, 40, 33, 33, 32, 32, 16)),
    "averaging": (_average, _dense_average, of_averaging(2, 5, 7, 6, 3, 4, 9)),
    "averaging of one sequence": (_average, _dense_average, of_averaging(1, 1, 16, 16, 8, 8, 12)),
    "averaging of many": (_average, _dense_average, of_averaging(1, 40, 33, 64, 8, 32, 64)),
}
EACH = pytest.mark.parametrize("name", PROBLEMS)


def step(run: Run, tensors: list[Tensor], dtype: torch.dtype, compute: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of all tensors but counts, for tensors of a dtype in another one."""
    leaves = [x.clone().to(dtype).to(compute).requires_grad_() for x in tensors]
    if run in (_product, outer_product.reference, _divided, _dense_divided):
        leaves[-1] = leaves[-1].detach()
    result = run(*leaves)
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(result.device)
    wanted = [x for x in leaves if x.requires_grad]
    return [result, *torch.autograd.grad(result, wanted, cotangent.to(dtype).to(compute))]


@pytest.mark.parametrize("size", [1, 1 << 12, 1 << 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EACH
def test_results_and_gradients(name: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row or sequence at a time, some, or all. They lose no more than 1.5 times what torch's own operations lose."""
    monkeypatch.setattr(slices, "BYTES", size)
    run, dense, tensors = PROBLEMS[name]
    right, plain = step(dense, tensors, dtype, torch.float64), step(dense, tensors, dtype, dtype)
    floor = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}[dtype]
    for actual, expected, rough in zip(step(run, tensors, dtype, dtype), right, plain, strict=True):
        assert actual.dtype == dtype and actual.shape == expected.shape
        assert relative_error(actual, expected) <= max(floor, 1.5 * relative_error(rough, expected))


@EACH
def test_two_runs_are_bit_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "BYTES", 1 << 12)
    run, _, tensors = PROBLEMS[name]
    first, second = (step(run, tensors, torch.float32, torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second))


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x._base is None:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return result


def test_no_tensor_of_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of pairs have 16 times as many elements as the largest tensor that is made, v and g of all sequences 8."""
    monkeypatch.setattr(slices, "BYTES", 1 << 14)
    s, length, c = 24, 24, 16
    a, b, weight, bias, counts = (x.float() for x in of_product(1, s, length, length, c, c, 8))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        outer_product._forward(a, b, weight, bias, counts, True)
        outer_product._backward(torch.ones(1, length, length, 8), a, b, weight, counts, True, [True] * 4)
    assert largest.elements * 16 <= length * length * c * c
    m, p, v, g, out = (x.float() for x in of_averaging(1, 256, length, 4, 8, 8, 4))
    joined = torch.cat((v, g))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        averaging._forward(m, p, joined, out)
        averaging._backward(torch.ones_like(m), m, p, joined, out, [True] * 4)
    assert largest.elements * 8 <= 256 * length * 2 * 8 * 8


@EACH
def test_transforms_of_torch(name: str) -> None:
    """`torch.func` differentiates torch's own operations, once and twice."""
    run, dense, tensors = PROBLEMS[name]
    first, *others = tensors

    def total(call: Run) -> Callable[[Tensor], Tensor]:
        return lambda x: call(x, *others).square().sum()

    torch.testing.assert_close(torch.func.grad(total(run))(first), torch.func.grad(total(dense))(first))
    batch = torch.stack([first, 2 * first])
    torch.testing.assert_close(torch.vmap(total(run))(batch), torch.vmap(total(dense))(batch))


@EACH
def test_a_second_derivative_raises(name: str) -> None:
    run, _, (first, *others) = PROBLEMS[name]
    x = first.clone().requires_grad_()
    (dx,) = torch.autograd.grad(run(x, *others).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dx.sum(), x)


def test_a_pair_of_no_sequences_has_gradients_in_float16() -> None:
    """Its sum is divided by eps. The gradient of the sum leaves float16's range, and meets sequences that are 0."""
    a, b, counts = torch.zeros(1, 3, 4, 2).half(), torch.zeros(1, 3, 4, 2).half(), torch.full((1, 4, 4), 1e-3)
    leaves = [x.requires_grad_() for x in (a, b, torch.full((5, 4), 100.0).half())]
    gradients = torch.autograd.grad(outer_product_mean(*leaves, counts=counts).sum(), leaves)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in gradients)


@pytest.mark.parametrize("which", ["product", "averaging"])
def test_empty_tensors(which: str) -> None:
    """No sequences: the sums are 0. No residues: nothing."""
    if which == "product":
        a, b, weight, bias, counts = of_product(2, 0, 4, 4, 2, 2, 3)
        assert torch.equal(_product(a, b, weight, bias, counts), bias.expand(2, 4, 4, 3))
        assert _product(a[:, :, :0], b, weight, bias, counts[:, :0]).shape == (2, 0, 4, 3)
    else:
        m, p, *weights = of_averaging(2, 3, 4, 4, 2, 2, 3)
        assert _average(m[:, :0], p, *weights).shape == (2, 0, 4, 3)
        assert _average(m[:, :, :0], p[..., :0, :0], *weights).shape == (2, 3, 0, 3)


A, B, W, BIAS, COUNTS = of_product(1, 3, 5, 4, 2, 3, 7)
M, P, V, G, OUT = of_averaging(1, 3, 5, 4, 2, 3, 7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: outer_product_mean(A.numpy(), B, W), TypeError, "a must be a torch.Tensor, got ndarray"),
        (lambda: outer_product_mean(A.long(), B, W), TypeError, "a must be of a floating-point dtype, got torch.int64"),
        (lambda: outer_product_mean(A, B.to("meta"), W), ValueError, "b must be on cpu, as a is, got meta"),
        (lambda: outer_product_mean(A[0, 0], B[0, 0], W), ValueError, r"a must be \[\*, S, I, C\], got shape \[5, 2\]"),
        (lambda: outer_product_mean(A, B[:, 1:], W), ValueError, r"b must be \[1, 3, 'J', 'D'\] for an a of shape"),
        (lambda: outer_product_mean(A, B, W[:, 1:]), ValueError, r"weight must be \[E, 6\] for 2 and 3 channels, got \[7, 5\]"),
        (lambda: outer_product_mean(A, B, W, BIAS[1:]), ValueError, r"bias must be \[7\], got shape \[6\]"),
        (
            lambda: outer_product_mean(A, B, W, counts=COUNTS.mT),
            ValueError,
            r"counts must be \[1, 5, 4\], got shape \[1, 4, 5\]",
        ),
        (
            lambda: outer_product_mean(A, B, W, counts=COUNTS.clone().requires_grad_()),
            ValueError,
            r"counts must not want a gradient: pass counts.detach\(\)",
        ),
        (lambda: _average(M[0, 0], P[0, 0], V, G, OUT), ValueError, r"m must be \[\*, S, L, C\], got shape \[5, 4\]"),
        (lambda: _average(M, P[..., 1:], V, G, OUT), ValueError, r"p must be \[1, 'H', 5, 5\] for an m of shape"),
        (lambda: _average(M, P, V[1:], G, OUT), ValueError, r"v_weight must be \[H D, 4\] for H = 2 heads of p, got shape"),
        (lambda: _average(M, P, V, G[:4], OUT), ValueError, r"g_weight must be \[6, 4\], as v_weight is, got shape \[4, 4\]"),
        (lambda: _average(M, P, V, G, OUT[:, 1:]), ValueError, r"out_weight must be \[E, 6\], got shape \[7, 5\]"),
    ],
)
def test_wrong_arguments(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
