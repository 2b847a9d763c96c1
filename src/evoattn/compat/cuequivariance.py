"""cuEquivariance's `triangle_attention`, by the same name and with the same arguments.

    from evoattn.compat.cuequivariance import triangle_attention

Beyond the original: any length, any number of channels, a bias of any shape that broadcasts and of any of these dtypes (it is
read as it is, never converted), float32 and float64 forward and backward, CPU as well as GPU. `triangle_multiplicative_update`
has cuEquivariance's arguments too. On a GPU its kernels are those of `evoattn.pair.triangle_multiplication`.
"""

from __future__ import annotations

import functools
from typing import Literal, overload

import torch
from torch import Tensor

from evoattn.api import evoformer_attention
from evoattn.core import guards
from evoattn.core.devices import uncast
from evoattn.core.problem import dtype_name
from evoattn.dispatch.axes import fits, with_axes
from evoattn.dispatch.checks import check_keys, check_tensors, check_tensors_or_none
from evoattn.empty_rows.means import EmptyRows, check_empty_rows, with_means_for_replaced_scores
from evoattn.pair import triangle_multiplication

__all__ = ["triangle_attention", "triangle_multiplicative_update"]

_MASKED = -1e9
"""The logit of a masked key in cuEquivariance's definition."""

_BLOCK_SCORES = 1 << 24
"""Scores held at a time while the maximum is taken."""


@overload
def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = ..., scale: float | None = ...,
    return_aux: Literal[False] = ..., kv_lengths: Tensor | None = ..., *, empty_rows: EmptyRows = ...,
) -> Tensor: ...  # fmt: skip
@overload
def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = ..., scale: float | None = ...,
    *, return_aux: Literal[True], kv_lengths: Tensor | None = ..., empty_rows: EmptyRows = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    kv_lengths: Tensor | None = None,
    *,
    empty_rows: EmptyRows = "mean",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Triangle attention as cuEquivariance calls it: the logits of masked keys are replaced by -1e9.

    Args:
        q: `[B, N, H, Q, D]`, or `[N, H, Q, D]` for B = 1.
        k: `[B, N, H, K, D]`, or `[N, H, K, D]`.
        v: `[B, N, H, K, C]`, or `[N, H, K, C]`.
        bias: `[B, 1, H, Q, K]`, or `[1, H, Q, K]`, or anything that broadcasts; float16, bfloat16, float32 or float64.
        mask: `[B, N, 1, 1, K]`, or `[N, 1, 1, K]`; True = keep. Other dtypes are converted to bool. A row with no key to keep
            has equal logits, so its output is the mean of v.
        scale: factor on q k; None is `D ** -0.5`.
        return_aux: also return the logsumexp and the maximum of the logits, which carry no gradient.
        kv_lengths: int32 `[B, N, 1, 1, 1]`: row n attends its first `kv_lengths[b, n]` keys, longer than K counts as K.
            A row of length 0 has output 0. Not together with mask.
        empty_rows: for a row with no key to keep, "mean" is the original's answer, the mean of v; "native" is that of
            `evoformer_attention`, 0 with a logsumexp of -inf.

    Returns:
        `[B, N, H, Q, C]` in q's dtype, 5-D also for 4-D input; with `return_aux`, also logsumexp and maximum,
        `[B, N, H, Q]`, float32.

    Raises:
        TypeError, ValueError: as `evoattn.evoformer_attention`; also for q, k, v or a mask with neither 4 nor 5 axes, for both
            mask and kv_lengths, or lengths of another shape or dtype.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 6, 4, 6, 32)
        >>> triangle_attention(q, q, q, torch.randn(1, 1, 4, 6, 6), mask=torch.ones(1, 6, 1, 1, 6, dtype=torch.bool)).shape
        torch.Size([1, 6, 4, 6, 32])
    """
    check_empty_rows(empty_rows)
    if mask is not None and kv_lengths is not None:
        raise ValueError("mask and kv_lengths exclude each other: give one of them")
    _check(q, k, v, bias, mask)
    q, k, v, bias = (with_axes(x, 5) for x in (q, k, v, bias))
    if kv_lengths is not None:
        mask = _prefix_mask(kv_lengths, q, k)
    elif mask is not None:
        mask = with_axes(mask, 5).to(torch.bool)
    if not return_aux:
        attend = functools.partial(evoformer_attention, q, k, mask=mask, pair_bias=bias, scale=scale, layout="bnhld")
        if mask is None or kv_lengths is not None or empty_rows == "native":
            return attend(v)
        return with_means_for_replaced_scores(attend, q, k, v, mask)
    o, lse = evoformer_attention(q, k, v, mask=mask, pair_bias=bias, scale=scale, layout="bnhld", return_lse=True)
    lse = lse.detach()
    if k.shape[-2] == 0:
        nothing = torch.zeros_like(lse, dtype=torch.float32)
        return o, nothing, nothing.clone()
    q, k = q.to(o.dtype), k.to(o.dtype)  # as autocast casts them
    largest = _largest_logit(q, k, bias, mask, q.shape[-1] ** -0.5 if scale is None else float(scale))
    if mask is None or empty_rows == "native":
        return o, lse.float(), largest
    attended = mask.any(-1).squeeze(-1).unsqueeze(2)  # [b,n|1,1,1] against [b,n,h,q]
    if kv_lengths is not None:
        return o, torch.where(attended, lse, 0).float(), torch.where(attended, largest, 0)
    # A row without a key to keep has every logit at -1e9, so it weighs all keys alike.
    o = torch.where(mask.any(-1, keepdim=True), o, v.mean(-2, keepdim=True).to(o.dtype))
    # Its logsumexp is that plus log K, which float32 does not hold beside it.
    return o, torch.where(attended, lse, _MASKED).float(), torch.where(attended, largest, _MASKED)


def triangle_multiplicative_update(
    x: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """Triangle multiplication by outgoing or incoming edges: `evoattn.pair.triangle_multiplication` by their names.

        y = norm(x)        a, b = mask * sigmoid(y g_in) * (y p_in), in halves
        z[i,j] = sum over k of a[i,k] b[j,k]  (outgoing),  a[k,i] b[k,j]  (incoming)
        result = sigmoid(y g_out) * (norm(z) p_out)

    Args:
        x: `[*, N, N, C]`, of any dtype and on any device. Three axes, `[N, N, C]`, are taken too.
        direction: "outgoing" or "incoming".
        mask: `[*, N, N]`, or anything that broadcasts to it; of any dtype.
        norm_in_weight, norm_in_bias: `[C]`.
        p_in_weight, g_in_weight: `[2 D, C]`, with biases `[2 D]`.
        norm_out_weight, norm_out_bias: `[D]`.
        p_out_weight: `[C, D]`, with a bias `[C]`.
        g_out_weight: `[C, C]`, with a bias `[C]`.
        eps: of both norms.
        precision: None; torch's own settings say how float32 is multiplied.

    Returns:
        `[*, N, N, C]`, with gradients for x and every weight.

    Raises:
        TypeError, ValueError: for what is no tensor, another direction or precision, a weight that is missing, or sizes that do
            not fit.

    Example:
        >>> import torch
        >>> x, w = torch.randn(1, 5, 5, 8), torch.randn(16, 8)
        >>> triangle_multiplicative_update(
        ...     x, p_in_weight=w, g_in_weight=w, p_out_weight=w[:8], g_out_weight=w[:8]
        ... ).shape
        torch.Size([1, 5, 5, 8])

    Source: Jumper et al. 2021, supplementary algorithms 11 and 12.
    """
    if precision is not None:
        raise ValueError(f"precision must be None here (torch.set_float32_matmul_precision sets it), got {precision!r}")
    check_tensors(x=x)
    check_tensors_or_none(mask=mask)
    if x.ndim < 3 or x.shape[-2] != x.shape[-3]:
        raise ValueError(f"x must be [*, N, N, C], got shape {list(x.shape)}")
    weights = {
        "p_in_weight": p_in_weight,
        "g_in_weight": g_in_weight,
        "p_out_weight": p_out_weight,
        "g_out_weight": g_out_weight,
    }
    for name, weight in weights.items():
        if weight is None:
            raise ValueError(f"{name} must be given, got None: only norms and biases may be left out")
    if mask is not None:
        if not fits(tuple(mask.shape), tuple(x.shape[:-1])):
            raise ValueError(f"mask must broadcast to {list(x.shape[:-1])}, got shape {list(mask.shape)}")
        mask = mask.expand(x.shape[:-1])
    return triangle_multiplication(
        x,
        mask,
        direction=direction,
        norm_in_weight=norm_in_weight,
        norm_in_bias=norm_in_bias,
        p_in_bias=p_in_bias,
        g_in_bias=g_in_bias,
        norm_out_weight=norm_out_weight,
        norm_out_bias=norm_out_bias,
        p_out_bias=p_out_bias,
        g_out_bias=g_out_bias,
        eps=eps,
        **weights,  # type: ignore[arg-type]
    )


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    """Raise TypeError or ValueError, with the caller's names and shapes."""
    check_tensors(q=q, k=k, v=v, bias=bias)
    check_tensors_or_none(mask=mask)
    for name, x, axes in (("q", q, "H, Q, D"), ("k", k, "H, K, D"), ("v", v, "H, K, C"), ("mask", mask, "1, 1, K")):
        if x is None:
            continue
        if x.ndim not in (4, 5):
            raise ValueError(f"{name} must be [B, N, {axes}], or [N, {axes}] for B = 1, got shape {list(x.shape)}")
    check_keys(q, k, v, ("[B, N, H, K, D]", "[B, N, H, K, C]"), least=5)
    if not bias.is_floating_point():
        hint = "; a bool mask goes to mask" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias must be float16, bfloat16, float32 or float64, got {dtype_name(bias.dtype)}{hint}")
    b, n = (1, *q.shape)[-5:-3]
    _check_fits("bias", bias, q, ("B", "N", "H", "Q", "K"), (b, n, q.shape[-3], q.shape[-2], k.shape[-2]))
    if mask is not None:
        _check_fits("mask", mask, q, ("B", "N", "1", "1", "K"), (b, n, 1, 1, k.shape[-2]))


def _check_fits(name: str, x: Tensor, q: Tensor, axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    if not fits(tuple(x.shape), sizes):
        first = 1 if x.ndim <= 4 == q.ndim else 0
        wanted = ", ".join(axes[first:])
        raise ValueError(f"{name} must broadcast to [{wanted}] = {list(sizes[first:])}, got shape {list(x.shape)}")


def _prefix_mask(kv_lengths: Tensor, q: Tensor, k: Tensor) -> Tensor:
    expected = (q.shape[0], q.shape[1], 1, 1, 1)
    check_tensors(kv_lengths=kv_lengths)
    if kv_lengths.dtype != torch.int32:
        raise TypeError(f"kv_lengths must be int32, got {dtype_name(kv_lengths.dtype)}")
    if tuple(kv_lengths.shape) != expected:
        raise ValueError(f"kv_lengths must be [B, N, 1, 1, 1] = {list(expected)}, got shape {list(kv_lengths.shape)}")
    return torch.arange(k.shape[-2], device=k.device) < kv_lengths


@torch.no_grad()
def _largest_logit(q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The maximum over keys `[b,n,h,q]` in float32.

    It takes a few rows at a time. While torch traces, it takes all: their number may be a symbol.
    """
    b, n, h, lq, _ = q.shape
    lk = k.shape[-2]
    bias = bias.expand(b, -1, h, lq, lk)

    def largest_of(part: slice) -> Tensor:
        s = torch.matmul(q[:, part].float() * scale, k[:, part].float().transpose(-1, -2))  # [b,n,h,q,k]
        s += bias if bias.shape[1] == 1 else bias[:, part]
        if mask is not None:
            s.masked_fill_(~(mask if mask.shape[1] == 1 else mask[:, part]), _MASKED)
        return s.amax(-1)

    with uncast(q.device):
        if not guards.only_computes():
            return largest_of(slice(None))
        rows = max(1, _BLOCK_SCORES // max(1, b * h * lq * lk))
        largest = [largest_of(slice(start, start + rows)) for start in range(0, n, rows)]
    return torch.cat(largest, 1) if largest else q.new_zeros((b, n, h, lq), dtype=torch.float32)
