"""The launches of a backward, a stage each: what it compiles, and what it takes of a group of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends.hopper.backward.common import TILE
from evoattn.backends.hopper.backward.dkdv.kernel import KeyGradients
from evoattn.backends.hopper.backward.dq.bias_sum import PanelSum
from evoattn.backends.hopper.backward.dq.kernel import QueryGradients
from evoattn.backends.hopper.backward.facts import Facts
from evoattn.backends.hopper.backward.fused.kernel import FusedGradients
from evoattn.backends.hopper.backward.statistics import Statistics
from evoattn.backends.hopper.backward.variants import query_interleave
from evoattn.backends.hopper.host.launch import note_tiles, plan, types
from evoattn.backends.hopper.kernels.tile_sizes import ROWS, SLICE

__all__ = ["Rows", "Seen", "Stage", "between", "stages_of"]


class Seen(NamedTuple):
    """All that the stages of a group read and write: as tensors that lie in memory like it, or as addresses."""

    q: Any
    k: Any
    v: Any
    o: Any
    do: Any
    lse: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    dmask: Any
    pair: Any
    tiles: Any
    sums: Any
    dpair: Any
    row: Any
    ends: Any
    order: Any
    starts: Any


class Rows(NamedTuple):
    """The key-wise bias: whether there is one, and how far its rows go from one b, and one n, to the next."""

    there: bool
    b: int
    n: int


Stage = Callable[[Seen, int, int], None]
"""A function of a group's addresses, and of those of the statistics and of the parts of d(pair bias)."""


def between(facts: Facts) -> tuple[Tensor, Tensor]:
    """Memory that stages leave for one another: the statistics of each query, and the parts of d(pair bias) of each block."""
    _, n, _, _, _ = facts.sizes
    cluster = facts.query.get("cluster", 1)
    slots = (facts.clusters + facts.heads * facts.panels) * cluster
    fragments, threads = facts.query.get("slices", 0) * 4, facts.query.get("groups", 0) * 128
    stats = torch.empty(facts.together.b, n, facts.together.h, facts.panels * TILE, dtype=torch.float32, device="meta")
    return stats, torch.empty(slots, fragments, threads, 4, dtype=torch.float32, device="meta")


def stages_of(facts: Facts, seen: Seen, rows: Rows, stats: Tensor, parts: Tensor, *, dlse: bool, tiles: bool) -> list[Stage]:
    """The launches of each group, in this order. Nothing may come between: a stage starts while the one before runs.

    Args:
        facts: of the call.
        seen: how lies in memory what the first group sees.
        rows: of the key-wise bias.
        stats, parts: as `between` has them.
        dlse: whether the LSE has a gradient.
        tiles: whether the pair bias streams through the kernel of the keys, in tiles.
    """
    if facts.fused:
        return [_fused(facts, seen, rows, dlse)]
    found = []
    if facts.first:
        found.append(_query(facts, seen, rows, dlse, stats, parts))
    elif facts.second:
        found.append(_statistics(facts, seen, dlse, stats))
    if facts.second:
        found.append(_key(facts, seen, rows, tiles, stats))
    if facts.partial:
        found.append(_bias_sum(facts, seen, parts))
    return found


def _fused(facts: Facts, seen: Seen, rows: Rows, dlse: bool) -> Stage:
    note_tiles("whole", block_q=ROWS, block_k=ROWS)
    b, n, h, _, _ = facts.sizes
    wishes: dict[str, Any] = {"row": rows.there, "mask_gradient": facts.needs[3], "dlse": dlse, "gate": facts.gated}
    made = FusedGradients(types[facts.dtype], facts.d, **wishes, tiles=facts.fused)  # type: ignore[arg-type]

    def taken(x: Seen) -> tuple[Any, ...]:
        return x.q, x.k, x.v, x.o, x.do, x.row, x.lse, x.dlse, x.dq, x.dk, x.dv, x.dmask, x.ends

    launch = plan(made, facts.device, *taken(seen), facts.unit, rows.b, rows.n, min(facts.processors, b * n * h))
    return lambda x, stats, parts: launch(*taken(x))


def _query(facts: Facts, seen: Seen, rows: Rows, dlse: bool, stats: Tensor, parts: Tensor) -> Stage:
    chosen = facts.query
    keys = chosen["groups"] * chosen["slices"] * SLICE
    note_tiles("dq", block_q=ROWS, block_k=keys, num_stages=chosen["stages"], cluster=chosen["cluster"])
    wishes: dict[str, Any] = {"bias_gradient": facts.needs[4], "partial": facts.partial, "skips": facts.skips}
    wishes |= {"dlse": dlse, "gate": facts.gated}
    has: dict[str, Any] = {"pair": facts.pair, "row": rows.there, "bias": None if facts.bias is None else types[facts.bias]}
    vector = not facts.pair or facts.sizes[4] % 2 == 0
    made = QueryGradients(types[facts.dtype], facts.d, **has, **wishes, **facts.query, vector=vector, timed=facts.query_timed)
    partial, added = facts.partial, facts.added is not None

    def taken(x: Seen, stats: Any, left: Any) -> tuple[Any, ...]:
        return x.q, x.k, x.v, x.o, x.do, x.pair, x.row, x.lse, x.dlse, stats, x.dq, left, x.order, x.starts

    left = parts if partial else seen.sums if added else seen.sums[..., :4]
    blocks = facts.clusters * facts.query["cluster"]
    launch = plan(made, facts.device, *taken(seen, stats, left), facts.unit, rows.b, rows.n, blocks)
    return lambda x, stats, parts: launch(*taken(x, stats, parts if partial else x.sums if added else x.lse))


def _statistics(facts: Facts, seen: Seen, dlse: bool, stats: Tensor) -> Stage:
    made = Statistics(types[facts.dtype], facts.d, dlse=dlse, gate=facts.gated)
    launch = plan(made, facts.device, seen.o, seen.do, seen.lse, seen.dlse, stats, facts.unit)
    return lambda x, stats, parts: launch(x.o, x.do, x.lse, x.dlse, stats)


def _key(facts: Facts, seen: Seen, rows: Rows, tiles: bool, stats: Tensor) -> Stage:
    note_tiles("dkdv", block_q=ROWS, block_k=ROWS, num_stages=facts.key["stages"])
    rounds = facts.gradient is not None and facts.gradient.rounds
    clears = facts.skips and facts.needs[0]
    wishes: dict[str, Any] = {"mask_gradient": facts.needs[3], "rounds": rounds, "skips": facts.skips, "clears": clears}
    has: dict[str, Any] = {"pair": facts.pair, "row": rows.there, "bias": None if facts.bias is None else types[facts.bias]}
    made = KeyGradients(types[facts.dtype], facts.d, **has, **wishes, **facts.key, timed=facts.key_timed)

    def taken(x: Seen, stats: Any, sums: Any, dpair: Any) -> tuple[Any, ...]:
        of_keys = (x.q, x.k, x.v, x.do, x.tiles if tiles else x.pair, x.row, stats)
        return *of_keys, x.dk, x.dv, x.dmask, sums, dpair, x.dq, x.order, x.starts

    fours = [x.view(-1, 4) for x in (seen.sums, seen.dpair)] if rounds else (None, None)
    launch = plan(made, facts.device, *taken(seen, stats, *fours), facts.unit, rows.b, rows.n, facts.key_blocks)
    return lambda x, stats, parts: launch(*taken(x, stats, x.sums, x.dpair))


def _bias_sum(facts: Facts, seen: Seen, parts: Tensor) -> Stage:
    split = {name: facts.query[name] for name in ("groups", "slices", "cluster")}
    interleave = query_interleave(facts.d, facts.query["slices"], facts.query["stage"])
    vector = facts.sizes[4] % 2 == 0
    made = PanelSum(types[facts.gradient.sums.dtype], **split, interleave=interleave, vector=vector, timed=facts.query_timed)  # type: ignore[union-attr]
    launch = plan(made, facts.device, parts, seen.sums, facts.sizes[1], facts.clusters)
    return lambda x, stats, parts: launch(parts, x.sums)
