"""Problems with so few queries and keys that they need no tiles of scores, and the programs for them."""

from __future__ import annotations

import dataclasses

from evoattn.core.config import Config
from evoattn.core.problem import Problem
from evoattn.core.sizes import power_of_two

_MOST_SCORES = {"forward": 64, "backward": 128}
"""Scores of a row (b, n, h) of several queries. H200, bfloat16, 32,768 rows of 32 channels, queries x keys, us, then in tiles:
forward 8 x 8 42, 58; 4 x 16 45, 51; 8 x 16 73, 52; backward 8 x 8 75, 213; 8 x 16 132, 218; 16 x 16 231, 228."""

_MOST_QUERIES = 16
_MOST_KEYS = 64
"""Of several queries."""

_MOST_KEYS_OF_ONE = 256
"""Of one query. H200, bfloat16, 32,768 rows of 32 channels, forward 282 us, in tiles 381; backward 581, 1,414. Few keys go at
the rate of memory: 131,072 rows with 16 take 68 and 140 us."""

_MOST_KEY_BITS = 1 << 15
"""Of a row's keys, so that a warp has registers for them, the values, and the gradients of both."""

_MOST_KEY_BITS_OF_ONE = 1 << 17
"""Of one query's keys, for two warps: nothing is kept from query to query."""

_WARP_KEY_BITS = 1 << 16
"""Of one query's keys, for one warp."""

_PROGRAM_KEY_BITS = 1 << 14
"""Of the keys of all rows of a program: 1,024 elements of 16 bits, 32 a thread."""

_MORE_PROGRAM_KEY_BITS = 1 << 15
"""The same if it is faster: one query, forward (32 keys 133 us, not 150) and from 16 keys on backward (141, not 155), and
several with 16 keys, backward (8 x 16 132 us, not 217)."""

_LEAST_KEYS = 4
"""Keys that a program has room for at least: fewer are not worth a variant of their own."""


@dataclasses.dataclass(frozen=True)
class FewTiles:
    """The work of one program of the kernels for few queries and keys.

    Args:
        rows: rows (b, n, h) of a program, a power of two.
        block_k: the largest number of keys that fit, a power of two.
        num_warps: one, if one warp has enough registers, so that sums over a row need no other warp. Else two.
    """

    rows: int
    block_k: int
    num_warps: int


def few_tiles(direction: str, problem: Problem, config: Config) -> FewTiles | None:
    """Tiles for the kernels of few queries and keys; None for a problem that goes the usual way.

    Those kernels take no pair bias, and no gradient of the mask bias. Tiles that the user sets are those of the usual way.
    Results of `evoattn tune` do not count, since its table has one entry for all lengths up to 16.
    """
    one = problem.lq == 1
    several = problem.lq <= _MOST_QUERIES and problem.lk <= _MOST_KEYS and problem.lq * problem.lk <= _MOST_SCORES[direction]
    few = problem.lk <= _MOST_KEYS_OF_ONE if one else several
    if not few or problem.pair_bias is not None or (direction == "backward" and problem.needs.mask_bias):
        return None
    block_k = power_of_two(problem.lk, _LEAST_KEYS)
    of_row = block_k * power_of_two(max(problem.d, problem.c), 1)
    bits = of_row * problem.dtype.itemsize * 8
    if bits > (_MOST_KEY_BITS_OF_ONE if one else _MOST_KEY_BITS) or config.tiles():
        return None
    more = one if direction == "forward" else block_k == 16 or (one and block_k > 16)
    rows = max(1, (_MORE_PROGRAM_KEY_BITS if more else _PROGRAM_KEY_BITS) // bits)
    return FewTiles(rows, block_k, 1 if bits <= _WARP_KEY_BITS else 2)
