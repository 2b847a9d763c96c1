"""The layers of `evoattn.nn` in dense torch, as the papers write them: each sub-module is called, one after the other.

With a layer and inputs of float64 they are the truth. In a narrower dtype they show what that dtype loses.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from evoattn.core.numerics import accumulate_dtype
from evoattn.nn import (
    AttentionPairBias,
    ConditionedTransition,
    DiffusionTransformer,
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSAPairWeightedAveraging,
    MSARowAttentionWithPairBias,
    OuterProductMean,
    TemplatePointwiseAttention,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
)
from evoattn.nn.attention import Attention
from evoattn.nn.pair_bias import AdaLN


@dataclasses.dataclass(frozen=True)
class MaskedSoftmax:
    """Softmax of scores, in float64 whatever the dtype of the scores, but if `rough` is given.

    Args:
        empty: what a row weighs that is masked at every key: all keys alike, with the gradient of softmax ("mean", what float32
            makes of -1e9), nothing ("native"), or as if there were no mask ("scores", what exact numbers make of -1e9).
        rough: the relative error of delta, the row sum that the backward of softmax takes off. A backend computes delta from an
            output that was rounded. If the gradient of the scores is 0 but for rounding, only that shows how much it is.
            The scores are then computed in the dtype in which a backend accumulates.
        seed: of these errors.
    """

    empty: Literal["mean", "native", "scores"] = "mean"
    rough: float = 0.0
    seed: int = 0

    def __call__(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """MaskedSoftmax of scores `[*, H, Q, K]` under a mask `[*, K]`, which is not 0 at keys that are attended."""
        scores = scores.to(accumulate_dtype(scores.dtype) if self.rough else torch.float64)
        if mask is None:
            return self._softmax(scores)
        attended = mask.bool()[..., None, None, :]
        empty = ~attended.any(-1, keepdim=True)
        if self.empty == "mean":
            scores = torch.where(empty, scores - scores.detach(), scores)
        weights = self._softmax(scores.masked_fill(~(attended | empty), -torch.inf))
        return weights.masked_fill(empty, 0) if self.empty == "native" else weights

    def _softmax(self, scores: Tensor) -> Tensor:
        return _Softmax.apply(scores, self.rough, self.seed) if self.rough else torch.softmax(scores, -1)  # type: ignore[no-untyped-call]


class _Softmax(torch.autograd.Function):
    """Softmax whose backward has a delta that is wrong by a random share."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, rough: float, seed: int) -> Tensor:
        p = torch.softmax(scores, -1)
        ctx.save_for_backward(p)
        ctx.rough, ctx.seed = rough, seed
        return p

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor, None, None]:
        (p,) = ctx.saved_tensors
        terms = p * dp
        rng = torch.Generator(dp.device).manual_seed(ctx.seed)
        noise = torch.randn((*dp.shape[:-1], 1), generator=rng, dtype=dp.dtype, device=dp.device)
        delta = terms.sum(-1, keepdim=True) + ctx.rough * noise * terms.abs().sum(-1, keepdim=True)
        return terms - p * delta, None, None


def attention(
    mha: Attention, x: Tensor, keys: Tensor, no_heads: int, mask: Tensor | None, pair: Tensor | float, weights: MaskedSoftmax
) -> Tensor:
    """x `[*, Q, C]`, keys `[*, K, C]`, mask `[*, K]`, pair what broadcasts to `[*, H, Q, K]`."""
    q, k, v = mha.linear_q(x), mha.linear_k(keys), mha.linear_v(keys)
    q, k = q if mha.layer_norm_q is None else mha.layer_norm_q(q), k if mha.layer_norm_k is None else mha.layer_norm_k(k)
    q, k, v = (y.unflatten(-1, (no_heads, -1)).transpose(-2, -3) for y in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + pair
    o = (weights(scores, mask).to(v.dtype) @ v).transpose(-2, -3).flatten(-2)
    return mha.linear_o(o if mha.linear_g is None else o * mha.linear_g(x).sigmoid())  # type: ignore[no-any-return]


def triangle(
    layer: TriangleAttention, z: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax, transpose_bias: bool = False
) -> Tensor:
    x = z
    if not layer.starting:
        x, mask = z.transpose(-2, -3), None if mask is None else mask.transpose(-1, -2)
    x = layer.layer_norm(x)
    pair = layer.linear(x).movedim(-1, -3).unsqueeze(-4)
    pair = pair.transpose(-1, -2) if transpose_bias else pair
    update = attention(layer.mha, x, x, layer.no_heads, mask, pair, weights)
    update = update if layer.starting else update.transpose(-2, -3)
    return z + update if layer.residual else update


def multiplication(layer: TriangleMultiplication, z: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    y = layer.layer_norm_in(z)
    a, b = (layer.linear_a_p(y) * layer.linear_a_g(y).sigmoid(), layer.linear_b_p(y) * layer.linear_b_g(y).sigmoid())
    if mask is not None:
        a, b = (x * mask[..., None].to(x.dtype) for x in (a, b))
    norm = layer.layer_norm_out
    if a.dtype == torch.float16:  # whose range the sums leave
        a, b, norm = a.float(), b.float(), norm.float()
    t = torch.einsum("...ikd,...jkd->...ijd" if layer.outgoing else "...kid,...kjd->...ijd", a, b)
    update: Tensor = layer.linear_z(norm(t).to(y.dtype)) * layer.linear_g(y).sigmoid()
    return z + update if layer.residual else update


def transition(layer: Transition, x: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    y = layer.layer_norm(x)
    if layer.activation == "relu":
        update: Tensor = layer.linear_2(rectified(layer.linear_1(y), weights))
    else:
        a = layer.swiglu.linear_a(y)
        update = layer.linear_out(a * a.sigmoid() * layer.swiglu.linear_b(y))
    update = update if mask is None else update * mask[..., None].to(update.dtype)
    return x + update if layer.residual else update


def rectified(x: Tensor, weights: MaskedSoftmax) -> Tensor:
    """ReLU. A rough one takes a random side where rounding decides the sign: all of a gradient or nothing passes there."""
    if not weights.rough:
        return x.relu()
    rng = torch.Generator(x.device).manual_seed(weights.seed)
    noise = torch.randn(x.shape, generator=rng, dtype=x.dtype, device=x.device)
    size = x.detach().square().mean().sqrt() * weights.rough / 8  # about the distance of neighbours
    return x * (x.detach() + size * noise > 0)


def rows(layer: MSARowAttentionWithPairBias, m: Tensor, z: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    pair = layer.linear_z(layer.layer_norm_z(z)).movedim(-1, -3).unsqueeze(-4)  # type: ignore[misc]
    x = layer.layer_norm_m(m)
    update = attention(layer.mha, x, x, layer.no_heads, mask, pair, weights)
    return m + update if layer.residual else update


def columns(layer: MSAColumnAttention, m: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    inner = layer._msa_att
    x = inner.layer_norm_m(m).transpose(-2, -3)
    mask = None if mask is None else mask.transpose(-1, -2)
    update = attention(inner.mha, x, x, inner.no_heads, mask, 0.0, weights).transpose(-2, -3)
    return m + update if inner.residual else update


def global_columns(layer: MSAColumnGlobalAttention, m: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    mha, x = layer.global_attention, layer.layer_norm_m(m).transpose(-2, -3)
    mask = torch.ones(m.shape[:-1], dtype=torch.float32, device=m.device) if mask is None else mask
    mask = mask.transpose(-1, -2)
    float_mask = mask.to(torch.promote_types(x.dtype, torch.float32))  # 1e-10 is 0 in float16
    mean = ((x * float_mask[..., None]).sum(-2) / (float_mask.sum(-1, keepdim=True) + layer.eps)).to(x.dtype)
    q = mha.linear_q(mean).unflatten(-1, (layer.no_heads, 1, -1))  # [*,l,h,1,d]
    k, v = (linear(x).unsqueeze(-3) for linear in (mha.linear_k, mha.linear_v))  # [*,l,1,s,d]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    o = (weights(scores, mask).to(v.dtype) @ v).flatten(-3).unsqueeze(-2)  # [*,l,1,hd]
    gate = 1.0 if mha.linear_g is None else mha.linear_g(x).sigmoid()
    update: Tensor = mha.linear_o(o * gate).transpose(-2, -3)
    return m + update if layer.residual else update


def outer_product(layer: OuterProductMean, m: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    y = layer.layer_norm(m)
    mask = torch.ones(m.shape[:-1], dtype=accumulate_dtype(y.dtype), device=m.device) if mask is None else mask
    factor = mask[..., None].to(y.dtype)
    wide = accumulate_dtype(y.dtype)
    a, b = ((projection(y) * factor).to(wide) for projection in (layer.linear_1, layer.linear_2))
    o = torch.einsum("...sic,...sjd->...ijcd", a, b).flatten(-2)
    counts = torch.einsum("...si,...sj->...ij", mask.to(wide), mask.to(wide))[..., None]
    if layer.at_least_one:
        return layer.linear_out((o / counts.clamp(min=1)).to(y.dtype))  # type: ignore[no-any-return]
    return layer.linear_out(o.to(y.dtype)) / (counts + layer.eps).to(y.dtype)  # type: ignore[no-any-return]


def averaging(layer: MSAPairWeightedAveraging, m: Tensor, z: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax) -> Tensor:
    y = layer.layer_norm_m(m)
    scores = layer.linear_z(layer.layer_norm_z(z)).transpose(-1, -2).unsqueeze(-2)  # [*,i,h,1,j]
    p = weights(scores, mask).to(y.dtype).squeeze(-2)
    v = layer.linear_v(y).unflatten(-1, (layer.no_heads, -1))
    o = torch.einsum("...ihj,...sjhd->...sihd", p, v).flatten(-2)
    update: Tensor = layer.linear_o(layer.linear_g(y).sigmoid() * o)
    return m + update if layer.residual else update


def templates(
    layer: TemplatePointwiseAttention, t: Tensor, z: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax
) -> Tensor:
    keys, mask = t.movedim(-4, -2), None if mask is None else mask[..., None, None, :]
    update = attention(layer.mha, z.unsqueeze(-2), keys, layer.no_heads, mask, 0.0, weights).squeeze(-2)
    return z + update if layer.residual else update


def pair_biased(
    layer: AttentionPairBias,
    a: Tensor,
    z: Tensor,
    s: Tensor | None = None,
    *,
    mask: Tensor | None,
    weights: MaskedSoftmax,
    keys: Tensor | None = None,
) -> Tensor:
    """The single track, or the diffusion transformer if there is a condition."""
    norm = layer.layer_norm_a

    def normed(x: Tensor) -> Tensor:
        if isinstance(norm, AdaLN):
            return adapted(norm, x, s)
        return x if norm is None else norm(x)

    x = normed(a)
    pair = z if layer.layer_norm_z is None else layer.layer_norm_z(z)
    pair = pair if layer.linear_z is None else layer.linear_z(pair)
    others = x if keys is None else normed(keys)
    update = attention(layer.mha, x, others, layer.no_heads, mask, pair.movedim(-1, -3), weights)
    update = update if layer.linear_ada_out is None else layer.linear_ada_out(s).sigmoid() * update
    return a + update if layer.residual else update


def adapted(norm: AdaLN, x: Tensor, s: Tensor | None) -> Tensor:
    """The adaptive norm of x under a condition."""
    condition = norm.layer_norm_s(s)
    return norm.linear_g(condition).sigmoid() * norm.layer_norm_a(x) + norm.linear_s(condition)  # type: ignore[no-any-return]


def conditioned_transition(
    layer: ConditionedTransition, a: Tensor, s: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax
) -> Tensor:
    first, *others = [adapted(layer.layer_norm, a, s) @ w.T for w in layer.hidden_weights()]
    u = first * first.sigmoid()
    for factor in others:
        u = u * factor
    update = layer.linear_g(s).sigmoid() * layer.linear_out(u)
    update = update if mask is None else update * mask[..., None].to(update.dtype)
    return a + update if layer.residual else update  # type: ignore[no-any-return]


def diffusion_transformer(
    layer: DiffusionTransformer, a: Tensor, s: Tensor, z: Tensor, *, mask: Tensor | None, weights: MaskedSoftmax
) -> Tensor:
    z = z if layer.layer_norm_z is None else layer.layer_norm_z(z)
    for block in layer.blocks:
        updated = pair_biased(block.attention_pair_bias, a, z, s, mask=mask, weights=weights)
        update = conditioned_transition(
            block.conditioned_transition, a if block.parallel else updated, s, mask=None, weights=weights
        )
        a = updated + update if block.parallel else update
    return a
