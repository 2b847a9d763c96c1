"""Huge biases that two arguments share: a query whose every key one of them masks keeps its scores."""

from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn import evoformer_attention, testing
from evoattn.core.config import Config

Biases = tuple[Tensor, Tensor]


def by_halves() -> Biases:
    """Four keys masked by the mask bias, the others by the pair bias."""
    mask_bias, pair_bias = torch.zeros(2, 1, 8), torch.randn(1, 1, 2, 8, 8)
    mask_bias[..., :4] = -1e9
    pair_bias[..., 4:] -= 1e9
    return mask_bias, pair_bias


def minus_inf() -> Biases:
    """A pair bias of -inf that leaves a query only keys at -1e9."""
    mask_bias, pair_bias = torch.zeros(2, 1, 8), torch.randn(1, 1, 2, 8, 8)
    mask_bias[..., 4:] = -1e9
    pair_bias[..., 0, :4] = -torch.inf
    return mask_bias, pair_bias


def both_huge() -> Biases:
    """Each key has half of its bias from either."""
    return torch.full((2, 1, 8), -5e8) * torch.arange(8).ge(4), torch.randn(1, 1, 2, 8, 8) - 5e8 * torch.arange(8).lt(4)


def step(
    q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor, dtype: torch.dtype, **options: Any
) -> list[Tensor]:
    """The output and all gradients, in a dtype."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, mask_bias, pair_bias)]
    o = evoformer_attention(*leaves[:3], mask_bias=leaves[3], pair_bias=leaves[4], **options)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("make", [by_halves, minus_inf, both_huge])
@pytest.mark.parametrize("config", [None, Config(block_q=3, block_k=3)], ids=["whole", "blocks"])
def test_scores_survive_a_huge_bias_that_all_keys_share(backend: str, make: Any, config: Config | None) -> None:
    if backend == "reference" and config:
        pytest.skip("the reference has no blocks")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 8, 2, 16) for _ in range(3))
    biases = make()
    expected = step(q, k, v, *biases, torch.float64, backend="reference")
    options: dict[str, Any] = {"backend": backend, "config": config}
    for actual, reference in zip(step(q, k, v, *biases, torch.float32, **options), expected, strict=True):
        assert testing.relative_error(actual, reference) < 2e-6
