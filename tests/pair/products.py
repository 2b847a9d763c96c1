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


_SPLIT = 2.0**-22
"""The errors of both splits and of a tensor core's sum together: two units in the last place of float32.

float32 itself loses less where there are few channels, or one row or column, which cuBLAS adds up in pairs.
"""

_MANY, _SEVERAL = 512, 16
"""Entries, and rows and columns of them, from which on their root mean square says more than the largest error: those of one
column share the rounding of one row of w."""


def error(y: Tensor, true: Tensor) -> float:
    """The relative error of the worst row."""
    return ((y.double() - true).norm(dim=-1) / true.norm(dim=-1)).max().item()


def is_close(y: Tensor, plain: Tensor, x: Tensor, w: Tensor) -> bool:
    """Whether x w^T is no further from float64 than in plain float32, or than the split: the root mean square of all entries.

    The errors are relative to the root of the sum of the squared terms of each entry, so that sums that cancel do not count
    more. No single one may be far beyond.
    """
    x, w = x.double(), w.double()
    true, size = x @ w.T, (x.square() @ w.square().T).sqrt()
    fused, budget = ((each - true) / size for each in (y.double(), plain.double()))
    many = fused.numel() >= _MANY and min(fused.shape) >= _SEVERAL
    if many and fused.square().mean().sqrt() > budget.square().mean().sqrt().clamp(min=_SPLIT):
        return False
    return bool(fused.abs().max() <= 1.5 * budget.abs().max().clamp(min=5 * _SPLIT))


def in_order(x: Tensor, w: Tensor) -> Tensor:
    """The product in float32, added up one channel after the other: what a plain kernel loses."""
    y = x.new_zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        y += x[:, k, None] * w[None, :, k]
    return y
