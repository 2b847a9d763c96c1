"""The end of a layer: the gate on the attention's output, and the output product.

    y = (o * sigmoid(g)) W^T + b

This module serves the layers that transpose O before the output product. In all others the attention applies the gate itself.

The backward keeps o and g, which attention and projections keep anyway, and multiplies them again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.devices import uncast
from evoattn.nn.submodules import call, is_linear
from evoattn.run.once import once_differentiable

__all__ = ["gated_linear"]


def gated_linear(o: Tensor, g: Tensor, module: nn.Linear) -> Tensor:
    """The output product of a gated attention.

    Args:
        o: `[*, C]`, the attention's output, any strides. An axis of size 1 is broadcast.
        g: `[*, C]`, the gate before the sigmoid, of o's dtype.
        module: the output product, of C input features.

    Returns:
        `[*, out_features]` in o's dtype, in memory in the order of its axes.
    """
    if not is_linear(module):
        return call(module, _gate(o, g)[0], o.dtype)
    bias = None if module.bias is None else module.bias.to(o.dtype)
    made: Tensor = _GatedLinear.apply(o, g, module.weight.to(o.dtype), bias)  # type: ignore[no-untyped-call]
    return made.view(*g.shape[:-1], made.shape[-1])  # a view made inside the function could not be changed in place


def _gate(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """o * sigmoid(g) and sigmoid(g). The gate is the first factor, so the product has its layout, and its rows are a view."""
    opened = torch.sigmoid(g)
    return opened * o, opened


def _gate_backward(d_gated: Tensor, o: Tensor, opened: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of o and g. If o was broadcast, autograd sums its gradient afterwards."""
    return d_gated * opened, torch.ops.aten.sigmoid_backward(d_gated * o, opened)


class _GatedLinear(torch.autograd.Function):
    """(o * sigmoid(g)) W^T + b, `[R, out_features]`."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(o, g, weight)
        return F.linear(_gate(o, g)[0].reshape(-1, g.shape[-1]), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        o, g, weight = ctx.saved_tensors
        need_o, need_g, need_weight, need_bias = ctx.needs_input_grad
        do = dg = dweight = dbias = None
        with uncast(o.device):
            gated, opened = _gate(o, g)
            if need_weight:
                dweight = rows.t() @ gated.reshape(-1, g.shape[-1])
            del gated
            if need_bias:
                dbias = rows.sum(0)
            if need_o or need_g:
                do, dg = _gate_backward((rows @ weight).view(g.shape), o, opened)
        return do, dg, dweight, dbias
