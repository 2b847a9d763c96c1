"""How the tiled backend cuts a problem: pure arithmetic on sizes."""

from __future__ import annotations

import dataclasses

from evoattn.problem import Problem
from evoattn.tuning import user
from evoattn.tuning.config import Config

__all__ = ["TiledPlan", "tiled_plan"]

_CPU_SCORE_BYTES = 4 << 20
"""Scores of one block stay in the second-level cache: on two cores, 2 to 4 MiB is the flat bottom, 8 MiB costs 5 to 10%."""

_DEVICE_SCORE_BYTES = 64 << 20
"""A GPU needs more work in flight for each launch."""

_LEAST_QUERIES = 64
"""Fewer query rows than this starve the matrix product; keys are cut before queries go below it."""


@dataclasses.dataclass(frozen=True)
class TiledPlan:
    """Block sizes along each axis of `[b,n,h,q,k]`, and the score budget that they came from."""

    b: int
    n: int
    h: int
    q: int
    k: int
    score_bytes: int

    @property
    def config(self) -> Config:
        """The plan as users see it."""
        return Config(block_q=self.q, block_k=self.k, score_bytes=self.score_bytes)


def tiled_plan(problem: Problem, config: Config) -> TiledPlan:
    """Whole rows while they fit the budget, several at a time if they are short; then heads, queries and last keys are cut.

    Where queries are few, a block's keys and values, which are copied as the scores are made, are larger than its scores.
    """
    config = user.preferred("tiled", "both", problem, config)
    default = _CPU_SCORE_BYTES if problem.device == "cpu" else _DEVICE_SCORE_BYTES
    score_bytes = config.score_bytes or default
    itemsize = 8 if problem.dtype.itemsize == 8 else 4
    room = max(1, score_bytes // itemsize)
    k = _size(config.block_k, problem.lk, room // min(_LEAST_QUERIES, max(1, problem.lq)))
    q = _size(config.block_q, problem.lq, room // k)
    room //= k * max(q, problem.d + problem.c)
    h = _size(None, problem.h, room)
    n = _size(None, problem.n, room // h) if h == problem.h else 1
    b = _size(None, problem.b, room // (h * n)) if n == problem.n else 1
    return TiledPlan(b=b, n=n, h=h, q=q, k=k, score_bytes=score_bytes)


def _size(asked: int | None, length: int, room: int) -> int:
    return max(1, min(length, asked or room))
