"""The main kernels of a backward: which of them a call needs, in which variants, and their launches."""

from __future__ import annotations

import dataclasses
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
from evoattn.backends.hopper.kernels.statistics import FLOAT16_STEP, TILE_WORDS, Statistics
from evoattn.backends.hopper.launch import types
from evoattn.backends.hopper.memory import KeyTerms, floats, split_scale
from evoattn.backends.hopper.planner import Planner
from evoattn.core import devices
from evoattn.core.inputs import Inputs
from evoattn.core.problem import Problem

MOST_IN_32_BITS = 2**31 - 1
"""The kernels that clear and round the sums of d(pair bias) count their elements in 32 bits; torch does it for more."""

_ROWS_THAT_HIDE_ROUNDING = 32
"""One warp of a block rounds d(pair bias) while the others go through n rows: it needs the time of a dozen."""


class PairGradient(NamedTuple):
    """The way to d(pair bias): blocks add to sums that were cleared, or leave parts that are summed in a fixed order.

    Args:
        layout: of d(pair bias).
        sums: the layout of what blocks add to, or of what the parts are summed to.
        partial: whether blocks leave parts, for `PanelSum`.
        rounds: whether the kernel of the keys writes it from the sums.
        over: axes that are still to be summed.
        keys: of a line of the sums, which may be up to three longer.
    """

    layout: Tensor
    sums: Tensor
    partial: bool
    rounds: bool
    over: tuple[int, ...]
    keys: int

    @classmethod
    def of(cls, pair_bias: Tensor, problem: Problem, *, idle_warp: bool) -> PairGradient:
        """Of a pair bias [b|1,h|1,q|1,k|1]; `idle_warp`: whether the kernel of the keys has a warp to spare."""
        deterministic, lq, lk = problem.deterministic, problem.lq, problem.lk
        shape, full = tuple(pair_bias.shape), (problem.b, problem.h, lq, lk)
        over = tuple(axis for axis in range(4) if shape[axis] != full[axis] and (deterministic or axis > 1))
        if deterministic:
            sums = torch.empty(full, dtype=torch.float32 if over else pair_bias.dtype, device="meta")
        else:
            sums = floats(*shape[:2], lq, -(-lk // 4) * 4)
        rounds = idle_warp and not deterministic and not over and lk % 4 == 0 and problem.n >= _ROWS_THAT_HIDE_ROUNDING
        rounds = rounds and sums.numel() <= MOST_IN_32_BITS and pair_bias.dtype != torch.float32
        return cls(torch.empty(shape, dtype=pair_bias.dtype, device="meta"), sums, deterministic, rounds, over, lk)

    def finish(self, sums: Tensor) -> Tensor:
        """Return d(pair bias) of the sums, if no kernel rounds them."""
        lines = sums if sums.shape[-1] == self.keys else sums[..., : self.keys]
        return (lines.sum(self.over, keepdim=True) if self.over else lines).to(self.layout.dtype).contiguous()


@dataclasses.dataclass(frozen=True)
class BackwardChoices:
    """The kernels that a backward launches, their variants, and how they share the work."""

    problem: Problem  # sizes, biases and needs of the call
    device: torch.device
    dtype: Any  # cutlass type of q, k and v
    bias: Any  # cutlass type of the pair bias, or None
    dlse: bool  # whether lse has a gradient
    gated: bool  # whether `GatePass` has found delta, which comes with dlse, so that o is not read
    factor: float  # what q is multiplied by before a kernel reads it
    unit: float  # the scale that the kernels apply; scale = factor * unit
    fused: int | None  # tiles of queries of `FusedGradients`, if that finds all gradients
    query: tiles.QueryVariant | None  # of `QueryGradients`, if it runs
    key: tiles.KeyVariant | None  # of `KeyGradients`, if it runs
    skips: bool  # whether these two skip rows without a key
    groups: HeadGroups  # heads that are launched together
    heads: int  # how many (b, h) these are
    panels: int  # panels of 64 queries of a (b, h)
    key_panels: int  # panels of 64 keys of a (b, h)
    clusters: int  # of `QueryGradients`; a block without others is one
    key_blocks: int  # blocks of `KeyGradients`
    row_blocks: int  # blocks of `FusedGradients`
    gradient: PairGradient | None  # of the pair bias, if it is wanted

    @property
    def streams(self) -> bool:
        """True if the pair bias streams through `KeyGradients`."""
        return self.key is not None and self.key.ring > 0

    @property
    def added(self) -> Tensor | None:
        """The layout of what blocks add d(pair bias) to, if they do."""
        return None if self.gradient is None or self.gradient.partial else self.gradient.sums

    @property
    def parts(self) -> Tensor | None:
        """The layout of the parts of d(pair bias) that blocks leave, if they do."""
        if self.query is None or self.gradient is None or not self.gradient.partial:
            return None
        slots = (self.clusters + self.heads * self.panels) * self.query.cluster
        return floats(slots, self.query.slices * 4, self.query.groups * 128, 4)

    @property
    def stats(self) -> Tensor:
        """The layout of the statistics of a group's queries."""
        return floats(self.groups.b, self.problem.n, self.groups.h, self.panels * TILE_WORDS)


def choose_kernels(problem: Problem, inputs: Inputs, *, scale: float, dlse: bool, gated: bool) -> BackwardChoices:
    """Choose the kernels of a backward, for canonical tensors."""
    needs, q, pair_bias, d, n = problem.needs, inputs.q, inputs.pair_bias, problem.d, problem.n
    pair, float32_pair = pair_bias is not None, problem.pair_bias == torch.float32
    of_queries, of_keys = needs.q or needs.pair_bias, needs.k or needs.v or needs.mask_bias
    processors = devices.processors(q.device)
    fused = tiles.fused_tiles(problem, processors) if needs.q and of_keys and not pair else None
    skips = not fused and tiles.skips_rows(problem)
    query = tiles.query_variant(d, problem.lk, pair) if of_queries and not fused else None
    key = tiles.key_variant(d, problem.lq, pair, skips, float32_pair=float32_pair) if of_keys and not fused else None

    panels, key_panels = -(-problem.lq // tiles.MMA_M), -(-problem.lk // tiles.MMA_M)
    groups = HeadGroups.of(q, pair_bias if key is not None and key.ring else None, key_panels * n, processors)
    heads = groups.b * groups.h
    at_once = processors
    if query is not None and query.cluster > 1:
        at_once = resident_clusters(query.cluster, tiles.SHARED, q.device)
    # `KeyGradients` takes lse / unit in float16, up to FLOAT16_STEP times its largest; with a pair bias lse goes to 65,504
    factor, unit = split_scale(scale, 2.0 / FLOAT16_STEP) if q.dtype == torch.float16 and pair else split_scale(scale)
    idle_warp = key is not None and key.streams + bool(key.ring) < 4
    gradient = PairGradient.of(pair_bias, problem, idle_warp=idle_warp) if pair_bias is not None and needs.pair_bias else None
    return BackwardChoices(
        problem=problem,
        device=q.device,
        dtype=types[q.dtype],
        bias=None if pair_bias is None else types[pair_bias.dtype],
        dlse=dlse,
        gated=gated,
        factor=factor,
        unit=unit,
        fused=fused,
        query=query,
        key=key,
        skips=skips,
        groups=groups,
        heads=heads,
        panels=panels,
        key_panels=key_panels,
        clusters=min(at_once, heads * panels * n),
        key_blocks=min(processors, heads * key_panels * n),
        row_blocks=min(processors, problem.b * n * problem.h),
        gradient=gradient,
    )


Launch = Callable[..., None]
"""A function of the addresses of `BackwardTensors`."""


class BackwardTensors(
    namedtuple("BackwardTensors", "mdO mQ mK mV mO mLSE mdLSE mdQ mdK mdV mdMask mPair mTiles mSums mdPair mTerms mEnds mOrder "
        "mStarts mStats mParts")
):  # fmt: skip
    """All that the launches of a group of heads read and write, by the kernels' names: as layouts, or as addresses.

    mSums: what blocks add d(pair bias) to, or what their parts `mParts` are summed to. mdPair: d(pair bias) in its own dtype.
    """


def plan_launches(planner: Planner, choices: BackwardChoices, first: BackwardTensors, terms: KeyTerms) -> list[Launch]:
    """Plan the launches of each group, in this order, for the layouts of the first.

    Nothing may come between: one starts while the one before runs.
    """
    if choices.fused:
        return [_plan_fused(planner, choices, first, terms)]
    launches = []
    if choices.query is not None:
        launches.append(_plan_query(planner, choices, choices.query, first, terms))
    elif choices.key is not None:
        launches.append(_plan_statistics(planner, choices, first))
    if choices.key is not None:
        launches.append(_plan_key(planner, choices, choices.key, first, terms))
    if choices.query is not None and choices.parts is not None:
        launches.append(_plan_panel_sum(planner, choices, choices.query, first))
    return launches


def _plan_fused(planner: Planner, choices: BackwardChoices, first: BackwardTensors, terms: KeyTerms) -> Launch:
    planner.tiles["whole"] = {"block_q": tiles.MMA_M, "block_k": tiles.MMA_M}
    options: dict[str, Any] = {"key_bias": terms.terms is not None, "mask_gradient": choices.problem.needs.mask_bias}
    options |= {"dlse": choices.dlse, "gate": choices.gated, "tiles": choices.fused}
    kernel = FusedGradients(choices.dtype, choices.problem.d, **options)
    return planner.plan_launch(kernel, first._asdict(), scale=choices.unit, **terms.strides, blocks=choices.row_blocks)


def _plan_query(
    planner: Planner, choices: BackwardChoices, variant: tiles.QueryVariant, first: BackwardTensors, terms: KeyTerms
) -> Launch:
    problem = choices.problem
    keys = variant.groups * variant.slices * tiles.SLICE
    planner.tiles["dq"] = {"block_q": tiles.MMA_M, "block_k": keys, "num_stages": variant.stages, "cluster": variant.cluster}
    timed = tiles.counts_changes(choices.heads * choices.panels, problem.n, choices.clusters)
    options: dict[str, Any] = {"pair": choices.bias is not None, "key_bias": terms.terms is not None, "bias": choices.bias}
    options |= {"bias_gradient": problem.needs.pair_bias, "partial": choices.parts is not None}
    options |= {"skips": choices.skips, "timed": timed}
    options |= {"dlse": choices.dlse, "gate": choices.gated, "vector": choices.bias is None or problem.lk % 2 == 0}
    kernel = QueryGradients(choices.dtype, problem.d, **options, **variant._asdict())
    blocks = choices.clusters * variant.cluster
    return planner.plan_launch(kernel, first._asdict(), scale=choices.unit, **terms.strides, blocks=blocks)


def _plan_statistics(planner: Planner, choices: BackwardChoices, first: BackwardTensors) -> Launch:
    kernel = Statistics(choices.dtype, choices.problem.d, dlse=choices.dlse, gate=choices.gated)
    return planner.plan_launch(kernel, first._asdict(), scale=choices.unit)


def _plan_key(
    planner: Planner, choices: BackwardChoices, variant: tiles.KeyVariant, first: BackwardTensors, terms: KeyTerms
) -> Launch:
    problem, needs = choices.problem, choices.problem.needs
    planner.tiles["dkdv"] = {"block_q": tiles.MMA_M, "block_k": tiles.MMA_M, "num_stages": variant.stages}
    timed = tiles.counts_changes(choices.heads * choices.key_panels, problem.n, choices.key_blocks)
    rounds = choices.gradient is not None and choices.gradient.rounds
    options: dict[str, Any] = {"pair": choices.bias is not None, "key_bias": terms.terms is not None, "bias": choices.bias}
    options |= {"mask_gradient": needs.mask_bias, "rounds": rounds, "timed": timed}
    options |= {"skips": choices.skips, "clears": choices.skips and needs.q}
    kernel = KeyGradients(choices.dtype, problem.d, **options, **variant._asdict())
    if rounds:
        first = first._replace(mSums=first.mSums.view(-1, 4), mdPair=first.mdPair.view(-1, 4))
    return planner.plan_launch(kernel, first._asdict(), scale=choices.unit, **terms.strides, blocks=choices.key_blocks)


def _plan_panel_sum(planner: Planner, choices: BackwardChoices, variant: tiles.QueryVariant, first: BackwardTensors) -> Launch:
    problem = choices.problem
    interleave = tiles.query_interleave(problem.d, variant.slices, variant.stage_slices)
    split = {"groups": variant.groups, "slices": variant.slices, "cluster": variant.cluster, "interleave": interleave}
    timed = tiles.counts_changes(choices.heads * choices.panels, problem.n, choices.clusters)
    kernel = PanelSum(types[first.mSums.dtype], **split, vector=problem.lk % 2 == 0, timed=timed)
    return planner.plan_launch(kernel, first._asdict(), n=problem.n, blocks=choices.clusters)
