"""Block sizes of the tiled backend: arithmetic on the sizes of a problem."""

from __future__ import annotations

import dataclasses

from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.problem import Problem

_CPU_SCORE_BYTES = 4 << 20
"""Scores of one block stay in the second-level cache: on two cores, 2 to 4 MiB is the flat bottom, 8 MiB costs 5 to 10%."""

_DEVICE_SCORE_BYTES = 64 << 20
"""A GPU needs more work in flight for each launch."""

_LEAST_QUERIES = 64
"""Fewer query rows than this starve the matrix product; keys are cut before queries go below it."""


LEAST_SHARED = 1 << 22
"""Of fewer scores than this, threads that start operations by themselves would wait for Python's lock most of the time."""

_PIECES = 4
"""Blocks for each thread, where several share them: with fewer, some would wait for the last."""

_LEAST_SCORES = 1 << 17
"""Heads that have as many scores in a block come one after another: their q, k and v need no copy then."""


@dataclasses.dataclass(frozen=True)
class TiledPlan:
    """Block sizes along each axis of `[b,n,h,q,k]`, the score budget that they came from, and how many threads share them."""

    b: int
    n: int
    h: int
    q: int
    k: int
    score_bytes: int
    threads: int = 1

    @property
    def config(self) -> Config:
        """The plan as users see it."""
        return Config(block_q=self.q, block_k=self.k, score_bytes=self.score_bytes)


def tiled_plan(problem: Problem, config: Config, threads: int = 1) -> TiledPlan:
    """Whole rows while they fit the budget, several at a time if they are short; then heads, queries and last keys are cut.

    Where queries are few, a block's keys and values, which are copied as the scores are made, are larger than its scores.
    Threads that share the blocks have a budget each, and there are some blocks for each of them if rows are short enough.
    """
    config = tuned_tiles.preferred("tiled", "both", problem, config)
    default = _CPU_SCORE_BYTES if problem.device == "cpu" else _DEVICE_SCORE_BYTES
    score_bytes = config.score_bytes or default
    itemsize = 8 if problem.dtype.itemsize == 8 else 4
    room = max(1, score_bytes // itemsize)
    k = _size(config.block_k, problem.lk, room // min(_LEAST_QUERIES, max(1, problem.lq)))
    q = _size(config.block_q, problem.lq, room // k)
    threads = threads if problem.scores >= LEAST_SHARED else 1
    if threads > 1:
        room = min(room, problem.scores // (_PIECES * threads))
    room //= k * max(q, problem.d + problem.c)
    n, h, b = _size(None, problem.n, room), 1, 1
    if n == problem.n:
        room = min(room, _LEAST_SCORES // (k * q))
        h = _size(None, problem.h, room // n)
        b = _size(None, problem.b, room // (h * n)) if h == problem.h else 1
    return TiledPlan(b=b, n=n, h=h, q=q, k=k, score_bytes=score_bytes, threads=threads)


def _size(asked: int | None, length: int, room: int) -> int:
    return max(1, min(length, asked or room))
