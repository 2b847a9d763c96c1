"""Sizes of tiles, and the variants of the backward kernels by size. Importing this imports no CuTe DSL."""

from __future__ import annotations

from typing import NamedTuple

import torch

from evoattn.core.problem import Problem

MMA_M = 64
"""M of a warpgroup's product (wgmma), which the instruction fixes: queries or keys of a tile."""

QUERIES = MMA_M
"""Queries of a tile of the backward."""

KEYS = MMA_M
"""Keys of a tile, and of a panel that a block of `KeyGradients` owns."""

SLICE = 32
"""Scores of a query or key that a warpgroup holds at a time."""

HALVES = 2
"""Warpgroups of a row in the forward."""

STREAMS = 2
"""Rows n that a block of the forward does at a time."""

CONSUMERS = STREAMS * HALVES
"""Warpgroups of a block of the forward that compute."""

CHAIN = 8
"""Blocks of keys whose steps the forward lays out one after another."""

FORWARD_QUERIES = HALVES * MMA_M
"""Queries of a panel in the forward."""

MOST_PANELS = 128
"""Panels of keys of rows that are listed: their numbers lie in the shared memory of one block."""

SHARED = 232_448
"""Bytes of shared memory that a block of sm_90 may have."""

_MOST_CLUSTER_BLOCKS = 8
"""Blocks of a cluster on every card of sm_90."""

# keys that a block has room for: warpgroups, slices of 32 keys of each, slices of a stage, stages
_ONE_BLOCK = (
    (128, 2, 2, 2, 3),
    (192, 2, 3, 3, 3),
    (256, 2, 4, 2, 4),
    (288, 3, 3, 3, 2),
    (384, 3, 4, 2, 3),
    (448, 2, 7, 1, 5),
    (512, 2, 8, 2, 3),
)
_CLUSTERED = ((288, 3, 3, 3, 2), (384, 2, 6, 2, 3), (448, 2, 7, 1, 5), (512, 2, 8, 2, 3))
_WITHOUT_PAIR_CLUSTERED = ((576, 3, 6, 2, 3), (768, 3, 8, 2, 3), (1024, 4, 8, 2, 3))
_WITHOUT_PAIR = (
    (128, 2, 2, 2, 3),
    (192, 3, 2, 2, 3),
    (288, 3, 3, 3, 2),
    (384, 3, 4, 2, 3),
    (512, 4, 4, 2, 3),
    *_WITHOUT_PAIR_CLUSTERED,
)
_MANY_CHANNELS = ((256, 2, 4, 2, 2), (384, 2, 6, 1, 3))

_MOST_IDLE_SHARE = 0.15
"""The largest idle share of all processors' time for one kernel that takes whole rows. A share of 0.19, at 384 queries and
keys, costs as much as the kernel gains."""

LEAST_SCORES_TO_SKIP = 1 << 25
"""`tri256` has twice as many: looking costs 1.5 of its 120 us where nothing is left out, H200."""

_MOST_ROWS_TO_LIST = 1 << 16
"""Rows of a batch up to which one block lists them."""

_MOST_BATCHES_TO_LIST = 32
"""Batches up to which each block goes through all of them to find its work."""


def pad_channels(channels: int) -> int:
    """The channels of a shared-memory tile: 16, 32 or 64. What lies past the tensor's own is read as zero."""
    return max(16, 1 << (channels - 1).bit_length())


class QueryVariant(NamedTuple):
    """The split of the keys in a `QueryGradients`, as its fields of these names."""

    groups: int
    slices: int
    stage_slices: int
    stages: int
    cluster: int

    @property
    def keys(self) -> int:
        """Keys that all blocks of a cluster have room for."""
        return self.cluster * self.groups * self.slices * SLICE


def query_variant(channels: int, keys: int, pair: bool) -> QueryVariant | None:
    """The variant of `QueryGradients` for `keys` keys of `channels`; None if no variant has room."""
    for cluster in range(1, _MOST_CLUSTER_BLOCKS + 1):
        one_block, clustered = (_ONE_BLOCK, _CLUSTERED) if pair else (_WITHOUT_PAIR, _WITHOUT_PAIR_CLUSTERED)
        table = _MANY_CHANNELS if channels > 32 else one_block if cluster == 1 else clustered
        for room, groups, slices, stage, stages in table:
            variant = QueryVariant(groups, slices, stage, stages, cluster)
            if keys <= cluster * room and query_shared_bytes(channels, pair, variant) <= SHARED:
                return variant
    return None


def counts_changes(panels: int, n: int, blocks: int) -> bool:
    """Return whether the schedule counts the time that a block takes to change to another panel (`schedule.CHANGE`).

    It does not if each block goes through whole panels, of `n` rows each. All blocks then change about as often, and a block
    has too few rows for some of them to be given to others.
    """
    return n > -(-panels * n // blocks)


def query_interleave(channels: int, slices: int, stage: int) -> int:
    """The number of slices of keys that each warpgroup of `QueryGradients` takes in turn, or 0 if its keys lie side by side.

    With interleaved keys, a row that a mask cuts short can end early. That takes registers. It costs other rows nothing with 48
    and 64 channels, but up to 5% with fewer.
    """
    return stage if channels > 32 and slices // stage > 2 else 0


def query_sums(channels: int, pair: bool, groups: int, slices: int, cluster: int) -> bool:
    """Return whether one producer warp of `QueryGradients` sums dq of each row (`dq_sum`). Else its warpgroups do so in turn.

    The warpgroups sum in three cases: with few keys or channels, since a row then ends before one warp has summed the row
    before; in a cluster, since the sum goes through all its blocks; and without a pair bias, which was not timed.
    """
    return pair and cluster == 1 and channels > 16 and groups * slices > 4


def query_shared_bytes(channels: int, pair: bool, variant: QueryVariant) -> int:
    """Bytes of shared memory of `QueryGradients`, with a key bias."""
    groups, slices, stage, stages, cluster = variant
    across = pad_channels(channels)
    keys = groups * stages * stage * 32
    warp_sums_dq = query_sums(channels, pair, groups, slices, cluster)
    rows = 4 * 64 * across * 2 + (1 if warp_sums_dq else groups) * 4 * 16 * across * 2
    sums = (groups if warp_sums_dq or cluster > 1 else groups - 1) * 64 * channels * 4 + 3 * 64 * 4
    panel = groups * slices * 8192 if pair else 0
    return rows + keys * (2 * across * 2 + 16) + panel + sums + 256 + (2 * groups * stages + 6) * 8


class KeyVariant(NamedTuple):
    """The shared memory of a `KeyGradients`, as its fields of these names."""

    blocks: int
    ring: int
    float32_tiles: bool
    streams: int
    stages: int
    own_tiles: bool = False


def key_variant(channels: int, queries: int, pair: bool, skips: bool = False, *, float32_pair: bool = False) -> KeyVariant:
    """The variant of `KeyGradients` for `queries` queries; `float32_pair`: the pair bias is float32."""
    streams = 3 if channels <= 48 else 2
    # 48 channels wait for L2: they take the pair bias as it is, in half the bytes, and convert it; in float32 fewer tiles fit
    ring = 3 if float32_pair and channels == 48 else 4
    float32_tiles = float32_pair or channels != 48
    least = 2 if channels <= 48 else 3  # stages for which a pair bias that stays leaves room
    staying = [KeyVariant(-(-queries // 64) if pair else 0, 0, False, streams, stages) for stages in range(4, least - 1, -1)]
    streaming = [KeyVariant(0, ring, float32_tiles, streams, stages) for stages in (4, 3, 2)]
    variant = next(x for x in (*staying, *streaming) if key_shared_bytes(channels, skips, x) <= SHARED)
    own_tiles = variant._replace(own_tiles=True)
    # as if it skips rows, also if it does not: `skips_rows` compares the two variants
    return own_tiles if key_shared_bytes(channels, True, own_tiles) <= SHARED else variant


def key_shared_bytes(channels: int, skips: bool, variant: KeyVariant) -> int:
    """Bytes of shared memory of `KeyGradients`: `blocks` tiles of the pair bias that stay, or `ring` that stream."""
    blocks, ring, float32_tiles, streams, stages, own_tiles = variant
    across = pad_channels(channels)
    stage = 2 * 64 * across * 2 + 4 * 64 * 4
    row = 2 * 64 * across * 2 + (1 + own_tiles) * 4 * 16 * across * 2
    bias = blocks * 16384 + (
        ring * (64 * 64 * (4 if float32_tiles else 2) + 16) if ring else 144
    )  # an empty ring has its place too
    return bias + streams * (stages * (stage + 16) + row + 32) + skips * 16 * across * 2


def fused_tiles(problem: Problem, processors: int) -> int | None:
    """The tiles of 64 queries that `FusedGradients` has room for; None if two kernels are faster.

    They are if queries or keys are one tile, which leaves warpgroups idle, or if the last rows leave processors idle.
    """
    tiles = {16: 16, 32: 8, 64: 0}[pad_channels(problem.d)]
    rows = problem.b * problem.n * problem.h
    idle = 1 - rows / (-(-rows // processors) * processors)
    return tiles if 64 < problem.lq <= 64 * tiles and problem.lk > 64 and idle <= _MOST_IDLE_SHARE else None


def skips_rows(problem: Problem) -> bool:
    """Return whether the two kernels skip rows without a key.

    They do not if a tile of zeros would take a stage: with 48 channels and no pair bias.
    """
    of_keys = problem.needs.k or problem.needs.v or problem.needs.mask_bias
    can_list = problem.n <= _MOST_ROWS_TO_LIST and problem.b <= _MOST_BATCHES_TO_LIST and problem.lk <= KEYS * MOST_PANELS
    if not (problem.mask and of_keys and can_list and problem.scores >= LEAST_SCORES_TO_SKIP):
        return False
    pair, float32_pair = problem.pair_bias is not None, problem.pair_bias == torch.float32
    skipping, other = (key_variant(problem.d, problem.lq, pair, skips, float32_pair=float32_pair) for skips in (True, False))
    return skipping == other
