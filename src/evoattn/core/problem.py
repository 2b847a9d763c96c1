"""Problem: a frozen description of one attention call. It holds sizes and dtypes, never a tensor.

Backends look at nothing else to say whether, and with which tiles, they can run a call.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from evoattn.core import devices
from evoattn.core.inputs import Inputs


class Needs(NamedTuple):
    """The gradients that are wanted: True or False for each input."""

    q: bool = False
    k: bool = False
    v: bool = False
    mask_bias: bool = False
    pair_bias: bool = False
    gate: bool = False


NO_GRADIENTS = Needs()
"""A forward alone."""

GRADIENTS = Needs._fields
"""The inputs that can have a gradient, in the order of all gradients and of `Inputs.differentiable`."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and wishes of one call in the canonical axes `[b, n, h, l, d]`.

    Args:
        device: a torch device type, "cpu" or "cuda" (which also names AMD's ROCm devices).
        capability: (major, minor) compute capability of a CUDA device; None elsewhere.
        dtype: dtype of q, k, v and of the output.
        b, n, h: batch, rows, heads.
        lq, lk: number of queries and of keys.
        d, c: query/key channels and value channels.
        mask: whether a bool mask is given.
        mask_bias: dtype of the mask bias, or None.
        pair_bias: dtype of the pair bias, or None.
        gate: whether O is multiplied by the sigmoid of a gate, which has q's dtype.
        scale: factor on q k; None is d ** -0.5.
        needs: the gradients that the call must be able to deliver.
        deterministic: whether results must be bit-equal from run to run.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    b: int
    n: int
    h: int
    lq: int
    lk: int
    d: int
    c: int
    mask: bool = False
    mask_bias: torch.dtype | None = None
    pair_bias: torch.dtype | None = None
    gate: bool = False
    scale: float | None = None
    needs: Needs = NO_GRADIENTS
    deterministic: bool = False

    @property
    def scores(self) -> int:
        """The number of scores: b * n * h * lq * lk."""
        return self.b * self.n * self.h * self.lq * self.lk

    def __str__(self) -> str:
        biases = ["mask"] * self.mask
        biases += [f"mask_bias {self.mask_bias}"] * (self.mask_bias is not None)
        biases += [f"pair_bias {self.pair_bias}"] * (self.pair_bias is not None)
        sizes = f"b={self.b} n={self.n} h={self.h} lq={self.lq} lk={self.lk} d={self.d} c={self.c}"
        gate = ", gate" if self.gate else ""
        return f"{self.dtype} on {self.device}, {sizes}, {', '.join(biases) or 'no bias'}{gate}".replace("torch.", "")


def describe(
    inputs: Inputs, *, scale: float | None = None, needs: Needs = NO_GRADIENTS, deterministic: bool = False
) -> Problem:
    """The Problem of canonical tensors: q [b,n,h,q,d], k [b,n,h,k,d], v [b,n,h,k,c]."""
    q, mask_bias, pair_bias = inputs.q, inputs.mask_bias, inputs.pair_bias
    b, n, h, lq, d = q.shape
    card = devices.card(q.device)
    return Problem(
        device=q.device.type if card is None else "cuda",
        capability=None if card is None else card.capability,
        dtype=q.dtype,
        b=b,
        n=n,
        h=h,
        lq=lq,
        lk=inputs.k.shape[-2],
        d=d,
        c=inputs.v.shape[-1],
        mask=inputs.mask is not None,
        mask_bias=None if mask_bias is None else mask_bias.dtype,
        pair_bias=None if pair_bias is None else pair_bias.dtype,
        gate=inputs.gate is not None,
        scale=scale,
        needs=needs,
        deterministic=deterministic,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
