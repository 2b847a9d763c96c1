"""Triangle multiplications whose sums leave the range of float16, in every way that has no kernels, under autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.nn import TriangleMultiplication
from evoattn.nn.multiplication import JoinedTriangleMultiplication
from evoattn.testing import relative_error
from tests.helpers.changes import change

CHANNELS, LENGTH = 8, 64


def layer_of(kind: type[TriangleMultiplication], outgoing: bool) -> TriangleMultiplication:
    torch.manual_seed(0)
    layer = kind(CHANNELS, CHANNELS, outgoing)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for projection in layer._projections[0]:
        projection.weight.data *= 20
    return layer


def with_hook(layer: TriangleMultiplication) -> Callable[[Tensor], Tensor]:
    layer.linear_z.register_forward_hook(lambda *_: None)
    return layer


def with_adapter(layer: TriangleMultiplication) -> Callable[[Tensor], Tensor]:
    change(layer, "linear_g", "adapter")
    nn.init.zeros_([p for name, p in layer.named_parameters() if name.startswith("linear_g.")][-1])
    return layer


def with_two_eps(layer: TriangleMultiplication) -> Callable[[Tensor], Tensor]:
    layer.layer_norm_out.eps = 1.001e-5
    return layer


def with_a_gradient_of_the_mask(layer: TriangleMultiplication) -> Callable[[Tensor], Tensor]:
    return lambda z: layer(z, torch.ones(z.shape[:-1], requires_grad=True))


def functional(layer: TriangleMultiplication) -> Callable[[Tensor], Tensor]:
    return lambda z: torch.vmap(layer)(z[None])[0]


def compiled(layer: TriangleMultiplication) -> Callable[[Tensor], Tensor]:
    return torch.compile(layer, backend="aot_eager", fullgraph=True)  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "as it is": lambda layer: layer,
    "hook": with_hook,
    "adapter": with_adapter,
    "two eps": with_two_eps,
    "gradient of the mask": with_a_gradient_of_the_mask,
    "vmap": functional,
    "compiled": compiled,
}


@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("kind", [TriangleMultiplication, JoinedTriangleMultiplication])
@pytest.mark.parametrize("way", WAYS)
def test_sums_are_float32_under_float16_autocast(way: str, kind: type[TriangleMultiplication], outgoing: bool) -> None:
    layer = layer_of(kind, outgoing)
    z = torch.randn(1, LENGTH, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1))
    call = WAYS[way](layer)
    right = copy.deepcopy(layer).double()
    with torch.no_grad():
        expected = right(z.double())
    with torch.autocast("cpu", torch.float16):
        z = z.requires_grad_()
        actual = call(z)
    (gradient,) = torch.autograd.grad(actual.float().sum(), z)
    assert bool(actual.isfinite().all()) and bool(gradient.isfinite().all())
    assert relative_error(actual, expected) < 5e-3
