"""The order in which the blocks of the Hopper backward take rows, on the CPU: every row of every panel once."""

import bisect
import itertools
import os
import random

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

import cutlass

from evoattn.backends.hopper import tiles
from evoattn.backends.hopper.kernels import dq_consumer, dq_producer
from evoattn.backends.hopper.kernels.dq import QueryGradients
from evoattn.backends.hopper.lib import schedule


def stretches(rows: list[int], blocks: int, timed: bool = True):
    """(block, its time, panel, row) of all units, as the kernels walk through them; rows[panel] there are of each panel."""
    change = schedule.CHANGE * timed
    if timed and len(set(rows)) == 1 and rows[0]:
        change = schedule.change_of(rows[0], schedule.share(sum(rows), blocks))
    starts = list(itertools.accumulate((n + change if n else 0 for n in rows), initial=0))
    total = starts[-1]
    each = max(schedule.share(total, blocks), 1)
    for block in range(blocks):
        at, end = min(block * each, total), min((block + 1) * each, total)
        while at < end:
            panel = bisect.bisect_right(starts, at) - 1
            start, n = starts[panel] + change, rows[panel]
            first = max(at - start, 0)
            known = schedule.panel_times(start, n, each, block, start + first)
            for position in range(min(n, end - start) - first):
                yield block, start + first + position - block * each, panel, schedule.nth_row(position, n, known)
            at = min(start + n, end)


SIZES = [*itertools.product(range(1, 4), range(1, 6), range(1, 6)), (6, 48, 33), (7, 40, 3), (3, 1, 20)]


@pytest.mark.parametrize("blocks", sorted({size[2] for size in SIZES}))
def test_stretches_of_all_blocks_cover_every_row_once(blocks: int) -> None:
    for panels, n, _ in (size for size in SIZES if size[2] == blocks):
        done = [(panel, row) for _, _, panel, row in stretches([n] * panels, blocks)]
        assert sorted(done) == list(itertools.product(range(panels), range(n))), (panels, n, blocks)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 7, 33])
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 40), marks=pytest.mark.slow)], ids=["few", "many"])
def test_every_row_that_is_left_once(seeds: range, blocks: int, timed: bool) -> None:
    """Where a mask leaves some panels fewer rows, or none."""
    for seed in seeds:
        left = random.Random(seed)
        rows = [left.choice((0, left.randint(0, 40))) for _ in range(left.randint(1, 12))]
        done = [(panel, row) for _, _, panel, row in stretches(rows, blocks, timed)]
        assert sorted(done) == [(panel, row) for panel, n in enumerate(rows) for row in range(n)], rows


@pytest.mark.parametrize("change", [0, 1, 3])
def test_equal_panels_are_shared_by_time(change: int) -> None:
    """The units that come before a time are those of a line in which each panel has its change before its rows."""
    for panels, n in itertools.product(range(1, 4), range(1, 6)):
        line = [unit for panel in range(panels) for unit in (*[None] * change, *range(panel * n, panel * n + n))]
        for time in range(len(line) + 1):
            assert schedule.count_units(time, n, change) == sum(unit is not None for unit in line[:time])
        for panel in range(panels):
            assert line[schedule.first_row(panel, n, change)] == panel * n


def test_blocks_that_change_panels_have_fewer_rows() -> None:
    """Two panels, three blocks: the first two each have the change to a panel in their time, the last has none."""
    done = [block for block, *_ in stretches([48] * 2, 3)]
    assert [done.count(block) for block in range(3)] == [31, 31, 34]


@pytest.mark.parametrize(
    ("panels", "n", "blocks"), [(6, 48, 33), (7, 40, 3), (24, 384, 132), (16, 256, 132), (66, 3, 132), (3, 1, 20)]
)
def test_the_parts_of_a_deterministic_sum_are_found(panels: int, n: int, blocks: int) -> None:
    """`PanelSum` adds up a slot of each block from the first to the last of a panel, as `dq` leaves them."""
    each = schedule.share(panels * n, blocks)
    change = schedule.change_of(n, each)
    each = schedule.share(panels * (n + change), blocks)
    at_work: dict[int, set[int]] = {}
    for block in range(blocks):
        times = (min(x * each, panels * (n + change)) for x in (block, block + 1))
        for unit in range(*(schedule.count_units(time, n, change) for time in times)):
            at_work.setdefault(unit // n, set()).add(block)
    slots = [panel + block for panel, of_panel in at_work.items() for block in of_panel]
    assert len(set(slots)) == len(slots)
    for panel, of_panel in at_work.items():
        start = schedule.first_row(panel, n, change)
        assert of_panel == set(range(start // each, (start + n - 1) // each + 1))


@pytest.mark.parametrize(
    ("panels", "n", "counts"),
    [(24, 384, True), (12, 64, True), (16, 256, True), (192, 4, False), (200, 1, False), (192, 48, False)],
)
def test_changes_count_where_blocks_have_part_of_a_panel(panels: int, n: int, counts: bool) -> None:
    assert tiles.counts_changes(panels, n, 132) is counts


def test_blocks_that_need_not_change_do_not() -> None:
    done = [(block, panel) for block, _, panel, _ in stretches([48] * 2, 6)]
    assert len(set(done)) == 6 and all(done.count(x) == 16 for x in done)


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
    variant = tiles.query_variant(channels, keys, pair)
    kernel = QueryGradients(
        cutlass.BFloat16, channels, pair=pair, key_bias=True, bias_gradient=pair, skips=True, **variant._asdict()
    )
    groups = [(rank, s) for rank in range(kernel.cluster) for s in range(kernel.groups)]
    of_all = [rank * kernel.groups + s for rank, s in groups]
    slices = sorted(dq_consumer.slice_key(kernel, u, group) for group in of_all for u in range(kernel.slices))
    assert slices == list(range(0, len(slices) * 32, 32))
    for group, j in itertools.product(of_all, range(kernel.tiles)):
        firsts = [dq_consumer.slice_key(kernel, j * kernel.stage_slices + x, group) for x in range(kernel.stage_slices)]
        assert firsts == [dq_producer.key_tile(kernel, j, group) * kernel.keys + x * 32 for x in range(kernel.stage_slices)]
    if kernel.exits:
        for live in range(len(groups) * kernel.tiles + 1):
            through = [
                dq_producer.key_tile(kernel, j, x)
                for x, at in zip(of_all, groups, strict=True)
                for j in range(dq_consumer.live_tiles(kernel, live, *at))
            ]
            assert set(range(live)) <= set(through) and len(set(through)) == len(through)
