"""Triangle multiplication by kernels, of which each process holds some rows or columns of z.

All steps but the product look at one position at a time. So the kernels take the positions of a process as squares of side 1,
which need no padding. `exchanged` makes the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.core.devices import uncast
from evoattn.dispatch.autograd import once_differentiable
from evoattn.dispatch.distributed import Split
from evoattn.pair.multiplication import exchanged
from evoattn.pair.multiplication.autograd import weight_gradients
from evoattn.pair.multiplication.values import Options, Weights

__all__ = ["ShardedTriangleMultiplication", "forward"]


def forward(
    z: Tensor,
    mask: Tensor | None,
    weights: Weights,
    options: Options,
    split: Split,
    save: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute the result for this process's part of z `[B, I, J, C]`, with a mask `[B, I, J]` or None.

    Returns:
        The result `[B, I, J, C]`, in `out` if that is given (it may be z), the product `[D, B, I, J]`, and with `save` the
        squares that were multiplied, for the backward.
    """
    from evoattn.pair.multiplication import steps

    with uncast(z.device):
        ones, rows = _ones(z), None if mask is None else mask.view(-1, 1, 1)
        ab = steps.gate_in(ones, rows, weights, options, 1)
        t, saved = exchanged.forward(ab.view(-1, *z.shape[:-1]), split, outgoing=options.outgoing, save=save)
        del ab  # before the result is allocated
        into = None if out is None else _ones(out)
        result = steps.gate_out(ones, t.view(t.shape[0], -1, 1, 1), weights, options, into)
        return result.view(z.shape) if out is None else out, t, saved


def _ones(x: Tensor) -> Tensor:
    """The positions of x `[B, I, J, C]` as squares of side 1."""
    return x.view(-1, 1, 1, x.shape[-1])


class ShardedTriangleMultiplication(torch.autograd.Function):
    """The result of `forward`, with gradients for z and the weights from this process's part."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor | None, options: Options, split: Split, *weights: Tensor | None) -> Tensor:
        result, t, saved = forward(z, mask, Weights(*weights), options, split)  # type: ignore[arg-type]
        ctx.save_for_backward(z, mask, t, *weights, *saved)
        ctx.options, ctx.split = options, split
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        from evoattn.pair.multiplication import steps

        z, mask, t, *rest = ctx.saved_tensors
        count, needs, options = len(Weights._fields), ctx.needs_input_grad[4:], ctx.options
        weights, saved = Weights(*rest[:count]), rest[count:]
        rows, needs_weights = None if mask is None else mask.view(-1, 1, 1), any(needs)
        do, ones = _ones(do.contiguous()), _ones(z)
        with uncast(z.device):
            flat = t.view(t.shape[0], -1, 1, 1)
            dt, dg, out_operands = steps.gate_out_backward(do, ones, flat, weights, options, needs_weights=needs_weights)
            dab = exchanged.backward(dt.view(t.shape), saved, ctx.split, outgoing=options.outgoing)
            del dt
            dab = dab.view(dab.shape[0], -1, 1, 1)
            dz, in_operands = steps.gate_in_backward(dab, dg, do, ones, rows, weights, options, needs_weights=needs_weights)
            del dab
            all_gradients: tuple[Tensor | None, ...] = (None,) * count
            if out_operands is not None and in_operands is not None:
                all_gradients = weight_gradients(dg, out_operands, in_operands, weights)
        gradients = [x if need else None for x, need in zip(all_gradients, needs, strict=True)]
        return dz.view(z.shape), None, None, None, *gradients
