"""The backward pass: plans what has to be computed, makes what the kernels share, and launches them.

statistics              delta, and lse in log2 units; with a gate, dO * sigmoid(gate) and the gradient of the gate
dq_kernel               dQ, and the pair-bias gradient (by addition in memory, or stored where nothing is to be summed)
dkdv_kernel             dK, dV, and the row-bias gradient
pair_gradient_kernel    the pair-bias gradient in a fixed order, where results must be bit-equal from run to run
total_kernel            its shares added up

Few queries and few keys without a pair bias go to `few` instead: one kernel makes all.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from evoattn.backends import GATED_BACKWARD, Description, Plan
from evoattn.backends.triton import bwd_dkdv, bwd_dq, launch
from evoattn.backends.triton.arguments import PairView, RowView, View
from evoattn.backends.triton.bwd_dkdv import MASK_NONE, dkdv_kernel
from evoattn.backends.triton.bwd_dq import PAIR_ADD, PAIR_NONE, dq_kernel
from evoattn.backends.triton.bwd_gate import gate_pass, only_gate
from evoattn.backends.triton.bwd_mask import MaskGradient, plan_mask_gradient
from evoattn.backends.triton.bwd_pair import Pair, plan_pair
from evoattn.backends.triton.bwd_plan import Call, round_up
from evoattn.backends.triton.bwd_preprocess import GatePass, Saved, plan_statistics
from evoattn.backends.triton.few import plan_backward_few
from evoattn.backends.triton.launch import Launch, Strided, contiguous, empty, layout_for, strided
from evoattn.backends.triton.overlap import overlap
from evoattn.backends.triton.prepare import RowBias, plan_rows
from evoattn.backends.triton.tiles.backward import BackwardTiles, backward_tiles
from evoattn.backends.triton.tiles.few import few_tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.problem import Needs, Problem, describe

__all__ = ["plan_backward"]

_LOG2E = 1.4426950408889634

_WARPGROUP = 4
"""Warps from which Hopper multiplies by wgmma, whose accumulators have to be written first: a start value is free below."""


@dataclasses.dataclass(frozen=True)
class Backward:
    """The launches of a call. Call it with the tensors, and with dq, dk, dv and dgate to write (None where not wanted).

    It returns the gradients of mask_bias and of pair_bias, in their canonical shapes, None where not wanted.

    Args:
        device: of all tensors.
        tiles: of the kernels.
        tuned: whether `evoattn tune` found them on this machine.
        stats: [2, b, n, h, padded_q]: lse and delta; with a pair bias [4, ...], see `bwd_preprocess.store_statistics`.
        rows: makes the row bias, where there is one.
        pair: the pair bias and its gradient.
        statistics, dq, dkdv: the launches, None where nothing asks for them.
        distant_dq, distant_dkdv: the same kernels for distant queries alone, where there is a pair bias.
        mask: the gradient of mask_bias, where it is wanted.
        gate: what the launch of the statistics does with a gate, where there is one and o has a cotangent.
        gathers: whether lse and reference lie in memory with gaps or in another order, and are copied.
    """

    device: torch.device
    tiles: BackwardTiles
    tuned: bool
    stats: Strided
    rows: RowBias | None
    pair: Pair
    statistics: Launch | None
    dq: Launch | None
    dkdv: Launch | None
    distant_dq: Launch | None
    distant_dkdv: Launch | None
    mask: MaskGradient | None
    gate: GatePass | None
    gathers: bool

    def describe(self) -> Description:
        """See `evoattn.backends`."""
        runs = {"dq": self.dq, "dkdv": self.dkdv, "dpair_bias": self.pair.in_order}
        of_each = {"dq": self.tiles.dq, "dkdv": self.tiles.dkdv, "dpair_bias": self.tiles.pair}
        kernels = {name: of_each[name].given() for name, run in runs.items() if run is not None}
        told = None if self.gate is None else GATED_BACKWARD
        return Description(kernels=kernels, copies=self.pair.copies(), gate=told, tuned="backward" if self.tuned else None)

    def __call__(
        self, cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        (do, dlse), (q, k, v, mask, mask_bias, pair_bias, gate) = cotangents, inputs
        (o, lse, reference), (dq, dk, dv, dgate) = outputs, gradients
        # What torch clears comes before our kernels and what it sums after them, so that they are neighbours in the stream.
        if do is None and dgate is not None:
            dgate.zero_()
        do = torch.zeros((), dtype=o.dtype, device=self.device) if do is None else do
        sums = None if self.mask is None else self.mask.begin()
        pair = self.pair.begin(pair_bias)
        stats = empty(self.stats, self.device)
        # What is not given is never read: any tensor stands in for it.
        dlse = lse if dlse is None else dlse
        if self.gathers:
            lse, reference = lse.contiguous(), reference.contiguous()
        row, runs = (stats, stats) if self.rows is None else self.rows(mask, mask_bias)
        self.pair.copy(pair_bias, pair)
        by_query, by_key = (q, q) if pair.by_query is None or pair.by_key is None else (pair.by_query, pair.by_key)
        gated = do if self.gate is None or not self.gate.needs_do else empty(self.gate.gated_do, self.device)
        of_all = (q, k, v, gated, stats, stats if pair.distant is None else pair.distant)
        spans = row if self.pair.in_order is None else self.pair.in_order.find_spans(row)
        if self.statistics is not None:
            of_gate = (o if gate is None else gate, gated, o if dgate is None else dgate)
            self.statistics(o, do, lse, reference, dlse, *of_all[4:], *of_gate)
        if self.dq is not None:
            to_dq, to_sums = q if dq is None else dq, stats if pair.sums is None else pair.sums
            of_dq = (*of_all, o, lse, reference, dlse, row, runs, by_query, to_dq, to_sums)
            self.dq(*of_dq)
        if self.dkdv is not None:
            to_dk, to_dv = k if dk is None else dk, v if dv is None else dv
            of_dkdv = (*of_all, row, by_key, to_dk, to_dv, stats if sums is None else sums)
            self.dkdv(*of_dkdv)
        if self.distant_dq is not None:
            self.distant_dq(*of_dq)
        if self.distant_dkdv is not None:
            self.distant_dkdv(*of_dkdv)
        of_pair = pair.sums if self.pair.in_order is None else self.pair.in_order(of_all, row, spans, by_query)
        dpair_bias = self.pair.finish(pair, of_pair)
        dmask_bias = None if self.mask is None or sums is None else self.mask.finish(sums)
        return dmask_bias, dpair_bias


def plan_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
    needs: Needs,
    deterministic: bool,
    config: Config,
) -> Plan:
    """What computes the gradients that `needs` asks for, of canonical tensors that lie in memory like these."""
    problem = dataclasses.replace(
        describe(inputs, needs=needs, deterministic=deterministic), capability=launch.capability(inputs.q.device)
    )
    others = any(needs[:5])
    if problem.scores == 0 or cotangents == (None, None) or (cotangents.do is None and not others):
        of_biases = zip(inputs.differentiable[3:5], needs[3:5], strict=True)
        zeros = _Zeros(*(None if x is None or not need else tuple(x.shape) for x, need in of_biases))
        return Plan(zeros, Description)
    few = few_tiles("backward", problem, config)
    if few is not None:
        run = plan_backward_few(cotangents, inputs, outputs, few, scale=scale, layout=layout, needs=(*needs[:3], needs[5]))
        told = None if inputs.gate is None else GATED_BACKWARD
        return Plan(run, functools.partial(Description, kernels={"few": dataclasses.asdict(few)}, gate=told))
    if not others:
        return Plan(only_gate(cotangents, inputs, outputs, layout), functools.partial(Description, gate=GATED_BACKWARD))
    tiles = backward_tiles(problem, config, launch.shared_memory_limit(inputs.q.device), problem.capability)
    call = _call(problem, tiles, cotangents, inputs, outputs, scale=scale, layout=layout)
    backward = _launches(call, inputs, outputs, tuned_tiles.is_tuned("triton", "backward", problem, config))
    _overlap(backward)
    return Plan(backward, backward.describe)


def _call(
    problem: Problem,
    tiles: BackwardTiles,
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
) -> Call:
    (do, dlse), (q, k, v, mask, mask_bias, pair_bias, _), (o, lse, _) = cotangents, inputs, outputs
    gate = gate_pass(cotangents, inputs, outputs, layout, needs_do=True, needs_dgate=problem.needs[5])
    padded_q = round_up(problem.lq, max(tiles.dq.block_q, tiles.dkdv.block_q, tiles.pair.block_q))
    of_do = Strided(tuple(o.shape), (0,) * 5, o.dtype) if do is None else strided(do)
    of_do = of_do if gate is None else gate.gated_do
    of_o = strided(o)
    return Call(
        problem=problem,
        tiles=tiles,
        device=q.device,
        layout=layout_for(strided(q), strided(k), strided(v), of_do, of_o),
        o=of_o,
        do=of_do,
        dlse=None if dlse is None else strided(dlse),
        stats=contiguous((2 if pair_bias is None else 4, *lse.shape[:3], padded_q), torch.float32),
        rows=_plan_rows(problem, tiles, mask, mask_bias, scale, q.device),
        scale=scale,
        heads_inside=layout == "bnlhd",
        gate=gate,
    )


def _launches(call: Call, inputs: Inputs, outputs: Outputs, tuned: bool) -> Backward:
    """All launches of a call, in no order yet."""
    (of_q, of_k, of_v, of_mask_bias, of_pair, _), deterministic = call.problem.needs, call.problem.deterministic
    mask_bias = inputs.mask_bias
    bias = None if inputs.pair_bias is None else strided(inputs.pair_bias)
    pair = plan_pair(call, bias, need=of_pair and bias is not None, deterministic=deterministic)
    of_mask = None if mask_bias is None or not of_mask_bias else plan_mask_gradient(call, mask_bias, deterministic)
    statistics, dq = _plan_dq(call, pair, of_q)
    dkdv = _plan_dkdv(call, pair, of_k, of_v, of_mask)
    distant_dq = distant_dkdv = None
    if bias is not None:
        _, distant_dq = _plan_dq(call, pair, of_q, distant_only=True)
        distant_dkdv = _plan_dkdv(call, pair, of_k, of_v, of_mask, distant_only=True)
    return Backward(
        call.device,
        call.tiles,
        tuned,
        call.stats,
        call.rows,
        pair,
        statistics,
        dq,
        dkdv,
        distant_dq,
        distant_dkdv,
        of_mask,
        call.gate,
        _has_gaps(outputs.lse, outputs.reference),
    )


def _has_gaps(*saved: Tensor) -> bool:
    """Whether saved tensors are not contiguous, as hooks may give them back."""
    return not all(x.is_contiguous() for x in saved)


@dataclasses.dataclass(frozen=True)
class _Zeros:
    """Gradients of nothing. Holds the shapes of mask_bias and pair_bias where theirs are wanted."""

    mask_bias: tuple[int, ...] | None
    pair_bias: tuple[int, ...] | None

    def __call__(
        self, cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        mask_bias, pair_bias = inputs.mask_bias, inputs.pair_bias
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        of_mask = None if self.mask_bias is None or mask_bias is None else mask_bias.new_zeros(self.mask_bias)
        return of_mask, None if self.pair_bias is None or pair_bias is None else pair_bias.new_zeros(self.pair_bias)


def _plan_rows(
    problem: Problem, tiles: BackwardTiles, mask: Tensor | None, mask_bias: Tensor | None, scale: float, device: torch.device
) -> RowBias | None:
    """The row bias of the call; where a key tile reaches past the end, one that switches off what lies there."""
    ragged = any(problem.lk % tile.block_k for tile in (tiles.dq, tiles.dkdv, tiles.pair))
    if mask is None and mask_bias is None and not ragged:
        return None
    unit = scale * _LOG2E if launch.folds(scale) else 1.0
    return plan_rows(mask, mask_bias, problem.lk, device, tiles.dq.block_k, unit=unit)


def _overlap(call: Backward) -> None:
    """Say in which order a call launches and who loads whose results, so that neighbours overlap."""
    straight, transposed = (None if copy is None else copy[1] for copy in (call.pair.straight, call.pair.transposed))
    rows = None if call.rows is None else call.rows.launch
    in_order = call.pair.in_order
    spans = None if in_order is None or in_order.spans is None else in_order.spans[1]
    prepared = (rows, straight, transposed, spans, call.statistics)
    in_shares, total = ((), None) if in_order is None else (in_order.launches, in_order.total)
    # Where no kernel of their own makes the statistics, dq does.
    with_statistics = prepared if call.statistics is not None else (*prepared, call.dq)
    overlap(
        call.device,
        (rows, ()),
        (straight, ()),
        (transposed, ()),
        (spans, (rows,)),
        (call.statistics, ()),
        (call.dq, prepared),
        (call.dkdv, with_statistics),
        (call.distant_dq, (call.dq, call.dkdv, *with_statistics)),
        (call.distant_dkdv, (call.dkdv, *with_statistics)),
        *((one, with_statistics) for one in in_shares),
        (total, in_shares),
    )


def _plan_dq(call: Call, pair: Pair, need: bool, *, distant_only: bool = False) -> tuple[Launch | None, Launch | None]:
    """The statistics that the kernels after it read, unless the dQ kernel makes them; and that, if anything asks for it."""
    problem, tiles = call.problem, call.tiles.dq
    launches = need or pair.mode != PAIR_NONE
    # With a gate, all kernels read what the statistics' launch makes of do.
    # With a row bias and additions in memory, ptxas would branch around each small load of the loop: .326 ms at tri384 instead
    # of .275. And past the end the other kernels may read further than this one's tiles write.
    light = pair.mode != PAIR_ADD or call.rows is None
    makes_stats = launches and light and call.gate is None and call.stats.shape[-1] == round_up(problem.lq, tiles.block_q)
    statistics = None if makes_stats or distant_only else plan_statistics(call.stats, call.o, call.do, call.dlse, call.gate)
    if not launches:
        return statistics, None
    bias = pair.by_query
    sums = None if pair.mode == PAIR_NONE else pair.sums or pair.result
    blocks, groups = -(-problem.lq // tiles.block_q), -(-problem.n // tiles.rows)
    of_bias, of_sums = layout_for(bias), layout_for(sums)
    dq = dq_kernel.plan(
        blocks * groups * problem.h * problem.b,
        **call.views(),
        stats=call.stats_view(),
        o=View(None, *call.layout.strides[20:]),
        saved=Saved(None, None, None, *launch.strides(call.dlse, 4)),
        row=call.row_view(),
        runs=RowView(None, *((0, 0) if call.rows is None else call.rows.strides[2:])),
        pair=PairView(None, *of_bias.strides),
        dq=bwd_dq.Gradient(None),
        dpair=bwd_dq.PairSums(None, *of_sums.strides[:3]),
        sizes=bwd_dq.Sizes(
            n=problem.n,
            h=problem.h,
            lq=problem.lq,
            lk=problem.lk,
            blocks=blocks,
            groups=groups,
            together=_heads_together(problem, bias, sums, call.device),
            scale=call.scale,
        ),
        T=call.tile(tiles, of_bias, of_sums),
        V=bwd_dq.Variant(
            ROWS=tiles.rows,
            GRAIN_PAIR=of_bias.grain,
            GRAIN_DPAIR=of_sums.grain,
            HAS_PAIR=bias is not None,
            MASK_PAIR=pair.masked(bias, tiles),
            MAKE_STATS=makes_stats and not distant_only,
            HAS_DLSE=call.dlse is not None,
            DO_IS_MADE=call.gate is not None,
            NEED_DQ=need,
            PAIR_MODE=pair.mode,
            FULL_Q=pair.full_q,
            FULL_K=pair.full_k,
            HEADS_INSIDE=call.heads_inside,
            DISTANT_ONLY=distant_only,
        ),
        **call.options(tiles),
    )
    return statistics, dq


def _heads_together(problem: Problem, bias: Strided | None, sums: Strided | None, device: torch.device) -> int:
    """Heads that dQ's programs work on at a time: as many as half of the cache holds the pair bias and its gradient of."""
    of_head = sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in (bias, sums) if x is not None and x.shape[1] > 1)
    divisors = (x for x in range(problem.h, 1, -1) if problem.h % x == 0)
    return next((x for x in divisors if x * of_head <= launch.cache_bytes(device) // 2), 1)


def _plan_dkdv(
    call: Call, pair: Pair, need_dk: bool, need_dv: bool, mask: MaskGradient | None, *, distant_only: bool = False
) -> Launch | None:
    """The dK and dV kernel, if anything asks for it."""
    if not need_dk and not need_dv and mask is None:
        return None
    problem, tiles = call.problem, call.tiles.dkdv
    bias = pair.by_key
    transposed = bias is not None and bias.stride[-1] != 1 and bias.stride[-2] == 1
    seen = bias
    if bias is not None and transposed:
        (*outer, size_q, size_k), (*steps, step_q, step_k) = bias.shape, bias.stride
        seen = bias._replace(shape=(*outer, size_k, size_q), stride=(*steps, step_k, step_q))
    of_bias = layout_for(seen)
    blocks = -(-problem.lk // tiles.block_k)
    return dkdv_kernel.plan(
        blocks * problem.n * problem.h * problem.b,
        **call.views(),
        stats=call.stats_view(),
        row=call.row_view(),
        pair=PairView(None, *of_bias.strides),
        out=bwd_dkdv.Gradients(None, None),
        dmask=bwd_dkdv.MaskView(None, *launch.strides(None if mask is None else mask.sums, 4)[:3]),
        sizes=bwd_dkdv.Sizes(problem.n, problem.h, problem.lq, problem.lk, blocks, call.scale),
        T=call.tile(tiles, of_bias),
        V=bwd_dkdv.Variant(
            GRAIN_PAIR=of_bias.grain,
            HAS_PAIR=bias is not None,
            MASK_PAIR=pair.masked(bias, tiles),
            PAIR_TRANSPOSED=transposed,
            NEED_DK=need_dk,
            NEED_DV=need_dv,
            MASK_MODE=MASK_NONE if mask is None else mask.mode,
            HEADS_INSIDE=call.heads_inside,
            SEED=tiles.num_warps < _WARPGROUP,
            DISTANT_ONLY=distant_only,
        ),
        **call.options(tiles),
    )
