"""Dense attention of small calls, which holds all scores at once. Its backward may start from saved probabilities.

    P = softmax(scale q k^T + bias)     o = sigmoid(gate) * P v     dS = softmax's backward of (P, do' v^T)

The biases are written where the scores will be, and the product is added to them. Each step is one operation of torch on all
rows, since operations of this size take as long to start as to compute.

In bfloat16, scores without biases, probabilities and dS are rounded, as in dense torch. A call whose LSE is asked for, or with
a score so large that its rounding would show, is not dense.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from evoattn.backends.tiled.scores import is_plain, statistic
from evoattn.core import numerics
from evoattn.core.inputs import Cotangents, Inputs, Outputs, SavedProbabilities
from evoattn.core.numerics import LOG2E, accumulate_dtype
from evoattn.core.problem import Problem

_MOST_CHANNELS = 1 << 22
"""Elements of q, k or v in a call that has more of them than scores: 16 MiB in float32."""

_MOST_BYTES = 16 << 20
"""Bytes of the scores, as those of float32 if they are wider. With more of them threads share the blocks."""

_LARGEST_ROUNDED = 8.0
"""A product of q and k of this size, rounded to bfloat16, changes its probability by 1.6% at the most."""


def fits(problem: Problem) -> bool:
    """Return whether a problem is small enough for dense attention. Float16 has no fast products on a CPU."""
    p = problem
    channels = p.b * p.n * p.h * max(p.lq, p.lk) * max(p.d, p.c)  # of q, k or v, of which dense attention makes copies
    few = 0 < p.scores * min(4, p.dtype.itemsize) <= _MOST_BYTES and channels <= max(_MOST_CHANNELS, p.scores)
    exact = p.dtype == accumulate_dtype(p.dtype)
    return few and p.device == "cpu" and (exact or (p.dtype == torch.bfloat16 and _multiplies_bfloat16()))


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products in bfloat16. Without them float32 is faster."""
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))


def forward(inputs: Inputs, o: Tensor, scale: float, outputs: Outputs | None = None) -> Tensor | None:
    """Write O, and the statistic of `outputs` if it is given. Return P `[g,q,k]`.

    Return None, and write nothing, if the call is not dense after all.
    """
    p = probabilities(inputs, scale, outputs)
    if p is None:
        return None
    values = torch.bmm(p, inputs.v.flatten(0, 2)).view(o.shape)
    if inputs.gate is None:
        o.copy_(values)
    else:
        torch.mul(values, torch.sigmoid(inputs.gate), out=o)
    return p


def probabilities(inputs: Inputs, scale: float, outputs: Outputs | None = None) -> Tensor | None:
    """P `[g,q,k]`, and the statistic of `outputs` if it is given; None if the call is not dense after all."""
    q, k, _, mask, mask_bias, pair_bias, _ = inputs
    acc = accumulate_dtype(q.dtype)
    rounds = q.dtype != acc
    if rounds and outputs is not None:
        return None
    if mask is not None and mask.all():
        mask = None
    key_bias = numerics.key_bias(mask, mask_bias, acc)
    if pair_bias is not None and not is_plain(pair_bias, key_bias, acc):
        return None
    biases = [] if pair_bias is None else [pair_bias.unsqueeze(1)]
    biases += [] if key_bias is None else [key_bias[:, :, None, None, :]]
    s = (_rounded_scores if rounds else _scores)(q, k, scale, biases)
    if s is None:
        return None
    s5 = s.view(*q.shape[:-1], -1)  # [b,n,h,q,k]
    m = None if outputs is None else s5.amax(-1)
    torch.softmax(s, -1, out=s)
    if key_bias is not None:
        empty = key_bias.amax(-1) == -torch.inf  # [b|1,n|1]
        if empty.any():
            s5.masked_fill_(empty[:, :, None, None, None], 0)
    if outputs is not None and m is not None:
        l = s5.amax(-1).reciprocal_()  # the largest probability is 1 / l, or 0 if there is no key
        l.masked_fill_(l == torch.inf, 0)
        for saved, found in zip(outputs[1:], statistic(m.mul_(LOG2E), l, None), strict=True):
            saved.copy_(found)
    return s.to(q.dtype)


def backward(
    cotangents: Cotangents,
    inputs: Inputs,
    saved: SavedProbabilities,
    gradients: Sequence[Tensor | None],
    scale: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Write dq, dk, dv and dgate where they are given; return dmask_bias and dpair_bias, if they are wanted.

    Softmax's backward subtracts the sum over keys of P dP, which is the sum over channels of O do.
    """
    (o, p), (do, dlse), gate, q = saved, cotangents, inputs.gate, inputs.q
    dq, dk, dv, dgate = gradients
    if do is None:
        do = torch.zeros((), dtype=q.dtype, device=q.device).expand(*q.shape[:-1], inputs.v.shape[-1])
    if gate is not None:
        if dgate is not None and o is not None:
            torch.mul(torch.sigmoid(-gate).mul_(o), do, out=dgate)  # 1 - sigmoid(gate), exact where it is small
        do = torch.sigmoid(gate).mul_(do)
    do = do.flatten(0, 2)
    if dv is not None:
        dv.copy_(torch.bmm(p.transpose(1, 2), do).view(dv.shape))
    if dq is None and dk is None and not any(needs[3:5]):
        return None, None
    ds = torch.bmm(do, inputs.v.flatten(0, 2).transpose(1, 2))  # dP [g,q,k]
    del do
    torch.ops.aten._softmax_backward_data.out(ds, p, -1, p.dtype, grad_input=ds)
    if dlse is not None:  # of the logarithm to base 2
        ds.addcmul_(p, dlse.reshape(*ds.shape[:2], 1), value=LOG2E)
    if dq is not None:
        dq.copy_(_times(ds, inputs.k.flatten(0, 2), scale).view(dq.shape))
    if dk is not None:
        dk.copy_(_times(ds.transpose(1, 2), inputs.q.flatten(0, 2), scale).view(dk.shape))
    return _bias_gradients(ds.view(*inputs.q.shape[:-1], -1), inputs, needs)


def _times(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(x.new_empty(1), x, y, beta=0, alpha=scale)


def _scores(q: Tensor, k: Tensor, scale: float, biases: Sequence[Tensor]) -> Tensor:
    """S `[g,q,k]`: the product is added to the sum of the biases, which is written first."""
    q_, k_ = q.flatten(0, 2), k.flatten(0, 2)  # [g,l,d], g = b*n*h
    s = q.new_empty((q_.shape[0], q_.shape[1], k_.shape[1]))
    s5 = s.view(*q.shape[:-1], -1)
    if len(biases) == 2:
        torch.add(biases[0].expand_as(s5), biases[1], out=s5)
    elif biases:
        s5.copy_(biases[0])
    return torch.baddbmm(s, q_, k_.transpose(1, 2), beta=int(bool(biases)), alpha=scale, out=s)


def _rounded_scores(q: Tensor, k: Tensor, scale: float, biases: Sequence[Tensor]) -> Tensor | None:
    """S `[g,q,k]` from rounded products, in float32 if there are biases; None if a product is too large to be rounded."""
    products = _times(q.flatten(0, 2), k.flatten(0, 2).transpose(1, 2), scale)
    if not max(abs(x.item()) for x in torch.aminmax(products)) <= _LARGEST_ROUNDED:
        return None
    s = products.float() if biases else products
    for bias in biases:
        s.view(*q.shape[:-1], -1).add_(bias.float())  # torch is slow if it adds numbers of two dtypes
    return s


def _bias_gradients(ds: Tensor, inputs: Inputs, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    """dmask_bias and dpair_bias of dS `[b,n,h,q,k]`, which is not read afterwards."""
    dmask = dpair = None
    if inputs.mask_bias is not None and needs[3]:
        dmask = ds.sum((2, 3)).sum_to_size(inputs.mask_bias.shape).to(inputs.mask_bias.dtype)
    if inputs.pair_bias is not None and needs[4]:
        ds = ds.squeeze(1) if ds.shape[1] == 1 else ds.sum(1)  # [b,h,q,k]
        dpair = ds.sum_to_size(inputs.pair_bias.shape).to(inputs.pair_bias.dtype)
    return dmask, dpair
