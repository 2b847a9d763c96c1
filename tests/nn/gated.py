"""Checks of the launch that ends a gated layer, on a GPU and in Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from evoattn.nn import TriangleAttention, gated

SHAPES = (((1, 5, 7, 16), 32, True), ((2, 9, 9, 20), 24, False), ((3, 1, 1, 8), 8, True))
"""Shapes of z, channels of o, and whether there is a bias."""

_BUDGETS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def error(result: Tensor, true: Tensor) -> float:
    return ((result.double() - true).norm() / true.norm()).item()


def check_kernel(shape: tuple[int, ...], hidden: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    """For o and g with rows that are part of longer ones, o with exchanged axes, and z of both dtypes."""
    b, i, j, channels = shape
    torch.manual_seed(0)
    linear = nn.Linear(hidden, channels, bias=bias, device=device).requires_grad_(False)
    o = torch.randn(b, j, i, hidden, device=device).to(dtype).transpose(1, 2)
    g = torch.randn(b, i, j, 3 * hidden, device=device).to(dtype)[..., hidden : 2 * hidden]
    for z in (torch.randn(shape, device=device), torch.randn(shape, device=device).to(dtype)):
        expected = z.double() + copy.deepcopy(linear).double()(o.double() * g.double().sigmoid())
        for in_place in (False, True):
            mine = z.clone()
            result = gated.add_gated(mine, o, g, linear, in_place=in_place)
            assert error(result, expected) < _BUDGETS[dtype] and (mine._version > 0) == in_place
            assert (result is mine) == in_place and torch.equal(mine, result if in_place else z)


def check_layer(starting: bool, transposed: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer ends in one launch, no further from float64 than in steps. Gradients and other residuals take the steps."""
    calls: list[bool] = []
    add, takes = gated.add_gated, gated.takes
    monkeypatch.setattr(gated, "has_kernel", lambda z: True)
    monkeypatch.setattr(gated, "add_gated", lambda *args, **named: (calls.append(True), add(*args, **named))[1])
    torch.manual_seed(1)
    layer = (
        TriangleAttention(32, 16, 2, starting=starting, residual=True, gate_bias=starting, out_bias=starting).eval().to(device)
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    z = torch.randn(2, 9, 9, 32, device=device)
    z = z.transpose(-2, -3) if transposed else z
    mask = (torch.rand(2, 9, 9, device=device) > 0.2).float()
    low = torch.autocast(device, torch.bfloat16)
    with torch.no_grad(), low:
        result = layer(z, mask)
        assert len(calls) == 1 and result.dtype == torch.float32
        mine = z.clone()
        assert layer(mine, mask, in_place=True) is mine and torch.equal(mine, result) and len(calls) == 2
        monkeypatch.setattr(gated, "takes", lambda *_: False)
        steps = layer(z, mask)
        monkeypatch.setattr(gated, "takes", takes)
    with torch.no_grad():
        true = copy.deepcopy(layer).double()(z.double(), mask.double())
    assert error(result, true) <= 1.1 * error(steps, true)
    zero = nn.Parameter(torch.zeros((), device=device))
    with low:
        for trained in (layer.mha.linear_o, layer.mha.linear_v, layer.linear, layer.layer_norm):
            layer.requires_grad_(False)
            trained.requires_grad_(True)
            assert layer(z, mask).requires_grad
            layer.requires_grad_(False)
            adapter = trained.register_forward_hook(lambda *x: x[-1] + zero)
            assert layer(z, mask).requires_grad, "of an adapter alone"
            adapter.remove()
    layer.residual = False
    with torch.no_grad(), low:
        torch.testing.assert_close(layer(z, mask) + z, steps)
    assert len(calls) == 2
