"""Kernels that fill fully masked rows in place. A call without such rows pays for a few launches.

The attention gets a mask of these rows, so its output and its gradients are 0 there. Kernels then write to its output, and add
to its gradients, in place. Two autograd functions enclose the attention:

    forward     _AddGradients passes q, k, v, pair bias and gate on; the attention; a kernel fills o
    backward    _SaveCotangent saves dO; the attention computes its gradients; _AddGradients adds to them in place
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.dispatch.autograd import once_differentiable
from evoattn.dispatch.axes import with_axes
from evoattn.fully_masked import kernels
from evoattn.fully_masked.means import heads_first

_Saved = list[Tensor]
"""dO and the means `[b,n,h,c]`: `_SaveCotangent.backward` leaves them for `_AddGradients.backward`, later in the same pass."""


class _AddGradients(torch.autograd.Function):
    """Return those of q, k, v, the pair bias and the gate that require a gradient. The backward adds to their gradients."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, settings: tuple[float, str], mask_bias: Tensor, stats: Tensor, *inputs: Any) -> Any:
        ctx.saved, ctx.settings = saved, settings
        *qkv, _, gate = inputs
        ctx.save_for_backward(mask_bias, stats, *qkv, gate)
        return tuple(x for x, need in zip(inputs, ctx.needs_input_grad[4:], strict=True) if need)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask_bias, stats, *inputs = ctx.saved_tensors
        scale, layout = ctx.settings
        if not ctx.saved:
            raise RuntimeError("the backward of the attention ran without that of its output")
        do, means = ctx.saved
        ctx.saved.clear()  # a graph that autograd retains holds no gradient
        q, k, v, gate, do = (None if x is None else heads_first(x, layout) for x in (*inputs, do))
        remaining = iter(grads)
        dq, dk, dv, dpair, dgate = all_grads = [next(remaining) if need else None for need in ctx.needs_input_grad[4:]]
        gradients = [None if x is None else heads_first(x, layout) for x in (dq, dk, dv, dgate)]
        gradients.append(None if dpair is None else with_axes(dpair, 5))
        kernels.add_gradients((q, k, v, gate), do, tuple(gradients), mask_bias, stats, means, scale)  # type: ignore[arg-type]
        return None, None, None, None, *all_grads


class _SaveCotangent(torch.autograd.Function):
    """Return the output of the attention. The backward saves its gradient for `_AddGradients`."""

    @staticmethod
    def forward(ctx: Any, saved: _Saved, o: Tensor, means: Tensor) -> Tensor:
        ctx.saved = saved
        ctx.save_for_backward(means)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, Tensor, None]:
        ctx.saved[:] = do, *ctx.saved_tensors
        return None, do, None


def attend(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_bias: Tensor,
    pair_bias: Tensor | None,
    gate: Tensor | None = None,
    *,
    scale: float | None,
    layout: str,
    limits: tuple[float, float],
) -> Tensor:
    """The output of `attention`, with the mean of v in rows whose mask bias is low at every key.

    Args:
        attention: `evoformer_attention` with this scale and layout.
        q, k, v: `[*, N, H, L, C]` or `[*, N, L, H, C]`, of the same heads and one dtype of at most 32 bits.
        mask_bias: `[*, N, 1, 1, K]`; every axis may be 1. It gets no gradient.
        pair_bias: `[*, 1, H, Q, K]`, with all leading axes of q or all of size 1. Without a gradient the last three may be 1.
        gate: of O's shape and dtype, or None. The means are gated too.
        scale, layout: what `attention` has; a scale of None is `D ** -0.5`.
        limits: the largest mask bias of a fully masked row. Keys whose bias is below the second number times the largest of an
            empty row weigh nothing.
    """
    lead = q.shape[:-3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if len(lead) != 2:
        q, k, v, mask_bias = (_with_one_lead(x) for x in (q, k, v, mask_bias.expand(*lead, *mask_bias.shape[-3:])))
        pair_bias = None if pair_bias is None else _with_one_lead(with_axes(pair_bias, len(lead) + 3))
        gate = None if gate is None else _with_one_lead(gate)
        o = attend(attention, q, k, v, mask_bias, pair_bias, gate, scale=scale, layout=layout, limits=limits)
        return o.reshape(*lead, *o.shape[-3:])
    every_key = mask_bias.detach().expand(*lead, 1, 1, k.shape[-2 if layout == "bnhld" else -3])
    alive, stats = kernels.find(every_key, *limits)
    inputs: tuple[Tensor | None, ...] = (q, k, v, pair_bias, gate)
    saved: _Saved = []
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    if any(needs):
        tracked = iter(_AddGradients.apply(saved, (scale, layout), every_key, stats, *inputs))  # type: ignore[no-untyped-call]
        inputs = tuple(next(tracked) if need else x for x, need in zip(inputs, needs, strict=True))
    o = attention(*inputs[:3], mask=alive, mask_bias=mask_bias, pair_bias=inputs[3], gate=inputs[4])
    o_view, v_view, gate_view = (None if x is None else heads_first(x.detach(), layout) for x in (o, v, gate))
    means = kernels.fill(o_view, v_view, gate_view, every_key, stats)  # type: ignore[arg-type]
    return _SaveCotangent.apply(saved, o, means) if any(needs) else o  # type: ignore[no-untyped-call, no-any-return]


def _with_one_lead(x: Tensor) -> Tensor:
    """Flatten the leading axes but the last to b: `[b,n,...]`."""
    return x[None] if x.ndim == 4 else x.flatten(0, -5)
