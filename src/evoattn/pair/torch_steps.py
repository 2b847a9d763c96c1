"""The steps of triangle multiplication and of its backward in plain torch: the CPU's path, and what the kernels have to give.

Shapes: z `[B, L, L, C]`, mask `[B, L, L]`. The halves, their product t and the gradients of these have channels first, and
sides of P >= L: `[channels, B, P, P]`, with zeros outside L. What the backward makes for the weights has R = B P P rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evoattn.numerics import accumulate_dtype
from evoattn.pair.values import Options, Weights

__all__ = ["gate_in", "gate_in_backward", "gate_out", "gate_out_backward"]


def gate_in(z: Tensor, mask: Tensor | None, weights: Weights, options: Options, padded: int) -> Tensor:
    """Make both halves, `mask * sigmoid(g_in(y)) * p_in(y)` with `y = norm_in(z)`: `[2 D, B, P, P]`."""
    w = weights
    y = _norm(z, w.norm_in_weight, w.norm_in_bias, options.eps)[0].to(w.dtype)
    p, s = F.linear(y, w.p_in_weight, w.p_in_bias), F.linear(y, w.g_in_weight, w.g_in_bias).sigmoid()
    ab = s * p if mask is None else s * p * mask.unsqueeze(-1).to(w.dtype)
    return _pad(ab, padded).movedim(-1, 0).contiguous()


def gate_out(z: Tensor, t: Tensor, weights: Weights, options: Options) -> Tensor:
    """Make the update `sigmoid(g_out(y)) * p_out(norm_out(t))`, or z + update."""
    w = weights
    y = _norm(z, w.norm_in_weight, w.norm_in_bias, options.eps)[0].to(w.dtype)
    n = _norm(_unpad(t, z), w.norm_out_weight, w.norm_out_bias, options.eps)[0].to(w.dtype)
    update = F.linear(n, w.p_out_weight, w.p_out_bias) * F.linear(y, w.g_out_weight, w.g_out_bias).sigmoid()
    return z + update if options.residual else update


def gate_out_backward(
    do: Tensor, z: Tensor, t: Tensor, weights: Weights, options: Options, *, needs_weights: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Differentiate `gate_out`, but for what flows through y.

    Returns:
        The gradient of t; that of the gate's product g_out(y), `[R, C]`; and for the weights the gradient of the output product
        `[R, C]`, its input `[D, R]`, and the gradients of the norm's weight and bias `[2, D]`.
    """
    w, padded = weights, t.shape[-1]
    y = _norm(z, w.norm_in_weight, w.norm_in_bias, options.eps)[0].to(w.dtype)
    n, x, rstd = _norm(_unpad(t, z), w.norm_out_weight, w.norm_out_bias, options.eps)
    n = n.to(w.dtype)
    s = F.linear(y, w.g_out_weight, w.g_out_bias).sigmoid()
    du = do.to(w.dtype) * s
    dg = du * F.linear(n, w.p_out_weight, w.p_out_bias) * (1 - s)
    dn = (du @ w.p_out_weight).to(x.dtype)
    dt = _norm_backward(dn, x, rstd, w.norm_out_weight).to(w.dtype)
    dt, dg = _pad(dt, padded).movedim(-1, 0).contiguous(), _pad(dg, padded).flatten(0, 2)
    if not needs_weights:
        return dt, dg, None
    return dt, dg, (_pad(du, padded).flatten(0, 2), _pad(n, padded).flatten(0, 2).t(), _sums(dn, x))


def gate_in_backward(
    dab: Tensor,
    dg_out: Tensor,
    do: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: Weights,
    options: Options,
    *,
    needs_weights: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Differentiate `gate_in`, and everything else that reads z.

    Args:
        dab: the gradient of the halves.
        dg_out: the gradient of the gate's product, `[R, C]`.
        do: the gradient of the result.

    Returns:
        The gradient of z; and for the weights the gradients of both products, p then g, `[4 D, R]`, the rows y that were
        multiplied `[R, C]`, and the gradients of the norm's weight and bias `[2, C]`.
    """
    w, padded = weights, dab.shape[-1]
    y, x, rstd = _norm(z, w.norm_in_weight, w.norm_in_bias, options.eps)
    y = y.to(w.dtype)
    p, s = F.linear(y, w.p_in_weight, w.p_in_bias), F.linear(y, w.g_in_weight, w.g_in_bias).sigmoid()
    dp = _unpad(dab, z) * s if mask is None else _unpad(dab, z) * s * mask.unsqueeze(-1).to(w.dtype)
    dg = dp * p * (1 - s)
    dg_out = dg_out.view(*dab.shape[1:], -1)[:, : z.shape[1], : z.shape[2]]
    dy = (dp @ w.p_in_weight + dg @ w.g_in_weight + dg_out @ w.g_out_weight).to(x.dtype)
    dz = _norm_backward(dy, x, rstd, w.norm_in_weight)
    dz = (dz + do if options.residual else dz).to(z.dtype)
    if not needs_weights:
        return dz, None
    both = torch.cat((dp, dg), -1)
    return dz, (_pad(both, padded).flatten(0, 2).t(), _pad(y, padded).flatten(0, 2), _sums(dy, x))


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """norm(x), x with mean 0 and deviation 1, and 1 / the deviation, in float32 or wider."""
    x = x.to(accumulate_dtype(x.dtype))
    x = x - x.mean(-1, keepdim=True)
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    x = x * rstd
    y = x if weight is None else x * weight
    return (y if bias is None else y + bias), x, rstd


def _norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    dy = dy if weight is None else dy * weight
    return (dy - dy.mean(-1, keepdim=True) - x * (dy * x).mean(-1, keepdim=True)) * rstd


def _sums(dy: Tensor, x: Tensor) -> Tensor:
    return torch.stack([(dy * x).flatten(0, -2).sum(0), dy.flatten(0, -2).sum(0)])


def _pad(x: Tensor, padded: int) -> Tensor:
    """`[B, L, L, channels]` with zeros to `[B, P, P, channels]`."""
    more = padded - x.shape[1]
    return F.pad(x, (0, 0, 0, more, 0, more)) if more else x


def _unpad(x: Tensor, like: Tensor) -> Tensor:
    """`[channels, B, P, P]` as `[B, L, L, channels]`."""
    return x[..., : like.shape[1], : like.shape[2]].movedim(0, -1)
