"""Layers that write z + update into z."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evoattn.nn import TriangleAttention, TriangleMultiplication

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
