"""Gradients of joined projections are joined: the same bits, in the columns of one tensor, and nothing is copied there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn import evoformer_attention
from evoattn.nn import AttentionPairBias, MSARowAttentionWithPairBias, TriangleAttention
from evoattn.nn.project import project

H, C = 4, 8
WIDTH = 3 * H * C + 16


def joined(*rows: int) -> Tensor:
    return torch.randn(*rows, WIDTH)


def parts(x: Tensor, across: bool = False) -> list[Tensor]:
    """q, k and v `[*, H, C]`, the columns of x."""
    columns = [x[..., i * H * C : (i + 1) * H * C].unflatten(-1, (H, C)) for i in range(3)]
    return [y.transpose(1, 2) for y in columns] if across else columns


X = joined(2, 5, 7)
OTHERS = {
    "contiguous": [x.contiguous() for x in parts(X)],
    "one of its own": [*parts(X)[:2], joined(2, 5, 7)[..., 64:96].unflatten(-1, (H, C))],
    "the same columns": [parts(X)[0]] * 3,
    "over one another": [x.unflatten(-1, (H, C)) for x in (X[..., :32], X[..., 16:48], X[..., 64:96])],
    "rows with gaps": parts(X[:, :, ::2]),
    "rows of others": [parts(X)[0], *parts(X[:, :, :3])[1:]],
    "not on 16 bytes": [x.unflatten(-1, (H, C)) for x in (X[..., 1:33], X[..., 33:65], X[..., 65:97])],
    "expanded": [x[:1].expand(2, 5, 7, H, C) for x in parts(X)],
    "one row": parts(joined(1, 1, 1)),
    "across the end of a row": [
        x.unflatten(-1, (H, C)) for x in X.view(-1).as_strided((3, 2, 5, 32), (32, 5 * WIDTH, WIDTH, 1), 96)
    ],
}


def gradients(tensors: list[Tensor], *biases: Tensor, **options: Any) -> list[Tensor]:
    """Those of q, k and v, and of a pair bias."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    o = evoformer_attention(*inputs, pair_bias=(*biases, None)[0], **options)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
    return list(torch.autograd.grad(o, [*inputs, *biases], do))


def contiguous(inputs: list[Tensor]) -> list[Tensor]:
    return [x.contiguous() for x in inputs]


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_tensors_apart_are_not_joined_columns(other: list[Tensor]) -> None:
    """Each gradient has memory of its own."""
    actual = gradients(other)
    assert len({memory(x) for x in actual}) == 3
    for x, y in zip(actual, gradients(contiguous(other)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_gradients_are_columns_of_one_tensor(backend: str, across: bool) -> None:
    """They lie as q, k and v do, and nobody touches the other columns."""
    inputs, length = parts(joined(2, 5, 7), across), 5 if across else 7
    pair_bias = torch.randn(2, 1, H, length, length, requires_grad=True)
    actual = gradients(inputs, pair_bias, backend=backend)
    for x, y in zip(actual, gradients(contiguous(inputs), pair_bias, backend=backend), strict=True):
        assert torch.equal(x, y)
    assert [(x.storage_offset(), x.stride()) for x in actual[:3]] == [(x.storage_offset(), x.stride()) for x in inputs]
    assert len({memory(x) for x in actual[:3]}) == 1
    assert actual[0].untyped_storage().nbytes() == 70 * WIDTH * 4
    assert bool(actual[0].as_strided((70, 16), (WIDTH, 1), 3 * H * C).isnan().all())


def test_channels_may_differ() -> None:
    x = joined(2, 5, 7)
    q, k, v = (x[..., at : at + H * c].unflatten(-1, (H, c)) for at, c in ((32, C), (64, C), (0, C // 2)))
    actual = gradients([q, k, v])
    assert [(x.storage_offset(), x.stride()) for x in actual] == [(x.storage_offset(), x.stride()) for x in (q, k, v)]
    assert len({memory(x) for x in actual}) == 1


def test_a_gradient_that_is_not_wanted_has_no_columns() -> None:
    q, k, v = parts(joined(2, 6, 6))
    q, k = (x.detach().requires_grad_() for x in (q, k))
    dq, dk = torch.autograd.grad(evoformer_attention(q, k, v).sum(), [q, k])
    assert dq.untyped_storage().data_ptr() != dk.untyped_storage().data_ptr()


@dataclasses.dataclass
class Projected:
    """q, k, v `[2, 6, 6, H * C]` and three features of a pair bias by one product, whose last column is a gap."""

    outputs: list[Tensor]
    gradient: Tensor | None = None
    """That of the product, once a backward has made it, `[72, WIDTH_OF_PRODUCT]`."""

    @classmethod
    def make(cls) -> Projected:
        linears = [torch.nn.Linear(16, size, bias=False) for size in (32, 32, 32, 3)]
        projected = cls(project(torch.randn(2, 6, 6, 16), None, linears))
        node: Any = projected.outputs[0].grad_fn
        node.next_functions[0][0].register_prehook(projected._keep)
        return projected

    def _keep(self, gradients: tuple[Tensor, ...]) -> None:
        self.gradient = gradients[0].view(72, WIDTH_OF_PRODUCT)

    def attend(self) -> Tensor:
        q, k, v = (x.unflatten(-1, (H, C)) for x in self.outputs[:3])
        return evoformer_attention(q, k, v).sin().sum() + self.outputs[3].sum()


WIDTH_OF_PRODUCT = 100


@pytest.mark.parametrize("hook", [False, True])
def test_gradients_in_columns_are_not_copied(hook: bool) -> None:
    """They are the gradient of the product, and what a hook has put elsewhere is copied there."""
    projected, seen = Projected.make(), {}
    for name, x in zip("qkv", projected.outputs, strict=False):
        x.register_hook(lambda dx, name=name: seen.update({name: dx}))
    if hook:
        projected.outputs[1].register_hook(lambda dx: seen.update(k=2 * dx) or seen["k"])
    projected.attend().backward()
    assert projected.gradient is not None and projected.gradient.data_ptr() == seen["q"].data_ptr()
    wanted = torch.cat([seen[name].view(72, 32) for name in "qkv"], 1)
    assert torch.equal(projected.gradient[:, :96], wanted)
    assert torch.equal(projected.gradient[:, 96:], torch.tensor([1.0, 1, 1, 0]).expand(72, -1))


@pytest.mark.parametrize("missing", range(4))
def test_gradients_of_their_own_are_joined(missing: int) -> None:
    """Zeros stand for one that there is not."""
    projected = Projected.make()
    cotangents = [torch.randn_like(x) if i != missing else torch.zeros_like(x) for i, x in enumerate(projected.outputs)]
    others = [i for i in range(4) if i != missing]
    torch.autograd.backward([projected.outputs[i] for i in others], [cotangents[i] for i in others])
    wanted = torch.cat([*cotangents, torch.zeros(2, 6, 6, 1)], -1).view(72, -1)
    assert projected.gradient is not None and torch.equal(projected.gradient, wanted)


def test_nobody_elses_memory_is_written() -> None:
    """Cotangents are columns of a tensor that is like the gradient of the product, but somebody's own."""
    projected, own = Projected.make(), torch.randn(2, 6, 6, WIDTH_OF_PRODUCT)
    before = own.clone()
    torch.autograd.backward(
        projected.outputs, [own[..., at : at + x.shape[-1]] for at, x in zip((0, 32, 64, 96), projected.outputs, strict=True)]
    )
    assert projected.gradient is not None and projected.gradient.data_ptr() != own.data_ptr()
    assert torch.equal(own, before)
    assert torch.equal(projected.gradient[:, :99], own.view(72, -1)[:, :99]) and not projected.gradient[:, 99].any()


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
    fused = [layer.pair_bias(z).movedim(-3, -1) for layer in layers]
    plain = [layer.linear_z(layer.layer_norm_z(z)) for layer in layers]  # type: ignore[misc]
    actual, wanted = (torch.autograd.grad(torch.cat(x[::-1], -1).square().mean(), parameters) for x in (fused, plain))
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("starting", [True, False])
def test_a_layer_copies_no_gradients_together(starting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TriangleAttention(16, 8, 4, starting=starting, empty_rows="native")
    z = torch.randn(1, 9, 9, 16, requires_grad=True)
    output = layer(z)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *args: pytest.fail("gradients are copied together"))
        output.sum().backward()
    assert z.grad is not None


def test_a_layer_whose_pair_bias_is_unused() -> None:
    """Projections of which one gets no gradient."""
    layer = MSARowAttentionWithPairBias(16, 8, 8, 4, empty_rows="native")
    m = torch.randn(1, 5, 9, 16, requires_grad=True)
    z = torch.randn(1, 9, 9, 8)
    layer(m, z).sum().backward()
    assert m.grad is not None
