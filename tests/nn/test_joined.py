"""Gradients of joined projections are joined: the same bits, in the columns of one tensor, and nothing is copied there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn import evoformer_attention
from evoattn.nn import AttentionPairBias, MSARowAttentionWithPairBias, TriangleAttention
from evoattn.run.joined import Columns, columns_of, join

H, C = 4, 8
WIDTH = 3 * H * C + 16


def joined(*rows: int) -> Tensor:
    return torch.randn(*rows, WIDTH)


def parts(x: Tensor, across: bool = False) -> list[Tensor]:
    """q, k and v `[*, H, C]`, the columns of x."""
    found = [x[..., i * H * C : (i + 1) * H * C].unflatten(-1, (H, C)) for i in range(3)]
    return [y.transpose(1, 2) for y in found] if across else found


@pytest.mark.parametrize("across", [False, True])
def test_columns_are_found(across: bool) -> None:
    assert columns_of(parts(joined(2, 5, 7), across)) == Columns(70, WIDTH, (0, 32, 64))


def test_heads_may_differ() -> None:
    x = joined(2, 5)
    q, k = x[..., 32:64].unflatten(-1, (H, C)), x[..., :8].unflatten(-1, (1, C))
    assert columns_of([q, k]) == Columns(10, WIDTH, (32, 0))


X = joined(2, 5, 7)
OTHERS = {
    "contiguous": [x.contiguous() for x in parts(X)],
    "one of its own": [*parts(X)[:2], joined(2, 5, 7)[..., 64:96].unflatten(-1, (H, C))],
    "the same columns": [parts(X)[0]] * 3,
    "over one another": [x.unflatten(-1, (H, C)) for x in (X[..., :32], X[..., 16:48], X[..., 64:96])],
    "rows with gaps": parts(X[:, :, ::2]),
    "rows of others": [parts(X)[0], parts(X[:, :3])[1], parts(X)[2]],
    "not on 16 bytes": [x.unflatten(-1, (H, C)) for x in (X[..., 1:33], X[..., 33:65], X[..., 65:97])],
    "expanded": [x[:1].expand(2, 5, 7, H, C) for x in parts(X)],
    "one row": parts(joined(1, 1, 1)),
    "across the end of a row": [x.unflatten(-1, (H, C)) for x in X.view(-1).as_strided((3, 10, 32), (32, WIDTH, 1), 96)],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_no_columns(other: list[Tensor]) -> None:
    assert columns_of(other) is None


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_gradients_are_columns_of_one_tensor(backend: str, across: bool) -> None:
    q, k, v = (x.detach().requires_grad_() for x in parts(joined(2, 6, 6), across))
    pair_bias, do = torch.randn(2, 1, H, 6, 6, requires_grad=True), torch.randn(2, 6, 6, H, C)

    def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        o = evoformer_attention(*inputs, pair_bias=pair_bias, backend=backend)
        return torch.autograd.grad(o, [*inputs, pair_bias], do)

    found = gradients(q, k, v)
    for x, y in zip(found, gradients(*(x.detach().contiguous().requires_grad_() for x in (q, k, v))), strict=True):
        assert torch.equal(x, y)
    assert columns_of(found[:3]) == columns_of((q, k, v))
    assert found[0].untyped_storage().nbytes() == 72 * WIDTH * 4


def test_a_gradient_that_is_not_wanted_has_no_columns() -> None:
    q, k, v = parts(joined(2, 6, 6))
    q, k = (x.detach().requires_grad_() for x in (q, k))
    dq, dk = torch.autograd.grad(evoformer_attention(q, k, v).sum(), [q, k])
    assert dq.untyped_storage().data_ptr() != dk.untyped_storage().data_ptr()


SIZES = (32, 0, 32, 0, 32, 0, 4, 12)


def made(given: list[Tensor]) -> list[Tensor | None]:
    """As `join` takes them: q, k and v, a pair bias, and gaps."""
    return [given[0], None, given[1], None, given[2], None, given[3], None]


def test_join_copies_nothing_of_columns() -> None:
    columns = Columns(10, WIDTH, (0, 32, 64))
    dq, dk, dv = (x.fill_(i).flatten(-2) for i, x in enumerate(columns.make(parts(joined(10)))))
    matrix = join(made([dq, dk, dv, torch.full((10, 4), 3.0)]), SIZES)
    assert matrix.data_ptr() == dq.data_ptr()
    wanted = torch.tensor([0.0] * 32 + [1] * 32 + [2] * 32 + [3] * 4 + [0] * 12).expand(10, -1)
    assert torch.equal(matrix, wanted)


def test_join_fills_in_what_lies_elsewhere() -> None:
    columns = Columns(10, WIDTH, (0, 32, 64))
    dq, _, dv = (x.fill_(i).flatten(-2) for i, x in enumerate(columns.make(parts(joined(10)))))
    matrix = join(made([dq, torch.full((10, 32), 7.0), dv, torch.ones(10, 4)]), SIZES)
    assert matrix.data_ptr() == dq.data_ptr()
    assert torch.equal(matrix[:, 32:64], torch.full((10, 32), 7.0))


@pytest.mark.parametrize("missing", range(4))
def test_join_of_tensors_of_their_own(missing: int) -> None:
    given = [torch.randn(10, size) for size in (32, 32, 32, 4)]
    some: list[Any] = made([x if i != missing else None for i, x in enumerate(given)])  # type: ignore[misc]
    zeros = [torch.zeros(10, size) for size in SIZES]
    wanted = torch.cat([z if x is None else x for x, z in zip(some, zeros, strict=True)], 1)
    assert torch.equal(join(some, SIZES), wanted)


def test_join_writes_to_nobody_elses_memory() -> None:
    x = joined(10)
    before = x.clone()
    dq, dk, dv = (y.flatten(-2) for y in parts(x))
    matrix = join(made([dq, dk, dv, torch.ones(10, 4)]), SIZES)
    assert matrix.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
    assert torch.equal(matrix[:, :96], x[:, :96])


def test_the_gradient_of_a_slice_stays_as_it_is() -> None:
    """Somebody's own tensor that is as large as the joined gradient, and whose first columns are given as a cotangent."""
    layer = AttentionPairBias(16, 8, 8, no_heads=2)
    cotangent = torch.ones(1, 9, 9, 4)
    layer.pair_bias(torch.randn(1, 9, 9, 8)).backward(cotangent[..., :2].movedim(-1, -3))
    assert bool((cotangent == 1).all())


def test_pair_biases_of_two_layers_in_one_loss() -> None:
    """The gradients of both are columns of the gradient of their concatenation."""
    torch.manual_seed(0)
    layers = [AttentionPairBias(16, 8, 8, no_heads=2) for _ in range(2)]
    z, parameters = torch.randn(1, 9, 9, 8), [layer.linear_z.weight for layer in layers]  # type: ignore[union-attr]
    ours = [layer.pair_bias(z).movedim(-3, -1) for layer in layers]
    plain = [layer.linear_z(layer.layer_norm_z(z)) for layer in layers]  # type: ignore[misc]
    found, wanted = (torch.autograd.grad(torch.cat(x[::-1], -1).square().mean(), parameters) for x in (ours, plain))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("starting", [True, False])
def test_a_layer_copies_no_gradients_together(starting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TriangleAttention(16, 8, 4, starting=starting, empty_rows="native")
    z = torch.randn(1, 9, 9, 16, requires_grad=True)
    made = layer(z)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *given: pytest.fail("gradients are copied together"))
        made.sum().backward()
    assert z.grad is not None


def test_a_layer_whose_pair_bias_is_unused() -> None:
    """Projections of which one gets no gradient."""
    layer = MSARowAttentionWithPairBias(16, 8, 8, 4, empty_rows="native")
    m = torch.randn(1, 5, 9, 16, requires_grad=True)
    z = torch.randn(1, 9, 9, 8)
    layer(m, z).sum().backward()
    assert m.grad is not None
