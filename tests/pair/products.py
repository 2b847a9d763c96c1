"""Random float32 products, the truth, and what plain float32 loses."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("normal", "heavy tails", "mean of 100", "rows of all sizes")


def draw(seed: int, m: int, n: int, k: int, kind: str, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x `[M, K]`, a weight `[N, K]` and a bias `[N]`."""
    rng = torch.Generator().manual_seed(seed)
    x, w, bias = (torch.randn(shape, generator=rng) for shape in ((m, k), (n, k), (n,)))
    if kind == "heavy tails":
        x, w = x * torch.exp(3 * torch.randn(m, k, generator=rng)), w * torch.exp(2 * torch.randn(n, k, generator=rng))
    if kind == "mean of 100":
        x = x + 100
    if kind == "rows of all sizes":
        x = x * torch.logspace(-20, 20, m)[:, None]
    return x.to(device), (w / k**0.5).to(device), bias.to(device)


_SPLIT = 2.0**-22.5
"""What the splits of both matrices lose: 2^-23 each. With few channels, sums in float32 lose less."""


def errors(y: Tensor, true: Tensor) -> Tensor:
    """The relative error of each row."""
    return (y.double() - true).norm(dim=-1) / true.norm(dim=-1)


def error(y: Tensor, true: Tensor) -> float:
    """The relative error of the worst row."""
    return errors(y, true).max().item()


def is_close(y: Tensor, plain: Tensor, x: Tensor, w: Tensor) -> bool:
    """Whether the rows of x w^T are on average no further from float64 than in plain float32, and the worst at most half more.

    The split itself counts as plain float32 does.
    """
    true = x.double() @ w.double().T
    fused, budget = errors(y, true), errors(plain, true).clamp(min=_SPLIT)
    return bool(fused.mean() <= budget.mean() and fused.max() <= 1.5 * budget.max())


def in_order(x: Tensor, w: Tensor) -> Tensor:
    """The product in float32, added up one channel after the other: what a plain kernel loses."""
    y = x.new_zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        y += x[:, k, None] * w[None, :, k]
    return y
