"""The tiles of the backward: pure functions of a Problem, the user's Config and the card's shared memory."""

from __future__ import annotations

import dataclasses

import torch

from evoattn.backends.triton.tiles import limits
from evoattn.backends.triton.tiles.limits import Tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Problem
from evoattn.core.sizes import MIN_TILE, SHORT, power_of_two

_WARPGROUP_ROWS = 64
_WARPS_OF_A_GROUP = 4
_PADDING_WORTH_SMALL_TILES = 0.08
"""Share of padded queries from which two tiles of 64 beat one of 128, which is 5% faster when it is full."""

_FEW_KEYS_IN_ALL_ROWS = 1 << 17
"""Keys in all rows and heads below which one-warp programs leave an H200 idle: .065 ms instead of .027 at 16 heads of 768."""


_FULL_CARD_PROGRAMS = 264
"""Grid size at which each SM of an H200 holds two dQ programs of one row each."""

_PROGRAMS_WORTH_TWO_ROWS = 528
"""Programs of one row from which two rows share a tile of bias. The whole backward of a triangle of 50 takes .0146 ms with one
row a program and .0163 with two, that of a triangle of 100 .0352 and .0328."""


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the three kernels: dQ, dK with dV, and the pair-bias gradient in a fixed order."""

    dq: Tiles
    dkdv: Tiles
    pair: Tiles


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of a table.

    Args:
        most: channels that it serves.
        dq, dq_only, dq_few: with and without the pair-bias gradient, and with few programs; None if they are the same.
        dkdv, dkdv_ragged, dkdv_few: with many programs on each processor; the same if the last tile of queries is not full,
            or channels are not a power of two; with few programs. None likewise.
        dkdv_pair: with more than few programs, a pair bias, and channels that are a power of two; goes before dkdv_ragged.
        few_warps: whether dQ takes one warp for each 16 of less than 64 queries.
        pair, pair_short: the pair-bias gradient in a fixed order, and of short lengths; None likewise.
    """

    most: int
    dq: Tiles
    dkdv: Tiles
    pair: Tiles
    dq_only: Tiles | None = None
    dq_few: Tiles | None = None
    dkdv_ragged: Tiles | None = None
    dkdv_pair: Tiles | None = None
    dkdv_few: Tiles | None = None
    few_warps: bool = False
    pair_short: Tiles | None = None


HOPPER: tuple[_Line, ...] = (
    _Line(
        most=16,
        # .973 ms with the statistics at `template384`, 1.293 at `extra_msa_row`; with 168 registers 1.009 and 1.334.
        dq=Tiles(64, 32, 4, 3, rows=2, max_registers=128),
        dq_only=Tiles(128, 32, 4, 3, max_registers=128),
        # The whole backward: 1.613 ms at `template384` and 2.16 at `extra_msa_row`; with (32, 32) 1.730 and 2.31.
        dkdv=Tiles(32, 64, 1, 3),
        dkdv_few=Tiles(128, 64, 4, 2),
        pair=Tiles(64, 64, 4, 3, max_registers=168),
    ),
    _Line(
        most=32,
        # .268 ms at tri384; .305 without the limit of registers (2 programs a processor, not 3), .34 with one row.
        dq=Tiles(64, 32, 4, 3, rows=2, max_registers=168),
        # .195 ms at tri384, .50 at the MSA column; 64 queries .211.
        dq_only=Tiles(128, 32, 4, 3, max_registers=128),
        # The whole backward of one row, 16 heads, D = 24: L = 384, 768 and 1,024 .023, .050, .071 ms; 32 keys .025, .054, .080.
        dq_few=Tiles(64, 128, 4, 3),
        # The whole backward of 16 and 32 sequences, N = 384, H 8: .017 and .031 ms, with 4 warps .026 and .047.
        few_warps=True,
        # Each warp has 32 keys and seldom waits for the other. The whole backward: .520 ms
        # at tri384, with one warp and (64, 32) .538; likewise 1.127 and 1.163 at tri512 (float16), 1.160 and 1.180 at the
        # MSA column, and the same at tri1024. Masked
        # channels or queries make both spill; 4 warps with wgmma are slower.
        dkdv=Tiles(64, 64, 2, 3),
        dkdv_ragged=Tiles(32, 32, 1, 3),
        dkdv_few=Tiles(128, 64, 4, 2),
        # .199 ms at tri384 in 4 splits; .214 without the limit.
        pair=Tiles(64, 64, 4, 3, max_registers=168),
        # The whole backward at triangles of 50, 100 and 128: .020, .044 and .051 ms, .023, .052 and .059 with (64, 64).
        pair_short=Tiles(32, 32, 1, 3),
    ),
    _Line(
        most=64,
        dq=Tiles(64, 32, 4, 3, rows=2),
        dq_only=Tiles(64, 32, 4, 3),
        # .678 ms at the diffusion shape; (32, 64) with 4 warps .683, and it spills.
        dkdv=Tiles(32, 128, 8, 3, max_registers=128),
        # The whole backward with 64 channels: .960 ms at 397, with (32, 128) 1.024; likewise .465 and .469 at 768 with 64
        # rows, and the same at 384. Without a pair bias 1.816 for 1.790, with 48 channels slower.
        dkdv_pair=Tiles(32, 64, 4, 3),
        dkdv_few=Tiles(32, 64, 4, 2),
        pair=Tiles(64, 64, 4, 3),
    ),
    _Line(
        most=128,
        # The whole backward at N = 96, L = 384, H 4, D = 128 takes .448 ms with two stages in both, .407 with three in dQ, and
        # .417 with three in dK and dV.
        dq=Tiles(64, 32, 4, 3),
        dkdv=Tiles(32, 64, 4, 3),
        pair=Tiles(64, 64, 8, 2),
    ),
    _Line(256, dq=Tiles(64, 32, 8, 1), dkdv=Tiles(32, 32, 8, 1), pair=Tiles(64, 64, 8, 1)),
)
"""16-bit inputs on compute capability 9.x, measured on an H200 (bfloat16)."""

HALF: tuple[_Line, ...] = (
    _Line(32, Tiles(64, 32, 4, 2, rows=2), Tiles(32, 64, 4, 2), Tiles(64, 64, 8, 2), dq_only=Tiles(64, 32, 4, 2)),
    _Line(128, Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 64, 8, 2)),
    _Line(256, Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(64, 64, 8, 1)),
)
"""16-bit inputs elsewhere: compiled, not measured. No limits of registers, and no dK, dV with one warp: there they spill."""

FLOAT: tuple[_Line, ...] = (
    # Three TF32 products a matmul: dQ 1.5 ms at tri384, where IEEE products take 4.7. Two rows take 1.3 and spill.
    _Line(32, Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 2)),
    _Line(64, Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    _Line(128, Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1)),
    _Line(256, Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
)
"""float32 inputs elsewhere: compiled, not measured. 65 to 128 channels spill up to 352 bytes in dK and dV, 416 in `pair`."""


FLOAT_HOPPER: tuple[_Line, ...] = (
    # The whole backward at N = 384, D = 16: 1.86 ms; with the tiles of `FLOAT` 1.99.
    _Line(most=16, dq=FLOAT[0].dq, dkdv=Tiles(32, 128, 8, 1), pair=FLOAT[0].pair),
    # dQ alone 2.85 ms at tri384, 3.14; dK and dV alone 3.07. Without a pair bias, N = 128, H 8, L = 512: 2.86 and 2.86, 2.97
    _Line(most=32, dq=Tiles(128, 32, 8, 2, max_registers=128), dkdv=Tiles(32, 64, 4, 3), pair=FLOAT[0].pair),
    # N = 128, L = 384, D = 64: dQ alone 1.77 ms, dK and dV alone 1.91, 2.09
    _Line(most=64, dq=Tiles(128, 64, 8, 1), dkdv=Tiles(32, 128, 8, 1), pair=FLOAT[1].pair),
    # N = 24, L = 384, D = 128: dQ alone 1.29 ms, (64, 32) 1.42, IEEE products 4.64; dK and dV alone 1.26, one stage 1.43,
    # (32, 64) 1.50, IEEE 4.84; in a fixed order 1.88, IEEE 6.59, (64, 64) with one stage 1.74, but for queries that are left
    # over that spills 5 KB.
    _Line(most=128, dq=Tiles(32, 32, 4, 2), dkdv=Tiles(32, 32, 4, 2), pair=Tiles(16, 32, 4, 2)),
    FLOAT[3],
)
"""float32 inputs on compute capability 9.x, measured on an H200."""


def _table(problem: Problem) -> tuple[_Line, ...]:
    major = 0 if problem.capability is None else problem.capability[0]
    if problem.dtype == torch.float32:
        return FLOAT_HOPPER if major == 9 else FLOAT
    return HOPPER if major == 9 else HALF


def backward_tiles(problem: Problem, config: Config, shared_limit: int) -> BackwardTiles:
    """Choose the tiles of the backward: those of the table, fitted to the sizes and to shared memory.

    Fields that `config` or `evoattn tune` sets hold for all three kernels. The results keep the rule of `tiles.limits`.
    """
    set_by_user, chosen = config.tiles(), tuned_tiles.preferred("triton", "backward", problem, config).tiles()
    channels = power_of_two(max(problem.d, problem.c))
    line = next(line for line in _table(problem) if channels <= line.most)
    heads = problem.b * problem.n * problem.h
    sums_pair = problem.pair_bias is not None and problem.needs.pair_bias and not problem.deterministic
    dq = line.dq if sums_pair else line.dq_only or line.dq
    blocks = -(-problem.lq // _WARPGROUP_ROWS)
    if heads * blocks < _FULL_CARD_PROGRAMS:
        dq = line.dq_few or dq
    if problem.n == 1 or heads * blocks < _PROGRAMS_WORTH_TWO_ROWS:
        dq = dataclasses.replace(dq, rows=1)
    saved = _padding(problem.lq, dq.block_q) - _padding(problem.lq, _WARPGROUP_ROWS)
    if dq.block_q > _WARPGROUP_ROWS and saved > _PADDING_WORTH_SMALL_TILES:
        limit = dq.max_registers if dq.num_warps == _WARPS_OF_A_GROUP else 0
        dq = dataclasses.replace(dq, block_q=_WARPGROUP_ROWS, num_warps=_WARPS_OF_A_GROUP, max_registers=limit)
    short = max(problem.lq, problem.lk) <= SHORT
    pair = (line.pair_short if short else None) or line.pair
    dkdv = line.dkdv
    if heads * problem.lk < _FEW_KEYS_IN_ALL_ROWS and problem.lq > SHORT:
        dkdv = line.dkdv_few or dkdv
    elif line.dkdv_pair and problem.pair_bias is not None and problem.d == problem.c == channels:
        dkdv = line.dkdv_pair
    elif problem.lq % dkdv.block_q or not problem.d == problem.c == channels:
        dkdv = line.dkdv_ragged or dkdv

    def fit(kernel: str, tile: Tiles) -> Tiles:
        tile = dataclasses.replace(
            tile,
            block_q=min(tile.block_q, power_of_two(problem.lq)),
            block_k=min(tile.block_k, power_of_two(problem.lk)),
        )
        if chosen:
            tile = dataclasses.replace(tile, max_registers=0, **chosen)
        tile = limits.shrink(tile, chosen, lambda tile: backward_shared_bytes(problem, tile) <= shared_limit)
        changed = limits.fit(kernel, tile, set_by_user, problem.dtype, problem.capability)
        return dataclasses.replace(tile, max_registers=0, **changed) if changed else tile

    few_queries = power_of_two(problem.lq)
    if line.few_warps and few_queries < _WARPGROUP_ROWS and not chosen:
        dq = dataclasses.replace(dq, num_warps=min(dq.num_warps, few_queries // MIN_TILE))
    return BackwardTiles(dq=fit("dq", dq), dkdv=fit("dkdv", dkdv), pair=fit("pair", pair))


def backward_shared_bytes(problem: Problem, tiles: Tiles) -> int:
    """Shared memory of the hungriest of the three kernels with these tiles: staged inputs of every row, and what stays."""
    element = problem.dtype.itemsize
    channels = power_of_two(problem.d) + power_of_two(problem.c)
    area = tiles.block_q * tiles.block_k
    pair = 0 if problem.pair_bias is None else area * problem.pair_bias.itemsize
    streamed = max(tiles.block_q, tiles.block_k) * channels * element + 4 * (tiles.block_k + 2 * tiles.block_q)
    stays = max(tiles.block_q, tiles.block_k) * channels * element
    exchange = area * (4 if problem.pair_bias is not None else element)
    return tiles.num_stages * (tiles.rows * streamed + pair) + tiles.rows * stays + exchange


def _padding(length: int, block: int) -> float:
    """The queries past the end of the last block, as a share of `length`."""
    return -length % block / max(length, 1)
