"""Rows that are masked at every key, as models compute them that add -1e9 to the scores.

In float32 a bias of -1e9 swallows the scores: numbers of that size are 64 apart. So a row that such a bias masks at every key
weighs all keys alike, and its output is the mean of v. Its gradients are those of softmax at equal weights w = 1 / K,

    dS = w (dP - delta),    delta = sum over k of w dP

and reach q, k, v and the biases as always. Equal weights make the products small: with V' = V - mean(V),

    dQ = scale dO (K^T w V')^T,    dK = scale w V' (Q^T dO)^T,    dV = w sum over q of dO,    d(bias) = w dO V'^T

Almost no mask has such a row, so a call without one should cost nothing. On the CPU the mask is looked at. On a GPU that would
wait for all work before it, so kernels look (`empty_rows_in_place`). Calls that torch compiles, traces or transforms, and those
that the kernels do not take, compute the means and their gradients for every row and choose by torch.where.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from evoattn.call.canonical import fits, key_axes, with_axes
from evoattn.call.validation import compute_dtype
from evoattn.devices import installed
from evoattn.numerics import bounded
from evoattn.run import guards

__all__ = ["EmptyRows", "check_choice", "with_means", "with_means_of_queries", "with_means_of_values"]

EmptyRows = Literal["mean", "native"]

_SWALLOWS = {torch.float32: -1e8, torch.bfloat16: -3e4, torch.float16: -3e4}
"""A mask bias no higher than this leaves a score of the dtype no digits that count. float64 keeps them at any usual mask."""

_EQUAL = {torch.float32: 1.0, torch.bfloat16: 1 + 2.0**-8, torch.float16: 1 + 2.0**-11}
"""A key weighs something in an empty row if its bias is at least this times the largest. Other keys are masked deeper.

In float32 the neighbours of -1e8 are 8 away, so only the largest bias counts. 16 bits round half a step more to it.
"""

_MAX_CHANNELS = 256
"""More channels need tiles that shared memory does not hold."""

MOST_GATED_CHANNELS = 128
"""With a gate Triton's compiler fails at 256 channels of 16 bits."""


def check_choice(empty_rows: str) -> None:
    """Raise ValueError for anything but "mean" and "native"."""
    if empty_rows not in ("mean", "native"):
        raise ValueError(f"empty_rows must be 'mean' or 'native', got {empty_rows!r}")


def with_means(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float | None,
    layout: str = "bnhld",
    gate: Tensor | None = None,
) -> Tensor:
    """The output of attention, with the mean of v in rows that the mask bias masks at every key.

    Args:
        attention: `evoformer_attention` with the scale and the layout. It checks the other arguments too.
        q, k, v: `[*, H, Q, D]`, `[*, H, K, D]`, `[*, H, K, C]`, or with H behind the length in layout "bnlhd".
        mask_bias: `[*, 1, 1, K]` or `[*, K]`, or None: then no row is masked. Every axis may be 1.
        pair_bias: anything that broadcasts to `[*, H, Q, K]`, or None.
        scale: factor on q k; None is `D ** -0.5`.
        layout: the order of axes in q, k, v and in the output.
        gate: as `evoformer_attention` takes it, or None. The means are gated too.
    """
    if mask_bias is None or (isinstance(q, Tensor) and compute_dtype(q) not in _SWALLOWS):
        return attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, gate=gate)
    plain = guards.is_plain((q, k, v, mask_bias, pair_bias, gate))
    most = MOST_GATED_CHANNELS
    of_o = gate is None or (gate.dtype == q.dtype and gate.shape == (*q.shape[:-1], v.shape[-1]) and v.shape[-1] <= most)
    if plain and of_o and _has_kernels(q.device) and _kernels_take(q, k, v, mask_bias, pair_bias, layout):
        from evoattn.compat.empty_rows_in_place import attend

        limit, equal = _SWALLOWS[q.dtype], _EQUAL[q.dtype]
        return attend(attention, q, k, v, mask_bias, pair_bias, gate, scale=scale, layout=layout, limit=limit, equal=equal)
    o = attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    looks = plain and o.device.type == "cpu"
    bias: Tensor = key_axes(mask_bias, q)[..., None, None, :]  # type: ignore[index]
    if layout == "bnhld":
        o = _with_means(o, q, k, v, bias, pair_bias, scale, looks=looks)
    else:
        o, q, k, v = (x.transpose(-2, -3) for x in (o, q, k, v))
        o = _with_means(o, q, k, v, bias, pair_bias, scale, looks=looks).transpose(-2, -3)
    return o if gate is None else torch.sigmoid(gate) * o


def _with_means(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor | None, scale: float, *, looks: bool
) -> Tensor:
    """o, with the means. looks: whether an answer may depend on the numbers of a mask."""
    if compute_dtype(q) not in _SWALLOWS or not k.shape[-2]:
        return o
    if pair_bias is not None:
        pair_bias = with_axes(pair_bias, q.ndim)
    empty, kept = _masked(mask_bias, k.shape[-2], compute_dtype(q))
    if looks and not bool(empty.any()):
        return o
    made: Tensor = _Means.apply(o, q, k, v, mask_bias, pair_bias, empty, kept, scale)  # type: ignore[no-untyped-call]
    return made


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for the device."""
    if device.type != "cuda" or not installed("triton"):
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _kernels_take(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor | None, layout: str) -> bool:
    """Whether plain tensors have the usual shapes and dtypes. What `attention` refuses may pass, and is refused there."""
    if q.ndim < 4 or not q.ndim == k.ndim == v.ndim == mask_bias.ndim:
        return False
    heads, length = (-2, -3) if layout == "bnlhd" else (-3, -2)
    lead, h, lq, lk = q.shape[:-3], q.shape[heads], q.shape[length], k.shape[length]
    same = all(x.shape[:-3] == lead and x.shape[heads] == h and x.dtype == compute_dtype(q) for x in (q, k, v))
    sizes = k.shape[-1] == q.shape[-1] <= _MAX_CHANNELS and v.shape[length] == lk and 0 < v.shape[-1] <= _MAX_CHANNELS
    if not (same and sizes and q.dtype in _SWALLOWS and q.numel() and k.numel()):
        return False
    if mask_bias.requires_grad or mask_bias.dtype not in _SWALLOWS or not fits(tuple(mask_bias.shape), (*lead, 1, 1, lk)):
        return False
    if pair_bias is None:
        return True
    if pair_bias.ndim > q.ndim:
        return False
    *of_lead, rows, pair_h, pair_q, pair_k = with_axes(pair_bias, q.ndim).shape
    whole = not pair_bias.requires_grad or (pair_h, pair_q, pair_k) == (h, lq, lk)
    return rows == 1 and whole and (tuple(of_lead) == lead[:-1] or all(size == 1 for size in of_lead))


def with_means_of_values(attention: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same for a mask that replaces the scores of masked keys by -1e9: they pass no gradient on to q, k and biases.

    Args:
        attention: the output for v, all else given.
        q, k, v: `[B, N, H, L, C]`.
        mask: bool `[B, N, 1, 1, K]`; every axis may be 1.
    """
    plain = guards.is_plain((q, k, v, mask))
    if plain and q.ndim == 5 and _has_kernels(q.device):
        bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -1e9)
        if _kernels_take(q, k, v, bias, None, "bnhld"):
            from evoattn.compat.empty_rows_in_place import attend

            def call(q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
                return attention(v)

            q, k = q.detach(), k.detach()
            limit, equal = _SWALLOWS[q.dtype], _EQUAL[q.dtype]
            return attend(call, q, k, v, bias, None, scale=1.0, layout="bnhld", limit=limit, equal=equal)
    o = attention(v)
    attended = mask.any(-1, keepdim=True)
    if not v.shape[-2] or (plain and o.device.type == "cpu" and bool(attended.all())):
        return o
    return torch.where(attended, o, v.mean(-2, keepdim=True).to(o.dtype))


def with_means_of_queries(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, biases: Sequence[Tensor], scale: float
) -> Tensor:
    """The same for queries that a mask per pair masks at every key. Scores are held: as many as the mask has, for each head.

    Args:
        o, q, k, v, scale: as `with_means` takes them.
        mask: `[*, 1, Q, K]`, the sum of all biases that count as masks.
        biases: all that are added to the scores.
    """
    if compute_dtype(q) not in _SWALLOWS or not k.shape[-2]:
        return o
    empty, kept = _masked(mask, k.shape[-2], compute_dtype(q))
    weights = _weights(kept, o.dtype)
    change = _change(scale * torch.matmul(q, k.transpose(-1, -2)))  # zeros, whose gradients are those of scores
    for bias in biases:
        change = change + _change(bias)
    p = weights * (1 + change - (weights * change).sum(-1, keepdim=True))
    return torch.where(empty, torch.matmul(p.to(o.dtype), v.to(o.dtype)), o)


def _change(x: Tensor) -> Tensor:
    """x less itself: 0, with x's gradient."""
    return torch.where(x.isfinite(), x - x.detach(), 0)


def _masked(bias: Tensor, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Which queries a mask leaves no key, `[*, 1, Q|1, 1]`, and which keys weigh something there, `[*, 1, Q|1, K]`.

    dtype: the compute dtype, whose numbers are wide enough apart to swallow the scores.
    """
    bias = bounded(bias.detach(), torch.float32).expand(*bias.shape[:-1], keys)
    largest = bias.amax(-1, keepdim=True)
    empty = largest <= _SWALLOWS[dtype]
    return empty, (bias >= _EQUAL[dtype] * largest) | ~empty  # elsewhere anything, as long as it is not nothing


class _Means(torch.autograd.Function):
    """o where a row is not empty, else the mean of v over the keys that are kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask_bias: Tensor,
        pair_bias: Tensor | None,
        empty: Tensor,
        kept: Tensor,
        scale: float,
    ) -> Tensor:
        return torch.where(empty, _mean(v, kept).to(o.dtype), o)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, q, k, v, mask_bias, pair_bias, empty, kept, scale = inputs
        ctx.save_for_backward(q, k, v, empty, kept)
        ctx.shapes = (mask_bias.shape, None if pair_bias is None else pair_bias.shape)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs[:6]]
        ctx.scale = scale

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, empty, kept = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, do.dtype
        of_o = torch.where(empty, 0, do) if needs[0] else None
        do = torch.where(empty, do, 0)
        q, k, v = (x.to(dtype) for x in (q, k, v))  # as autocast casts them
        weights = _weights(kept, dtype).transpose(-1, -2)  # [*,1,k,1]
        apart = weights * (v - _mean(v, kept).to(dtype))  # w V'
        dq = dk = dv = dmask = dpair = None
        if needs[1]:
            dq = ctx.scale * torch.matmul(do, torch.matmul(apart.transpose(-1, -2), k))
        if needs[2]:
            dk = ctx.scale * torch.matmul(apart, torch.matmul(do.transpose(-1, -2), q))
        if needs[3]:
            dv = weights * do.sum(-2, keepdim=True)
        if needs[4]:
            dmask = torch.matmul(do.sum(-2, keepdim=True), apart.transpose(-1, -2)).sum_to_size(ctx.shapes[0])
        if needs[5]:
            dpair = _of_pairs(do, apart, ctx.shapes[1])
        found = (of_o, dq, dk, dv, dmask, dpair)
        return *(None if x is None else x.to(to) for x, to in zip(found, ctx.dtypes, strict=True)), None, None, None


def _weights(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of each key, `[*, 1, Q|1, K]`. A quotient of integers would have torch's default dtype."""
    return (kept / kept.sum(-1, keepdim=True).float()).to(dtype)


def _mean(v: Tensor, kept: Tensor) -> Tensor:
    """The mean of v over the keys that are kept, `[*, H, 1, C]`, in float32."""
    share = kept.shape[-1] / kept.sum(-1, keepdim=True).float()  # of all keys
    return torch.where(kept.transpose(-1, -2), v, 0).mean(-2, keepdim=True, dtype=torch.float32) * share


def _of_pairs(do: Tensor, apart: Tensor, shape: torch.Size) -> Tensor:
    """dO (w V')^T, summed to the shape of a pair bias; what rows share is summed within the product."""
    lead = do.ndim - 3
    kept = [axis for axis in range(lead) if shape[axis] != 1]
    shared = [axis for axis in range(lead) if shape[axis] == 1]
    apart = apart.expand(*do.shape[:lead], *apart.shape[lead:])
    turned = [x.permute(*kept, lead, lead + 1, *shared, lead + 2) for x in (do, apart)]
    left, right = (x.reshape(*x.shape[: len(kept) + 2], math.prod(x.shape[len(kept) + 2 :])) for x in turned)
    made = torch.matmul(left, right.transpose(-1, -2))
    made = made.reshape(*(size if shape[axis] != 1 else 1 for axis, size in enumerate(do.shape[:lead])), *made.shape[-3:])
    return made.sum_to_size(shape)
