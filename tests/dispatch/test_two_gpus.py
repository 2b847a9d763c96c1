"""Two GPUs of one process: calls, layers and triangle multiplication on each, in turns and in threads.

python -m pytest -m gpu tests/dispatch/test_two_gpus.py
"""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.nn import TriangleAttention, TriangleMultiplication

STATUS = {status.name: status for status in evoattn.backends()}
CASE = testing.Case("small", n=40, h=4, lq=130, lk=140, d=32, dtype=torch.bfloat16, mask="random", pair_bias="b1hqk")
DEVICES = ("cuda:0", "cuda:1")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def of_backend(name: str) -> Callable[[str, int], list[Tensor]]:
    """Forward and backward of a call: the same seed gives the same numbers on each device."""

    def run(device: str, seed: int) -> list[Tensor]:
        return list(testing.run(CASE.make(seed, device), name, deterministic=True).values.values())

    return run


def of_layer(make: Callable[[], torch.nn.Module]) -> Callable[[str, int], list[Tensor]]:
    torch.manual_seed(0)
    layer = make()
    for x in layer.parameters():
        torch.nn.init.normal_(x, std=0.1)
    on = {device: copy.deepcopy(layer).to(device) for device in DEVICES if torch.cuda.device_count() > 1}

    def run(device: str, seed: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        z, do = (torch.randn(1, 77, 77, 64, generator=rng, dtype=torch.float32).to(device) for _ in range(2))
        z.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            out = on[device](z)
        return [out, *torch.autograd.grad(out, [z, *on[device].parameters()], do.to(out.dtype))]

    return run


WHAT = {
    "triton": of_backend("triton"),
    "hopper": of_backend("hopper"),
    "tiled": of_backend("tiled"),
    "attention": of_layer(lambda: TriangleAttention(64, 32, 2, starting=False)),
    "multiplication": of_layer(lambda: TriangleMultiplication(64, 64)),
}


@pytest.fixture(params=list(WHAT))
def run(request: pytest.FixtureRequest) -> Callable[[str, int], list[Tensor]]:
    status = STATUS.get(request.param)
    if status is not None and not status.available:
        pytest.skip(status.reason)
    return WHAT[request.param]


def same(actual: list[Tensor], expected: list[Tensor], device: str) -> bool:
    """Equal but for the order of sums, which layers leave to torch."""
    return all(
        str(x.device) == device and testing.relative_error(x.cpu(), y) < 1e-2 for x, y in zip(actual, expected, strict=True)
    )


def test_calls_on_two_gpus_in_turns_give_the_same_bits(run: Callable[[str, int], list[Tensor]]) -> None:
    """The current device stays as it was."""
    expected = [[x.cpu() for x in run("cuda:0", seed)] for seed in range(3)]
    for seed in (0, 1, 2, 0):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            assert same(run(device, seed), expected[seed], device)
            assert torch.cuda.current_device() == 0


def test_calls_on_two_gpus_in_threads_give_the_same_bits(run: Callable[[str, int], list[Tensor]]) -> None:
    expected = [[x.cpu() for x in run("cuda:0", seed)] for seed in range(4)]
    work = [(device, seed) for _ in range(3) for seed in range(4) for device in DEVICES]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(lambda each: same(run(*each), expected[each[1]], each[0]), work))
    assert all(actual)
