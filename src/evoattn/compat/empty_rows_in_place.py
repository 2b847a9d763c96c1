"""Attention whose rows without a key have the mean of v, at the cost of a few launches that find no such row.

The attention is told by its mask that these rows are dead, so it gives them an output of 0 and gradients of 0. Kernels then
write to its output, and add to its gradients, in place. `_Taken` stands before the attention and `_Filled` behind it:

    forward     _Taken passes q, k, v, pair bias and gate on; the attention; a kernel fills o
    backward    _Filled keeps dO; the attention makes its gradients; _Taken adds to them before anybody else sees them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.call.canonical import with_axes
from evoattn.compat import empty_rows_kernels as kernels
from evoattn.run.once import once_differentiable

__all__ = ["attend"]


@dataclasses.dataclass
class _Between:
    """Tensors that the backward of `_Filled` leaves for the backward of `_Taken`, which runs later in the same pass.

    Args:
        do: the gradient of the output.
        means: the mean of v for each empty row, `[b,n,h,c]`.
    """

    do: Tensor | None = None
    means: Tensor | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        """Return both. Forget `do`, so that a graph that autograd keeps holds no gradient."""
        do, self.do = self.do, None
        if do is None or self.means is None:
            raise RuntimeError("the backward of the attention ran without that of its output")
        return do, self.means


class _Taken(torch.autograd.Function):
    """Pass on those of q, k, v, the pair bias and the gate that require a gradient. The backward adds to their gradients."""

    @staticmethod
    def forward(ctx: Any, between: _Between, settings: tuple[float, str], keys: Tensor, stats: Tensor, *inputs: Any) -> Any:
        ctx.between, ctx.settings = between, settings
        *qkv, _, gate = inputs
        ctx.save_for_backward(keys, stats, *qkv, gate)
        return tuple(x for x, need in zip(inputs, ctx.needs_input_grad[4:], strict=True) if need)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *made: Tensor) -> tuple[Tensor | None, ...]:
        keys, stats, *inputs = ctx.saved_tensors
        scale, layout = ctx.settings
        do, means = ctx.between.take()
        q, k, v, gate, do = (None if x is None else _heads_first(x, layout) for x in (*inputs, do))
        fresh = iter(made)
        dq, dk, dv, dpair, dgate = found = [next(fresh) if need else None for need in ctx.needs_input_grad[4:]]
        gradients = [None if x is None else _heads_first(x, layout) for x in (dq, dk, dv, dgate)]
        if any(x is not None for x in gradients):
            kernels.add_to_inputs((q, k, v), gate, do, tuple(gradients), keys, stats, means, scale)  # type: ignore[arg-type]
        if dpair is not None:
            kernels.add_to_pairs(v, gate, do, with_axes(dpair, 5), keys, stats, means)  # type: ignore[arg-type]
        return None, None, None, None, *found


class _Filled(torch.autograd.Function):
    """Pass on the output of the attention. The backward keeps its gradient for `_Taken`."""

    @staticmethod
    def forward(ctx: Any, between: _Between, o: Tensor, means: Tensor) -> Tensor:
        ctx.between = between
        ctx.save_for_backward(means)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[None, Tensor, None]:
        ctx.between.do, (ctx.between.means,) = do, ctx.saved_tensors
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
    limit: float,
    equal: float,
) -> Tensor:
    """The output of `attention`, with the mean of v in rows whose mask bias is at most `limit` at every key.

    Args:
        attention: `evoformer_attention` with this scale and layout.
        q, k, v: `[*, N, H, L, C]` or `[*, N, L, H, C]`, of the same heads and one dtype of at most 32 bits.
        mask_bias: `[*, N, 1, 1, K]`; every axis may be 1. It gets no gradient.
        pair_bias: `[*, 1, H, Q, K]`, with all leading axes of q or all of size 1. Without a gradient the last three may be 1.
        gate: of O's shape and dtype, or None. The means are gated too.
        scale, layout: what `attention` has; a scale of None is `D ** -0.5`.
        limit: what an empty row's mask bias is at most.
        equal: keys whose bias is below this times the largest of an empty row weigh nothing.
    """
    lead = q.shape[:-3]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if len(lead) != 2:
        q, k, v, mask_bias = (_of_five(x) for x in (q, k, v, mask_bias.expand(*lead, *mask_bias.shape[-3:])))
        pair_bias = None if pair_bias is None else _of_five(with_axes(pair_bias, len(lead) + 3))
        gate = None if gate is None else _of_five(gate)
        o = attend(attention, q, k, v, mask_bias, pair_bias, gate, scale=scale, layout=layout, limit=limit, equal=equal)
        return o.reshape(*lead, *o.shape[-3:])
    keys = mask_bias.detach().expand(*lead, 1, 1, k.shape[-2 if layout == "bnhld" else -3])[:, :, 0, 0]
    alive, stats = kernels.find(keys, limit, equal)
    inputs: tuple[Tensor | None, ...] = (q, k, v, pair_bias, gate)
    between = _Between()
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    if any(needs):
        taken = iter(_Taken.apply(between, (scale, layout), keys, stats, *inputs))  # type: ignore[no-untyped-call]
        inputs = tuple(next(taken) if need else x for x, need in zip(inputs, needs, strict=True))
    o = attention(*inputs[:3], mask=alive, mask_bias=mask_bias, pair_bias=inputs[3], gate=inputs[4])
    of_o, of_v, of_gate = (None if x is None else _heads_first(x.detach(), layout) for x in (o, v, gate))
    means = kernels.fill(of_o, of_v, of_gate, keys, stats)  # type: ignore[arg-type]
    return _Filled.apply(between, o, means) if any(needs) else o  # type: ignore[no-untyped-call, no-any-return]


def _heads_first(x: Tensor, layout: str) -> Tensor:
    return x if layout == "bnhld" else x.transpose(-2, -3)


def _of_five(x: Tensor) -> Tensor:
    """`[b,n,...]`: all leading axes but the last are b, also where there are none."""
    return x[None] if x.ndim == 4 else x.flatten(0, -5)
