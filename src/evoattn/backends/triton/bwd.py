"""The backward pass: plans what has to be computed, makes what the kernels share, and launches them.

statistics              delta, and lse in log2 units
dq_kernel               dQ, and the pair-bias gradient (by addition in memory, or stored where nothing is to be summed)
dkdv_kernel             dK, dV, and the row-bias gradient
pair_gradient_kernel    the pair-bias gradient in a fixed order, where results must be bit-equal from run to run
"""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import torch
from torch import Tensor

from evoattn.backends.triton import launch
from evoattn.backends.triton.bwd_bias import pair_gradient_kernel
from evoattn.backends.triton.bwd_dkdv import MASK_ADD, MASK_NONE, MASK_STORE, dkdv_kernel
from evoattn.backends.triton.bwd_dq import PAIR_ADD, PAIR_NONE, PAIR_STORE, dq_kernel
from evoattn.backends.triton.bwd_preprocess import PAD, pack_pair_bias, row_spans, statistics
from evoattn.backends.triton.launch import Layout, layout_for
from evoattn.backends.triton.prepare import RowBias, loads_wide, prepare_rows
from evoattn.layouts import empty
from evoattn.problem import Problem, describe
from evoattn.tuning.config import Config
from evoattn.tuning.heuristics_backward import BackwardTiles, Tiles, backward_tiles

__all__ = ["run_backward"]

_ROWS_WORTH_A_COPY = 4
"""Rows n from which a copy of the pair bias, made once, costs less than narrow loads of the original on every row."""

_LOG2E = 1.4426950408889634

_WARPGROUP = 4
"""Warps from which Hopper multiplies by wgmma, whose accumulators have to be written first: a start value is free below."""

_SMALL = 100
"""A copy of the pair bias in memory of its own may take one hundredth of what the outputs take."""

_PAIR_PROGRAMS = 528
"""Programs that the pair-gradient kernel wants: 4 for each of an H200's 132 processors."""

_MOST_SPLITS = 4
"""Shares of the rows n, each with a float32 pair-bias gradient of its own: what they cost in memory stays small."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """What every kernel of one backward call reads. `layout` is that of q, k, v, do and o."""

    problem: Problem
    tiles: BackwardTiles
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    o: Tensor
    lse: Tensor
    dlse: Tensor | None
    stats: Tensor
    rows: RowBias | None
    scale: float
    heads_inside: bool
    layout: Layout

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, do, statistics: the first pointers of every kernel."""
        return self.q, self.k, self.v, self.do, self.stats

    def row_strides(self) -> tuple[int, int]:
        """Strides of the row bias over b and n, in units of PAD."""
        return (0, 0) if self.rows is None else (self.rows.stride_b // PAD, self.rows.stride_n // PAD)

    def stats_sizes(self) -> tuple[int, int]:
        """Padded queries, and what lies between an lse and its delta, in units of PAD."""
        return self.stats.shape[-1] // PAD, self.stats.numel() // (2 * PAD)

    def constants(self, tiles: Tiles, *more: Layout) -> dict[str, object]:
        """Compile-time constants and launch options of all kernels; `more`: tensors besides, whose offsets may be long."""
        problem = self.problem
        return {
            "D": problem.d,
            "C": problem.c,
            "BLOCK_D": launch.head_block(problem.d),
            "BLOCK_C": launch.head_block(problem.c),
            "BLOCK_Q": tiles.block_q,
            "BLOCK_K": tiles.block_k,
            "STAGES": tiles.num_stages,
            "PAD": PAD,
            "GRAIN": self.layout.grain,
            "HAS_ROW": self.rows is not None,
            "EVEN_Q": problem.lq % tiles.block_q == 0,
            "EVEN_K": problem.lk % tiles.block_k == 0,
            "FOLD": launch.folds(self.scale),
            "PRECISION": launch.split_precision(problem.dtype, max(problem.d, problem.c)),
            "WIDE": self.layout.wide or any(layout.wide for layout in more),
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            **({"maxnreg": tiles.max_registers} if tiles.max_registers and not launch.on_amd() else {}),
        }


def run_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, bool, bool, bool, bool],
    deterministic: bool,
    config: Config,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dmask_bias, dpair_bias of canonical tensors that the backend takes; None where `needs` is False."""
    problem = describe(q, k, v, mask, mask_bias, pair_bias, needs=needs, deterministic=deterministic)
    dq = empty(q.shape, layout, q) if needs[0] else None
    dk = empty(k.shape, layout, k) if needs[1] else None
    dv = empty(v.shape, layout, v) if needs[2] else None
    biases = tuple(bias if need else None for bias, need in zip((mask_bias, pair_bias), needs[3:], strict=True))
    if problem.scores == 0 or (do is None and dlse is None):
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
        return dq, dk, dv, *(None if bias is None else bias.new_zeros(bias.shape) for bias in biases)
    if do is None:
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape)
    tiles = backward_tiles(problem, config, launch.shared_memory_limit(q.device), launch.capability(q.device))
    padded_q = _round_up(problem.lq, max(tiles.dq.block_q, tiles.dkdv.block_q, tiles.pair.block_q))
    call = _Call(
        problem=problem,
        tiles=tiles,
        q=q,
        k=k,
        v=v,
        do=do,
        o=o,
        lse=lse,
        dlse=dlse,
        stats=torch.empty(2, *lse.shape[:3], padded_q, dtype=torch.float32, device=q.device),
        rows=_rows(problem, tiles, mask, mask_bias, scale, q.device),
        scale=scale,
        heads_inside=layout == "bnlhd",
        layout=layout_for(q, k, v, do, o),
    )
    pair = _Pair(call, pair_bias, need=biases[1] is not None, deterministic=deterministic)
    _dq(call, pair, dq)
    dmask_bias = _dkdv(call, pair, dk, dv, biases[0], deterministic)
    return dq, dk, dv, dmask_bias, pair.gradient()


def _rows(
    problem: Problem, tiles: BackwardTiles, mask: Tensor | None, mask_bias: Tensor | None, scale: float, device: torch.device
) -> RowBias | None:
    """The row bias of the call; where a key tile reaches past the end, one that switches off what lies there."""
    if mask is None and mask_bias is None and any(problem.lk % tile.block_k for tile in (tiles.dq, tiles.dkdv, tiles.pair)):
        mask = torch.ones(1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, problem.lk)
    return prepare_rows(mask, mask_bias, tiles.dq.block_k, unit=scale * _LOG2E if launch.folds(scale) else 1.0)


class _Pair:
    """The pair bias as each kernel reads it best, and its gradient on the way from partial sums to the result.

    The result's memory is written last. Until then it holds a transposed copy of the bias for the dK and dV kernel, which
    reads tiles [k,q]: without it that kernel takes .305 ms instead of .249 at tri384 on an H200.
    """

    def __init__(self, call: _Call, bias: Tensor | None, *, need: bool, deterministic: bool) -> None:
        self.call = call
        self.bias = bias
        self.mode = PAIR_NONE
        self.sums: Tensor | None = None
        self.result: Tensor | None = None
        self.by_query = bias
        self.by_key = bias
        if bias is None:
            return
        problem = call.problem
        self.full_q = bias.shape[2] == problem.lq
        self.full_k = bias.shape[3] == problem.lk
        alone = self.full_q and self.full_k and tuple(bias.shape[:2]) == (problem.b, problem.h) and problem.n == 1
        storage = self._copies(reuse=need and not alone)
        if not need:
            return
        self.result = (storage if storage is not None else bias.new_empty(bias.numel()))[: bias.numel()].view(bias.shape)
        if alone:
            self.mode = PAIR_STORE
            # Tiles that a mask switches off are not visited.
            self.sums = self.result if call.rows is None else self.result.zero_()
        elif not deterministic:
            self.mode = PAIR_ADD
            tile = call.tiles.dq
            size_q = _round_up(problem.lq, tile.block_q) if self.full_q else 1
            size_k = _round_up(problem.lk, tile.block_k) if self.full_k else 1
            exact = bias.dtype == torch.float32 and (size_q, size_k) == tuple(bias.shape[2:])
            self.sums = self.result if exact else bias.new_empty(*bias.shape[:2], size_q, size_k, dtype=torch.float32)
            self.sums.zero_()

    def _copies(self, *, reuse: bool) -> Tensor | None:
        """Make the copies that pay; returns the memory for the result, where a copy lives in it for now."""
        bias, problem, tiles = cast(Tensor, self.bias), self.call.problem, self.call.tiles
        if not (self.full_q and self.full_k and problem.n >= _ROWS_WORTH_A_COPY):
            return None
        each = (tiles.dq, tiles.dkdv, tiles.pair)
        size_q = _round_up(problem.lq, max(tile.block_q for tile in each))
        size_k = _round_up(problem.lk, max(tile.block_k for tile in each))
        numel = bias.shape[0] * bias.shape[1] * size_q * size_k
        if (size_q, size_k) != (problem.lq, problem.lk) or not loads_wide(bias):
            self.by_query = self.by_key = pack_pair_bias(bias, size_q, size_k, transpose=False)
        storage = None
        outputs = problem.b * problem.n * problem.h * (problem.lq + problem.lk) * (problem.d + problem.c)
        if reuse and bias.element_size() == 2:
            storage = bias.new_empty(max(numel, bias.numel()))
        elif numel * bias.element_size() * _SMALL > outputs * problem.dtype.itemsize:
            return None
        self.by_key = pack_pair_bias(bias, size_q, size_k, transpose=True, storage=storage)
        return storage

    def masked(self, view: Tensor | None) -> bool:
        """Whether loads of this view must be masked: a copy is padded to whole tiles, an original is not."""
        return view is self.bias

    def gradient(self) -> Tensor | None:
        """The finished gradient, in the bias's shape and dtype."""
        if self.result is None or self.bias is None:
            return None
        sums = self.sums
        if sums is None:
            sums = _pair_in_order(self.call, self)
        if sums is not self.result:
            self.result.copy_(sums[..., : self.bias.shape[2], : self.bias.shape[3]])
        return self.result


def _dq(call: _Call, pair: _Pair, dq: Tensor | None) -> None:
    """Launch the dQ kernel, if anything asks for it, and see to the statistics that the kernels after it read."""
    problem, tiles = call.problem, call.tiles.dq
    launches = dq is not None or pair.mode != PAIR_NONE
    # With a row bias and additions in memory, ptxas would branch around each small load of the loop: .326 ms at tri384 instead
    # of .275. And past the end the other kernels may read further than this one's tiles write.
    light = pair.mode != PAIR_ADD or call.rows is None
    makes_stats = launches and light and call.stats.shape[-1] == _round_up(problem.lq, tiles.block_q)
    if not makes_stats:
        statistics(call.stats, call.o, call.do, call.lse, call.dlse)
    if not launches:
        return
    bias, sums = pair.by_query, pair.sums
    blocks, groups = -(-problem.lq // tiles.block_q), -(-problem.n // tiles.rows)
    of_bias, of_sums = layout_for(bias), layout_for(sums)
    dq_kernel(
        blocks * groups * problem.h * problem.b,
        *call.inputs(),
        call.o,
        call.lse,
        call.lse if call.dlse is None else call.dlse,
        call.stats if call.rows is None else call.rows.bias,
        call.stats if call.rows is None else call.rows.runs,
        call.q if bias is None else bias,
        call.q if dq is None else dq,
        call.stats if sums is None else sums,
        call.scale,
        *call.layout.strides,
        *launch.strides(call.dlse, 4),
        *of_bias.strides,
        *of_sums.strides[:3],
        *call.row_strides(),
        *((0, 0) if call.rows is None else call.rows.strides[2:]),
        problem.n,
        problem.h,
        problem.lq,
        problem.lk,
        *call.stats_sizes(),
        blocks,
        groups,
        ROWS=tiles.rows,
        GRAIN_PAIR=of_bias.grain,
        GRAIN_DPAIR=of_sums.grain,
        HAS_PAIR=bias is not None,
        MASK_PAIR=pair.masked(bias),
        MAKE_STATS=makes_stats,
        HAS_DLSE=call.dlse is not None,
        NEED_DQ=dq is not None,
        PAIR_MODE=pair.mode,
        FULL_Q=bias is not None and pair.full_q,
        FULL_K=bias is not None and pair.full_k,
        HEADS_INSIDE=call.heads_inside,
        **call.constants(tiles, of_bias, of_sums),
    )


def _dkdv(
    call: _Call, pair: _Pair, dk: Tensor | None, dv: Tensor | None, mask_bias: Tensor | None, deterministic: bool
) -> Tensor | None:
    """Launch the dK and dV kernel, if anything asks for it; returns the gradient of mask_bias, if that is given."""
    if dk is None and dv is None and mask_bias is None:
        return None
    problem, tiles = call.problem, call.tiles.dkdv
    mode, sums = MASK_NONE, None
    if mask_bias is not None and deterministic:
        mode = MASK_STORE
        sums = call.stats.new_empty(problem.b, problem.n, problem.h, problem.lk)
    elif mask_bias is not None:
        mode = MASK_ADD
        sums = call.stats.new_zeros(*mask_bias.shape[:2], 1, problem.lk)
    bias = pair.by_key
    transposed = bias is not None and bias.stride(-1) != 1 and bias.stride(-2) == 1
    seen = bias.transpose(2, 3) if bias is not None and transposed else bias
    of_bias = layout_for(seen)
    blocks = -(-problem.lk // tiles.block_k)
    dkdv_kernel(
        blocks * problem.n * problem.h * problem.b,
        *call.inputs(),
        call.stats if call.rows is None else call.rows.bias,
        call.q if bias is None else bias,
        call.k if dk is None else dk,
        call.v if dv is None else dv,
        call.stats if sums is None else sums,
        call.scale,
        *call.layout.strides[:20],
        *of_bias.strides,
        *launch.strides(sums, 4)[:3],
        *call.row_strides(),
        problem.n,
        problem.h,
        problem.lq,
        problem.lk,
        *call.stats_sizes(),
        blocks,
        GRAIN_PAIR=of_bias.grain,
        HAS_PAIR=bias is not None,
        MASK_PAIR=pair.masked(bias),
        PAIR_TRANSPOSED=transposed,
        NEED_DK=dk is not None,
        NEED_DV=dv is not None,
        MASK_MODE=mode,
        SEED=tiles.num_warps < _WARPGROUP,
        HEADS_INSIDE=call.heads_inside,
        **call.constants(tiles, of_bias),
    )
    if mask_bias is None or sums is None:
        return None
    summed = [axis for axis in (0, 1, 2) if sums.shape[axis] > 1 and (axis == 2 or mask_bias.shape[axis] == 1)]
    return (sums.sum(summed, keepdim=True) if summed else sums)[:, :, 0].to(mask_bias.dtype)


def _pair_in_order(call: _Call, pair: _Pair) -> Tensor:
    """The pair-bias gradient, float32, each sum in a fixed order."""
    problem, tiles = call.problem, call.tiles.pair
    bias, given = cast(Tensor, pair.by_query), cast(Tensor, pair.bias)
    blocks_q, blocks_k = -(-problem.lq // tiles.block_q), -(-problem.lk // tiles.block_k)
    programs = problem.b * problem.h * blocks_q * blocks_k
    splits = min(problem.n, _MOST_SPLITS, math.ceil(_PAIR_PROGRAMS / programs))
    # An axis of size 1 holds one partial sum a tile.
    size_q = _round_up(blocks_q * tiles.block_q if pair.full_q else blocks_q, PAD)
    size_k = _round_up(blocks_k * tiles.block_k if pair.full_k else blocks_k, PAD)
    partial = call.stats.new_empty(problem.b, splits, problem.h, size_q, size_k)
    spans = None if call.rows is None else row_spans(call.rows, problem.b, problem.n, tiles.block_k)
    of_bias = layout_for(bias)
    pair_gradient_kernel(
        programs * splits,
        *call.inputs(),
        call.stats if call.rows is None else call.rows.bias,
        call.stats if spans is None else spans,
        bias,
        partial,
        call.scale,
        *call.layout.strides[:20],
        *of_bias.strides,
        *call.row_strides(),
        *((0, 0) if spans is None else spans.stride()[:2]),
        problem.n,
        problem.h,
        problem.lq,
        problem.lk,
        *call.stats_sizes(),
        blocks_q,
        blocks_k,
        splits,
        size_q // PAD,
        size_k // PAD,
        GRAIN_PAIR=of_bias.grain,
        MASK_PAIR=pair.masked(bias),
        FULL_Q=pair.full_q,
        FULL_K=pair.full_k,
        **call.constants(tiles, of_bias, layout_for(partial[0])),
    )
    used = partial[..., : problem.lq if pair.full_q else blocks_q, : problem.lk if pair.full_k else blocks_k]
    sizes = (given.shape[0], 1, *given.shape[1:])
    summed = [axis for axis, size in enumerate(sizes) if size == 1 and used.shape[axis] > 1]
    return (used.sum(summed, keepdim=True) if summed else used)[:, 0]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
