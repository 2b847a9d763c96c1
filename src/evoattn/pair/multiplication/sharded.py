"""Triangle multiplication by kernels, of which each process holds some rows or columns of z.

All steps but the product look at one position at a time. So the kernels take the positions of a process as squares of side 1,
which need no padding. `exchanged` makes the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.devices import uncast
from evoattn.pair.multiplication import exchanged
from evoattn.pair.multiplication.autograd import of_weights
from evoattn.pair.multiplication.values import Options, Weights
from evoattn.run.once import once_differentiable
from evoattn.run.split import Split

__all__ = ["ShardedTriangleMultiplication", "forward"]


def forward(
    z: Tensor,
    mask: Tensor | None,
    weights: Weights,
    options: Options,
    split: Split,
    keep: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The result for this process's part of z.

    Args:
        z: `[B, I, J, C]`, contiguous.
        mask: `[B, I, J]`, contiguous, or None.
        weights, options: of the call.
        split: how rows or columns of z lie on the processes.
        keep: whether the squares are wanted for the backward.
        out: where the result is written, which may be z, or None.

    Returns:
        The result `[B, I, J, C]`, the product `[D, B, I, J]`, and the squares that were multiplied.
    """
    from evoattn.pair.multiplication import steps

    with uncast(z.device):
        ones, rows = _ones(z), None if mask is None else mask.view(-1, 1, 1)
        ab = steps.gate_in(ones, rows, weights, options, 1)
        t, kept = exchanged.forward(ab.view(-1, *z.shape[:-1]), split, outgoing=options.outgoing, keep=keep)
        del ab  # before the result is allocated
        into = None if out is None else _ones(out)
        made = steps.gate_out(ones, t.view(t.shape[0], -1, 1, 1), weights, options, into)
        return made.view(z.shape) if out is None else out, t, kept


def _ones(x: Tensor) -> Tensor:
    """The positions of x `[B, I, J, C]` as squares of side 1."""
    return x.view(-1, 1, 1, x.shape[-1])


class ShardedTriangleMultiplication(torch.autograd.Function):
    """The result of `forward`, with gradients for z and the weights from this process's part."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor | None, options: Options, split: Split, *weights: Tensor | None) -> Tensor:
        made, t, kept = forward(z, mask, Weights(*weights), options, split)  # type: ignore[arg-type]
        ctx.save_for_backward(z, mask, t, *weights, *kept)
        ctx.options, ctx.split = options, split
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        from evoattn.pair.multiplication import steps

        z, mask, t, *rest = ctx.saved_tensors
        count, needs, options = len(Weights._fields), ctx.needs_input_grad[4:], ctx.options
        weights, kept = Weights(*rest[:count]), rest[count:]
        rows, needs_weights = None if mask is None else mask.view(-1, 1, 1), any(needs)
        do, ones = _ones(do.contiguous()), _ones(z)
        with uncast(z.device):
            flat = t.view(t.shape[0], -1, 1, 1)
            dt, dg, of_output = steps.gate_out_backward(do, ones, flat, weights, options, needs_weights=needs_weights)
            dab = exchanged.backward(dt.view(t.shape), kept, ctx.split, outgoing=options.outgoing)
            del dt
            dab = dab.view(dab.shape[0], -1, 1, 1)
            dz, of_input = steps.gate_in_backward(dab, dg, do, ones, rows, weights, options, needs_weights=needs_weights)
            del dab
            found: tuple[Tensor | None, ...] = (None,) * count
            if of_output is not None and of_input is not None:
                found = of_weights(dg, of_output, of_input, weights)
        made = [x if need else None for x, need in zip(found, needs, strict=True)]
        return dz.view(z.shape), None, None, None, *made
