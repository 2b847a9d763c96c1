"""Which variant of the backward kernels serves which lengths: arguments of `QueryGradients` and `KeyGradients`."""

from __future__ import annotations

SHARED = 232_448
"""Bytes of shared memory that a block of sm_90 may have."""

_QUERY_VARIANTS = {
    # keys of a variant: warpgroups, slices of 32 keys of each, slices of a stage, stages
    32: ((192, 3, 2, 2, 3), (288, 3, 3, 3, 2), (384, 3, 4, 2, 3), (448, 2, 7, 1, 5), (512, 2, 8, 2, 3)),
    64: ((256, 2, 4, 2, 2), (384, 2, 6, 1, 3)),
}


def query_variant(channels: int, keys: int) -> dict[str, int] | None:
    """groups, slices, stage, stages for `keys` keys of (padded) `channels`; None where no variant has room."""
    for room, groups, slices, stage, stages in _QUERY_VARIANTS.get(max(channels, 32), ()):
        if keys <= room:
            return {"groups": groups, "slices": slices, "stage": stage, "stages": stages}
    return None


def query_shared(channels: int, groups: int, slices: int, stage: int, stages: int) -> int:
    """Bytes of shared memory of `QueryGradients`, with both biases."""
    keys = groups * stages * stage * 32
    rows = 4 * 64 * channels * 2 + groups * 4 * 16 * channels * 2
    sums = (groups - 1) * 64 * channels * 4 + 3 * 64 * 4
    return rows + keys * (2 * channels * 2 + 16) + groups * slices * 8192 + sums + (2 * groups * stages + 3) * 8


def key_variant(channels: int, queries: int, pair: bool) -> dict[str, int] | None:
    """blocks, streams, stages for `queries` queries of (padded) `channels`; None where no variant has room."""
    blocks = -(-queries // 64) if pair else 0
    streams = 3 if channels <= 32 else 2
    for stages in (4, 3, 2):
        if key_shared(channels, blocks, streams, stages) <= SHARED:
            return {"blocks": blocks, "streams": streams, "stages": stages}
    return None


def key_shared(channels: int, blocks: int, streams: int, stages: int) -> int:
    """Bytes of shared memory of `KeyGradients`, whose panel holds `blocks` blocks of 64 queries."""
    stage = 2 * 64 * channels * 2 + 5 * 64 * 4
    row = 2 * 64 * channels * 2 + 4 * 16 * channels * 2
    return blocks * 16384 + streams * (stages * (stage + 16) + row + 16)
