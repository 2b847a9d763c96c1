"""The order in which the blocks of the Hopper backward take rows, on the CPU: every row of every panel once."""

import bisect
import itertools
import os
import random

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install 'evoattn[hopper]'")

import cutlass

from evoattn.backends.hopper import bwd_plan
from evoattn.backends.hopper import bwd_schedule as schedule
from evoattn.backends.hopper.bwd_dq import QueryGradients


def stretches(rows: list[int], blocks: int):
    """(block, its time, panel, row) of all units, as the kernels walk through them; rows[panel] there are of each panel."""
    starts = list(itertools.accumulate(rows, initial=0))
    total = starts[-1]
    each = max(schedule.share(total, blocks), 1)
    for block in range(blocks):
        at, end = min(block * each, total), min((block + 1) * each, total)
        while at < end:
            panel = bisect.bisect_right(starts, at) - 1
            start, n = starts[panel], rows[panel]
            count = min(start + n - at, end - at)
            known = schedule.opening(start, n, each, block, at)
            for position in range(count):
                yield block, at + position - block * each, panel, schedule.row(position, n, known)
            at += count


SIZES = [*itertools.product(range(1, 4), range(1, 6), range(1, 6)), (6, 48, 33), (7, 40, 3), (3, 1, 20)]


@pytest.mark.parametrize("blocks", sorted({size[2] for size in SIZES}))
def test_every_row_once(blocks: int) -> None:
    for panels, n, _ in (size for size in SIZES if size[2] == blocks):
        done = [(panel, row) for _, _, panel, row in stretches([n] * panels, blocks)]
        assert sorted(done) == list(itertools.product(range(panels), range(n))), (panels, n, blocks)


@pytest.mark.parametrize("blocks", [1, 2, 7, 33])
def test_every_row_that_is_left_once(blocks: int) -> None:
    """Where a mask leaves some panels fewer rows, or none."""
    for seed in range(40):
        left = random.Random(seed)
        rows = [left.choice((0, left.randint(0, 40))) for _ in range(left.randint(1, 12))]
        done = [(panel, row) for _, _, panel, row in stretches(rows, blocks)]
        assert sorted(done) == [(panel, row) for panel, n in enumerate(rows) for row in range(n)], rows


@pytest.mark.parametrize(("panels", "n", "blocks", "apart"), [(16, 64, 17, 8), (16, 64, 33, 8)])
def test_panels_go_through_the_rows_together(panels: int, n: int, blocks: int, apart: int) -> None:
    at_time: dict[int, list[int]] = {}
    for _, time, _, row in stretches([n] * panels, blocks):
        at_time.setdefault(time, []).append(row)
    assert max(max(rows) - min(rows) for rows in at_time.values()) <= apart


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize(
    ("channels", "keys"), [(32, 100), (32, 300), (32, 384), (32, 397), (32, 512), (16, 1500), (48, 700), (64, 384), (64, 640)]
)
def test_warpgroups_share_the_keys(channels: int, keys: int, pair: bool) -> None:
    """Each slice is one warpgroup's; and where a row ends after some tiles, they are among those that are gone through."""
    variant = bwd_plan.query_variant(channels, keys, pair)
    kernel = QueryGradients(cutlass.BFloat16, channels, pair=pair, row=True, bias_gradient=pair, skips=True, **variant)
    groups = [(rank, s) for rank in range(kernel.cluster) for s in range(kernel.groups)]
    of_all = [rank * kernel.groups + s for rank, s in groups]
    slices = sorted(kernel.key(u, group) for group in of_all for u in range(kernel.slices))
    assert slices == list(range(0, len(slices) * 32, 32))
    for group, j in itertools.product(of_all, range(kernel.tiles)):
        firsts = [kernel.key(j * kernel.stage + x, group) for x in range(kernel.stage)]
        assert firsts == [kernel.tile_of(j, group) * kernel.keys + x * 32 for x in range(kernel.stage)]
    if kernel.exits:
        for tiles in range(len(groups) * kernel.tiles + 1):
            through = [
                kernel.tile_of(j, x) for x, at in zip(of_all, groups, strict=True) for j in range(kernel.live_tiles(tiles, *at))
            ]
            assert set(range(tiles)) <= set(through) and len(set(through)) == len(through)
