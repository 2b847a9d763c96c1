"""Calls with a gate, made straight from a backend's plans, and judged against float64 autograd of dense attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Cotangents, Inputs, Outputs
from evoattn.core import layouts
from evoattn.core.config import Config
from evoattn.core.problem import GRADIENTS

__all__ = ["ALL", "ONLY_GATE", "Gated"]

ALL, ONLY_GATE = (True,) * 6, (*(False,) * 5, True)

_LOG2E = math.log2(math.e)
_TIMES_DENSE, _ROUNDINGS = 3.0, 4.0
"""A result may be off by this many times what dense attention in the same dtype is, and by so many roundings of the largest."""


@dataclasses.dataclass(frozen=True)
class Gated:
    """One call with a gate.

    Args:
        name: for test ids.
        gate: how it lies in memory: "contiguous", "sliced" (heads of a wider row), "odd" (the same, not on 16 bytes),
            "transposed" (queries innermost), "expanded" (one row n for all); or "large": most sigmoids are 0 or 1.
        do, dlse: which cotangents are given.
        needs: which gradients are wanted, if their inputs are there.
        q_size: standard deviation of q.
        swallowed: whether every third query has a pair bias of -1e9 for all keys.
        first_masked: whether the first row n has no key.
    """

    name: str
    b: int = 1
    n: int = 3
    h: int = 2
    lq: int = 37
    lk: int = 41
    d: int = 8
    c: int = 8
    dtype: torch.dtype = torch.float32
    layout: str = "bnlhd"
    mask: bool = True
    mask_bias: bool = False
    pair_bias: torch.dtype | None = torch.float32
    gate: str = "contiguous"
    do: bool = True
    dlse: bool = False
    needs: tuple[bool, ...] = ALL
    deterministic: bool = False
    q_size: float = 1.0
    swallowed: bool = False
    first_masked: bool = True

    def inputs(self, device: str, seed: int) -> Inputs:
        """Random canonical tensors."""
        random = torch.Generator().manual_seed(seed)
        b, n, h, lq, lk = self.b, self.n, self.h, self.lq, self.lk

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=random).to(device, dtype)

        def heads(length: int, channels: int) -> Tensor:
            shape = (b, n, length, h, channels) if self.layout == "bnlhd" else (b, n, h, length, channels)
            return layouts.to_canonical(normal(*shape), self.layout)

        c = self.c
        if self.gate in ("sliced", "odd"):
            first = 8 if self.gate == "sliced" else 3
            buffer = normal(b, n, lq, 8 + first + h * c + (-h * c - first) % 8)
            gate = buffer[..., first : first + h * c].unflatten(-1, (h, c)).transpose(2, 3)
        elif self.gate == "transposed":
            gate = normal(b, n, h, c, lq).transpose(3, 4)
        elif self.gate == "expanded":
            gate = heads(lq, c)[:, :1].expand(b, n, h, lq, c)
        else:
            gate = heads(lq, c) * (1.0 if self.gate == "contiguous" else 30.0)
        mask = None
        if self.mask:
            mask = torch.rand(b, n, lk, generator=random).to(device) > 0.3
            mask[:, 0] &= not self.first_masked
        bias = normal(b, n, lk, dtype=torch.float32) if self.mask_bias else None
        pair = None if self.pair_bias is None else normal(b, h, lq, lk, dtype=self.pair_bias)
        if pair is not None and self.swallowed:
            pair[..., ::3, :] = 0.0
        return Inputs(heads(lq, self.d) * self.q_size, heads(lk, self.d), heads(lk, c), mask, bias, pair, gate)

    def wrong(self, backend: Any, device: str = "cpu", seed: int = 1) -> list[str]:
        """What is wrong of a backend's results, with the errors; empty when all is right."""
        inputs, wanted = self.inputs(device, seed), self.needs
        needs = tuple([need and x is not None for need, x in zip(wanted, inputs.differentiable, strict=True)])
        random = torch.Generator().manual_seed(seed + 1)
        shape = (*inputs.q.shape[:-1], self.c)
        do = torch.randn(shape, generator=random).to(device, self.dtype) if self.do else None
        dlse = torch.randn(shape[:-1], generator=random).to(device) if self.dlse else None
        cotangents = Cotangents(do, dlse)
        expected = _dense(inputs, cotangents, torch.float64)
        rough = _dense(inputs, cotangents, self.dtype)
        pair = inputs.pair_bias
        if pair is not None and self.swallowed:
            pair = pair.clone()
            pair[..., ::3, :] = -1e9
        actual = self._run(backend, inputs._replace(pair_bias=pair), cotangents, needs)
        wrong = []
        for name, value in actual.items():
            size = expected[name].abs().max().item()
            budget = _TIMES_DENSE * (rough[name].double() - expected[name]).abs().max().item()
            budget += _ROUNDINGS * torch.finfo(value.dtype).eps * size
            error = (value.double() - expected[name]).abs().max().item()
            if not error <= budget:
                wrong.append(f"{name}: off by {error:.2e}, allowed {budget:.2e}, largest {size:.2e}")
        return wrong

    def _run(self, backend: Any, inputs: Inputs, cotangents: Cotangents, needs: tuple[bool, ...]) -> dict[str, Tensor]:
        common: dict[str, Any] = {"scale": self.d**-0.5, "layout": self.layout, "config": Config()}
        outputs = layouts.empty_outputs(inputs, self.layout)
        for x in outputs:
            x.fill_(math.nan)
        backend.plan_forward(inputs, **common).run(inputs, outputs)
        options = {"needs": needs, "deterministic": self.deterministic}
        plan = backend.plan_backward(cotangents, inputs, Outputs(*outputs), **common, **options)
        gradients = layouts.empty_gradients(inputs, self.layout, needs)
        for x in gradients:
            if x is not None:
                x.fill_(math.nan)
        biases = plan.run(cotangents, inputs, outputs, gradients)
        gradients_wanted = zip(GRADIENTS, (*gradients[:3], *biases, gradients[3]), needs, strict=True)
        return {"o": outputs.o} | {f"d{name}": x for name, x, need in gradients_wanted if need}


def _dense(inputs: Inputs, cotangents: Cotangents, dtype: torch.dtype) -> dict[str, Tensor]:
    """O and all gradients of dense attention, computed in a dtype; the LSE counts in log2 units."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs.differentiable]
    q, k, v, bias, pair, gate = leaves
    assert q is not None and k is not None and v is not None and gate is not None
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias[:, :, None, None]
    if pair is not None:
        s = s + pair[:, None]
    if inputs.mask is not None:
        s = s.masked_fill(~inputs.mask[:, :, None, None], -math.inf)
    lse = s.logsumexp(-1)
    lse = torch.where(lse.isinf(), 0.0, lse)
    o = (s - lse[..., None]).exp() @ v * gate.sigmoid()
    do, dlse = cotangents
    loss = lse.new_zeros(())
    if do is not None:
        loss = loss + (o * do.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.to(dtype)).sum() * _LOG2E
    present = [x for x in leaves if x is not None]
    computed = iter(torch.autograd.grad(loss, present, allow_unused=True))
    gradients = [None if x is None else _or_zero(next(computed), x) for x in leaves]
    return {"o": o.detach()} | {f"d{name}": x for name, x in zip(GRADIENTS, gradients, strict=True) if x is not None}


def _or_zero(gradient: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if gradient is None else gradient
