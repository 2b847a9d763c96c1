"""The attention that OpenFold and all its descendants call between projections and gate, by their conventions.

    from evoattn.compat.openfold import attention

OpenFold, OpenFold-3, Boltz, BoltzGen, Protenix, OpenDDE and ESMFold have it as `_attention(query, key, value, biases)`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from evoattn.api import evoformer_attention
from evoattn.core.numerics import accumulate_dtype
from evoattn.dispatch.axes import fits, with_axes
from evoattn.dispatch.checks import check_keys, check_tensors
from evoattn.empty_rows.means import EmptyRows, check_empty_rows, with_means, with_means_per_query

__all__ = ["attention"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor | None], *, scaled: bool = True, empty_rows: EmptyRows = "mean"
) -> Tensor:
    """Attention with a list of biases that each broadcast to the scores; none of them is expanded.

    A bias that has size 1 for heads and queries is a mask bias. All others are pair biases; several of them are added up, in
    float32, to the smallest shape that holds their sum.

    Args:
        q: `[*, H, Q, D]` with any leading axes, also none.
        k: `[*, H, K, D]`, the same leading axes; H may be 1.
        v: `[*, H, K, C]`, likewise.
        biases: any number, in any order, of any dtype. Each is None or broadcasts to `[*, H, Q, K]`. Integers and bools are
            added as numbers, which is what `scores += bias` does.
        scaled: whether q has been multiplied by the scale already; else the scale is `D ** -0.5`.
        empty_rows: "mean" is what the originals compute, which add -1e9 to the scores in float32 or narrower: a query whose
            masks add up to at most -1e8 (-3e4 if q has 16 bits) at every key has the mean of v, and the gradients of that. In
            float64 it is ordinary softmax. Mask biases count as masks, and pair biases of size 1 for heads if q has several:
            for these the scores are held in memory. "native" is the rule of `evoformer_attention`: a finite mask bias
            does not swallow the scores, and a query of -inf has output 0.

    Returns:
        `[*, H, Q, C]` in q's dtype.

    Raises:
        TypeError, ValueError: as `evoattn.evoformer_attention`; also for a bias that does not broadcast.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 12, 4, 12, 32)  # [*, N, H, L, D]
        >>> attention(q, q, q, [torch.zeros(1, 12, 1, 1, 12), torch.randn(1, 1, 4, 12, 12)]).shape
        torch.Size([1, 12, 4, 12, 32])

    Source: Ahdritz et al. 2024, `openfold.model.primitives._attention`.
    """
    check_empty_rows(empty_rows)
    if not isinstance(biases, (list, tuple)):
        raise TypeError(f"biases must be a list of tensors, got {type(biases).__name__}")
    check_tensors(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            raise ValueError(f"{name} must be [*, H, L, C], got shape {list(x.shape)}")
    check_keys(q, k, v, ("[*, H, K, D]", "[*, H, K, C]"))
    added = _checked(q, k, biases)
    if q.ndim == 3:
        return attention(q[None], k[None], v[None], added, scaled=scaled, empty_rows=empty_rows)[0]
    masks = [x for x in added if x.shape[-2] == 1 and x.shape[-3] == 1]
    pairs = [x for x in added if x.shape[-2] != 1 or x.shape[-3] != 1]
    mask_bias, pair_bias = _sum(masks, q.dtype), _sum(pairs, q.dtype)
    scale = 1.0 if scaled else q.shape[-1] ** -0.5
    attend = functools.partial(evoformer_attention, scale=scale, layout="bnhld")
    per_pair = [x for x in pairs if x.shape[-3] == 1 < q.shape[-3]]
    if empty_rows == "mean" and not per_pair:
        return with_means(attend, q, k, v, mask_bias, pair_bias, scale)
    o = attend(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias)
    if empty_rows == "native":
        return o
    mask = _sum([*masks, *per_pair], q.dtype)
    return with_means_per_query(o, q, k, v, mask, added, scale)  # type: ignore[arg-type]


def _checked(q: Tensor, k: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """The biases that are there, of a floating-point dtype, with as many axes as q."""
    scores = (*q.shape[:-1], k.shape[-2])
    checked: list[Tensor] = []
    for place, bias in enumerate(biases):
        if bias is None:
            continue
        if not isinstance(bias, Tensor):
            raise TypeError(f"biases[{place}] must be a torch.Tensor or None, got {type(bias).__name__}")
        if not fits(tuple(bias.shape), scores):
            raise ValueError(f"biases[{place}] must broadcast to the scores, {list(scores)}, got shape {list(bias.shape)}")
        checked.append(with_axes(bias if bias.is_floating_point() else bias.to(accumulate_dtype(q.dtype)), q.ndim))
    return checked


def _sum(biases: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """One bias as it is; several in the accumulation dtype, those first that vary along few axes."""
    if len(biases) < 2:
        return biases[0] if biases else None
    first, *others = sorted(biases, key=lambda x: len([size for size in x.shape if size != 1]))  # torch sorts no symbols
    return sum(others, first.to(accumulate_dtype(dtype)))
