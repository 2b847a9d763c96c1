"""Float32 inference by products of float16 on a GPU: against float64, plain float32 and itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_graphs import captured
from torch import Tensor

from evoattn.nn import Transition, TriangleAttention
from evoattn.pair import launching
from evoattn.pair.multiplication import call as multiplication
from evoattn.pair.products import call as products
from evoattn.pair.products import steps
from evoattn.pair.transitions import call as transition
from evoattn.pair.values import MultiplicationOptions, TransitionOptions
from evoattn.testing import relative_error
from tests.pair import problems, transitions

pytestmark = pytest.mark.gpu

_SPLIT = 2.0**-22
"""What a product of float16 may lose where float32 loses less: see `products.is_close`. Products in a row add up as squares."""


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def frozen(parameters: Any) -> Any:
    return type(parameters)(*[None if x is None else x.detach() for x in parameters])


def doubles(parameters: Any) -> Any:
    return type(parameters)(*[None if x is None else x.double() for x in parameters])


def scaled(x: Tensor, kind: str) -> Tensor:
    rng = torch.Generator(x.device).manual_seed(3)
    if kind == "heavy tails":
        x = x * torch.exp(3 * torch.randn(x.shape, generator=rng, device=x.device))
    return x + 100 if kind == "mean of 100" else x


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "mean of 100"])
@pytest.mark.parametrize("outgoing", [True, False], ids=["outgoing", "incoming"])
@pytest.mark.parametrize("length", [46, 61, 128, 200, 256])
@pytest.mark.parametrize(("channels", "hidden"), [(128, 128), (64, 32), (24, 40)])
def test_multiplications_are_no_further_from_float64_than_float32(
    channels: int, hidden: int, length: int, outgoing: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = frozen(problems.weights(channels, hidden, bias=channels != 128, dtype=torch.float32, device="cuda"))
    z, mask, _ = problems.inputs((2,), length, channels, torch.float32, "cuda")
    z, options = scaled(z.detach(), kind), MultiplicationOptions(outgoing, 1e-5, residual=False)
    y = problems.call(z, mask, parameters, options)
    right = multiplication.reference(z.double(), mask.double(), doubles(parameters), options)
    monkeypatch.setattr(products, "takes", lambda *_: False)
    plain = multiplication.reference(z, mask, parameters, options)
    assert relative_error(y, right) <= max(relative_error(plain, right), 3**0.5 * _SPLIT)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "mean of 100"])
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
@pytest.mark.parametrize(("channels", "hidden"), [(128, 512), (64, 256), (24, 40), (128, 510), (384, 1536)])
def test_transitions_are_no_further_from_float64_than_float32(
    channels: int, hidden: int, gated: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = frozen(transitions.weights(channels, hidden, gated=gated, bias=gated, dtype=torch.float32, device="cuda"))
    x, mask, _ = transitions.inputs((5001,), channels, torch.float32, "cuda")
    x, options = scaled(x.detach(), kind), TransitionOptions(1e-5, residual=False)
    y = transitions.call(x, mask, parameters, options)
    right = transition.dense(x.double(), mask.double(), doubles(parameters), options)
    monkeypatch.setattr(products, "takes", lambda *_: False)
    plain = transition.dense(x, mask, parameters, options)
    assert relative_error(y, right) <= max(relative_error(plain, right), 2**0.5 * _SPLIT)


@pytest.mark.parametrize("length", [80, 96, 128, 208, 512])
def test_squares_have_a_unit_for_each_row(length: int) -> None:
    rng = torch.Generator("cuda").manual_seed(1)
    sizes = torch.logspace(-18, 18, length, device="cuda")[:, None]
    ab = torch.randn(6, 2, length, length, generator=rng, device="cuda") * sizes
    a, b = ab.double().chunk(2)
    right, size = a @ b.mT, a.norm(dim=-1)[..., None] * b.norm(dim=-1)[..., None, :]
    errors = [((x - right) / size).square().mean().sqrt() for x in (ab[:3] @ ab[3:].mT, steps.multiply_squares(ab.clone()))]
    assert errors[1] <= errors[0].clamp(min=2.0**-24)


@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
def test_a_triangle_attention(starting: bool) -> None:
    torch.manual_seed(1)
    layer = TriangleAttention(128, 32, 4, starting=starting, residual=True).cuda()
    for x in layer.parameters():
        torch.nn.init.normal_(x, std=0.1)
    z, mask, _ = problems.inputs((1,), 129, 128, torch.float32, "cuda")
    y = layer(z, mask)
    right = layer.double()(z.double(), mask.double())
    assert relative_error(y, right) < 1e-6


def test_two_runs_and_a_graph_are_bit_equal() -> None:
    parameters = frozen(problems.weights(128, 128, bias=True, dtype=torch.float32, device="cuda"))
    z, mask, _ = problems.inputs((1,), 77, 128, torch.float32, "cuda")
    z, layer = z.detach(), Transition(128, residual=True).cuda()

    def run(_: int = 0) -> list[Tensor]:
        y = problems.call(z, mask, parameters, MultiplicationOptions(False, 1e-5, True))
        return [y, layer(y, mask)]

    first, second = run(), run()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    replay, output = captured(run)
    replay(0)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(first, output, strict=True))


def test_no_more_memory_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = frozen(problems.weights(128, 128, bias=True, dtype=torch.float32, device="cuda"))
    z, _, _ = problems.inputs((1,), 400, 128, torch.float32, "cuda")
    z = z.detach()

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        problems.call(z, None, parameters, MultiplicationOptions(True, 1e-5, False))
        return torch.cuda.max_memory_allocated()

    peak()
    halves = peak()
    monkeypatch.setattr(launching, "FEWEST_ROWS", 1 << 40)
    assert halves <= 1.01 * peak()
