"""The launches of the statistics, of dQ, and of dK with dV, and the mask-bias gradient that the last one writes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.backends.triton.backward_call import BackwardCall, GateTensors, round_up
from evoattn.backends.triton.kernels import dkdv, dq, statistics
from evoattn.backends.triton.kernels.backward import PAD, Stats
from evoattn.backends.triton.kernels.dkdv import dkdv_kernel
from evoattn.backends.triton.kernels.dq import dq_kernel
from evoattn.backends.triton.kernels.statistics import statistics_kernel
from evoattn.backends.triton.key_bias_plan import key_bias_views
from evoattn.backends.triton.pair_plan import PairBias
from evoattn.core.problem import Problem
from evoattn.core.sizes import power_of_two
from evoattn.kit import cards
from evoattn.kit.arguments import lse_view, pair_view, view
from evoattn.kit.launch import Launch
from evoattn.kit.strides import Strided, contiguous, empty, grain, is_long

_STATISTICS_ROWS = 64
_GATE_ELEMENTS = 2048
"""Elements of a statistics tile, at most, if there is a gate too: with more, 128 channels spill on every card."""

_WARPGROUP = 4
"""Hopper multiplies by wgmma if a program has this many warps. A start value of the accumulators costs time then, else none."""


def writes_statistics(call: BackwardCall, pair: PairBias) -> bool:
    """Return whether the dQ kernel writes the statistics that later kernels read, so that no other kernel needs to.

    With a gate, all kernels read the gated do of the statistics kernel. With a key bias and additions in memory, ptxas would
    branch around each small load of the loop: .326 ms at tri384 instead of .275. And past the end the other kernels may read
    further than this one's tiles write.
    """
    launched = call.problem.needs.q or pair.mode != "none"
    light = pair.mode != "add" or call.key_bias is None
    covered = call.stats.shape[-1] == round_up(call.problem.lq, call.tiles.dq.block_q)
    return launched and light and call.gate is None and covered


def plan_statistics(stats: Strided, o: Strided, do: Strided, dlse: Strided | None, gate: GateTensors | None = None) -> Launch:
    """Plan the launch of (o, do, lse, reference, dlse or lse, stats, distant, gate, gated do, dgate) that fills `stats`
    [2 or 4, b, n, h, padded_q].

    The first two are lse and delta, the others, with a pair bias, are for queries with a reference (`store_statistics`). It
    touches of the last three tensors what `gate` asks for.
    """
    b, n, h, lq, c = o.shape
    padded_q = stats.shape[-1]
    of_gate, written = (None, None) if gate is None else (gate.gate, gate.written)
    tensors = (o, do if gate is None else gate.do, of_gate, written)
    units = grain(*tensors)
    rows = _STATISTICS_ROWS if gate is None else max(PAD, min(_STATISTICS_ROWS, _GATE_ELEMENTS // power_of_two(c)))
    blocks = -(-padded_q // rows)
    return statistics_kernel.plan(
        blocks * n * h * b,
        o=view(o, units),
        dO=view(tensors[1], units),
        dlse=lse_view(dlse),
        stats=Stats(None, None, padded_q // PAD, b * n * h * padded_q // PAD),
        gate=view(of_gate, units),
        gated=view(written, units),
        dgate=view(written, units),
        n_rows=n,
        heads=h,
        lq=lq,
        blocks=blocks,
        V=statistics.Variant(
            C=c,
            BLOCK_C=power_of_two(c),
            BLOCK_Q=rows,
            GRAIN=units,
            HAS_DLSE=dlse is not None,
            HAS_PAIR=stats.shape[0] == 4,
            GATED_DO=gate is not None and gate.needs_do,
            DGATE=gate is not None and gate.needs_dgate,
            LONG=is_long(*tensors) or stats.stride[0] >= 1 << 31,
        ),
        num_warps=4 if c <= 128 else 8,  # with 4, 256 channels of float32 spill 208 bytes on 8.6
    )


def plan_dq(call: BackwardCall, pair: PairBias, *, distant_only: bool = False) -> Launch | None:
    """The dQ kernel, if dQ or the pair-bias gradient needs it."""
    problem, tiles = call.problem, call.tiles.dq
    if not problem.needs.q and pair.mode == "none":
        return None
    bias = pair.by_query
    sums = None if pair.mode == "none" else pair.sums or pair.result
    blocks, groups = -(-problem.lq // tiles.block_q), -(-problem.n // tiles.rows)
    return dq_kernel.plan(
        blocks * groups * problem.h * problem.b,
        **call.arguments(tiles, bias, sums),
        o=view(call.o, call.grain),
        dlse=lse_view(call.dlse),
        runs=key_bias_views(call.key_bias)["runs"],
        pair=pair_view(bias, grain(bias)),
        dpair=pair_view(sums, grain(sums)),
        blocks=blocks,
        groups=groups,
        heads_at_once=_heads_at_once(problem, bias, sums, call.device),
        V=dq.Variant(
            ROWS=tiles.rows,
            GRAIN_PAIR=grain(bias),
            GRAIN_DPAIR=grain(sums),
            HAS_PAIR=bias is not None,
            MASK_PAIR=pair.needs_mask(bias, tiles),
            MAKE_STATS=writes_statistics(call, pair) and not distant_only,
            HAS_DLSE=call.dlse is not None,
            WAITS_FOR_DO=call.gate is not None,
            NEED_DQ=problem.needs.q,
            PAIR_MODE=pair.mode,
            FULL_Q=pair.full_q,
            FULL_K=pair.full_k,
            DISTANT_ONLY=distant_only,
        ),
    )


def _heads_at_once(problem: Problem, bias: Strided | None, sums: Strided | None, device: torch.device) -> int:
    """Heads that dQ's programs work on at a time: as many as half of the cache holds the pair bias and its gradient of."""
    head_bytes = sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in (bias, sums) if x is not None and x.shape[1] > 1)
    divisors = (x for x in range(problem.h, 1, -1) if problem.h % x == 0)
    return next((x for x in divisors if x * head_bytes <= cards.cache_bytes(device) // 2), 1)


def plan_dkdv(call: BackwardCall, pair: PairBias, mask: MaskGradient | None, *, distant_only: bool = False) -> Launch | None:
    """The dK and dV kernel, if dK, dV or the mask-bias gradient needs it."""
    problem, tiles = call.problem, call.tiles.dkdv
    if not problem.needs.k and not problem.needs.v and mask is None:
        return None
    bias = seen = pair.by_key
    transposed = bias is not None and bias.stride[-1] != 1 and bias.stride[-2] == 1
    if bias is not None and transposed:
        (*outer, size_q, size_k), (*steps, step_q, step_k) = bias.shape, bias.stride
        seen = bias._replace(shape=(*outer, size_k, size_q), stride=(*steps, step_k, step_q))
    blocks = -(-problem.lk // tiles.block_k)
    return dkdv_kernel.plan(
        blocks * problem.n * problem.h * problem.b,
        **call.arguments(tiles, bias),
        pair=pair_view(seen, grain(seen)),
        dmask=lse_view(None if mask is None else mask.sums),
        blocks=blocks,
        V=dkdv.Variant(
            GRAIN_PAIR=grain(seen),
            HAS_PAIR=bias is not None,
            MASK_PAIR=pair.needs_mask(bias, tiles),
            PAIR_TRANSPOSED=transposed,
            NEED_DK=problem.needs.k,
            NEED_DV=problem.needs.v,
            MASK_MODE="none" if mask is None else "store" if problem.deterministic else "add",
            SEED=tiles.num_warps < _WARPGROUP,
            DISTANT_ONLY=distant_only,
        ),
    )


class MaskGradient(NamedTuple):
    """The gradient of a mask bias: added up in memory or, if it is deterministic, stored a head each and summed by torch.

    `sums` is [b, n, h, k], with 1 for what the kernel sums over, and torch sums over its axes `summed`.
    """

    sums: Strided
    summed: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, call: BackwardCall) -> Tensor:
        """Memory for the sums."""
        sums = empty(self.sums, call.device)
        return sums if call.problem.deterministic else sums.zero_()

    def finish(self, sums: Tensor) -> Tensor:
        """The gradient, [b|1,n|1,k]."""
        total = sums.sum(self.summed, keepdim=True) if self.summed else sums
        return total.squeeze(2).to(self.dtype)


def plan_mask_gradient(problem: Problem, mask_bias: Tensor) -> MaskGradient:
    """Plan the gradient of a mask bias `[b|1,n|1,k]`."""
    b, n, _ = mask_bias.shape
    shape = (problem.b, problem.n, problem.h, problem.lk) if problem.deterministic else (b, n, 1, problem.lk)
    summed = tuple(axis for axis in (0, 1, 2) if shape[axis] > 1 and (axis == 2 or mask_bias.shape[axis] == 1))
    return MaskGradient(contiguous(shape, torch.float32), summed, mask_bias.dtype)
