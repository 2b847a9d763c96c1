"""The pair-bias gradient in a fixed order: its launches, each for a share of the rows n, and memory for their sums."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.backends.triton.backward_call import BackwardCall, round_up
from evoattn.backends.triton.kernels.backward import PAD
from evoattn.backends.triton.kernels.pair_gradient import Grid, Variant, pair_gradient_kernel, total_kernel
from evoattn.backends.triton.key_bias_plan import RowSpans, plan_row_spans
from evoattn.backends.triton.tiles.limits import Tiles, most_warps
from evoattn.core.problem import Problem
from evoattn.core.sizes import SHORT
from evoattn.kit.arguments import RowView, pair_view
from evoattn.kit.cards import cache_bytes, programs_at_once
from evoattn.kit.launch import Launch
from evoattn.kit.strides import Strided, contiguous, empty, grain, split

_MOST_SPLITS = 8
"""Shares of the rows n, each with a float32 pair-bias gradient of its own: what they cost in memory stays small."""

_MOST_SPLITS_OF_SHORT = 16
"""Likewise for lengths up to SHORT, whose tiles are few."""

_LARGE_TILE = 64
"""Queries and keys from which what is left over goes to smaller tiles."""

_ROWS_TO_DRIFT = 192
"""If fewer rows of a head fill the cache, programs that go through all of them read from memory what others have read."""

ROWS_WORTH_SPANS = 128
"""Rows from which a kernel that finds the live ones first costs less than the others do."""

_LEAST_ROWS_OF_A_TURN = 32
"""Rows of a turn: each turn reads and writes the sums once more."""

_LEAST_SPEEDUP = 1.05
"""More shares must make the pair-gradient kernel this much faster."""

_SHARES_AT_ONCE = (1, 8, 16)
_TOTAL_TILE_Q = 16
_TOTAL_TILE_K = 64

MOST_TILES_IN_SERIES = 64
"""Tiles that one program adds up, each of all splits: torch, which adds in parallel, does it for more."""


@dataclasses.dataclass(frozen=True)
class InOrder:
    """The pair-bias gradient, float32, each sum in a fixed order.

    Args:
        device: of all memory.
        partial: [b, splits, h, q, k], a share of the sums each; an axis of the bias that is 1 counts tiles instead.
        used: the part of it that holds something.
        spans: the rows n that are live, if there is a key bias and so many rows that it pays to find them.
        launches: the kernel, for each turn of rows once a strip of tiles, full ones first; then all again with DISTANT_ONLY.
        total: the launch of (shares, result) that adds up the shares; None if torch does.
    """

    device: torch.device
    partial: Strided
    used: tuple[int, ...]
    spans: RowSpans | None
    launches: tuple[Launch, ...]
    total: Launch | None

    def allocate(self) -> tuple[Tensor | None, Tensor]:
        """Memory for the spans and the shares."""
        return None if self.spans is None else empty(self.spans.tensor, self.device), empty(self.partial, self.device)

    def finish(self, partial: Tensor, result: Tensor) -> Tensor:
        """The gradient, [b|1,h|1,q|1,k|1], from the shares."""
        if self.total is not None:
            return result
        sizes = (result.shape[0], 1, *result.shape[1:])
        used = partial.as_strided(self.used, self.partial.stride)
        return result.copy_(used.sum([axis for axis, size in enumerate(sizes) if size == 1], keepdim=True)[:, 0])


def plan_in_order(call: BackwardCall, bias: Strided, by_query: Strided | None, *, masked: bool) -> InOrder:
    """Plan the gradient of the caller's bias. The kernels load `by_query`, which may be a copy, with a mask if `masked`."""
    problem, tiles = call.problem, call.tiles.pair
    full_q, full_k = bias.shape[2] == problem.lq, bias.shape[3] == problem.lk
    parts = strips(problem.lq, problem.lk, tiles)
    blocks_q, blocks_k = -(-problem.lq // tiles.block_q), -(-problem.lk // tiles.block_k)
    most = _MOST_SPLITS_OF_SHORT if max(problem.lq, problem.lk) <= SHORT else _MOST_SPLITS
    at_once = programs_at_once(call.device, tiles.num_warps, tiles.max_registers)
    full_tiles = parts[0][0].blocks * parts[0][1].blocks
    splits = shares(problem.b * problem.h * full_tiles, problem.n, at_once, most)
    # An axis of size 1 holds one partial sum a tile.
    size_q = round_up(blocks_q * tiles.block_q if full_q else blocks_q, PAD)
    size_k = round_up(blocks_k * tiles.block_k if full_k else blocks_k, PAD)
    partial = contiguous((problem.b, splits, problem.h, size_q, size_k), torch.float32)
    spans = None
    if call.key_bias is not None and problem.n >= ROWS_WORTH_SPANS:
        spans = plan_row_spans(call.key_bias, problem.b, problem.n, tiles.block_k)
    row_bytes = (problem.lq + problem.lk) * (problem.d + problem.c) * problem.dtype.itemsize
    rows = rows_of_a_turn(-(-problem.n // splits), row_bytes, splits, cache_bytes(call.device))
    common = call.arguments(tiles, by_query, partial)

    def plan(q: Strip, k: Strip, turn: int, *, distant_only: bool) -> Launch:
        tile = common["T"]._replace(BLOCK_Q=q.block, BLOCK_K=k.block, EVEN_Q=q.even, EVEN_K=k.even)
        strip = {"T": tile, "num_warps": strip_warps(problem, tiles, q, k)}
        return pair_gradient_kernel.plan(
            problem.b * problem.h * q.blocks * k.blocks * splits,
            **{**common, **strip},
            spans=RowView(None, *((0, 0) if spans is None else spans.tensor.stride[:2])),
            pair=pair_view(by_query, grain(by_query)),
            grid=Grid(
                blocks_q=q.blocks,
                blocks_k=k.blocks,
                splits=splits,
                units_q=size_q // PAD,
                units_k=size_k // PAD,
                before_q=q.before,
                before_k=k.before,
                turn=turn,
                rows=rows,
            ),
            V=Variant(
                TILE_Q=tiles.block_q,
                TILE_K=tiles.block_k,
                GOES_ON=turn > 0,
                HAS_SPANS=spans is not None,
                GRAIN_PAIR=grain(by_query),
                MASK_PAIR=masked,
                FULL_Q=full_q,
                FULL_K=full_k,
                DISTANT_ONLY=distant_only,
            ),
        )

    used = (*partial.shape[:3], problem.lq if full_q else blocks_q, problem.lk if full_k else blocks_k)
    steps = [(q, k, turn) for turn in range(-(-problem.n // (splits * rows))) for q, k in parts]
    launches = tuple(plan(*step, distant_only=again) for again in (False, True) for step in steps)
    total = plan_total(partial, used, contiguous(bias.shape, bias.dtype))
    return InOrder(call.device, partial, used, spans, launches, total)


def plan_total(shares: Strided, used: tuple[int, ...], result: Strided) -> Launch | None:
    """The launch of (shares, result) that adds up shares [b,splits,h,q,k] to the contiguous gradient [b|1,h|1,q|1,k|1].

    None if a bias that broadcasts has so many that a program would take long.

    used: the part of the shares that holds something; along axes of the result of size 1 all of it is added up.
    """
    b, heads, size_q, size_k = result.shape
    each = [size if axis == 1 else 1 for size, axis in zip((used[0], *used[2:]), result.shape, strict=True)]
    if math.prod(each) > MOST_TILES_IN_SERIES:
        return None
    blocks_q, blocks_k = math.ceil(size_q / _TOTAL_TILE_Q), math.ceil(size_k / _TOTAL_TILE_K)
    return total_kernel.plan(
        blocks_q * blocks_k * heads * b,
        **dict(zip(("stride_b", "stride_split", "stride_h", "stride_q"), shares.stride, strict=False)),
        splits=used[1],
        **dict(zip(("each_b", "each_h", "each_q", "each_k"), each, strict=True)),
        heads=heads,
        size_q=size_q,
        size_k=size_k,
        blocks_q=blocks_q,
        blocks_k=blocks_k,
        BLOCK_Q=_TOTAL_TILE_Q,
        BLOCK_K=_TOTAL_TILE_K,
        AT_ONCE=next(most for most in _SHARES_AT_ONCE if used[1] <= most),
        num_warps=4,
    )


def rows_of_a_turn(share: int, row_bytes: int, splits: int, cache: int) -> int:
    """Rows of each of `splits` shares in one turn, of `share`: all, unless few rows of so many bytes fill the cache.

    Programs that work on one head read the same rows at about the same time, and so from the cache; the more rows there are,
    the further they drift apart.
    """
    fit = cache // row_bytes
    return share if fit >= _ROWS_TO_DRIFT else min(share, max(_LEAST_ROWS_OF_A_TURN, fit // (2 * splits)))


class Strip(NamedTuple):
    """Tiles of one size along an axis: full tiles before them, how many, their size, and whether all of them are full."""

    before: int
    blocks: int
    block: int
    even: bool


def _cover(length: int, block: int) -> Strip:
    """All of an axis in tiles of one size."""
    return Strip(0, -(-length // block), block, length % block == 0)


def _cut(length: int, block: int) -> list[Strip]:
    """The full tiles of an axis, and a smaller one for what is left over, if that is half a tile or less."""
    return [_cover(size, tile)._replace(before=start // block) for start, size, tile in split(length, block)]


def strips(lq: int, lk: int, tiles: Tiles) -> list[tuple[Strip, Strip]]:
    """The launches, queries and keys: full tiles first, then queries that are left over, then keys that are.

    At `tri397`, where 13 are left over, tiles of 64 alone count 27% too many scores. Smaller tiles, those of float32, are not
    cut: with 128 channels, 16 by 16 would spill 3,456 bytes.
    """
    all_q = _cover(lq, tiles.block_q)
    if min(tiles.block_q, tiles.block_k) < _LARGE_TILE:
        return [(all_q, _cover(lk, tiles.block_k))]
    (full_q, *left_q), (full_k, *left_k) = _cut(lq, tiles.block_q), _cut(lk, tiles.block_k)
    return [(full_q, full_k), *((q, full_k) for q in left_q), *((all_q, k) for k in left_k)]


def strip_warps(problem: Problem, tiles: Tiles, q: Strip, k: Strip) -> int:
    """Warps of a strip: those of full tiles, or as many as its smaller tiles can hold."""
    return min(tiles.num_warps, most_warps("pair", q.block, k.block, problem.dtype, problem.capability))


def shares(programs: int, n: int, at_once: int, most: int = _MOST_SPLITS) -> int:
    """Shares of the rows n, `most` at most: with as many programs each, all alike, fewest processors are idle at the end.

    A kernel of w programs of which m run at a time takes ceil(w / m) turns, each for a share of the rows. At `tri397`, 196
    programs and 396 at a time, three shares took 940 us and two 862, the whole backward, all tiles being full; at `tri256`,
    64 programs, four 241 and six 218.
    """
    turns = {each: math.ceil(programs * each / at_once) / each for each in range(1, min(n, most) + 1)}
    return next(each for each, needed in turns.items() if needed <= _LEAST_SPEEDUP * min(turns.values()))
