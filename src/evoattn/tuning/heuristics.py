"""Which tiles the Triton forward uses: pure functions of a Problem, the user's Config and the card's shared memory."""

from __future__ import annotations

import dataclasses

import torch

from evoattn.problem import Problem
from evoattn.tuning import user
from evoattn.tuning.config import Config

__all__ = ["ForwardTiles", "forward_registers", "forward_shared_bytes", "forward_tiles", "least_warps"]

_FULL_CARD = 256
"""Programs below which halving the query tile beats its lower reuse: fewer than two for each of an H200's 132 processors."""

_MIN_TILE = 16


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """A resolved configuration of the forward kernel; every field is set."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def warps(self, block_q: int, least: int = 1) -> int:
        """Warps for a tile of block_q rows, which is smaller than self.block_q where a few queries are left over."""
        if block_q >= self.block_q:
            return self.num_warps
        return min(self.num_warps, max(least, block_q // _MIN_TILE))


def _tiles(block_q: int, block_k: int, num_warps: int, num_stages: int) -> ForwardTiles:
    return ForwardTiles(block_q, block_k, num_warps, num_stages)


_HOPPER, _BLACKWELL, _OTHER = range(3)

_HALF_TILES: tuple[tuple[int, tuple[ForwardTiles, ForwardTiles, ForwardTiles]], ...] = (
    # 127 registers on Hopper, so that four programs fit on a processor; mma.sync keeps more alive, and takes 64 x 64
    (32, (_tiles(128, 32, 4, 3), _tiles(128, 32, 4, 3), _tiles(64, 64, 4, 3))),
    # H200, D = 48 and 64: N = L = 384 0.274 and 0.258 ms, 64 x 64 0.284 and 0.260; `diffusion768` 0.462, 0.488; N = L = 397,
    # D = 64, 0.363, 0.453; without a pair bias, N = 256, L = 512, D = 64, 0.229, 0.254. It spills 48 bytes at most.
    (64, (_tiles(128, 64, 4, 3), _tiles(64, 64, 4, 3), _tiles(64, 64, 4, 3))),
    # H200, N = 64, L = 512, D = 128: 0.151 ms, 128 x 64 with 8 warps 0.165 ms
    (128, (_tiles(64, 32, 4, 3), _tiles(64, 32, 4, 3), _tiles(64, 32, 4, 3))),
    # H200, the same with D = 256: 0.221 ms, 64 x 32 with 4 warps 0.259 ms; elsewhere what does not spill
    (256, (_tiles(128, 64, 8, 2), _tiles(32, 32, 4, 2), _tiles(64, 32, 8, 2))),
)
"""16-bit inputs, for Hopper, Blackwell (capability 10) and all others: the first line whose number holds the channels."""

_HOPPER_WITHOUT_PAIR = _tiles(64, 64, 4, 3)
"""MSA column attention, H200, N = 384, L = 512, D = 32: 0.523 ms; 128 x 32 0.587 ms."""

_FLOAT_TILES: tuple[tuple[int, tuple[ForwardTiles, ForwardTiles, ForwardTiles]], ...] = (
    # H200, N = L = 384: 0.769 ms, with two stages 0.814, 64 x 32 0.962; four templates of 16 channels 2.166, 2.333 and 2.198
    (32, (_tiles(128, 32, 4, 3), _tiles(64, 32, 4, 2), _tiles(64, 32, 4, 2))),
    (64, (_tiles(64, 32, 4, 2), _tiles(64, 32, 8, 2), _tiles(32, 32, 4, 2))),
    (128, (_tiles(64, 32, 8, 2), _tiles(64, 32, 8, 2), _tiles(32, 32, 8, 2))),
    (256, (_tiles(32, 32, 8, 1), _tiles(32, 32, 8, 1), _tiles(32, 32, 8, 1))),
)
"""float32 inputs, likewise; chosen so that nothing spills, but on Hopper for 88 bytes where the last key tile is ragged, and
what a limit of registers costs (`forward_registers`)."""


def forward_tiles(problem: Problem, config: Config, shared_limit: int) -> ForwardTiles:
    """The tiles that the forward would run: the table's, fitted to the sizes and to shared memory, under what `config` sets.

    Args:
        problem: the call.
        config: what the user set; a field given there is kept as it is.
        shared_limit: bytes of shared memory that one program may use.
    """
    config = user.preferred("triton", "forward", problem, config)
    table = _FLOAT_TILES if problem.dtype == torch.float32 else _HALF_TILES
    channels = _power_of_two(max(problem.d, problem.c))
    family = {9: _HOPPER, 10: _BLACKWELL}.get(problem.capability[0], _OTHER) if problem.capability else _OTHER
    tiles = next(families[family] for most, families in table if channels <= most)
    if family == _HOPPER and problem.pair_bias is None and table is _HALF_TILES and channels <= 32:
        tiles = _HOPPER_WITHOUT_PAIR
    block_q, block_k = tiles.block_q, tiles.block_k
    if problem.b * problem.n * problem.h * -(-problem.lq // block_q) < _FULL_CARD and block_q > 64:
        block_q = 64
    block_q = min(block_q, _power_of_two(problem.lq))
    block_k = min(block_k, _power_of_two(problem.lk))
    tiles = dataclasses.replace(tiles, block_q=block_q, block_k=block_k, num_warps=tiles.warps(block_q))
    given = {name: value for name, value in config.given().items() if name != "score_bytes"}
    tiles = dataclasses.replace(tiles, **given)
    while forward_shared_bytes(problem, tiles) > shared_limit:
        smaller = _smaller(tiles, given)
        if smaller is None:
            break
        tiles = smaller
    return tiles


def least_warps(dtype: torch.dtype) -> int:
    """Warps at least for a tile of queries that are left over.

    With 16 bits two: 0.222 ms and not 0.265 at N = 128, L = 397, D = 128, where one spills; 0.238 and not 0.242 at `tri397`. In
    float32 one: 0.957 ms there, 0.984 with two.
    """
    return 1 if dtype == torch.float32 else 2


def forward_registers(problem: Problem, tiles: ForwardTiles, *, maps: bool) -> int | None:
    """The most registers a thread may have, or None to leave that to the compiler.

    The code for a ragged last key tile costs Hopper's main tile 26 registers in Triton 3.6, and with them the fourth program on
    a processor: 0.277 ms instead of 0.254 at N = L = 397. With 128 two registers are spilled, outside the loop.
    Without a pair bias compilers take 92 to 101 for the same code; 96 keep five programs on a processor and spill nothing.
    In float32 16 channels take 202; with 168 three programs fit, not two, and 40 bytes spill: 2.01 ms instead of 2.14 for four
    templates. A ragged last key tile would spill 200, a pair bias that does not come through a tensor map (`maps`) 368, and 32
    channels 160, which costs more than it gains.
    """
    if problem.capability is None or problem.capability[0] != 9:
        return None
    if problem.dtype == torch.float32:
        few = max(problem.d, problem.c) <= 16 and maps and problem.lk % tiles.block_k == 0
        return 168 if few and tiles == _FLOAT_TILES[0][1][_HOPPER] else None
    if tiles == _HALF_TILES[0][1][_HOPPER]:
        return 128 if problem.lk % tiles.block_k else None
    crowded = tiles == _HOPPER_WITHOUT_PAIR and problem.pair_bias is None and _power_of_two(max(problem.d, problem.c)) == 32
    return 96 if crowded else None


def forward_shared_bytes(problem: Problem, tiles: ForwardTiles) -> int:
    """Shared memory of one forward program: `num_stages` tiles of keys, values, pair bias and row bias, and the queries."""
    element = problem.dtype.itemsize
    channels = _power_of_two(problem.d) + _power_of_two(problem.c)
    pair = 0 if problem.pair_bias is None else tiles.block_q * tiles.block_k * problem.pair_bias.itemsize
    row = 4 * tiles.block_k if problem.mask or problem.mask_bias is not None else 0
    stage = tiles.block_k * channels * element + pair + row
    return tiles.num_stages * stage + tiles.block_q * _power_of_two(problem.d) * element


def _smaller(tiles: ForwardTiles, given: dict[str, int]) -> ForwardTiles | None:
    """The next smaller tiles: fewer stages, then fewer keys, then fewer queries; never what the user set."""
    if tiles.num_stages > 1 and "num_stages" not in given:
        return dataclasses.replace(tiles, num_stages=tiles.num_stages - 1)
    for name in ("block_k", "block_q"):
        size = getattr(tiles, name)
        if size > _MIN_TILE and name not in given:
            return dataclasses.replace(tiles, **{name: size // 2})
    return None


def _power_of_two(size: int) -> int:
    return max(_MIN_TILE, 1 << (max(size, 1) - 1).bit_length())
