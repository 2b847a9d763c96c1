"""Pair-weighted averaging: each sequence of an alignment takes, for each residue, a gated mean of its own residues.

    v = W_v m    g = W_g m    o[s,i,h] = sum over j of p[h,i,j] v[s,j,h]    result = W_o (sigmoid(g) o)

All sequences share the weights p. They are computed some at a time, so v, g and o of all of them are never in memory. The
backward computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.core.devices import uncast
from evoattn.core.numerics import accumulate_dtype
from evoattn.dispatch.autograd import NO_SECOND_DERIVATIVE
from evoattn.dispatch.checks import compute_dtype
from evoattn.dispatch.custom_operator import CustomOperator
from evoattn.pair.checking import check_floating
from evoattn.pair.slices import empty_gradients, gradients_of, is_for_torch, slices, wide_product


def pair_weighted_averaging(m: Tensor, p: Tensor, *, v_weight: Tensor, g_weight: Tensor, out_weight: Tensor) -> Tensor:
    """Average the residues of each sequence by weights that all sequences share, gate the mean, and project it.

    Sums are float32 or wider. Gradients are deterministic, and have no derivative of their own.

    Args:
        m: a normalised alignment, `[*, S, L, C]`.
        p: the weight of residue j for residue i in each head, `[*, H, L, L]`, such as a softmax over j.
        v_weight, g_weight: `[H D, C]`, a head's D rows next to each other.
        out_weight: `[E, H D]`.

    Returns:
        `[*, S, L, E]`, in autocast's dtype, or the narrower one of m and the weights.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device.

    Example:
        >>> import torch
        >>> m, p, w = torch.ones(1, 4, 5, 8), torch.ones(1, 2, 5, 5) / 5, torch.ones(6, 8)
        >>> pair_weighted_averaging(m, p, v_weight=w, g_weight=w, out_weight=w.mT).shape
        torch.Size([1, 4, 5, 8])

    Source: Abramson et al. 2024, algorithm 10.
    """
    weights = _Weights(v_weight, g_weight, out_weight)
    _check(m, p, weights)
    dtype = compute_dtype(m, v_weight)
    m, p, weights = m.to(dtype), p.to(dtype), _Weights(*[x.to(dtype) for x in weights])
    with uncast(m.device):
        if is_for_torch(m, p, *weights):
            return reference(m, p, weights)
        lead = m.shape[:-3]
        folded = [x.reshape(math.prod(lead), *x.shape[-3:]).contiguous() for x in (m, p)]
        y: Tensor = _OPERATOR.operator(*folded, torch.cat(weights[:2]), weights.out)
        return y.view(*lead, *y.shape[-3:])


class _Weights(NamedTuple):
    v: Tensor
    g: Tensor
    out: Tensor


def _check(m: Tensor, p: Tensor, weights: _Weights) -> None:
    check_floating({"m": m, "p": p, "v_weight": weights.v, "g_weight": weights.g, "out_weight": weights.out})
    if m.ndim < 3:
        raise ValueError(f"m must be [*, S, L, C], got shape {list(m.shape)}")
    length = m.shape[-2]
    if p.ndim != m.ndim or p.shape[:-3] != m.shape[:-3] or p.shape[-2:] != (length, length):
        wanted = [*m.shape[:-3], "H", length, length]
        raise ValueError(f"p must be {wanted} for an m of shape {list(m.shape)}, got shape {list(p.shape)}")
    heads, channels = p.shape[-3], m.shape[-1]
    for name, x in (("v_weight", weights.v), ("g_weight", weights.g)):
        if x.ndim != 2 or x.shape[1] != channels or x.shape[0] % max(heads, 1):
            raise ValueError(f"{name} must be [H D, {channels}] for H = {heads} heads of p, got shape {list(x.shape)}")
    if weights.g.shape != weights.v.shape:
        raise ValueError(f"g_weight must be {list(weights.v.shape)}, as v_weight is, got shape {list(weights.g.shape)}")
    if weights.out.ndim != 2 or weights.out.shape[1] != weights.v.shape[0]:
        raise ValueError(f"out_weight must be [E, {weights.v.shape[0]}], got shape {list(weights.out.shape)}")


def reference(m: Tensor, p: Tensor, weights: _Weights) -> Tensor:
    """The same in plain torch, which differentiates it, with v, g and o of all sequences in memory."""
    v = (m @ weights.v.mT).unflatten(-1, (p.shape[-3], -1)).movedim(-2, -4)  # [*,h,s,j,d]
    o = (p.unsqueeze(-3) @ v).movedim(-4, -2).flatten(-2)
    gated: Tensor = (m @ weights.g.mT).sigmoid() * o
    return gated @ weights.out.mT


def _forward(m: Tensor, p: Tensor, joined: Tensor, out_weight: Tensor) -> Tensor:
    """m `[B, S, L, C]`, p `[B, H, L, L]`, weights of v and g `[2 H D, C]`, those of the output `[E, H D]` -> `[B, S, L, E]`."""
    y = _outline(m, p, joined, out_weight)
    with uncast(m.device):
        for n in range(m.shape[0]):
            for some in _slices(m, joined):
                _, gate, o = _parts(m[n, some], p[n], joined)
                torch.mm(_rows(gate.sigmoid_().mul_(o)), out_weight.t(), out=_rows(y[n, some]))
    return y


def _outline(m: Tensor, p: Tensor, joined: Tensor, out_weight: Tensor) -> Tensor:
    return m.new_empty(*m.shape[:-1], out_weight.shape[0])


def _backward(
    dy: Tensor, m: Tensor, p: Tensor, joined: Tensor, out_weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients of m, p and both weights. One that is not needed has no elements."""
    dm, *others = _outline_backward(dy, m, p, joined, out_weight, needs)
    dp, djoined, dout = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in others)
    with uncast(dy.device):
        for n in range(m.shape[0]):
            for some in _slices(m, joined):
                part, of_y = m[n, some], dy[n, some].reshape(-1, out_weight.shape[0])
                v, gate, o = _parts(part, p[n], joined)
                gate = gate.sigmoid()
                gated = of_y.mm(out_weight).view_as(gate)  # the gradient of sigmoid(g) o
                do = _by_head(gated * gate, p.shape[1])
                if needs[1]:
                    dp[n] += wide_product(do, v.transpose(1, 2))
                if needs[3]:
                    dout += wide_product(of_y.t(), _rows(gate * o))
                if needs[0] or needs[2]:
                    dv = _by_residue(p[n].transpose(1, 2).bmm(do), part.shape[0])
                    both = _rows(torch.cat((dv, gated * o * gate * (1 - gate)), -1))
                    if needs[2]:
                        djoined += wide_product(both.t(), _rows(part))
                    if needs[0]:
                        dm[n, some] = both.mm(joined).view_as(part)
    return dm, *[x.copy_(total) for x, total in zip(others, (dp, djoined, dout), strict=True)]


def _outline_backward(
    dy: Tensor, m: Tensor, p: Tensor, joined: Tensor, out_weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    return empty_gradients((m, p, joined, out_weight), needs)


_VALUES = ("Tensor m", "Tensor p", "Tensor joined", "Tensor out_weight")
_OPERATOR = CustomOperator("pair_weighted_averaging", _VALUES, "Tensor", _forward, _outline)
_BACKWARD = CustomOperator(
    "pair_weighted_averaging_backward",
    ("Tensor dy", *_VALUES, "bool[] needs"),
    "(Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _outline_backward,
)


def _save(ctx: Any, values: Sequence[Any], output: Tensor) -> None:
    ctx.save_for_backward(*values)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return gradients_of(_BACKWARD.operator, ctx, len(_VALUES), dy)


_OPERATOR.differentiate(_save, _differentiate)
_BACKWARD.refuse_derivative(NO_SECOND_DERIVATIVE)


def _slices(m: Tensor, joined: Tensor) -> Any:
    """Slices of the sequences, by v and g of each."""
    return slices(m.shape[1], m.shape[2] * joined.shape[0] * m.itemsize)


def _rows(x: Tensor) -> Tensor:
    """All axes but the last as one."""
    return x.reshape(-1, x.shape[-1])


def _parts(m: Tensor, p: Tensor, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """v `[H, L, S D]`, g and o `[S, L, H D]` of some sequences `[S, L, C]`."""
    v, gate = _rows(m).mm(joined.t()).view(*m.shape[:-1], -1).chunk(2, -1)
    v = _by_head(v, p.shape[0])
    return v, gate, _by_residue(p.bmm(v), m.shape[0])


def _by_head(x: Tensor, heads: int) -> Tensor:
    """`[S, L, H D]` as `[H, L, S D]`."""
    return x.view(*x.shape[:-1], heads, -1).permute(2, 1, 0, 3).flatten(-2)


def _by_residue(x: Tensor, sequences: int) -> Tensor:
    """`[H, L, S D]` as `[S, L, H D]`."""
    return x.view(*x.shape[:-1], sequences, -1).permute(2, 1, 0, 3).flatten(-2)
