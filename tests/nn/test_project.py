"""The pieces of a layer: the joined product, the gated output, dropout, what is kept for the backward, and what is refused."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from evoattn import explain
from evoattn.backends.tiled import dense
from evoattn.nn import (
    AttentionPairBias,
    MSAColumnAttention,
    MSARowAttentionWithPairBias,
    TemplatePointwiseAttention,
    TriangleAttention,
)
from evoattn.nn.attention import add_residual, dropout_mask, gated_linear
from evoattn.nn.project import layer_norm, project

pytestmark = pytest.mark.usefixtures("poisoned")


def linears(c: int, *sizes: tuple[int, bool]) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(c, out, bias=bias, dtype=torch.float64) for out, bias in sizes]


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), nn.LayerNorm(6, bias=False), nn.LayerNorm(6, elementwise_affine=False), None]
)
@pytest.mark.parametrize("sizes", [((8, False), (3, False)), ((3, True), (5, False), (4, True), (1, False)), ((7, True),)])
def test_one_product_is_each_product(norm: nn.Module | None, sizes: tuple[tuple[int, bool], ...]) -> None:
    modules = linears(6, *sizes)
    norm = None if norm is None else norm.double()
    for scale in () if norm is None else norm.parameters():
        nn.init.normal_(scale)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for module in (norm, *modules) if module is not None for p in module.parameters())]
    actual = project(x, norm, modules)
    expected = [module(x if norm is None else norm(x)) for module in modules]
    cotangents = [torch.randn_like(y) for y in expected]
    gradients = torch.autograd.grad(actual, leaves, cotangents), torch.autograd.grad(expected, leaves, cotangents)
    for a, b in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_each_projection_and_each_row_starts_on_16_bytes(dtype: torch.dtype) -> None:
    modules = [module.to(dtype) for module in linears(6, (3, False), (5, True), (4, False))]
    for x in project(torch.randn(7, 5, 6, dtype=dtype), nn.LayerNorm(6, dtype=dtype), modules):
        assert x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(-1) == 1


@pytest.mark.parametrize(("x", "parameters", "expected"), [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float64, torch.float64, torch.float64),
])  # fmt: skip
def test_a_layer_computes_in_the_narrower_dtype(x: torch.dtype, parameters: torch.dtype, expected: torch.dtype) -> None:
    layer = TriangleAttention(8, 4, 2).to(parameters)
    assert layer(torch.randn(1, 3, 3, 8, dtype=x)).dtype == expected


def test_a_norm_alone_has_gradients_where_a_kernel_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU autograd sees nothing of what makes it."""
    module = importlib.import_module("evoattn.nn.project")
    right = module.normalise

    def opaque(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in right(*arguments))

    monkeypatch.setattr(module, "normalise", opaque)
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(6), torch.randn(2, 5, 6, requires_grad=True)
    nn.init.normal_(norm.weight)
    wanted, cotangent = (x, norm.weight, norm.bias), torch.randn(2, 5, 6)
    actual = torch.autograd.grad(layer_norm(x, norm, torch.float32), wanted, cotangent)
    for a, b in zip(actual, torch.autograd.grad(norm(x), wanted, cotangent), strict=True):
        torch.testing.assert_close(a, b)


def test_gated_output() -> None:
    """A broadcast output, as that of global attention, has the sum of the gradients."""
    (module,) = linears(6, (4, True))
    o, g = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 1, 5, 6), (2, 3, 5, 6)))
    assert torch.autograd.gradcheck(lambda o, g, *_: gated_linear(o, g, module), (o, g, *module.parameters()))
    assert torch.allclose(gated_linear(o, g, module), module(o * g.sigmoid()))


def test_a_backward_under_autocast_has_the_dtypes_of_its_forward() -> None:
    modules, norm = [nn.Linear(6, 8), nn.Linear(8, 6)], nn.LayerNorm(6)
    x, g = torch.randn(5, 6, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    output = gated_linear(*project(x, norm, modules[:1]), g, modules[1])
    leaves = [x, g, *modules[0].parameters(), *modules[1].parameters(), *norm.parameters()]
    expected = torch.autograd.grad(output, leaves, torch.ones_like(output), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3)])
@pytest.mark.parametrize("length", [0, 1, 17])
def test_any_leading_axes_and_any_length(lead: tuple[int, ...], length: int) -> None:
    layer = TriangleAttention(8, 4, 2).double()
    for x in layer.parameters():
        nn.init.normal_(x)
    z, mask = torch.randn(*lead, length, length, 8, dtype=torch.float64), torch.ones(*lead, length, length)
    output = layer(z, mask)
    assert output.shape == z.shape
    outputs, flat_input = (x.flatten(0, -4) if lead else x[None] for x in (output, z))
    for a, b in zip(outputs, flat_input, strict=True):
        torch.testing.assert_close(a, layer(b))


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("transpose_bias", [True, False])
def test_a_transposed_pair_representation(starting: bool, transpose_bias: bool) -> None:
    """It is read as it lies, and the answer is that of a copy."""
    layer = TriangleAttention(8, 4, 2, starting=starting).double()
    for x in layer.parameters():
        nn.init.normal_(x)
    z = torch.randn(2, 5, 5, 8, dtype=torch.float64).transpose(1, 2)
    mask = (torch.rand(2, 5, 5) > 0.3).double()
    with Copies() as copies:
        output = layer(z, mask, transpose_bias=transpose_bias)
    assert output.transpose(1, 2).is_contiguous() and not copies.of(z)
    torch.testing.assert_close(output, layer(z.contiguous(), mask, transpose_bias=transpose_bias))
    other = TriangleAttention(8, 4, 2, starting=not starting).double()
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(
        output, other(z.transpose(1, 2), mask.transpose(1, 2), transpose_bias=transpose_bias).transpose(1, 2)
    )


class Copies(TorchDispatchMode):
    """Shapes of what is copied without being converted."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        output = function(*arguments, **(named or {}))
        if function.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.shapes.append(tuple(output.shape))
        return output

    def of(self, z: Tensor) -> bool:
        """Whether something as large as z was copied."""
        return any(torch.Size(shape).numel() >= z.numel() for shape in self.shapes)


@pytest.mark.parametrize("starting", [True, False])
def test_the_forward_of_a_triangle_copies_nothing_large(starting: bool) -> None:
    layer, z = TriangleAttention(32, 8, 4, starting=starting), torch.randn(1, 9, 9, 32)
    with Copies() as copies:
        layer(z)
    assert not copies.of(z)


def test_the_operator_takes_the_views_without_a_copy() -> None:
    """q, k and v of both nodes, and the pair bias, as the layer hands them over."""
    modules = linears(16, (32, False), (32, False), (32, False), (4, False))
    for x in (y := project(torch.randn(2, 9, 9, 16), None, modules), [t.transpose(1, 2) for t in y]):
        q, k, v = (t.unflatten(-1, (4, 8)) for t in x[:3])
        assert explain(q, k, v, pair_bias=x[3].movedim(-1, -3).unsqueeze(-4)).copies == []


LAYERS = (
    (TriangleAttention(32, 8, 4), [(1, 9, 9, 32)], (1, 9, 9), 9 * 9 * (3 * 32 + 32 + 4 + 32 + 4)),
    (TriangleAttention(32, 8, 4, starting=False), [(1, 9, 9, 32)], (1, 9, 9), 9 * 9 * (3 * 32 + 32 + 4 + 32 + 4)),
    (MSARowAttentionWithPairBias(32, 16, 8, 4), [(1, 5, 9, 32), (1, 9, 9, 16)], (1, 5, 9), 5 * 9 * 5 * 32 + 9 * 9 * 4),
    (MSAColumnAttention(32, 8, 4), [(1, 5, 9, 32)], (1, 5, 9), 5 * 9 * 5 * 32),
    (AttentionPairBias(32, 16, 8, 4), [(5, 9, 32), (5, 9, 9, 16)], (5, 9), 5 * (9 * 5 * 32 + 9 * 9 * 4)),
)


@pytest.mark.parametrize(("layer", "shapes", "mask", "most"), LAYERS, ids=lambda x: type(x).__name__)
def test_what_is_kept_for_the_backward(
    layer: nn.Module, shapes: list[Any], mask: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs, one tensor of all projections, O, and a few numbers a row: nothing else of that size.

    Small calls on the CPU keep the probabilities too, so this one is not small.
    """
    monkeypatch.setattr(dense, "fits", lambda problem: False)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    own = {x.untyped_storage().data_ptr() for x in (*inputs, *layer.parameters())}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    layer.empty_rows = "native"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = layer(*inputs)
    assert output.requires_grad
    weights = sum(x.numel() for x in layer.parameters())
    numbers = sum(x.untyped_storage().nbytes() for x in kept.values()) // 4
    statistics = 2 * sum(x[..., 0].numel() for x in inputs) + 2 * 4 * inputs[0][..., 0].numel()
    assert most <= numbers <= most + statistics + 2 * weights


@pytest.mark.parametrize("shared", [-3, -2])
@pytest.mark.parametrize("residual", [True, False])
def test_dropout_is_shared(shared: int, residual: bool) -> None:
    torch.manual_seed(0)
    x, update = torch.randn(2, 9, 9, 8), torch.randn(2, 9, 9, 8)
    actual = add_residual(x, update, dropout_mask(update, 0.25, shared), residual=residual) - (x if residual else 0)
    factor = (actual / update).mul(30).round()  # 0 or 4 / 3
    assert set(factor.unique().tolist()) == {0, 40}
    assert (factor == factor.narrow(shared, 0, 1)).all() and 0.1 < (factor == 0).float().mean() < 0.4
    assert (factor != factor[:, :1, :1]).any()
    assert torch.equal(add_residual(x, update, residual=residual), x + update if residual else update)


@pytest.mark.parametrize(("starting", "axis"), [(True, -3), (False, -2)])
def test_dropout_of_a_triangle(starting: bool, axis: int) -> None:
    """Rows share it around the starting node, columns around the ending node; the residual is added in z's dtype."""
    torch.manual_seed(0)
    layer = TriangleAttention(8, 4, 2, starting=starting, dropout=0.5, residual=True)
    nn.init.ones_(layer.mha.linear_o.bias)  # its weight is 0: the update is 1 everywhere
    z = torch.randn(1, 6, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        update = layer(z) - z
    assert update.dtype == torch.float32
    assert (update.narrow(axis, 0, 1) - update).abs().max() < 1e-6 and 0 < (update.abs() < 1e-6).sum() < update.numel()


NOT_SQUARE = r"z must be \[\*, L, L, 8\], the same L twice, got shape \{}"


@pytest.mark.parametrize(("call", "error", "what"), [
    (lambda: TriangleAttention(8, 4, 2, dropout=1.0), ValueError, "dropout must be"),
    (lambda: TriangleAttention(8, 4, 2, empty_rows="zero"), ValueError, "empty_rows must be"),
    (lambda: TriangleAttention(8, 4, 2)(None), TypeError, "z must be a torch.Tensor"),
    (lambda: TriangleAttention(8, 4, 2)(torch.ones(2, 3, 3, 8, dtype=torch.int64)), TypeError, "z must be of a floating"),
    (lambda: TriangleAttention(8, 4, 2)(torch.ones(3, 8)), ValueError, "z must have at least 3 axes and 8"),
    (lambda: TriangleAttention(8, 4, 2)(torch.ones(3, 3, 9)), ValueError, "z must have at least 3 axes and 8"),
    (lambda: TriangleAttention(8, 4, 2)(torch.ones(1, 3, 3, 8), torch.ones(3, 3)), ValueError, "mask must broadcast to"),
    (lambda: TriangleAttention(8, 4, 2)(torch.ones(2, 3, 4, 8)), ValueError, NOT_SQUARE.format("[2, 3, 4, 8]")),
    (lambda: TriangleAttention(8, 4, 2, starting=False)(torch.ones(3, 1, 8)), ValueError, NOT_SQUARE.format("[3, 1, 8]")),
    (lambda: TriangleAttention(8, 4, 2)(torch.ones(1, 3, 8)), ValueError, NOT_SQUARE.format("[1, 3, 8]")),
    (lambda: TriangleAttention(8, 4, 2)(torch.ones(3, 3, 8), [1]), TypeError, "mask must be a torch.Tensor or None"),
    (lambda: MSARowAttentionWithPairBias(8, 6, 4, 2)(torch.ones(1, 3, 5, 8)), ValueError, "z must be given"),
    (lambda: MSARowAttentionWithPairBias(8, 6, 4, 2)(torch.ones(1, 3, 5, 8), torch.ones(5, 5, 6)), ValueError, "z must be"),
    (lambda: AttentionPairBias(8, 6, 4, 2, c_s=5, norm=False), ValueError, "acts on the norm"),
    (lambda: AttentionPairBias(8, 6, 4, 2)(torch.ones(1, 5, 8), torch.ones(1, 5, 4, 6)), ValueError, "z must be"),
    (lambda: AttentionPairBias(8, 6, 4, 2, c_s=5)(torch.ones(5, 8), torch.ones(5, 5, 6)), ValueError, "s must be given"),
    (
        lambda: AttentionPairBias(8, 6, 4, 2, c_s=5)(torch.ones(3, 5, 8), torch.ones(1, 5, 5, 6), torch.ones(3, 6, 5)),
        ValueError,
        r"s must broadcast to \[3, 5, 5\], got shape \[3, 6, 5\]",
    ),
    (
        lambda: AttentionPairBias(8, 6, 4, 2)(torch.ones(3, 5, 8), torch.ones(3, 5, 7, 6), keys=torch.ones(2, 7, 8)),
        ValueError,
        r"keys must have the leading axes of a, \[3, 5, 8\], got shape \[2, 7, 8\]",
    ),
    (
        lambda: AttentionPairBias(8, 6, 4, 2)(torch.ones(5, 8), None, pair_bias=torch.ones(2, 5, 6)),
        ValueError,
        r"pair_bias must broadcast to \[2, 5, 5\] and have as many axes, got shape \[2, 5, 6\]",
    ),
])  # fmt: skip
def test_bad_projections_raise(call: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        call()


@pytest.mark.parametrize(("batch", "rows", "columns"), [(5, 4, 5), (5, 5, 5), (4, 4, 6), (3, 3, 3)])
def test_templates_with_sizes_that_coincide(batch: int, rows: int, columns: int) -> None:
    """A mask `[B, T]` belongs to the batch, also if there are as many rows, columns or templates."""
    layer = TemplatePointwiseAttention(10, 12, 6, 4, empty_rows="native").double()
    nn.init.normal_(layer.mha.linear_o.weight)
    t, z = (torch.randn(batch, *size, dtype=torch.float64) for size in ((3, rows, columns, 10), (rows, columns, 12)))
    mask = torch.rand(batch, 3) > 0.4
    expected = [layer(t[b : b + 1], z[b : b + 1], mask[b : b + 1])[0] for b in range(batch)]
    torch.testing.assert_close(layer(t, z, mask), torch.stack(expected))


def test_samples_share_one_bias() -> None:
    """A pair representation with one entry for all samples gives what a repeated one gives, and is projected once."""
    layer = AttentionPairBias(8, 6, 4, 2, c_s=5).double()
    for x in layer.parameters():
        nn.init.normal_(x)
    a, s, z = (torch.randn(size, dtype=torch.float64) for size in ((2, 3, 7, 8), (2, 3, 7, 5), (2, 1, 7, 7, 6)))
    torch.testing.assert_close(layer(a, z, s), layer(a, z.expand(2, 3, 7, 7, 6), s))
    torch.testing.assert_close(layer(a, z, s)[1, 2], layer(a[1, 2], z[1, 0], s[1, 2]))


def test_keys_of_their_own() -> None:
    """Windows: 4 queries and 7 keys, which are normalised as the queries are."""
    layer = AttentionPairBias(8, 6, 4, 2).double()
    for x in layer.parameters():
        nn.init.normal_(x)
    a, z = torch.randn(3, 7, 8, dtype=torch.float64), torch.randn(3, 7, 7, 6, dtype=torch.float64)
    mask = (torch.rand(3, 7) > 0.3).double()
    torch.testing.assert_close(layer(a[:, :4], z[:, :4], mask=mask, keys=a), layer(a, z, mask=mask)[:, :4])
