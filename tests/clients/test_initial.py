"""Initial weights that are drawn fast are those that the client draws."""

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn.clients import initial
from evoattn.clients.site import Count


def of_the_client(weights: Tensor, scale: float = 1.0, fan: str = "fan_in") -> None:
    """What Boltz, BoltzGen, OpenDDE and Protenix have."""
    import numpy as np
    from scipy.stats import truncnorm

    fan_out, fan_in = weights.shape
    size = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[fan]
    std = math.sqrt(scale / max(1, size)) / truncnorm.std(a=-2, b=2, loc=0, scale=1)
    samples = truncnorm.rvs(a=-2, b=2, loc=0, scale=std, size=weights.numel())
    with torch.no_grad():
        weights.copy_(torch.tensor(np.reshape(samples, weights.shape)))


ours = initial.truncated(of_the_client, Count())


@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="SciPy is not installed")
@pytest.mark.parametrize(("scale", "fan"), [(1.0, "fan_in"), (2.0, "fan_out"), (0.3, "fan_avg")])
def test_they_are_the_clients_and_leave_the_same_numbers(scale: float, fan: str) -> None:
    np: Any = pytest.importorskip("numpy")
    drawn = []
    for init in (of_the_client, ours):
        np.random.seed(3)
        weights = torch.full((70, 33), math.nan, dtype=torch.float64, requires_grad=True)
        init(weights, scale, fan)
        drawn.append((weights.detach(), np.random.uniform()))
    (first, after_first), (second, after_second) = drawn
    torch.testing.assert_close(first, second, rtol=1e-13, atol=1e-15)
    assert after_first == after_second


def test_they_are_a_cut_normal_distribution() -> None:
    pytest.importorskip("numpy").random.seed(0)
    weights = torch.empty(400, 100)
    ours(weights, scale=2.0)
    assert weights.std().item() == pytest.approx(math.sqrt(2 / 100), rel=0.02)
    assert weights.abs().max().item() <= 2 * math.sqrt(2 / 100) / initial._STD
    assert pytest.approx(0.879625661034, abs=1e-12) == initial._STD


def test_what_is_not_known_is_left_to_the_client() -> None:
    calls: list[tuple[Any, ...]] = []
    init = initial.truncated(lambda *args: calls.append(args), Count())
    for weights, fan in ((torch.empty(2, 3, 4), "fan_in"), (torch.empty(2, 3), "none")):
        init(weights, 1.0, fan)
    assert [(x.ndim, scale, fan) for x, scale, fan in calls] == [(3, 1.0, "fan_in"), (2, 1.0, "none")]
