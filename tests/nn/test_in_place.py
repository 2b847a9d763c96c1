"""Layers that write z + update into z."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from evoattn.nn import PairBlock, PairformerBlock, Transition, TriangleAttention, TriangleMultiplication

LAYERS = [
    TriangleMultiplication(8, 6, residual=True),
    TriangleAttention(8, 4, 2, residual=True),
    TriangleAttention(8, 4, 2, starting=False, residual=True),
]


@pytest.fixture(params=LAYERS, ids=["multiplication", "attention, start", "attention, end"])
def layer(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    for x in request.param.parameters():
        nn.init.normal_(x, std=0.5)
    return request.param


@pytest.mark.parametrize("hooked", [False, True])
def test_in_place_overwrites_z_with_the_result(layer: nn.Module, hooked: bool) -> None:
    z, mask = torch.randn(1, 7, 7, 8), torch.rand(1, 7, 7) > 0.2
    with torch.no_grad():
        right = layer(z, mask)
        handle = next(x for x in layer.modules() if type(x) is nn.Linear).register_forward_hook(lambda *_: None)
        if not hooked:
            handle.remove()
        output = layer(z, mask, in_place=True)
        handle.remove()
    assert output is z
    torch.testing.assert_close(output, right, rtol=1e-6, atol=1e-6)


def test_z_keeps_its_numbers_otherwise(layer: nn.Module) -> None:
    z = torch.randn(1, 7, 7, 8)
    before = z.clone()
    with torch.no_grad():
        layer(z)
    assert torch.equal(z, before)


def test_in_place_is_refused_where_z_cannot_hold_the_result(layer: nn.Module) -> None:
    z = torch.randn(1, 7, 7, 8)
    with pytest.raises(ValueError, match=r"in_place=True overwrites z, which a gradient needs"):
        layer(z, in_place=True)
    with torch.no_grad():
        wanted = r"z must have the result's dtype float32 for in_place=True, got float16"
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=wanted):
            layer(z.half(), in_place=True)
        layer.residual = False
        try:
            with pytest.raises(ValueError, match="needs residual=True"):
                layer(z, in_place=True)
        finally:
            layer.residual = True


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a channel": lambda z: z[..., 3],
    "the first numbers": lambda z: z.flatten()[:49].view(1, 7, 7),
    "the last numbers": lambda z: z.flatten()[-49:].view(1, 7, 7),
    "a row": lambda z: z[:, 2:3, :, 0],
    "one number": lambda z: z[:, :1, :1, 5],
    "bits": lambda z: z.view(torch.int32)[..., 0],
}
"""Masks of z `[1, 7, 7, 8]` that share memory with it."""


def drawn(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for x in layer.parameters():
        nn.init.normal_(x, std=0.4)
    return layer.eval()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_mask_that_shares_memory_with_z(view: str, compiled: bool) -> None:
    block = drawn(PairBlock(8, 8, 4, 2, 2))
    torch.compiler.reset()  # torch reads another view of an argument that it overwrites where the first one was
    run = torch.compile(block, backend="aot_eager") if compiled else block
    z = torch.rand(1, 7, 7, 8) + 0.5
    with torch.no_grad():
        right = block(z.clone(), VIEWS[view](z).clone())
        if compiled and view == "bits":
            with pytest.raises(RuntimeError, match="input mutations on views with different dtypes"):
                run(z, VIEWS[view](z), in_place=True)
            return
        output = run(z, VIEWS[view](z), in_place=True)
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layer", [*LAYERS, Transition(8, 2, residual=True)], ids=lambda x: type(x).__name__)
def test_a_layer_with_a_mask_that_shares_memory_with_z(layer: nn.Module, view: str) -> None:
    layer, z = drawn(layer), torch.rand(1, 7, 7, 8) + 0.5
    with torch.no_grad():
        right = layer(z.clone(), VIEWS[view](z).clone())
        torch.testing.assert_close(layer(z, VIEWS[view](z), in_place=True), right, rtol=1e-5, atol=1e-5)


def test_a_single_track_that_shares_memory_with_z() -> None:
    block = drawn(PairformerBlock(8, 8, 4, 2, 8, 4, 2, 2))
    z = torch.rand(1, 7, 7, 8) + 0.5
    with torch.no_grad():
        right = block(z[:, 1].clone(), z.clone(), z[:, 0, :, 3].clone(), z[..., 1].clone())
        output = block(z[:, 1], z, z[:, 0, :, 3], z[..., 1], in_place=True)
    for actual, expected in zip(output, right, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_memory_of_z_alone_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    block, z, mask = drawn(PairBlock(8, 8, 4, 2, 2)), torch.rand(1, 7, 7, 8), torch.ones(1, 7, 7)
    monkeypatch.setattr(Tensor, "clone", None)
    with torch.no_grad():
        block(z, mask, in_place=True)
