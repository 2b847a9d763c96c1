"""The tiles of the forward: pure functions of a Problem, the user's Config and the card's shared memory."""

from __future__ import annotations

import dataclasses

import torch

from evoattn.backends.triton.tiles import limits
from evoattn.backends.triton.tiles.limits import Tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Problem
from evoattn.core.sizes import power_of_two

_FULL_CARD_PROGRAMS = 256
"""Programs below which halving the query tile beats its lower reuse: fewer than two for each of an H200's 132 processors."""

LEFT_OVER_WARPS = 2
"""Warps at least for a tile of queries that are left over. H200, ms, two warps and then one: `tri397` 0.238, 0.242; N = 128,
L 397, D = 128 0.222, 0.265; float32, D = 64 0.588, 0.627 (four 0.606), D = 32 0.303, 0.306 (0.314)."""


_Family = tuple[tuple[int, Tiles], ...]
"""The first line whose number holds the channels."""

HALF: _Family = (
    (64, Tiles(64, 64, 4, 3)),
    (128, Tiles(64, 32, 4, 3)),
    (256, Tiles(64, 32, 8, 2)),
)
"""16-bit inputs; mma.sync keeps more registers alive than wgmma."""

HALF_BLACKWELL: _Family = ((32, Tiles(128, 32, 4, 3)), *HALF[:2], (256, Tiles(32, 32, 4, 2)))
"""16-bit inputs on compute capability 10: what does not spill."""

FLOAT: _Family = (
    (32, Tiles(64, 32, 4, 2)),
    (64, Tiles(32, 32, 4, 2)),
    (256, Tiles(32, 32, 8, 1)),
)
"""float32 inputs; chosen so that nothing spills, unless keys are left over: then with 65 to 128 channels some 900 bytes."""

FLOAT_BLACKWELL: _Family = (FLOAT[0], (64, Tiles(64, 32, 8, 2)), *FLOAT[2:])

_FEW_PROGRAMS = {"half": 40, "float32": 64}
"""Programs of 128 queries below which the smallest tile of queries is the fastest: its programs wait for memory, not for
others."""

_FEW_QUERIES = 64
_LONG_LENGTH = 384
_LONG_RAGGED_LENGTH = 512
"""Queries and keys from which tiles of 64 keys are faster, if all are full and if the last one is not."""


def _programs(problem: Problem, block_q: int) -> int:
    return problem.b * problem.n * problem.h * -(-problem.lq // block_q)


def _hopper_few(problem: Problem, channels: int) -> Tiles | None:
    """Tiles of few programs on Hopper: one structure in a denoiser. Times of an H200, ms, are of 16 heads and D = 48."""
    full, programs = problem.dtype == torch.float32, _programs(problem, 128)
    if problem.pair_bias is None or channels > 64:
        return None
    if full and channels <= 32 and problem.lq <= 64 and problem.lk <= 256:
        # Windows of 32 queries and 128 keys, 4 heads, D = 32: 38 windows 0.0074, 32 x 32 0.0088; 171 windows 0.0170, 0.0219
        return Tiles(16, 64, 2, 2) if _programs(problem, 32) < _FULL_CARD_PROGRAMS else Tiles(32, 16, 2, 2)
    if channels <= 32 or programs >= _FULL_CARD_PROGRAMS:
        return None
    if not full:
        # L = 152: 0.0060, 64 x 64 0.0085; but 304 0.0092, 0.0075
        return Tiles(16, 32, 1, 2) if programs < _FEW_PROGRAMS["half"] else None
    if programs < _FEW_PROGRAMS["float32"]:
        # L = 100: 0.0109, 64 x 32 0.0134; 152 0.0134, 0.0192; 304 0.0258, 0.0288
        return Tiles(16, 32, 2, 3)
    # L = 684: 0.0742, 64 x 32 0.0823; 988 0.091, 0.133; five rows of 304 0.0704, 0.0779; of 152 0.0230, with 64 keys 0.0299
    return Tiles(128, 64 if problem.lk > 256 else 32, 8, 3)


def _hopper_half(problem: Problem, channels: int) -> Tiles:
    """16-bit inputs on Hopper, each with what it was measured against on an H200, ms.

    A limit of registers keeps one more program on a processor, and up to 64 bytes spill for it. The code for a ragged last tile
    costs the main loop registers too.
    """
    few_programs = _programs(problem, 128) < _FULL_CARD_PROGRAMS
    ragged = problem.lk % 64 != 0
    long = min(problem.lq, problem.lk) >= (_LONG_RAGGED_LENGTH if ragged else _LONG_LENGTH)
    if channels > 128:
        # N = 64, L = 512, D = 256: 0.221; 64 x 32 with 4 warps 0.259
        return Tiles(128, 64, 8, 2)
    if channels > 64:
        # N = 96, D = 128: L = 384 0.111, 64 x 32 with 4 warps 0.128; without a pair bias L = 512 0.156, 0.204
        return Tiles(128, 32, 8, 3, max_registers=128)
    if channels > 32:
        if problem.pair_bias is not None and long:
            # `diffusion768` 0.425, 4 warps 0.460; `wide384` 0.243, 0.258; N = 200, L = 765 0.450, 0.479; `wide397` 0.363, 0.349
            return Tiles(128, 64, 8, 3, max_registers=128)
        # N = L = 384, D = 48 and 64: 0.274 and 0.258, 64 x 64 0.284 and 0.260; without a pair bias L = 512 0.229, 0.254
        return Tiles(128, 64, 4, 3)
    if problem.pair_bias is None and problem.lq > _FEW_QUERIES:
        # `msa_column` 0.477, three stages 0.486, 64 x 64 0.530; 397 sequences 0.374, 0.372, 0.411; 128 sequences 0.053, 0.053,
        # 0.059. Of 64 x 64 five programs fit with 96 registers.
        return Tiles(64, 64, 4, 3, max_registers=96) if few_programs else Tiles(128, 64, 4, 4, max_registers=128)
    if problem.pair_bias is not None and few_programs:
        # 16 heads, D = 24, one row: L = 384 0.0080, 64 x 32 0.0102; 768 0.0182, 0.0206; 1,024 0.0241, 0.0267
        return Tiles(64, 128, 4, 3)
    if problem.pair_bias is not None and long:
        # `tri384` 0.175, 128 x 32 0.178; `tri512` 0.381, 0.396; `tri1024` 2.74, 2.89; `template384` 0.597, 0.641;
        # `extra_msa_row` 0.806, 0.862; 765 1.24, 1.27; 1,001 2.70, 2.78. The same at 256 and 448; slower at 320 (0.117, 0.114)
        # and 397 (0.239, 0.232)
        return Tiles(128, 64, 4, 3, max_registers=168)
    # 127 registers, so that four programs fit; 0.254 and not 0.277 at N = L = 397
    return Tiles(128, 32, 4, 3, max_registers=128)


def _hopper_float(problem: Problem, channels: int) -> Tiles:
    """float32 inputs on Hopper, likewise; `tests/backends/triton/test_forward_compile.py` holds what they spill."""
    if channels > 128:
        return Tiles(32, 32, 8, 1)
    if channels > 64:
        # N = 24, D = 128: L = 384 0.326, 64 x 64 with 4 warps 0.459; L = 397 0.384, 128 x 64 1.018; IEEE products 0.813, 7.855
        return Tiles(128, 32, 8, 2)
    if channels > 32:
        # N = 128, D = 64: L = 384 0.458, 64 x 32 with 4 warps 0.580, without a pair bias 0.432, 0.560; L = 397 0.712, 128 x 32
        # 0.623, 64 x 32 0.699
        return Tiles(128, 32, 4, 2) if problem.lk % 64 else Tiles(128, 64, 8, 2)
    # `template384` 2.01, without the limit 2.14: three programs fit, not two, and 40 bytes spill. A ragged last tile would
    # spill 200, 32 channels 160.
    limited = channels == 16 and problem.pair_bias is not None and problem.lk % 32 == 0
    # N = L = 384: 0.769, with two stages 0.814, 64 x 32 0.962; four templates of 16 channels 2.166, 2.333 and 2.198
    return Tiles(128, 32, 4, 3, max_registers=168 if limited else 0)


def _table(problem: Problem) -> Tiles:
    """The tiles for a problem's channels, dtype and card. Few programs have fewer queries each, so that there are more."""
    channels = power_of_two(max(problem.d, problem.c))
    major = problem.capability[0] if problem.capability else 0
    full = problem.dtype == torch.float32
    if major == 9:
        few = _hopper_few(problem, channels)
        if few is not None:
            return few
        tiles = (_hopper_float if full else _hopper_half)(problem, channels)
    else:
        family = (FLOAT_BLACKWELL if full else HALF_BLACKWELL) if major == 10 else (FLOAT if full else HALF)
        tiles = next(tiles for most, tiles in family if channels <= most)
    if tiles.block_q > 64 and _programs(problem, tiles.block_q) < _FULL_CARD_PROGRAMS:
        return dataclasses.replace(tiles, block_q=64, num_warps=tiles.warps(64), max_registers=0)
    return tiles


def forward_tiles(problem: Problem, config: Config, shared_limit: int) -> Tiles:
    """Choose the tiles of the forward: those of the table, made smaller for small sizes and to fit in shared memory.

    Fields that `config` or `evoattn tune` sets override the table. The result keeps the rule of `tiles.limits`.
    """
    set_by_user, config = config.tiles(), tuned_tiles.preferred("triton", "forward", problem, config)
    table = _table(problem)
    block_q, block_k = min(table.block_q, power_of_two(problem.lq)), min(table.block_k, power_of_two(problem.lk))
    tiles = dataclasses.replace(table, block_q=block_q, block_k=block_k, num_warps=table.warps(block_q))
    chosen = config.tiles()
    tiles = dataclasses.replace(tiles, **chosen)
    tiles = limits.shrink(tiles, chosen, lambda tiles: forward_shared_bytes(problem, tiles) <= shared_limit)
    tiles = dataclasses.replace(tiles, **limits.fit("forward", tiles, set_by_user, problem.dtype, problem.capability))
    return tiles if tiles == table else dataclasses.replace(tiles, max_registers=0)


def forward_shared_bytes(problem: Problem, tiles: Tiles) -> int:
    """Shared memory of one forward program: `num_stages` tiles of keys, values, pair bias and key bias, and the queries."""
    element = problem.dtype.itemsize
    channels = power_of_two(problem.d) + power_of_two(problem.c)
    pair = 0 if problem.pair_bias is None else tiles.block_q * tiles.block_k * problem.pair_bias.itemsize
    key_bias = 4 * tiles.block_k if problem.mask or problem.mask_bias is not None else 0
    stage = tiles.block_k * channels * element + pair + key_bias
    return tiles.num_stages * stage + tiles.block_q * power_of_two(problem.d) * element
