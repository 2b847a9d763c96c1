"""Every tile to which the fitting rules can shrink a line of a table, with the smallest problem that launches it.

The real functions choose: this file only goes through sizes, channels, biases, numbers of rows and cards.

    for problem, tiles in reachable((9, 0), 232_448):
        ...  # `tiles` are the launches of `problem` that no smaller problem has
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch

from evoattn.backends.triton.forward_plan import tail as tail_of
from evoattn.backends.triton.pair_in_order import strip_warps, strips
from evoattn.backends.triton.tiles.backward import backward_tiles
from evoattn.backends.triton.tiles.few import few_tiles
from evoattn.backends.triton.tiles.forward import LEFT_OVER_WARPS, forward_tiles
from evoattn.backends.triton.tiles.limits import most_warps
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Needs, Problem
from evoattn.core.sizes import power_of_two
from evoattn.kit.strides import split

__all__ = ["CARDS", "Launched", "launches", "reachable"]

EDGES = (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 384, 512)
"""Lengths at which a tile becomes larger, or a line of a table gives way to another."""

CHANNELS = ((16, 16), (24, 24), (32, 32), (40, 8), (48, 48), (64, 64), (128, 128), (256, 256))
ROWS = ((1, 1), (3, 4), (70, 4), (1024, 8))
"""Rows n and heads: each program alone, and numbers of programs on either side of what fills a card."""

MOST_SCORES = 1 << 28
"""Larger problems are left out: smaller ones have the same tiles."""

CARDS: dict[str, tuple[tuple[int, int] | None, int]] = {
    "sm_80": ((8, 0), 166_912),
    "sm_86": ((8, 6), 101_376),
    "sm_90": ((9, 0), 232_448),
    "sm_100": ((10, 0), 232_448),
    "gfx942": (None, 65_536),
}
"""Compute capability and shared memory of a program: each table, and each limit under it."""


@dataclasses.dataclass(frozen=True)
class Launched:
    """What one launch of a kernel is compiled for.

    Args:
        kernel: as `tiles.limits` names it.
        block_q, block_k, num_warps, num_stages, rows: the tile.
        dtype: of q, k and v.
        block_d, block_c: channels, as powers of two.
        tail: keys of the forward's last tile.
    """

    kernel: str
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    rows: int
    dtype: torch.dtype
    block_d: int
    block_c: int
    tail: int = 0

    def keeps_rule(self, capability: tuple[int, int] | None) -> bool:
        """Whether the tile, and the forward's last one, hold so many warps."""
        keys = {self.block_k, self.tail or self.block_k}
        return all(self.num_warps <= most_warps(self.kernel, self.block_q, each, self.dtype, capability) for each in keys)


def launches(problem: Problem, shared_limit: int, config: Config | None = None) -> set[Launched]:
    """The launches of both passes of a problem, without those of few queries and keys."""
    config = config or Config()
    common = (problem.dtype, power_of_two(problem.d), power_of_two(problem.c))
    launched = set()
    if few_tiles("forward", problem, config) is None:
        tiles = forward_tiles(problem, config, shared_limit)
        for _, _, block_q in split(problem.lq, tiles.block_q):
            tail = tail_of(problem.lk, tiles) if block_q == tiles.block_q else tiles.block_k
            warps = tiles.warps(block_q, LEFT_OVER_WARPS)
            launched.add(Launched("forward", block_q, tiles.block_k, warps, tiles.num_stages, 1, *common, tail))
    if few_tiles("backward", problem, config) is None:
        backward = backward_tiles(problem, config, shared_limit)
        for kernel, tile in (("dq", backward.dq), ("dkdv", backward.dkdv)):
            launched.add(Launched(kernel, tile.block_q, tile.block_k, tile.num_warps, tile.num_stages, tile.rows, *common))
        if problem.pair_bias is not None and problem.deterministic:
            tile = backward.pair
            for q, k in strips(problem.lq, problem.lk, tile):
                warps = strip_warps(problem, tile, q, k)
                launched.add(Launched("pair", q.block, k.block, warps, tile.num_stages, 1, *common))
    return launched


def _problems(capability: tuple[int, int] | None) -> list[Problem]:
    """All problems to look at, the smallest first."""
    biases = ((False, False), (True, False), (True, True))
    every = itertools.product(EDGES, EDGES, CHANNELS, ROWS, biases, (torch.bfloat16, torch.float32))
    problems = [
        Problem(
            "cuda", capability, dtype, 1, n, h, lq, lk, d, c,
            pair_bias=dtype if pair else None, needs=Needs(True, True, True, pair_bias=pair), deterministic=fixed,
        )
        for lq, lk, (d, c), (n, h), (pair, fixed), dtype in every
        if n * h * lq * lk <= MOST_SCORES
    ]  # fmt: skip
    return sorted(problems, key=lambda problem: problem.scores * (problem.d + problem.c))


@functools.cache
def reachable(capability: tuple[int, int] | None, shared_limit: int) -> tuple[tuple[Problem, frozenset[Launched]], ...]:
    """Problems with the launches that no smaller problem has, by the built-in tables."""
    seen: set[Launched] = set()
    problems = []
    with tuned_tiles.ignored():
        for problem in _problems(capability):
            new = launches(problem, shared_limit) - seen
            if new:
                seen |= new
                problems.append((problem, frozenset(new)))
    return tuple(problems)
