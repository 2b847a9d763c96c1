"""The backward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike.

`bwd_dq` runs first, and leaves for `bwd_dkdv` the two statistics of each query that it finds on the way; where no gradient of q
or the pair bias is wanted, `bwd_preprocess` finds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn import layouts
from evoattn.backends.hopper.bwd_bias import PanelSum
from evoattn.backends.hopper.bwd_dkdv import KeyGradients
from evoattn.backends.hopper.bwd_dq import QueryGradients
from evoattn.backends.hopper.bwd_plan import SHARED, key_variant, query_variant
from evoattn.backends.hopper.bwd_preprocess import Statistics
from evoattn.backends.hopper.bwd_steps import ROWS, SLICE, TILE
from evoattn.backends.hopper.clusters import resident_clusters
from evoattn.backends.hopper.fwd import fold, loads_wide, row_plan
from evoattn.backends.hopper.launch import compiled, types
from evoattn.backends.hopper.prepare import Tiles

__all__ = ["plan_backward"]


def plan_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None,
    pair_bias: Tensor | None, o: Tensor, lse: Tensor,
    *, scale: float, layout: str, needs: tuple[bool, ...], deterministic: bool,
) -> Callable[..., tuple[None, Tensor | None]]:  # fmt: skip
    """A function of (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, dq, dk, dv): see `evoattn.backends.Plans`."""
    b, n, h, lq, d = q.shape
    lk, dtype, device = k.shape[3], types[q.dtype], q.device
    of_q, of_k, of_v, _, of_pair = needs
    first, second = of_q or of_pair, of_k or of_v
    factor, unit = fold(scale)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    given = (1, 1, 1, 1) if pair_bias is None else tuple(pair_bias.shape)
    panels, key_panels = -(-lq // ROWS), -(-lk // ROWS)

    chosen: dict[str, Any] = (query_variant(d, lk, pair_bias is not None) if first else None) or {
        "groups": 0,
        "slices": 0,
        "cluster": 1,
    }
    split = {name: chosen[name] for name in ("groups", "slices", "cluster")}
    room = math.prod(split.values()) * SLICE if first else key_panels * ROWS
    terms = row_plan(mask, mask_bias, q, lk, room=room, always=lk != room)
    vector = pair_bias is not None and lk % 2 == 0 and _by_two(pair_bias)
    has = {"pair": pair_bias is not None, "row": terms is not None}
    partial = of_pair and deterministic
    cluster = split["cluster"]
    at_once = processors if cluster == 1 else resident_clusters(cluster, SHARED, device)
    clusters, key_blocks = min(at_once, b * h * panels * n), min(processors, b * h * key_panels * n)
    query_kernel = key_kernel = statistics = total = tiles = None
    if first:
        wishes = {"bias_gradient": of_pair, "dlse": dlse is not None, "partial": partial}
        query_kernel = compiled(QueryGradients(dtype, d, **has, **wishes, **chosen, vector=vector or pair_bias is None))
    if second:
        variant = key_variant(d, lq, pair_bias is not None)
        key_kernel = compiled(KeyGradients(dtype, d, **has, **variant))  # type: ignore[arg-type]
        tiles = compiled(Tiles(dtype)) if variant["ring"] else None
        if not first:
            statistics = compiled(Statistics(dtype, d, dlse=dlse is not None))
    whole = given == (b, h, lq, lk)  # otherwise sums over axes of size 1 are still to be taken, in float32
    if partial:
        total = compiled(PanelSum(dtype if whole else types[torch.float32], **split, vector=lk % 2 == 0))
    shape_of_parts = ((clusters + b * h * panels) * cluster, split["slices"] * 4, split["groups"] * 128, 4)
    shape_of_tiles = (*given[:2], key_panels, panels, ROWS * ROWS)
    sums = (b, h, lq, lk) if partial else (*given[:2], lq, -(-lk // 4) * 4)
    summed_dtype = q.dtype if partial and whole else torch.float32
    over = tuple(axis for axis, size in enumerate(given) if size == 1 and (b, h, lq, lk)[axis] != 1)
    if not partial:
        over = tuple(axis for axis in over if axis > 1)

    tensors = (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse)
    views: list[Any] = [None if x is None else (x.shape, x.stride()) for x in tensors]
    if pair_bias is not None:
        views[7] = ((*given[:2], lq, lk), pair_bias.expand(-1, -1, lq, lk).stride())
    copied = [i for i in (0, 2, 3, 4, 8) if tensors[i] is not None and not loads_wide(tensors[i])]  # type: ignore[arg-type]
    likes = [layouts.empty(x.shape, layout, x.new_empty(0, device="meta")) for x in (q, k, v)]
    stored = [(x.shape, x.stride()) for x in likes]
    statistics_shape = (b, n, h, panels * TILE)

    def run(*tensors: Any) -> tuple[None, Tensor | None]:
        seen: list[Any] = [x if x is None else x.as_strided(*view) for x, view in zip(tensors[:10], views, strict=True)]
        if factor != 1.0:
            seen[2] = seen[2] * factor
        for i in copied:
            seen[i] = seen[i].contiguous()
        do, dlse, q, k, v, mask, mask_bias, pair, o, lse = seen
        do = torch.zeros_like(o) if do is None else do
        dq, dk, dv = (
            torch.empty_strided(*how, dtype=q.dtype, device=device) if x is None else x.as_strided(*how)
            for x, how in zip(tensors[10:], stored, strict=True)
        )
        row, _, row_b, row_n = terms(mask, mask_bias) if terms is not None else (k.as_strided((1, 8), (8, 1)), None, 0, 0)
        pair = k.as_strided((1, 1, lq, lk), (0, 0, 0, 1)) if pair is None else pair
        stats = torch.empty(statistics_shape, dtype=torch.float32, device=device)
        of_lse = lse if dlse is None else dlse.contiguous()
        dpair = None
        if query_kernel is not None:
            room = lse.as_strided((1, 1, lq, 4), (0, 0, 0, 1))
            if partial:
                room = torch.empty(shape_of_parts, dtype=torch.float32, device=device)
            elif of_pair:
                room = dpair = torch.zeros(sums, dtype=torch.float32, device=device)
            query_kernel(q, k, v, o, do, pair, row, lse, of_lse, stats, dq, room, unit, row_b, row_n, clusters * cluster)
            if total is not None:
                dpair = torch.empty(sums, dtype=summed_dtype, device=device)
                total(room, dpair, n, clusters)
            if factor != 1.0:
                dq.mul_(factor)
        elif statistics is not None:
            statistics(o, do, lse, of_lse, stats, unit)
        if key_kernel is not None:
            if tiles is not None:
                laid = torch.empty(shape_of_tiles, dtype=q.dtype, device=device)
                tiles(pair, laid)
                pair = laid
            key_kernel(q, k, v, do, pair, row, stats, dk, dv, unit, row_b, row_n, key_blocks)
        if dpair is None:
            return None, None
        dpair = dpair[..., :lk]
        return None, (dpair.sum(over, keepdim=True) if over else dpair).to(q.dtype)

    return run


def _by_two(x: Tensor) -> bool:
    """Whether every line of keys starts on two elements, with stride 1 inside."""
    steps = x.stride()
    return x.data_ptr() % 4 == 0 and steps[-1] == 1 and x.shape[-1] != 1 and all(step % 2 == 0 for step in steps[:-1])
