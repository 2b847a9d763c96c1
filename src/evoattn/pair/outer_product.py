"""The outer product mean: what two projections of an alignment tell a pair representation.

    O[i,j] = sum over s of a[s,i] b[s,j]^T      z[i,j] = W vec(O[i,j] / counts[i,j]) + bias      (or bias / counts[i,j])

Rows i are computed some at a time, so no tensor of [I, J, C D] is ever whole. The backward computes O again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evoattn.core.devices import uncast
from evoattn.core.numerics import accumulate_dtype
from evoattn.dispatch.autograd import NO_SECOND_DERIVATIVE
from evoattn.dispatch.checks import compute_dtype
from evoattn.dispatch.custom_operator import CustomOperator
from evoattn.pair.checking import check_floating
from evoattn.pair.slices import empty_gradients, gradients_of, is_for_torch, slices, wide_product, widened


def outer_product_mean(
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    divides_bias: bool = False,
) -> Tensor:
    """Compute W vec(sum over s of a[s,i] b[s,j]^T / counts[i,j]) + bias for all pairs of columns i, j of an alignment.

    Sums are float32 or wider. Beside the result a call needs some slices of 32 MB, and copies of a and b if these are not
    contiguous or have another dtype. Gradients are deterministic, and have no derivative of their own.

    Args:
        a: `[*, S, I, C]`, a projection of an alignment of S sequences. It is 0 where it is masked.
        b: `[*, S, J, D]`, another one, with the leading axes of a.
        weight: `[E, C D]`: its columns are those of C, for each of them those of D.
        bias: `[E]`, or None.
        counts: `[*, I, J]`, by which each sum is divided. None: by 1. It has no gradient.
        divides_bias: whether the bias is divided too.

    Returns:
        `[*, I, J, E]`, in autocast's dtype, or the narrower one of a and the weight.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape or device, or `counts` wants a gradient.

    Example:
        >>> import torch
        >>> outer_product_mean(torch.ones(1, 4, 5, 2), torch.ones(1, 4, 6, 3), torch.ones(8, 6)).shape
        torch.Size([1, 5, 6, 8])

    Source: Jumper et al. 2021, supplementary algorithm 10; Abramson et al. 2024, algorithm 9.
    """
    _check(a, b, weight, bias, counts)
    divides_bias = divides_bias and counts is not None
    dtype = compute_dtype(a, weight)
    a, b, weight = a.to(dtype), b.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    with uncast(a.device):
        if is_for_torch(a, b, weight, bias, counts):
            return reference(a, b, weight, bias, counts, divides_bias)
        lead = a.shape[:-3]
        folded = [x.reshape(math.prod(lead), *x.shape[-3:]).contiguous() for x in (a, b)]
        by = None if counts is None else counts.reshape(math.prod(lead), *counts.shape[-2:])
        z: Tensor = _OPERATOR.operator(*folded, weight, bias, by, divides_bias)
        return z.view(*lead, *z.shape[-3:])


def _check(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None) -> None:
    optional = {name: x for name, x in (("bias", bias), ("counts", counts)) if x is not None}
    check_floating({"a": a, "b": b, "weight": weight, **optional})
    if a.ndim < 3:
        raise ValueError(f"a must be [*, S, I, C], got shape {list(a.shape)}")
    if b.ndim != a.ndim or b.shape[:-2] != a.shape[:-2]:
        raise ValueError(f"b must be {[*a.shape[:-2], 'J', 'D']} for an a of shape {list(a.shape)}, got shape {list(b.shape)}")
    width = a.shape[-1] * b.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != width:
        raise ValueError(f"weight must be [E, {width}] for {a.shape[-1]} and {b.shape[-1]} channels, got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be {list(weight.shape[:1])}, got shape {list(bias.shape)}")
    pairs = (*a.shape[:-3], a.shape[-2], b.shape[-2])
    if counts is not None and tuple(counts.shape) != pairs:
        raise ValueError(f"counts must be {list(pairs)}, got shape {list(counts.shape)}")
    if counts is not None and counts.requires_grad:
        raise ValueError("counts must not want a gradient: pass counts.detach()")


def reference(
    a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None, divides_bias: bool = False
) -> Tensor:
    """The same in plain torch, which differentiates it, with all products in memory."""
    o = all_sums(a, b)
    if counts is None:
        return F.linear(o.to(a.dtype), weight, bias)
    counts = counts.unsqueeze(-1).to(o.dtype)
    if bias is None or not divides_bias:
        return F.linear((o / counts).to(a.dtype), weight, bias)
    return F.linear((o / counts).to(a.dtype), weight) + (bias / counts).to(a.dtype)


def all_sums(a: Tensor, b: Tensor) -> Tensor:
    """O of all pairs, `[*, I, J, C D]`, in float32 or wider."""
    wide = accumulate_dtype(a.dtype)
    return torch.einsum("...sic,...sjd->...ijcd", a.to(wide), b.to(wide)).flatten(-2)


def _forward(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None, divides_bias: bool) -> Tensor:
    """a `[B, S, I, C]`, b `[B, S, J, D]`, weight `[E, C D]`, bias `[E]`, counts `[B, I, J]` -> z `[B, I, J, E]`."""
    z = _outline(a, b, weight)
    with uncast(a.device):
        for n, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
            columns = widened(_flat(of_b))
            for rows in _slices(a, b):
                by = _part(counts, n, rows)
                o, into = _sums(of_a[:, rows], columns, b.shape[-1], by), z[n, rows].view(-1, weight.shape[0])
                if bias is None or divides_bias:
                    torch.mm(o, weight.t(), out=into)
                else:
                    torch.addmm(bias, o, weight.t(), out=into)
                if bias is not None and divides_bias:
                    z[n, rows] += bias / by[..., None]  # type: ignore[index]
    return z


def _outline(a: Tensor, b: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[2], b.shape[2], weight.shape[0])


def _backward(
    dz: Tensor, a: Tensor, b: Tensor, weight: Tensor, counts: Tensor | None, divides_bias: bool, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients of a, b, weight and bias. One that is not needed has no elements."""
    da, db, dweight, dbias = _outline_backward(dz, a, b, weight, counts, divides_bias, needs)
    wide = accumulate_dtype(weight.dtype)
    sums, bias_sums = (torch.zeros(x.shape, dtype=wide, device=dz.device) for x in (dweight, dbias))
    with uncast(dz.device):
        for n, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
            every = widened(_flat(of_b)) if needs[2] else of_b
            for rows in _slices(a, b) if needs[0] or needs[2] or needs[3] else ():
                part, by = dz[n, rows], _part(counts, n, rows)
                if needs[2]:
                    sums += wide_product(part.reshape(-1, weight.shape[0]).t(), _sums(of_a[:, rows], every, b.shape[-1], by))
                if needs[3]:
                    of_bias = part.to(wide)
                    bias_sums += (of_bias / by[..., None] if divides_bias else of_bias).sum((0, 1))  # type: ignore[index]
                if needs[0]:
                    do = _gradients(part, weight, by, a)
                    da[n, :, rows] = _flat(of_b).mm(do.t()).view_as(da[n, :, rows])
            for columns in _slices(b, a) if needs[1] else ():
                do = _gradients(dz[n, :, columns], weight, _part(counts, n, slice(None), columns), a)
                db[n, :, columns] = _flat(of_a).mm(do).view_as(db[n, :, columns])
    return da, db, dweight.copy_(sums), dbias.copy_(bias_sums)


def _outline_backward(
    dz: Tensor, a: Tensor, b: Tensor, weight: Tensor, counts: Tensor | None, divides_bias: bool, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    return empty_gradients((a, b, weight, weight[:, 0]), needs)


_VALUES, _DIVIDED = ("Tensor a", "Tensor b", "Tensor weight"), ("Tensor? counts", "bool divides_bias")
_OPERATOR = CustomOperator("outer_product_mean", (*_VALUES, "Tensor? bias", *_DIVIDED), "Tensor", _forward, _outline)
_BACKWARD = CustomOperator(
    "outer_product_mean_backward",
    ("Tensor dz", *_VALUES, *_DIVIDED, "bool[] needs"),
    "(Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _outline_backward,
)


def _save(ctx: Any, values: Sequence[Any], output: Tensor) -> None:
    a, b, weight, _, counts, ctx.divides_bias = values
    ctx.save_for_backward(a, b, weight, counts)


def _differentiate(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    return gradients_of(_BACKWARD.operator, ctx, len(_VALUES) + 1, dz, ctx.divides_bias)  # of the bias too


_OPERATOR.differentiate(_save, _differentiate)
_BACKWARD.refuse_derivative(NO_SECOND_DERIVATIVE)


def _slices(a: Tensor, b: Tensor) -> Any:
    """Slices of the columns of a, by the products of each with all columns of b."""
    return slices(a.shape[-2], 4 * b.shape[-2] * a.shape[-1] * b.shape[-1])


def _flat(x: Tensor) -> Tensor:
    """The last two axes as one."""
    return x.reshape(*x.shape[:-2], -1)


def _part(counts: Tensor | None, n: int, rows: slice, columns: slice = slice(None)) -> Tensor | None:
    """The counts of some pairs of one batch, `[R, J]`."""
    return None if counts is None else counts[n, rows, columns]


def _sums(a: Tensor, b: Tensor, d: int, counts: Tensor | None) -> Tensor:
    """O / counts of a `[S, R, C]` and b `[S, J D]`, as `[R J, C D]` in the dtype of a."""
    (_, r, c), j = a.shape, b.shape[1] // d
    o = wide_product(_flat(a).t(), b).view(r, c, j, d)
    return _divided(o.transpose(1, 2), None if counts is None else counts[:, :, None, None], a.dtype).view(r * j, c * d)


def _gradients(dz: Tensor, weight: Tensor, counts: Tensor | None, a: Tensor) -> Tensor:
    """The gradient of O, as `[R C, J D]` in the dtype of a, from that of z, `[R, J, E]`."""
    (r, j, _), c = dz.shape, a.shape[-1]
    do = wide_product(dz.reshape(-1, weight.shape[0]), weight).view(r, j, c, -1).transpose(1, 2)
    if counts is not None and a.dtype == torch.float16:  # an infinity times a sequence that is masked would be NaN
        largest = torch.finfo(a.dtype).max
        do, counts = (do / counts[:, None, :, None].to(do.dtype)).clamp_(-largest, largest), None
    return _divided(do, None if counts is None else counts[:, None, :, None], a.dtype).view(r * c, -1)


def _divided(x: Tensor, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x / counts in a dtype, contiguous, in one pass."""
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    return result.copy_(x) if counts is None else torch.div(x, counts.to(x.dtype), out=result)
