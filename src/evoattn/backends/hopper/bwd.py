"""The backward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike.

`bwd_dq` runs first, and leaves for `bwd_dkdv` the two statistics of each query that it finds on the way; where no gradient of q
or the pair bias is wanted, `bwd_preprocess` finds them. Without a pair bias `bwd_whole` may do all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn import layouts
from evoattn.backends.hopper.bwd_bias import PanelSum
from evoattn.backends.hopper.bwd_dkdv import KeyGradients
from evoattn.backends.hopper.bwd_dq import QueryGradients
from evoattn.backends.hopper.bwd_plan import SHARED, key_variant, one_kernel, query_deal, query_variant, skips_rows, timed
from evoattn.backends.hopper.bwd_preprocess import Statistics
from evoattn.backends.hopper.bwd_steps import ROWS, SLICE, STEP, TILE
from evoattn.backends.hopper.bwd_whole import WholeGradients
from evoattn.backends.hopper.clusters import resident_clusters
from evoattn.backends.hopper.fwd import changed, contiguous, fold, loadable, pair_plan, row_plan
from evoattn.backends.hopper.launch import plan, types
from evoattn.backends.hopper.prepare import CLEARED, Tiles
from evoattn.backends.hopper.turns import Turns, in_turn
from evoattn.backends.hopper.workspace import Workspace

__all__ = ["plan_backward"]

_MOST_IN_32_BITS = 2**31 - 1
"""The kernels that clear and round the sums of d(pair bias) count their elements in 32 bits; torch does it for more."""

_ROWS_THAT_HIDE_ROUNDING = 32
"""One warp of a block rounds d(pair bias) while the others go through n rows: it needs the time of a dozen."""


def plan_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None,
    pair_bias: Tensor | None, o: Tensor, lse: Tensor, reference: Tensor,
    *, scale: float, layout: str, needs: tuple[bool, ...], deterministic: bool,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """A function of (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference, dq, dk, dv).

    See `evoattn.backends.Plans`.
    """
    b, n, h, lq, d = q.shape
    lk, dtype, device = k.shape[3], types[q.dtype], q.device
    of_q, of_k, of_v, of_mask, of_pair = needs
    first, second = of_q or of_pair, of_k or of_v or of_mask
    # The kernel of the keys takes lse / unit in float16, up to STEP times its largest; with a pair bias lse goes to 65,504.
    factor, unit = fold(scale, 2.0 / STEP) if q.dtype == torch.float16 and pair_bias is not None else fold(scale)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    panels, key_panels = -(-lq // ROWS), -(-lk // ROWS)
    sizes = (b, n, h, lq, lk)
    whole = one_kernel(needs, pair_bias is not None, d, sizes, processors)
    exact = pair_bias is not None and pair_bias.dtype == torch.float32
    skips = not whole and skips_rows(mask is not None, needs, pair_bias is not None, d, sizes, exact=exact)

    nothing: dict[str, Any] = {"groups": 0, "slices": 0, "cluster": 1}
    chosen = (query_variant(d, lk, pair_bias is not None) if first and not whole else None) or nothing
    split = {name: chosen[name] for name in nothing}
    cluster = split["cluster"]
    at_once = processors if cluster == 1 else resident_clusters(cluster, SHARED, device)
    variant = key_variant(d, lq, pair_bias is not None, skips, exact=exact)
    turns = Turns.of(q, pair_bias if second and variant["ring"] else None, key_panels * n, processors)
    of_turn = turns.b * turns.h
    clusters, key_blocks = min(at_once, of_turn * panels * n), min(processors, of_turn * key_panels * n)
    by_queries, by_keys = timed(of_turn * panels, n, clusters), timed(of_turn * key_panels, n, key_blocks)
    idle = second and variant["streams"] + bool(variant["ring"]) < 4  # a warp of the kernel of the keys
    gradient = None if pair_bias is None or not of_pair else PairGradient.of(pair_bias, sizes, deterministic, idle)
    partial = gradient is not None and deterministic

    like = functools.partial(torch.empty, device="meta", dtype=torch.float32)
    parts = like((clusters + of_turn * panels) * cluster, split["slices"] * 4, split["groups"] * 128, 4)
    workspace = Workspace(device)
    keys_of_terms = math.prod(split.values()) * SLICE if chosen is not nothing else key_panels * ROWS
    added = None if gradient is None or partial else gradient.sums
    clears = None if added is None or max(added.numel(), 4 * CLEARED * b * n) > _MOST_IN_32_BITS else added
    always = lk != keys_of_terms
    bounded = pair_bias is not None and mask_bias is not None
    terms = row_plan(
        mask, mask_bias, q, lk, workspace, room=keys_of_terms, always=always, clears=clears, lists=skips, bounded=bounded
    )
    has = {"pair": pair_bias is not None, "row": terms is not None}
    bias = None if pair_bias is None else types[pair_bias.dtype]

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
    pair, even, shifts, pairs = nowhere, None, None, None
    if pair_bias is not None:
        even, shifts, pairs = pair_plan(pair_bias, lq, lk, beside=q.dtype, bounded=True)
        pair = even[..., :lk]
    row, row_b, row_n = (like(1, 8), 0, 0) if terms is None else (terms.like, terms.row_b, terms.row_n)
    ends, order, starts = (None, None, None) if terms is None else (terms.ends, terms.order, terms.starts)
    stats = like(turns.b, n, turns.h, panels * TILE)
    outputs = [layouts.empty(x.shape, layout, x.new_empty(0, device="meta")) for x in (q, k, v)]
    wide = variant["wide"]
    laid = like(*pair.shape[:2], key_panels, panels, ROWS * ROWS, dtype=torch.float32 if wide else q.dtype)
    sums, wanted = (nowhere, nowhere) if gradient is None else (gradient.sums, gradient.wanted)

    # d(mask bias): each head leaves its part of it, in float32; heads and axes of size 1 are summed at last
    of_heads = like(b, n, h, lk)
    of_bias = like(1, 1, lk) if mask_bias is None else torch.empty_like(mask_bias, device="meta")

    # What the first turn sees, and how many bytes further the others find the same: in the order of `launch`
    of_rows = (*(inputs[name] for name in ("q", "k", "v", "o", "do")), lse, of_lse, *outputs, of_heads)
    of_pairs = (pair, laid, sums, wanted)
    by_b = (None, None) if terms is None else (terms.by_b(terms.like), terms.by_b(terms.ends))
    further = turns.further(
        *((x, 2) for x in of_rows), *((x, 1) for x in of_pairs), *((x, None) for x in (*by_b, order, starts))
    )
    at_q, at_k, at_v, at_o, at_do, at_lse, at_dlse, at_dq, at_dk, at_dv, at_mask = (turns.cut(x, 2) for x in of_rows)
    at_pair, at_laid, at_sums, at_wanted = (turns.cut(x, 1) for x in of_pairs)
    at_order, at_starts = (None if x is None else x[: turns.b] for x in (order, starts))

    whole_kernel = query_kernel = key_kernel = statistics = total = tiles = None
    tensors: tuple[Any, ...]
    if whole:
        wishes = {"mask_gradient": of_mask, "dlse": dlse is not None}
        tensors = (at_q, at_k, at_v, at_o, at_do, row, at_lse, at_dlse, at_dq, at_dk, at_dv, at_mask, ends)
        made = WholeGradients(dtype, d, row=terms is not None, **wishes, tiles=whole)
        whole_kernel = plan(made, device, *tensors, unit, row_b, row_n, min(processors, b * n * h))
    elif first:
        wishes = {"bias_gradient": of_pair, "dlse": dlse is not None, "partial": partial, "skips": skips}
        vector = pair_bias is None or lk % 2 == 0
        made = QueryGradients(dtype, d, bias=bias, **has, **wishes, **chosen, vector=vector, timed=by_queries)  # type: ignore[assignment]
        left = parts if partial else nowhere[..., :4] if added is None else at_sums
        tensors = (at_q, at_k, at_v, at_o, at_do, at_pair, row, at_lse, at_dlse, stats, at_dq, left, at_order, at_starts)
        query_kernel = plan(made, device, *tensors, unit, row_b, row_n, clusters * cluster)
    elif second:
        found = Statistics(dtype, d, dlse=dlse is not None)
        statistics = plan(found, device, at_o, at_do, at_lse, at_dlse, stats, unit)
    if gradient is not None and partial:
        deal = query_deal(d, chosen["slices"], chosen["stage"])
        summed = PanelSum(types[gradient.sums.dtype], **split, deal=deal, vector=lk % 2 == 0, timed=by_queries)
        total = plan(summed, device, parts, at_sums, n, clusters)
    if second and not whole:
        tiles = plan(Tiles(bias, wide=wide), device, pair, laid, unit) if variant["ring"] else None
        rounds = gradient is not None and gradient.rounds
        fours = [x.view(-1, 4) for x in (at_sums, at_wanted)] if rounds else (None, None)
        wishes = {"mask_gradient": of_mask, "rounds": rounds, "skips": skips, "clears": skips and of_q}
        made = KeyGradients(dtype, d, bias=bias, **has, **wishes, **variant, timed=by_keys)  # type: ignore[arg-type, assignment]
        tensors = (at_q, at_k, at_v, at_do, at_laid if tiles else at_pair, row, stats, at_dk, at_dv, at_mask)
        key_kernel = plan(made, device, *tensors, *fours, at_dq, at_order, at_starts, unit, row_b, row_n, key_blocks)

    place_of_stats = 0 if whole else workspace.add(stats)
    place_of_tiles = workspace.add(laid) if tiles else 0
    place_of_pair, place_of_shifts = (0 if x is None else workspace.add(x) for x in (even, shifts))
    place_of_parts = workspace.add(parts) if partial else 0
    # what a kernel makes and nobody wants has a place too
    made_by = (whole_kernel,) * 3 if whole else (query_kernel, key_kernel, key_kernel)
    which = zip(outputs, needs, made_by, strict=False)
    unwanted = [workspace.add(x) if kernel is not None and not need else 0 for x, need, kernel in which]
    by_torch = added is not None and (terms is None or clears is None)

    def launch(  # type: ignore[no-untyped-def]
        start: int, q, k, v, o, do, lse, dlse, dq, dk, dv, dmask, pair, laid, sums, dpair, row, ends, order, starts
    ) -> None:
        """The main kernels of a turn. Nothing may come between: the second starts while the first runs.

        The next turn's first waits for this one's last, which never says that another may start. So both may use the same
        statistics and parts.
        """
        if whole_kernel is not None:
            whole_kernel(q, k, v, o, do, row, lse, dlse, dq, dk, dv, dmask, ends)
        stats, parts = start + place_of_stats, start + place_of_parts
        if query_kernel is not None:
            left = parts if partial else lse if sums is None else sums
            query_kernel(q, k, v, o, do, pair, row, lse, dlse, stats, dq, left, order, starts)
        elif statistics is not None:
            statistics(o, do, lse, dlse, stats)
        if key_kernel is not None:
            key_kernel(q, k, v, do, pair if tiles is None else laid, row, stats, dk, dv, dmask, sums, dpair, dq, order, starts)
        if total is not None:
            total(parts, sums)

    def run(*tensors: Any) -> tuple[Tensor | None, Tensor | None]:
        if tensors[0] is None:
            tensors = (torch.zeros_like(tensors[8]), *tensors[1:])
        if changes:
            tensors = changed(tensors, changes)
        room = workspace.make()
        start = room.data_ptr()
        do, dlse, q, k, v, mask, mask_bias, pair, o, lse, _, *wanted = [None if x is None else x.data_ptr() for x in tensors]
        dq, dk, dv = [start + at if x is None else x for x, at in zip(wanted, unwanted, strict=True)]
        dlse = lse if dlse is None else dlse
        if pairs is not None:
            given, pair = pair, start + place_of_pair
            pairs(given, pair, start + place_of_shifts)
        pair = k if pair is None else pair
        sums = None if gradient is None else new(gradient.sums)
        to_sums = None if sums is None else sums.data_ptr()
        dmask = new(of_heads) if of_mask else None
        to_mask = None if dmask is None else dmask.data_ptr()
        dpair = new(gradient.wanted) if gradient is not None and gradient.rounds else None
        to_pair = None if dpair is None else dpair.data_ptr()
        if by_torch:
            sums.zero_()  # type: ignore[union-attr]
        laid = start + place_of_tiles
        if tiles is not None:
            tiles(pair, laid)
        # From here each kernel starts while the one before it runs: memory for all that they write is made by now. The first
        # waits for the terms where it reads them, the second for the first where it reads its statistics. Order and starts it
        # reads at once: the first lets it start only when it has waited for them.
        made = (k, *(None,) * 4) if terms is None else terms.make(start, mask, mask_bias, to_sums)
        of_keys = (*made[:2], *made[3:])  # without `deep`
        places = (q, k, v, o, do, lse, dlse, dq, dk, dv, to_mask, pair, laid, to_sums, to_pair, *of_keys)
        in_turn(functools.partial(launch, start), places, further)
        if first and factor != 1.0 and tensors[11] is not None:
            tensors[11].mul_(factor)
        if dmask is not None:
            dmask = dmask.sum(2).sum_to_size(of_bias.shape).to(of_bias.dtype)
        if gradient is not None and dpair is None:
            dpair = gradient.finish(sums)  # type: ignore[arg-type]
        return dmask, dpair

    def new(how: Tensor) -> Tensor:
        return torch.empty_strided(how.shape, how.stride(), dtype=how.dtype, device=device)

    return run


class PairGradient(NamedTuple):
    """How d(pair bias) is found: blocks add to sums that were cleared, or leave parts that are summed in a fixed order.

    Args:
        wanted: how d(pair bias) lies in memory.
        sums: how that lies in memory which blocks add to, or which the parts are summed to.
        rounds: whether the kernel of the keys writes it from the sums.
        over: axes that are still to be summed.
        keys: of a line of the sums, which may be up to three longer.
    """

    wanted: Tensor
    sums: Tensor
    rounds: bool
    over: tuple[int, ...]
    keys: int

    @classmethod
    def of(cls, pair_bias: Tensor, sizes: tuple[int, int, int, int, int], deterministic: bool, idle: bool) -> PairGradient:
        """Of a pair bias [b|1,h|1,q|1,k|1] for sizes b, n, h, q, k; `idle`: the kernel of the keys has a warp to spare."""
        b, n, h, lq, lk = sizes
        shape, full = tuple(pair_bias.shape), (b, h, lq, lk)
        over = tuple(axis for axis in range(4) if shape[axis] != full[axis] and (deterministic or axis > 1))
        wanted = torch.empty(shape, dtype=pair_bias.dtype, device="meta")
        if deterministic:
            sums = torch.empty(full, dtype=torch.float32 if over else pair_bias.dtype, device="meta")
        else:
            sums = torch.empty((*shape[:2], lq, -(-lk // 4) * 4), dtype=torch.float32, device="meta")
        rounds = idle and not deterministic and not over and lk % 4 == 0 and n >= _ROWS_THAT_HIDE_ROUNDING
        rounds = rounds and sums.numel() <= _MOST_IN_32_BITS and pair_bias.dtype != torch.float32
        return cls(wanted, sums, rounds, over, lk)

    def finish(self, sums: Tensor) -> Tensor:
        """d(pair bias) of the sums, where nobody rounded them."""
        lines = sums if sums.shape[-1] == self.keys else sums[..., : self.keys]
        return (lines.sum(self.over, keepdim=True) if self.over else lines).to(self.wanted.dtype).contiguous()
