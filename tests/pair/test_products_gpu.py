"""Float32 products on a GPU: random problems against float64 and cuBLAS, graphs, repeated runs, the public call."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from cuda_graphs import captured

from evoattn import nn
from evoattn.nn import sampling
from evoattn.pair import linear
from evoattn.pair.products import call, steps
from tests.pair.products import KINDS, draw, is_close

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 152, 200, 256, 273, 397, 511, 684, 768, 1000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(4))
def test_random_products(part: int, kind: str) -> None:
    """Many of each kind, of all sizes around those of tiles: no further from float64 than cuBLAS, or than the split."""
    rng = torch.Generator().manual_seed(part)
    for seed in range(70):
        m, n, k = (SIZES[int(i)] for i in torch.randint(len(SIZES), (3,), generator=rng))
        x, w, _ = draw(seed, m, n, k, kind, "cuda")
        assert is_close(linear(x, w), x @ w.T, x, w), (m, n, k, seed)


def test_wide_products() -> None:
    x, w, _ = draw(1, 96, 200, 6144, "normal", "cuda")
    assert is_close(linear(x, w), x @ w.T, x, w)


def test_infinities_and_nan_give_what_float32_gives() -> None:
    x, w, _ = draw(2, 200, 150, 96, "normal", "cuda")
    x[3, 5] = w[8, 3] = torch.inf
    x[7, 1] = torch.nan
    x[9, 2], x[9, 4] = -torch.inf, torch.inf
    w[4, 5] = x[20, 3] = 0
    y, right = linear(x, w), x @ w.T
    assert torch.equal(y.isnan(), right.isnan()) and torch.equal(y.isinf(), right.isinf())
    assert torch.equal(y.sign()[y.isinf()], right.sign()[y.isinf()])


def test_strides_and_leading_axes() -> None:
    x, w, bias = draw(3, 120, 40, 64, "normal", "cuda")
    views = (x.view(2, 60, 64), x.t().contiguous().t(), x[::2], torch.cat([x, x], 1)[:, 3:67])
    for view in views:
        assert torch.equal(linear(view, w, bias), linear(view.contiguous(), w, bias))
    turned = w.t().contiguous().t()
    assert torch.equal(linear(x, turned, bias), linear(x, w, bias))
    assert linear(x[:0], w, bias).shape == (0, 40)


def test_two_runs_and_a_graph_have_the_same_bits() -> None:
    x, w, bias = draw(4, 152, 768, 768, "normal", "cuda")
    first = linear(x, w, bias)
    assert torch.equal(linear(x, w, bias), first)
    with sampling():
        linear(x, w, bias)
        replay, result = captured(lambda _: linear(x, w, bias))
        replay(0)
        assert torch.equal(result, first)


def test_a_sampling_splits_a_weight_once_and_notices_writes() -> None:
    x, w, _ = draw(5, 64, 64, 64, "normal", "cuda")
    with sampling():
        before = linear(x, w)
        w.mul_(2)
        assert torch.equal(linear(x, w), 2 * before)


@pytest.mark.parametrize("low", [True, False], ids=["exact", "tf32"])
def test_every_tile(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edges of each: one row or column less, as many, one more."""
    for choice in steps._TILES[low]:
        monkeypatch.setattr(steps, "_TILES", {low: (choice,)})
        for m in (choice.tile.m - 1, choice.tile.m, choice.tile.m + 1, 3 * choice.tile.m):
            for n in (choice.tile.n - 1, choice.tile.n + 1):
                for k in (choice.tile.k, 3 * choice.tile.k, 100):
                    x, w, _ = draw(m, m, n, k, "normal", "cuda")
                    y, true = linear(x, w, precision="exact" if low else "tf32"), x.double() @ w.double().T
                    limit = 3e-7 if low else 1e-3
                    assert ((y - true).norm() / true.norm()).item() < limit


def test_gradients_of_random_products() -> None:
    """No further from float64 than cuBLAS, also those of so many rows that they are taken in parts."""
    rng = torch.Generator().manual_seed(0)
    for seed in range(24):
        m, n, k = (SIZES[int(i)] for i in torch.randint(len(SIZES), (3,), generator=rng))
        m, n, k = (40_000 if seed == 7 else m * 8), max(n, 256), max(k, 256)
        x, w, bias = (y.requires_grad_() for y in draw(seed, m, n, k, KINDS[seed % 3], "cuda"))
        dy = torch.randn(m, n, generator=torch.Generator().manual_seed(100 + seed)).cuda()  # other numbers than those of x
        dx, dw, dbias = torch.autograd.grad(linear(x, w, bias), (x, w, bias), dy)
        x, w = x.detach(), w.detach()
        assert is_close(dx, dy @ w, dy, w.t()) and is_close(dw, dy.t() @ x, dy.t(), x.t()), (m, n, k, seed)
        assert torch.allclose(dbias, dy.sum(0), rtol=1e-4, atol=1e-3)


def test_layers_train_in_float32_as_near_to_float64_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the products behind a norm. Gradients of a block of the diffusion transformer, of both ways."""
    torch.manual_seed(0)
    block = nn.DiffusionTransformerBlock(384, 384, 16, 48, 8).cuda()
    with torch.no_grad():
        for x in block.parameters():
            x.normal_(0, 0.05)
    inputs = [torch.randn(shape, device="cuda") for shape in ((1, 8, 200, 384), (1, 8, 200, 384), (1, 1, 8, 200, 200))]
    cotangent = torch.randn(1, 8, 200, 384, device="cuda")

    def step(dtype: torch.dtype) -> list[torch.Tensor]:
        a, s, bias = (x.to(dtype).requires_grad_() for x in inputs)
        of = copy.deepcopy(block).to(dtype)
        y = of(a, s, pair_bias=bias)
        weights = [x for name, x in of.named_parameters() if "linear_z" not in name]  # of z, which comes as a pair bias
        return [y.detach(), *torch.autograd.grad(y, (a, s, bias, *weights), cotangent.to(dtype))]

    counted = mock.Mock(wraps=call._across)
    monkeypatch.setattr(call, "_across", counted)
    monkeypatch.setattr(call, "SMALLEST", 0)
    ours = step(torch.float32)
    assert counted.call_count >= 8
    monkeypatch.setattr(call, "SMALLEST", 1 << 62)
    plain, true = step(torch.float32), step(torch.float64)
    for x, y, z in zip(ours, plain, true, strict=True):
        error, budget = ((each.double() - z).norm() / z.norm() for each in (x, y))
        assert error <= max(1.5 * budget, 1e-6)
