"""Triangle multiplication by kernels: its steps, what it saves for its backward, and its gradients.

The forward keeps z, both halves and their product. The backward normalises again what it needs, in the kernels that read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.core.devices import uncast
from evoattn.pair.checking import result_dtype
from evoattn.pair.multiplication.squares import multiply, multiply_backward, side
from evoattn.pair.multiplication.values import Options, Weights

__all__ = ["backward", "forward", "outline", "weight_gradients"]


def forward(
    z: Tensor, mask: Tensor | None, weights: Weights, options: Options, save: bool = True, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The result `[B, L, L, C]`, the halves `[2 D, B, P, P]` if they are to be kept, and their product `[D, B, P, P]`.

    The result is written into `out`, which may be z, if that is given.
    """
    from evoattn.pair.multiplication import steps

    with uncast(z.device):
        ab = steps.gate_in(z, mask, weights, options, side(z.shape[1]))
        t = multiply(*_halves(ab), outgoing=options.outgoing).view(-1, *ab.shape[1:])
        saved = ab if save else None
        del ab  # before the result is allocated
        return steps.gate_out(z, t, weights, options, out), saved, t


def outline(z: Tensor, weights: Weights, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of the shapes and dtypes that `forward` returns."""
    hidden, square = weights.p_out_weight.shape[1], (z.shape[0], side(z.shape[1]), side(z.shape[1]))
    ab = z.new_empty((2 * hidden, *square), dtype=weights.dtype)
    t = z.new_empty((hidden, *square), dtype=torch.float32 if weights.dtype == torch.float16 else weights.dtype)
    return torch.empty_like(z, dtype=result_dtype(z, weights, options)), ab, t


def backward(
    do: Tensor, z: Tensor, mask: Tensor | None, ab: Tensor, t: Tensor, weights: Weights, options: Options, needs_weights: bool
) -> tuple[Tensor, Weights | None]:
    """The gradient of z, and those of the weights, all of them or none."""
    from evoattn.pair.multiplication import steps

    with uncast(z.device):
        dt, dg, out_operands = steps.gate_out_backward(do, z, t, weights, options, needs_weights=needs_weights)
        dab = torch.empty_like(ab)
        multiply_backward(dt.flatten(0, 1), *_halves(ab), *_halves(dab), outgoing=options.outgoing)
        del dt
        dz, in_operands = steps.gate_in_backward(dab, dg, do, z, mask, weights, options, needs_weights=needs_weights)
        del dab
        if out_operands is None or in_operands is None:
            return dz, None
        return dz, weight_gradients(dg, out_operands, in_operands, weights)


def weight_gradients(
    dg: Tensor, out_operands: tuple[Tensor, ...], in_operands: tuple[Tensor, ...], weights: Weights
) -> Weights:
    """The gradients of all weights, from their operands and sums, which the steps return."""

    def sums(bias: Tensor | None, rows: Tensor, axis: int) -> Tensor | None:
        return None if bias is None else rows.sum(axis)

    du, n, norm_out = out_operands
    dpg, y, norm_in = in_operands
    dp_in, dg_in = dpg.chunk(2)
    dp_weight, dg_weight = (dpg @ y).chunk(2)
    w = weights
    return Weights(
        norm_in_weight=_as(norm_in[0], w.norm_in_weight),
        norm_in_bias=_as(norm_in[1], w.norm_in_bias),
        p_in_weight=dp_weight,
        p_in_bias=sums(w.p_in_bias, dp_in, 1),
        g_in_weight=dg_weight,
        g_in_bias=sums(w.g_in_bias, dg_in, 1),
        norm_out_weight=_as(norm_out[0], w.norm_out_weight),
        norm_out_bias=_as(norm_out[1], w.norm_out_bias),
        p_out_weight=du.t() @ n.t(),
        p_out_bias=sums(w.p_out_bias, du, 0),
        g_out_weight=dg.t() @ y,
        g_out_bias=sums(w.g_out_bias, dg, 0),
    )


def _as(gradient: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else gradient.to(weight.dtype)


def _halves(ab: Tensor) -> tuple[Tensor, Tensor]:
    """The halves a and b of `[2 D, B, P, P]`, as batches of squares."""
    a, b = ab.flatten(0, 1).chunk(2)
    return a, b
