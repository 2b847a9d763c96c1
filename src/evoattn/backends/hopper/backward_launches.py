"""The main kernels of a backward: the facts of a call that they depend on, and their launches."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends.hopper import tiles
from evoattn.backends.hopper.clusters import resident_clusters
from evoattn.backends.hopper.head_groups import HeadGroups
from evoattn.backends.hopper.kernels.dkdv import KeyGradients
from evoattn.backends.hopper.kernels.dq import QueryGradients
from evoattn.backends.hopper.kernels.dq_sum import PanelSum
from evoattn.backends.hopper.kernels.fused import FusedGradients
from evoattn.backends.hopper.kernels.statistics import STEP, TILE, Statistics
from evoattn.backends.hopper.launch import note_tiles, plan_launch, types
from evoattn.backends.hopper.memory import floats, split_scale
from evoattn.backends.hopper.tiles import (
    MMA_M,
    SHARED,
    SLICE,
    key_variant,
    query_interleave,
    query_variant,
    skips_rows,
    timed,
)
from evoattn.core import devices

MOST_IN_32_BITS = 2**31 - 1
"""The kernels that clear and round the sums of d(pair bias) count their elements in 32 bits; torch does it for more."""

_ROWS_THAT_HIDE_ROUNDING = 32
"""One warp of a block rounds d(pair bias) while the others go through n rows: it needs the time of a dozen."""


class PairGradient(NamedTuple):
    """The way to d(pair bias): blocks add to sums that were cleared, or leave parts that are summed in a fixed order.

    Args:
        layout: of d(pair bias).
        sums: the layout of what blocks add to, or of what the parts are summed to.
        rounds: whether the kernel of the keys writes it from the sums.
        over: axes that are still to be summed.
        keys: of a line of the sums, which may be up to three longer.
    """

    layout: Tensor
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
        if deterministic:
            sums = torch.empty(full, dtype=torch.float32 if over else pair_bias.dtype, device="meta")
        else:
            sums = floats(*shape[:2], lq, -(-lk // 4) * 4)
        rounds = idle and not deterministic and not over and lk % 4 == 0 and n >= _ROWS_THAT_HIDE_ROUNDING
        rounds = rounds and sums.numel() <= MOST_IN_32_BITS and pair_bias.dtype != torch.float32
        return cls(torch.empty(shape, dtype=pair_bias.dtype, device="meta"), sums, rounds, over, lk)

    def finish(self, sums: Tensor) -> Tensor:
        """Return d(pair bias) of the sums, if no kernel rounds them."""
        lines = sums if sums.shape[-1] == self.keys else sums[..., : self.keys]
        return (lines.sum(self.over, keepdim=True) if self.over else lines).to(self.layout.dtype).contiguous()


class Facts:
    """The facts that all launches of a backward share, of tensors as a backend's `plan_backward` gets them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        pair_bias: Tensor | None,
        *,
        scale: float,
        needs: tuple[bool, ...],
        deterministic: bool,
        gated: bool,
    ) -> None:
        (b, n, h, lq, d), lk = q.shape, k.shape[3]
        self.dtype, self.device, self.d, self.sizes = types[q.dtype], q.device, d, (b, n, h, lq, lk)
        self.needs, self.gated = needs, gated
        self.pair, float32_pair = pair_bias is not None, pair_bias is not None and pair_bias.dtype == torch.float32
        self.bias = None if pair_bias is None else types[pair_bias.dtype]
        # The kernel of the keys takes lse / unit in float16, up to STEP times its largest; with a pair bias lse goes to 65,504.
        self.factor, self.unit = (
            split_scale(scale, 2.0 / STEP) if q.dtype == torch.float16 and self.pair else split_scale(scale)
        )
        processors = devices.processors(q.device)
        # tiles of the one kernel that finds all gradients, if it does; which kernels run besides
        both = needs[0] and any(needs[1:4])  # what queries and what keys hold
        self.fused = tiles.fused_tiles(d, self.sizes, processors) if both and not self.pair else None
        self.has_query_kernel = not self.fused and (needs[0] or needs[4])
        self.has_key_kernel = not self.fused and any(needs[1:4])
        self.skips = not self.fused and skips_rows(mask is not None, needs, self.pair, d, self.sizes, float32_pair=float32_pair)
        self.query: dict[str, Any] = (query_variant(d, lk, self.pair) if self.has_query_kernel else None) or {}
        self.key = key_variant(d, lq, self.pair, self.skips, float32_pair=float32_pair)
        self.streams = self.has_key_kernel and bool(self.key["ring"])

        self.panels, self.key_panels = -(-lq // MMA_M), -(-lk // MMA_M)
        self.groups = HeadGroups.of(q, pair_bias if self.streams else None, self.key_panels * n, processors)
        self.heads = self.groups.b * self.groups.h  # that are launched together
        cluster = self.query.get("cluster", 1)
        at_once = processors if cluster == 1 else resident_clusters(cluster, SHARED, q.device)
        self.clusters = min(at_once, self.heads * self.panels * n)
        self.key_blocks = min(processors, self.heads * self.key_panels * n)
        self.rows_blocks = min(processors, b * n * h)
        self.query_timed = timed(self.heads * self.panels, n, self.clusters)
        self.key_timed = timed(self.heads * self.key_panels, n, self.key_blocks)

        idle = self.has_key_kernel and self.key["streams"] + bool(self.key["ring"]) < 4  # a warp of the kernel of the keys
        self.gradient = (
            None if pair_bias is None or not needs[4] else PairGradient.of(pair_bias, self.sizes, deterministic, idle)
        )
        self.partial = self.gradient is not None and deterministic  # blocks leave parts for `PanelSum`
        self.added = None if self.gradient is None or self.partial else self.gradient.sums  # what blocks add to
        slots = (self.clusters + self.heads * self.panels) * cluster
        self.stats = floats(self.groups.b, n, self.groups.h, self.panels * TILE)
        self.parts = floats(slots, self.query.get("slices", 0) * 4, self.query.get("groups", 0) * 128, 4)


class Tensors(namedtuple("Tensors", "q k v o do lse dlse dq dk dv dmask pair tiles sums dpair key_terms ends order starts")):
    """All that the launches of a group read and write: as layouts, or as addresses."""


GroupLaunch = Callable[[Tensors, int, int], None]
"""A function of a group's addresses, and of those of the statistics and of the parts of d(pair bias)."""


def plan_launches(facts: Facts, first: Tensors, strides: tuple[int, int], *, key_bias: bool, dlse: bool) -> list[GroupLaunch]:
    """Plan the launches of each group, in this order. Nothing may come between: one starts while the one before runs.

    Args:
        facts: of the call.
        first: the layouts of what the first group sees.
        strides: of the rows of the key bias, from one b, and one n, to the next.
        key_bias: whether there is one.
        dlse: whether the LSE has a gradient.
    """
    if facts.fused:
        return [_fused(facts, first, strides, key_bias, dlse)]
    launches = []
    if facts.has_query_kernel:
        launches.append(_query(facts, first, strides, key_bias, dlse))
    elif facts.has_key_kernel:
        launches.append(_statistics(facts, first, dlse))
    if facts.has_key_kernel:
        launches.append(_key(facts, first, strides, key_bias))
    if facts.partial:
        launches.append(_panel_sum(facts, first))
    return launches


def _fused(facts: Facts, first: Tensors, strides: tuple[int, int], key_bias: bool, dlse: bool) -> GroupLaunch:
    note_tiles("whole", block_q=MMA_M, block_k=MMA_M)
    options: dict[str, Any] = {"key_bias": key_bias, "mask_gradient": facts.needs[3], "dlse": dlse, "gate": facts.gated}
    kernel = FusedGradients(facts.dtype, facts.d, **options, tiles=facts.fused)  # type: ignore[arg-type]

    def arguments(x: Tensors) -> tuple[Any, ...]:
        return x.q, x.k, x.v, x.o, x.do, x.key_terms, x.lse, x.dlse, x.dq, x.dk, x.dv, x.dmask, x.ends

    launch = plan_launch(kernel, facts.device, *arguments(first), facts.unit, *strides, facts.rows_blocks)
    return lambda x, stats, parts: launch(*arguments(x))


def _query(facts: Facts, first: Tensors, strides: tuple[int, int], key_bias: bool, dlse: bool) -> GroupLaunch:
    chosen, partial, added = facts.query, facts.partial, facts.added is not None
    keys = chosen["groups"] * chosen["slices"] * SLICE
    note_tiles("dq", block_q=MMA_M, block_k=keys, num_stages=chosen["stages"], cluster=chosen["cluster"])
    options: dict[str, Any] = {"pair": facts.pair, "key_bias": key_bias, "bias": facts.bias, "bias_gradient": facts.needs[4]}
    options |= {"partial": partial, "skips": facts.skips, "dlse": dlse, "gate": facts.gated, "timed": facts.query_timed}
    kernel = QueryGradients(facts.dtype, facts.d, **options, **chosen, vector=not facts.pair or facts.sizes[4] % 2 == 0)

    def arguments(x: Tensors, stats: Any, dpair: Any) -> tuple[Any, ...]:
        return x.q, x.k, x.v, x.o, x.do, x.pair, x.key_terms, x.lse, x.dlse, stats, x.dq, dpair, x.order, x.starts

    # without sums of d(pair bias), any layout with four columns compiles the same code, and nothing is written
    dpair = facts.parts if partial else first.sums if added else first.sums[..., :4]
    blocks = facts.clusters * chosen["cluster"]
    launch = plan_launch(kernel, facts.device, *arguments(first, facts.stats, dpair), facts.unit, *strides, blocks)
    return lambda x, stats, parts: launch(*arguments(x, stats, parts if partial else x.sums if added else x.lse))


def _statistics(facts: Facts, first: Tensors, dlse: bool) -> GroupLaunch:
    kernel = Statistics(facts.dtype, facts.d, dlse=dlse, gate=facts.gated)
    launch = plan_launch(kernel, facts.device, first.o, first.do, first.lse, first.dlse, facts.stats, facts.unit)
    return lambda x, stats, parts: launch(x.o, x.do, x.lse, x.dlse, stats)


def _key(facts: Facts, first: Tensors, strides: tuple[int, int], key_bias: bool) -> GroupLaunch:
    note_tiles("dkdv", block_q=MMA_M, block_k=MMA_M, num_stages=facts.key["stages"])
    rounds = facts.gradient is not None and facts.gradient.rounds
    options: dict[str, Any] = {"pair": facts.pair, "key_bias": key_bias, "bias": facts.bias, "mask_gradient": facts.needs[3]}
    options |= {"rounds": rounds, "skips": facts.skips, "clears": facts.skips and facts.needs[0], "timed": facts.key_timed}
    kernel = KeyGradients(facts.dtype, facts.d, **options, **facts.key)

    def arguments(x: Tensors, stats: Any, sums: Any, dpair: Any) -> tuple[Any, ...]:
        pair = x.tiles if facts.streams else x.pair
        return x.q, x.k, x.v, x.do, pair, x.key_terms, stats, x.dk, x.dv, x.dmask, sums, dpair, x.dq, x.order, x.starts

    fours = [x.view(-1, 4) for x in (first.sums, first.dpair)] if rounds else (None, None)
    launch = plan_launch(kernel, facts.device, *arguments(first, facts.stats, *fours), facts.unit, *strides, facts.key_blocks)
    return lambda x, stats, parts: launch(*arguments(x, stats, x.sums, x.dpair))


def _panel_sum(facts: Facts, first: Tensors) -> GroupLaunch:
    split = {name: facts.query[name] for name in ("groups", "slices", "cluster")}
    interleave = query_interleave(facts.d, facts.query["slices"], facts.query["stage"])
    vector = facts.sizes[4] % 2 == 0
    kernel = PanelSum(types[first.sums.dtype], **split, interleave=interleave, vector=vector, timed=facts.query_timed)
    launch = plan_launch(kernel, facts.device, facts.parts, first.sums, facts.sizes[1], facts.clusters)
    return lambda x, stats, parts: launch(parts, x.sums)
