"""The backward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike.

`bwd_dq` runs first, and leaves for `bwd_dkdv` the two statistics of each query that it finds on the way; where no gradient of q
or the pair bias is wanted, `bwd_preprocess` finds them.
"""

from __future__ import annotations

import functools
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
from evoattn.backends.hopper.bwd_steps import ROWS, SLICE, STEP, TILE
from evoattn.backends.hopper.clusters import resident_clusters
from evoattn.backends.hopper.fwd import changed, contiguous, fold, loadable, row_plan
from evoattn.backends.hopper.launch import plan, types
from evoattn.backends.hopper.prepare import Tiles
from evoattn.backends.hopper.workspace import Workspace

__all__ = ["plan_backward"]

_ROWS_THAT_HIDE_ROUNDING = 32
"""One warp of a block rounds d(pair bias) while the others go through n rows: it needs the time of a dozen."""


def plan_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None,
    pair_bias: Tensor | None, o: Tensor, lse: Tensor,
    *, scale: float, layout: str, needs: tuple[bool, ...], deterministic: bool,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """A function of (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, dq, dk, dv): see `evoattn.backends.Plans`."""
    b, n, h, lq, d = q.shape
    lk, dtype, device = k.shape[3], types[q.dtype], q.device
    of_q, of_k, of_v, of_mask, of_pair = needs
    first, second = of_q or of_pair, of_k or of_v or of_mask
    # The kernel of the keys takes lse / unit in float16, up to STEP times its largest; with a pair bias lse goes to 65,504.
    factor, unit = fold(scale, 2.0 / STEP) if q.dtype == torch.float16 and pair_bias is not None else fold(scale)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    panels, key_panels = -(-lq // ROWS), -(-lk // ROWS)

    nothing: dict[str, Any] = {"groups": 0, "slices": 0, "cluster": 1}
    chosen = (query_variant(d, lk, pair_bias is not None) if first else None) or nothing
    split = {name: chosen[name] for name in nothing}
    cluster = split["cluster"]
    at_once = processors if cluster == 1 else resident_clusters(cluster, SHARED, device)
    clusters, key_blocks = min(at_once, b * h * panels * n), min(processors, b * h * key_panels * n)
    partial = of_pair and deterministic

    # d(pair bias): where blocks add to it, or leave their parts of it; axes of size 1 are summed at last, in float32
    like = functools.partial(torch.empty, device="meta", dtype=torch.float32)
    given = (1, 1, 1, 1) if pair_bias is None else tuple(pair_bias.shape)
    whole = given == (b, h, lq, lk)
    over = tuple(axis for axis, size in enumerate(given) if size == 1 and (b, h, lq, lk)[axis] != 1 and (partial or axis > 1))
    sums = like(b, h, lq, lk, dtype=q.dtype if whole else torch.float32) if partial else like(*given[:2], lq, -(-lk // 4) * 4)
    parts = like((clusters + b * h * panels) * cluster, split["slices"] * 4, split["groups"] * 128, 4) if partial else sums
    variant = key_variant(d, lq, pair_bias is not None)
    rounds = of_pair and second and not partial and not over and lk % 4 == 0 and n >= _ROWS_THAT_HIDE_ROUNDING
    rounds = rounds and variant["streams"] + bool(variant["ring"]) < 4
    of_pair_bias = torch.empty(given, dtype=q.dtype, device="meta")

    workspace = Workspace(device)
    keys_of_terms = math.prod(split.values()) * SLICE if first else key_panels * ROWS
    needs_terms = mask is not None or mask_bias is not None or lk != keys_of_terms
    clears = sums if of_pair and not partial else None
    terms = row_plan(mask, mask_bias, q, lk, workspace, room=keys_of_terms, always=needs_terms, clears=clears)
    has = {"pair": pair_bias is not None, "row": terms is not None}

    # How all that the kernels see lies in memory. In the place of what is not there they get another address, and do not look.
    inputs: dict[str, Tensor] = {}
    changes: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    for i, name, x in ((0, "do", do), (2, "q", q), (3, "k", k), (4, "v", v), (8, "o", o)):
        inputs[name], change = loadable(o if x is None else x, factor if name == "q" else 1.0)
        if change is not None:
            changes.append((i, change))
    of_lse = lse
    if dlse is not None:
        of_lse, change = contiguous(dlse)
        changes.append((1, change))
    nowhere = torch.empty_strided((1, 1, lq, lk), (0, 0, 0, 1), device="meta")
    pair = nowhere if pair_bias is None else pair_bias.expand(-1, -1, lq, lk)
    row, row_b, row_n = (like(1, 8), 0, 0) if terms is None else (terms.like, terms.row_b, terms.row_n)
    stats = like(b, n, h, panels * TILE)
    outputs = [layouts.empty(x.shape, layout, x.new_empty(0, device="meta")) for x in (q, k, v)]

    # d(mask bias): each head leaves its part of it, in float32; heads and axes of size 1 are summed at last
    of_heads = like(b, n, h, lk)
    of_bias = like(1, 1, lk) if mask_bias is None else torch.empty_like(mask_bias, device="meta")

    query_kernel = key_kernel = statistics = total = tiles = None
    if first:
        wishes = {"bias_gradient": of_pair, "dlse": dlse is not None, "partial": partial}
        vector = pair_bias is None or (lk % 2 == 0 and _by_two(pair_bias))
        tensors = (*(inputs[name] for name in ("q", "k", "v", "o", "do")), pair, row, lse, of_lse, stats, outputs[0])
        numbers = (unit, row_b, row_n, clusters * cluster)
        made = QueryGradients(dtype, d, **has, **wishes, **chosen, vector=vector)
        query_kernel = plan(made, device, *tensors, parts if of_pair else nowhere[..., :4], *numbers)
    elif second:
        found = Statistics(dtype, d, dlse=dlse is not None)
        statistics = plan(found, device, inputs["o"], inputs["do"], lse, of_lse, stats, unit)
    if partial:
        summed = PanelSum(types[sums.dtype], **split, vector=lk % 2 == 0)
        total = plan(summed, device, parts, sums, n, clusters)
    laid = like(*given[:2], key_panels, panels, ROWS * ROWS, dtype=q.dtype)
    if second:
        tiles = plan(Tiles(dtype), device, pair, laid) if variant["ring"] else None
        tensors = (*(inputs[name] for name in ("q", "k", "v", "do")), laid if tiles else pair, row, stats, *outputs[1:])
        fours = [x.view(-1, 4) for x in (sums, of_pair_bias)] if rounds else (None, None)
        made = KeyGradients(dtype, d, **has, mask_gradient=of_mask, rounds=rounds, **variant)  # type: ignore[arg-type, assignment]
        key_kernel = plan(made, device, *tensors, of_heads, *fours, unit, row_b, row_n, key_blocks)

    at_stats, at_laid = workspace.add(stats), workspace.add(laid) if tiles else 0
    at_parts = workspace.add(parts) if partial else 0
    unwanted = [0 if need else workspace.add(x) for x, need in zip(outputs, needs, strict=False)]

    def run(*tensors: Any) -> tuple[Tensor | None, Tensor | None]:
        if tensors[0] is None:
            tensors = (torch.zeros_like(tensors[8]), *tensors[1:])
        if changes:
            tensors = changed(tensors, changes)
        room = workspace.make()
        start = room.data_ptr()
        do, dlse, q, k, v, mask, mask_bias, pair, o, lse, *wanted = [None if x is None else x.data_ptr() for x in tensors]
        dq, dk, dv = [start + at if x is None else x for x, at in zip(wanted, unwanted, strict=True)]
        dlse = lse if dlse is None else dlse
        pair = k if pair is None else pair
        statistic, bias = start + at_stats, pair
        added = new(sums) if clears is not None else None
        to_add = lse if added is None else added.data_ptr()
        dmask = new(of_heads) if of_mask else None
        dpair = new(of_pair_bias) if rounds else None
        if added is not None and terms is None:
            added.zero_()
        if tiles is not None:
            bias = start + at_laid
            tiles(pair, bias)
        # From here each kernel starts while the one before it runs: all that they write is there by now, and nothing may come
        # between. The first waits for the terms where it reads them, the second for the first where it reads its statistics.
        row = k if terms is None else terms.make(start, mask, mask_bias, to_add)[0]
        if query_kernel is not None:
            to_leave = start + at_parts if partial else to_add
            query_kernel(q, k, v, o, do, pair, row, lse, dlse, statistic, dq, to_leave)
        elif statistics is not None:
            statistics(o, do, lse, dlse, statistic)
        if key_kernel is not None:
            of_masks = None if dmask is None else dmask.data_ptr()
            rounded = (None, None) if dpair is None else (to_add, dpair.data_ptr())
            key_kernel(q, k, v, do, bias, row, statistic, dk, dv, of_masks, *rounded)
        if total is not None:
            added = new(sums)
            total(start + at_parts, added.data_ptr())
        if first and factor != 1.0 and tensors[10] is not None:
            tensors[10].mul_(factor)
        if dmask is not None:
            dmask = dmask.sum(2).sum_to_size(of_bias.shape).to(of_bias.dtype)
        if dpair is None and added is not None:
            dpair = added if added.shape[-1] == lk else added[..., :lk]
            dpair = (dpair.sum(over, keepdim=True) if over else dpair).to(tensors[2].dtype)
        return dmask, dpair

    def new(how: Tensor) -> Tensor:
        return torch.empty_strided(how.shape, how.stride(), dtype=how.dtype, device=device)

    return run


def _by_two(x: Tensor) -> bool:
    """Whether every line of keys starts on two elements, with stride 1 inside. A plan is for starts on 16 bytes, or for any."""
    steps = x.stride()
    return x.data_ptr() % 16 == 0 and steps[-1] == 1 and x.shape[-1] != 1 and all(step % 2 == 0 for step in steps[:-1])
