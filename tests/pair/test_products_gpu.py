"""Float32 products on a GPU: random problems against float64 and cuBLAS, graphs, repeated runs, the public call."""

from __future__ import annotations

import pytest
import torch
from cuda_graphs import captured

from evoattn.nn import sampling
from evoattn.pair import linear
from evoattn.pair.products import steps
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
