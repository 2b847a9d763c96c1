"""The pair bias in the backward: copies that each kernel reads best, and its gradient from partial sums to the result.

The result's memory is written last. Until then it holds a transposed copy of the bias for the dK and dV kernel, which reads
tiles [k,q]: without it that kernel takes .305 ms instead of .249 at tri384 on an H200.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.backends.triton.arguments import PairView
from evoattn.backends.triton.bwd_bias import Partial, Sizes, Spans, Variant, pair_gradient_kernel
from evoattn.backends.triton.bwd_dq import PAIR_ADD, PAIR_NONE, PAIR_STORE
from evoattn.backends.triton.bwd_plan import Call, round_up
from evoattn.backends.triton.bwd_preprocess import PAD, plan_pack, plan_row_spans
from evoattn.backends.triton.bwd_total import plan_total
from evoattn.backends.triton.launch import Launch, Strided, cache_bytes, contiguous, empty, layout_for, programs_at_once
from evoattn.backends.triton.prepare import COPIED, loads_wide
from evoattn.backends.triton.tiles.backward import Tiles
from evoattn.backends.triton.tiles.limits import most_warps
from evoattn.core.problem import Problem
from evoattn.core.sizes import SHORT

__all__ = ["Pair", "PairTensors", "plan_pair", "rows_of_a_turn", "shares"]

_ROWS_WORTH_A_COPY = 4
"""Rows n from which a copy of the pair bias, made once, costs less than narrow loads of the original on every row."""

_SMALL = 100
"""A copy of the pair bias in memory of its own may take one hundredth of what the outputs take."""

_MOST_SPLITS = 8
"""Shares of the rows n, each with a float32 pair-bias gradient of its own: what they cost in memory stays small."""

_MOST_SPLITS_OF_SHORT = 16
"""Likewise for lengths up to SHORT, whose tiles are few."""

_WORTH_A_STRIP = 64
"""Queries and keys of tiles that are large enough to have what is left over in smaller ones."""

_SMALLEST = 16
"""Queries or keys that a matrix product takes at least."""

_ROWS_TO_DRIFT = 192
"""Where fewer rows of a head fill the cache, programs that go through all of them read from memory what others have read."""

_ROWS_WORTH_SPANS = 128
"""Rows from which a kernel that finds the live ones first costs less than the others do."""

_LEAST_ROWS = 32
"""Rows of a turn: each turn reads and writes the sums once more."""

_WORTH_A_SHARE = 1.05
"""More shares must make the pair-gradient kernel this much faster."""


class PairTensors(NamedTuple):
    """The tensors of one run; None where there is none. `sums` may be the result itself.

    `distant` is one float32 number, not 0 if a query has a reference (`bwd_preprocess.store_statistics`).
    """

    by_query: Tensor | None = None
    by_key: Tensor | None = None
    sums: Tensor | None = None
    result: Tensor | None = None
    distant: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """How one call sees its pair bias.

    Args:
        device: where everything is made.
        lq, lk: queries and keys.
        bias: as given, [b|1,h|1,q|1,k|1]; None without one, and then all that follows says nothing.
        result: its gradient, if that is wanted.
        mode: what the dQ kernel does about that gradient.
        full_q, full_k: whether the bias varies along the axis.
        straight, transposed: copies that are made, and the launches that fill them.
        storage: elements of the result's memory where that holds the transposed copy for now, else 0.
        sums: where partial sums are added up, if not in the result.
        cleared: whether sums start from 0.
        in_order: the kernel of a fixed order of summation.
    """

    device: torch.device
    lq: int
    lk: int
    bias: Strided | None = None
    result: Strided | None = None
    mode: int = PAIR_NONE
    full_q: bool = False
    full_k: bool = False
    straight: tuple[Strided, Launch] | None = None
    transposed: tuple[Strided, Launch] | None = None
    storage: int = 0
    sums: Strided | None = None
    cleared: bool = False
    in_order: InOrder | None = None

    @property
    def by_query(self) -> Strided | None:
        """The bias as the kernels read it that own queries."""
        return self.bias if self.straight is None else self.straight[0]

    @property
    def by_key(self) -> Strided | None:
        """The bias as the kernel reads it that owns keys."""
        return self.by_query if self.transposed is None else self.transposed[0]

    def masked(self, view: Strided | None, tile: Tiles) -> bool:
        """Whether loads of this view must be masked: an original that is no whole number of tiles. A copy is padded to one."""
        if view is None or view is not self.bias:
            return False
        return bool(self.lq % tile.block_q or self.lk % tile.block_k)

    def copies(self) -> tuple[str, ...]:
        """The copies of the bias that are made, in words."""
        made = []
        if self.straight is not None and self.bias is not None:
            made.append("pair_bias: padded to whole tiles once a backward" if loads_wide(self.bias) else COPIED)
        if self.transposed is not None:
            made.append("pair_bias: transposed once a backward, for dK and dV")
        return tuple(made)

    def begin(self, bias: Tensor | None) -> PairTensors:
        """The memory of the copies and of the gradient, whose sums are cleared."""
        if bias is None or self.bias is None:
            return PairTensors()
        by_query, memory, result, sums, distant = bias, None, None, None, None
        if self.straight is not None:
            by_query = empty(self.straight[0], self.device)
        by_key = by_query
        if self.transposed is not None:
            by_key = empty(self.transposed[0], self.device)
            if self.storage:
                by_key = memory = torch.empty_strided((self.storage,), (1,), dtype=self.bias.dtype, device=self.device)
        if self.result is not None:
            like = self.result if self.sums is None else self.sums
            if self.mode == PAIR_ADD:
                sums, distant = self._cleared(like)
            if memory is not None:
                result = memory.as_strided(*self.result[:2])
            else:
                result = sums if self.mode == PAIR_ADD and self.sums is None else empty(self.result, self.device)
            if self.mode == PAIR_STORE:
                sums = result.zero_() if self.cleared and result is not None else result
        if distant is None:
            distant = torch.zeros(1, dtype=torch.float32, device=self.device)
        return PairTensors(by_query, by_key, sums, result, distant)

    def _cleared(self, like: Strided) -> tuple[Tensor, Tensor]:
        """Memory of zeros for a record that has no gaps, and `distant`, in one piece."""
        behind = round_up(math.prod(like.shape), PAD)
        room = torch.zeros(behind + 1, dtype=torch.float32, device=self.device)
        return room.as_strided(like.shape, like.stride), room.as_strided((1,), (1,), behind)

    def copy(self, bias: Tensor | None, tensors: PairTensors) -> None:
        """Make the copies."""
        for made, copy in ((self.straight, tensors.by_query), (self.transposed, tensors.by_key)):
            if made is not None and bias is not None and copy is not None:
                made[1](bias, copy)

    def finish(self, tensors: PairTensors, found: Tensor | None) -> Tensor | None:
        """The gradient in the bias's shape and dtype, from the sums or shares that were found."""
        result = tensors.result
        if result is None or found is None or found is result:
            return result
        if self.in_order is not None:
            return self.in_order.finish(found, result)
        return result.copy_(found.as_strided(result.shape, found.stride()))


@dataclasses.dataclass(frozen=True)
class InOrder:
    """The pair-bias gradient, float32, each sum in a fixed order.

    Args:
        device: where everything is made.
        partial: [b, splits, h, q, k], a share of the sums each; an axis of the bias that is 1 counts tiles instead.
        used: the part of it that holds something.
        spans: the rows n that are live, and what finds them, where there is a row bias and so many rows that it pays.
        launches: the kernel, for each turn of rows once a strip of tiles, whole ones first; then all of them for distant
            queries alone.
        total: what adds up the shares; None where torch does.
    """

    device: torch.device
    partial: Strided
    used: tuple[int, ...]
    spans: tuple[Strided, Launch] | None
    launches: tuple[Launch, ...]
    total: Launch | None

    def find_spans(self, row: Tensor) -> Tensor:
        """The spans, from the row bias; without one, that itself stands in for them."""
        if self.spans is None:
            return row
        spans = empty(self.spans[0], self.device)
        self.spans[1](row, spans)
        return spans

    def __call__(self, inputs: tuple[Tensor, ...], row: Tensor, spans: Tensor, bias: Tensor) -> Tensor:
        """The shares, from q, k, v, do and statistics, the row bias, its spans and the pair bias by query."""
        partial = empty(self.partial, self.device)
        for launch in self.launches:
            launch(*inputs, row, spans, bias, partial)
        return partial

    def finish(self, partial: Tensor, result: Tensor) -> Tensor:
        """The gradient, [b|1,h|1,q|1,k|1], from the shares."""
        if self.total is not None:
            self.total(partial, result)
            return result
        sizes = (result.shape[0], 1, *result.shape[1:])
        used = partial.as_strided(self.used, self.partial.stride)
        return result.copy_(used.sum([axis for axis, size in enumerate(sizes) if size == 1], keepdim=True)[:, 0])


def plan_pair(call: Call, bias: Strided | None, *, need: bool, deterministic: bool) -> Pair:
    """Which copies of the pair bias pay, and where its gradient is summed."""
    problem, tile = call.problem, call.tiles.dq
    if bias is None:
        return Pair(call.device, problem.lq, problem.lk)
    full_q, full_k = bias.shape[2] == problem.lq, bias.shape[3] == problem.lk
    alone = full_q and full_k and bias.shape[:2] == (problem.b, problem.h) and problem.n == 1
    result = contiguous(bias.shape, bias.dtype) if need else None
    pair = Pair(call.device, problem.lq, problem.lk, bias, result, full_q=full_q, full_k=full_k)
    if full_q and full_k and problem.n >= _ROWS_WORTH_A_COPY:
        pair = _with_copies(call, pair, bias, reuse=need and not alone)
    if not need:
        return pair
    if alone:
        # Tiles that a mask switches off are not visited.
        return dataclasses.replace(pair, mode=PAIR_STORE, cleared=call.rows is not None)
    if deterministic:
        return dataclasses.replace(pair, in_order=_plan_in_order(call, pair, bias))
    unread = tile.block_q if call.rows is not None else 0  # for what rows add that have no live key
    size_q = round_up(problem.lq, tile.block_q) + unread if full_q else 1
    size_k = round_up(problem.lk, tile.block_k) if full_k else 1
    exact = bias.dtype == torch.float32 and (size_q, size_k) == bias.shape[2:]
    sums = None if exact else contiguous((*bias.shape[:2], size_q, size_k), torch.float32)
    return dataclasses.replace(pair, mode=PAIR_ADD, sums=sums, cleared=True)


def _with_copies(call: Call, pair: Pair, bias: Strided, *, reuse: bool) -> Pair:
    problem, tiles = call.problem, call.tiles
    each = (tiles.dq, tiles.dkdv, tiles.pair)
    size_q = round_up(problem.lq, max(tile.block_q for tile in each))
    size_k = round_up(problem.lk, max(tile.block_k for tile in each))
    if (size_q, size_k) != (problem.lq, problem.lk) or not loads_wide(bias):
        pair = dataclasses.replace(pair, straight=plan_pack(bias, size_q, size_k, transpose=False))
    numel = bias.shape[0] * bias.shape[1] * size_q * size_k
    outputs = problem.b * problem.n * problem.h * (problem.lq + problem.lk) * (problem.d + problem.c)
    inside = reuse and bias.dtype.itemsize == 2
    if not inside and numel * bias.dtype.itemsize * _SMALL > outputs * problem.dtype.itemsize:
        return pair
    storage = max(numel, math.prod(bias.shape)) if inside else 0
    return dataclasses.replace(pair, transposed=plan_pack(bias, size_q, size_k, transpose=True), storage=storage)


def _plan_in_order(call: Call, pair: Pair, given: Strided) -> InOrder:
    problem, tiles = call.problem, call.tiles.pair
    bias = pair.by_query
    strips = _strips(problem.lq, problem.lk, tiles)
    blocks_q, blocks_k = -(-problem.lq // tiles.block_q), -(-problem.lk // tiles.block_k)
    whole = problem.b * problem.h * strips[0][0].blocks * strips[0][1].blocks
    most = _MOST_SPLITS_OF_SHORT if max(problem.lq, problem.lk) <= SHORT else _MOST_SPLITS
    splits = shares(whole, problem.n, programs_at_once(call.device, tiles.num_warps, tiles.max_registers), most)
    # An axis of size 1 holds one partial sum a tile.
    size_q = round_up(blocks_q * tiles.block_q if pair.full_q else blocks_q, PAD)
    size_k = round_up(blocks_k * tiles.block_k if pair.full_k else blocks_k, PAD)
    partial = contiguous((problem.b, splits, problem.h, size_q, size_k), torch.float32)
    few = problem.n < _ROWS_WORTH_SPANS
    spans = None if call.rows is None or few else plan_row_spans(call.rows, problem.b, problem.n, tiles.block_k)
    of_bias, of_partial = layout_for(bias), layout_for(contiguous(partial.shape[1:], torch.float32))

    row = (problem.lq + problem.lk) * (problem.d + problem.c) * problem.dtype.itemsize
    rows = rows_of_a_turn(-(-problem.n // splits), row, splits, cache_bytes(call.device))

    def plan(q: _Strip, k: _Strip, turn: int, *, distant_only: bool) -> Launch:
        tile = call.tile(tiles, of_bias, of_partial)
        return pair_gradient_kernel.plan(
            problem.b * problem.h * q.blocks * k.blocks * splits,
            **call.views(),
            stats=call.stats_view(),
            row=call.row_view(),
            spans=Spans(None, *((0, 0) if spans is None else spans[0].stride[:2])),
            pair=PairView(None, *of_bias.strides),
            partial=Partial(None),
            sizes=Sizes(
                n=problem.n,
                h=problem.h,
                lq=problem.lq,
                lk=problem.lk,
                blocks_q=q.blocks,
                blocks_k=k.blocks,
                splits=splits,
                units_q=size_q // PAD,
                units_k=size_k // PAD,
                before_q=q.before,
                before_k=k.before,
                turn=turn,
                rows=rows,
                scale=call.scale,
            ),
            T=tile._replace(BLOCK_Q=q.block, BLOCK_K=k.block, EVEN_Q=q.even, EVEN_K=k.even),
            V=Variant(
                TILE_Q=tiles.block_q,
                TILE_K=tiles.block_k,
                GOES_ON=turn > 0,
                HAS_SPANS=spans is not None,
                GRAIN_PAIR=of_bias.grain,
                MASK_PAIR=pair.masked(bias, tiles),
                FULL_Q=pair.full_q,
                FULL_K=pair.full_k,
                DISTANT_ONLY=distant_only,
            ),
            **call.options(tiles) | {"num_warps": _strip_warps(problem, tiles, q, k)},
        )

    used = (*partial.shape[:3], problem.lq if pair.full_q else blocks_q, problem.lk if pair.full_k else blocks_k)
    turns = range(-(-problem.n // (splits * rows)))
    parts = [(q, k, turn) for turn in turns for q, k in strips]
    launches = tuple(plan(*part, distant_only=again) for again in (False, True) for part in parts)
    total = plan_total(partial, used, contiguous(given.shape, given.dtype))
    return InOrder(call.device, partial, used, spans, launches, total)


def rows_of_a_turn(share: int, row: int, splits: int, cache: int) -> int:
    """Rows of each of `splits` shares that go together, of `share`: all, unless few rows of so many bytes fill the cache.

    Programs that work on one head read the same rows at about the same time, and so from the cache; the more rows there are,
    the further they drift apart.
    """
    fit = cache // row
    return share if fit >= _ROWS_TO_DRIFT else min(share, max(_LEAST_ROWS, fit // (2 * splits)))


class _Strip(NamedTuple):
    """Tiles of one size along an axis.

    Args:
        before: tiles of the whole size before them.
        blocks: how many.
        block: their size.
        even: whether they are full.
    """

    before: int
    blocks: int
    block: int
    even: bool

    @classmethod
    def all(cls, length: int, block: int) -> _Strip:
        """All of an axis in tiles of one size."""
        return cls(0, -(-length // block), block, length % block == 0)

    @classmethod
    def parted(cls, length: int, block: int) -> tuple[_Strip, _Strip | None]:
        """The whole tiles of an axis, and a smaller one for what is left over, if that is half a tile or less."""
        blocks, left = divmod(length, block)
        small = max(_SMALLEST, 1 << (left - 1).bit_length()) if left else block
        if small >= block or not blocks:
            return cls.all(length, block), None
        return cls(0, blocks, block, True), cls(blocks, 1, small, left == small)


def _strips(lq: int, lk: int, tiles: Tiles) -> list[tuple[_Strip, _Strip]]:
    """What is launched, queries and keys: whole tiles first, then queries that are left over, then all of the keys that are.

    At `tri397`, where 13 are left over, tiles of 64 alone count 27% too many scores. Smaller tiles, those of float32, are not
    split: with 128 channels, 16 by 16 would spill 3,456 bytes.
    """
    all_q = _Strip.all(lq, tiles.block_q)
    if min(tiles.block_q, tiles.block_k) < _WORTH_A_STRIP:
        return [(all_q, _Strip.all(lk, tiles.block_k))]
    (whole_q, left_q), (whole_k, left_k) = _Strip.parted(lq, tiles.block_q), _Strip.parted(lk, tiles.block_k)
    parts = ((whole_q, whole_k), (left_q, whole_k), (all_q, left_k))
    return [(q, k) for q, k in parts if q is not None and k is not None]


def _strip_warps(problem: Problem, tiles: Tiles, q: _Strip, k: _Strip) -> int:
    """Warps of a strip: those of whole tiles, or as many as its smaller tiles can hold."""
    return min(tiles.num_warps, most_warps("pair", q.block, k.block, problem.dtype, problem.capability))


def shares(programs: int, n: int, at_once: int, most: int = _MOST_SPLITS) -> int:
    """Shares of the rows n, `most` at most: with as many programs each, all alike, fewest processors are idle at the end.

    A kernel of w programs of which m run at a time takes ceil(w / m) turns, each for a share of the rows. At `tri397`, 196
    programs and 396 at a time, three shares took 940 us and two 862, the whole backward, all tiles being whole; at `tri256`,
    64 programs, four 241 and six 218.
    """
    turns = {each: math.ceil(programs * each / at_once) / each for each in range(1, min(n, most) + 1)}
    return next(each for each, needed in turns.items() if needed <= _WORTH_A_SHARE * min(turns.values()))
