"""The order in which the blocks of the Hopper backward take rows, on the CPU: every row of every panel once."""

import itertools
import os

import pytest

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install 'evoattn[hopper]'")

from evoattn.backends.hopper import bwd_schedule as schedule


def stretches(panels: int, n: int, blocks: int):
    """(block, its time, panel, row) of all units, as the kernels walk through them."""
    each = schedule.share(panels * n, blocks)
    for block in range(blocks):
        at, end = min(block * each, panels * n), min((block + 1) * each, panels * n)
        while at < end:
            panel = at // n
            first = at - panel * n
            count = min(n - first, end - at)
            known = schedule.opening(panel, n, each, block, at)
            for position in range(count):
                yield block, at + position - block * each, panel, schedule.row(position, n, known)
            at += count


SIZES = [*itertools.product(range(1, 4), range(1, 6), range(1, 6)), (6, 48, 33), (7, 40, 3), (3, 1, 20)]


@pytest.mark.parametrize("blocks", sorted({size[2] for size in SIZES}))
def test_every_row_once(blocks: int) -> None:
    for panels, n, _ in (size for size in SIZES if size[2] == blocks):
        done = [(panel, row) for _, _, panel, row in stretches(panels, n, blocks)]
        assert sorted(done) == list(itertools.product(range(panels), range(n))), (panels, n, blocks)


@pytest.mark.parametrize(("panels", "n", "blocks", "apart"), [(16, 64, 17, 8), (16, 64, 33, 8)])
def test_panels_go_through_the_rows_together(panels: int, n: int, blocks: int, apart: int) -> None:
    at_time: dict[int, list[int]] = {}
    for _, time, _, row in stretches(panels, n, blocks):
        at_time.setdefault(time, []).append(row)
    assert max(max(rows) - min(rows) for rows in at_time.values()) <= apart
