"""Attention whose empty rows, those without a key, have the mean of v, as in models that add -1e9 to the scores.

In float32 a bias of -1e9 swallows the scores: numbers of that size are 64 apart. So a row that such a bias masks at every key
has equal weights w = 1 / K for all keys, and its output is the mean of v. Its gradients are those of softmax at these weights,

    dS = w (dP - delta),    delta = sum over k of w dP

and reach q, k, v and the biases as always. Equal weights make the products small: with V' = V - mean(V),

    dQ = scale dO (K^T w V')^T,    dK = scale w V' (Q^T dO)^T,    dV = w sum over q of dO,    d(bias) = w dO V'^T

Almost no mask has such a row, so a call without one should cost nothing. On the CPU the host reads the mask. On a GPU that
would wait for all work before it, so kernels read it (`in_place`). Calls that torch compiles, traces or transforms, and those
that the kernels do not take, compute the means and their gradients for every row, and select by torch.where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from evoattn.core import guards
from evoattn.core.devices import installed
from evoattn.core.numerics import bounded
from evoattn.dispatch.axes import fits, key_axes, with_axes
from evoattn.dispatch.checks import compute_dtype

EmptyRows = Literal["mean", "native"]


class MaskLimits(NamedTuple):
    """Limits of the mask bias.

    Args:
        empty: a mask bias that is no higher leaves a score no digits that count. A row of such biases is empty.
        equal: a key weighs something in an empty row if its bias is at least this times the largest.
    """

    empty: float
    equal: float


_LIMITS = {
    torch.float32: MaskLimits(-1e8, 1.0),
    torch.bfloat16: MaskLimits(-3e4, 1 + 2.0**-8),
    torch.float16: MaskLimits(-3e4, 1 + 2.0**-11),
}
"""By compute dtype. float64 keeps the digits of a score at any usual mask.

In float32 the neighbours of -1e8 are 8 away, so only the largest bias counts. 16 bits
round half a step more to it.
"""

_MAX_CHANNELS = 256
"""More channels need tiles that shared memory does not hold."""

MOST_GATED_CHANNELS = 128
"""With a gate Triton's compiler fails at 256 channels of 16 bits."""


def check_empty_rows(empty_rows: str) -> None:
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
        q, k, v: `[*, H, Q, D]`, `[*, H, K, D]`, `[*, H, K, C]`, or with H after the length in layout "bnlhd".
        mask_bias: `[*, 1, 1, K]` or `[*, K]`, or None: then no row is masked. Every axis may be 1.
        pair_bias: anything that broadcasts to `[*, H, Q, K]`, or None.
        scale: factor on q k; None is `D ** -0.5`.
        layout: the order of axes in q, k, v and in the output.
        gate: as `evoformer_attention` takes it, or None. The means are gated too.

    Raises:
        RuntimeError: `torch.jit.trace` meets the means, which are a call of Python: nobody could save it.
    """
    if mask_bias is None or (isinstance(q, Tensor) and compute_dtype(q) not in _LIMITS):
        return attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, gate=gate)
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            'torch.jit.trace takes no mask with empty_rows="mean": pass empty_rows="native", or use torch.export'
        )
    plain = guards.is_plain((q, k, v, mask_bias, pair_bias, gate))
    if plain and has_kernels(q.device) and kernels_take(q, k, v, mask_bias, pair_bias, layout, gate):
        from evoattn.empty_rows.in_place import attend

        return attend(attention, q, k, v, mask_bias, pair_bias, gate, scale=scale, layout=layout, limits=_LIMITS[q.dtype])
    o = attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias)
    mask_bias = key_axes(mask_bias, q)[..., None, None, :]  # type: ignore[index]
    scale, keys = q.shape[-1] ** -0.5 if scale is None else scale, k.shape[-2 if layout == "bnhld" else -3]
    if keys:
        empty, attended = _find_empty_rows(mask_bias, keys, compute_dtype(q))
        if not (plain and o.device.type == "cpu") or bool(empty.any()):
            pair_bias = None if pair_bias is None else with_axes(pair_bias, q.ndim)
            o, q, k, v = (heads_first(x.view_as(x), layout) for x in (o, q, k, v))  # Dynamo takes no tensor twice
            o = Means.apply(o, q, k, v, mask_bias, pair_bias, empty, attended, scale)  # type: ignore[no-untyped-call]
            o = heads_first(o, layout)
    return o if gate is None else torch.sigmoid(gate) * o


def may_be_empty(inf: float, dtype: torch.dtype) -> bool:
    """Return whether a row may count as empty, in a compute dtype, whose masked keys have a bias of -inf."""
    return dtype in _LIMITS and -inf <= _LIMITS[dtype].empty


def heads_first(x: Tensor, layout: str) -> Tensor:
    """View x as `[*, H, L, C]`, or turn such a view back."""
    return x if layout == "bnhld" else x.transpose(-2, -3)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for the device."""
    if device.type != "cuda" or not installed("triton"):
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def kernels_take(
    q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor | None, layout: str, gate: Tensor | None = None
) -> bool:
    """Return whether plain tensors have the usual shapes and dtypes. Arguments that `attention` refuses may pass."""
    if q.ndim < 4 or not q.ndim == k.ndim == v.ndim == mask_bias.ndim:
        return False
    if gate is not None and (
        gate.dtype != q.dtype or gate.shape != (*q.shape[:-1], v.shape[-1]) or v.shape[-1] > MOST_GATED_CHANNELS
    ):
        return False
    heads, length = (-2, -3) if layout == "bnlhd" else (-3, -2)
    lead, h, lq, lk = q.shape[:-3], q.shape[heads], q.shape[length], k.shape[length]
    same = all(x.shape[:-3] == lead and x.shape[heads] == h and x.dtype == compute_dtype(q) for x in (q, k, v))
    sizes = k.shape[-1] == q.shape[-1] <= _MAX_CHANNELS and v.shape[length] == lk and 0 < v.shape[-1] <= _MAX_CHANNELS
    if not (same and sizes and q.dtype in _LIMITS and q.numel() and k.numel()):
        return False
    if mask_bias.requires_grad or mask_bias.dtype not in _LIMITS or not fits(tuple(mask_bias.shape), (*lead, 1, 1, lk)):
        return False
    if pair_bias is None:
        return True
    if pair_bias.ndim > q.ndim:
        return False
    *pair_lead, pair_n, pair_h, pair_q, pair_k = with_axes(pair_bias, q.ndim).shape
    expanded = pair_bias.requires_grad and (pair_h, pair_q, pair_k) != (h, lq, lk)
    return pair_n == 1 and not expanded and (tuple(pair_lead) == lead[:-1] or all(size == 1 for size in pair_lead))


def with_means_for_replaced_scores(
    attention: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """`with_means` for a bool mask that replaces the scores of masked keys by -1e9.

    Such a mask passes no gradient to q, k and biases. q, k and v are `[B, N, H, L, C]`, and the mask `[B, N, 1, 1, K]`; every
    axis of it may be 1.
    """
    plain = guards.is_plain((q, k, v, mask))
    if plain and q.ndim == 5 and has_kernels(q.device):
        bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -1e9)
        if kernels_take(q, k, v, bias, None, "bnhld"):
            from evoattn.empty_rows.in_place import attend

            def call(q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
                return attention(v)

            q, k = q.detach(), k.detach()
            return attend(call, q, k, v, bias, None, scale=1.0, layout="bnhld", limits=_LIMITS[q.dtype])
    o = attention(v)
    attended = mask.any(-1, keepdim=True)
    if not v.shape[-2] or (plain and o.device.type == "cpu" and bool(attended.all())):
        return o
    return torch.where(attended, o, v.mean(-2, keepdim=True).to(o.dtype))


def with_means_per_query(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, biases: Sequence[Tensor], scale: float
) -> Tensor:
    """`with_means` for a mask that varies by query. All scores of the mask's shape are held in memory, for each head.

    Args:
        o, q, k, v, scale: as `with_means` takes them.
        mask: `[*, 1, Q, K]`, the sum of all biases that count as masks.
        biases: all that are added to the scores.
    """
    if compute_dtype(q) not in _LIMITS or not k.shape[-2]:
        return o
    empty, attended = _find_empty_rows(mask, k.shape[-2], compute_dtype(q))
    weights = _weights(attended, o.dtype)
    change = _change(scale * torch.matmul(q, k.transpose(-1, -2)))  # zeros, whose gradients are those of scores
    for bias in biases:
        change = change + _change(bias)
    p = weights * (1 + change - (weights * change).sum(-1, keepdim=True))
    return torch.where(empty, torch.matmul(p.to(o.dtype), v.to(o.dtype)), o)


def _change(x: Tensor) -> Tensor:
    """A 0 with the gradient of x."""
    return torch.where(x.isfinite(), x - x.detach(), 0)


def _find_empty_rows(bias: Tensor, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the empty queries, `[*, 1, Q|1, 1]`, and the keys that have a weight there, `[*, 1, Q|1, K]`.

    dtype: the compute dtype, in which a low bias swallows the scores.
    """
    bias = bounded(bias.detach(), torch.float32).expand(*bias.shape[:-1], keys)
    largest = bias.amax(-1, keepdim=True)
    limits = _LIMITS[dtype]
    empty = largest <= limits.empty
    return empty, (bias >= limits.equal * largest) | ~empty  # the keys of other rows are not used, but there must be some


class Means(torch.autograd.Function):
    """o, with the mean of v over the `attended` keys in the `empty` queries."""

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
        attended: Tensor,
        scale: float,
    ) -> Tensor:  # by name: Dynamo counts them to tell whether they begin with a ctx
        return torch.where(empty, _mean(v, attended).to(o.dtype), o)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, q, k, v, mask_bias, pair_bias, empty, attended, scale = inputs
        ctx.save_for_backward(q, k, v, empty, attended)
        ctx.shapes = (mask_bias.shape, None if pair_bias is None else pair_bias.shape)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs[:6]]
        ctx.scale = scale

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, empty, attended = ctx.saved_tensors
        needs, dtype = ctx.needs_input_grad, do.dtype
        passed_do = torch.where(empty, 0, do) if needs[0] else None
        do = torch.where(empty, do, 0)
        q, k, v = (x.to(dtype) for x in (q, k, v))  # as autocast casts them
        weights = _weights(attended, dtype).transpose(-1, -2)  # [*,1,k,1]
        weighted = weights * (v - _mean(v, attended).to(dtype))  # w V'
        dq = dk = dv = dmask = dpair = None
        if needs[1]:
            dq = ctx.scale * torch.matmul(do, torch.matmul(weighted.transpose(-1, -2), k))
        if needs[2]:
            dk = ctx.scale * torch.matmul(weighted, torch.matmul(do.transpose(-1, -2), q))
        if needs[3]:
            dv = weights * do.sum(-2, keepdim=True)
        if needs[4]:
            dmask = torch.matmul(do.sum(-2, keepdim=True), weighted.transpose(-1, -2)).sum_to_size(ctx.shapes[0])
        if needs[5]:
            dpair = _pair_bias_gradient(do, weighted, ctx.shapes[1])
        gradients = (passed_do, dq, dk, dv, dmask, dpair)
        return *(None if x is None else x.to(to) for x, to in zip(gradients, ctx.dtypes, strict=True)), None, None, None


def _weights(attended: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of each key, `[*, 1, Q|1, K]`. A quotient of integers would have torch's default dtype."""
    return (attended / attended.sum(-1, keepdim=True).float()).to(dtype)


def _mean(v: Tensor, attended: Tensor) -> Tensor:
    """The mean of v over the attended keys, `[*, H, 1, C]`, in float32."""
    share = attended.shape[-1] / attended.sum(-1, keepdim=True).float()  # of all keys
    return torch.where(attended.transpose(-1, -2), v, 0).mean(-2, keepdim=True, dtype=torch.float32) * share


def _pair_bias_gradient(do: Tensor, weighted: Tensor, shape: torch.Size) -> Tensor:
    """dO (w V')^T, summed to the shape of a pair bias. The product itself sums over axes along which the bias is broadcast."""
    h, q, k, c = range(do.ndim - 3, do.ndim + 1)
    lead = range(h)
    varying = [axis for axis in lead if shape[axis] != 1]
    dpair = torch.einsum(do, [*lead, h, q, c], weighted, [*lead, h, k, c], [*varying, h, q, k])
    return dpair.reshape(*shape[:h], *dpair.shape[-3:]).sum_to_size(shape)
