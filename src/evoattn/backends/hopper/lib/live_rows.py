"""The rows n that `KeyGradients` does if there is a mask: those with a live key in a panel or beyond.

`KeyBias` counts the panels of 64 keys of each row, up to the last key that is not masked: order[b,1,n]. It lists the rows of
each b by that count, the largest first: order[b,0,rank]. So the rows of a panel are the first of the list.

Units (panel, row) lie in a line, as in `schedule`. starts [b, panels + 2] says where each panel of a head begins, where the
head ends, and how many panels have a row. Panels with a row come first, and empty panels are not scheduled. Units that are not
in the line have gradients of zero.

`variant` is the kernel. Without its `skips` each panel has all rows. With its `timed`, a change to another panel takes time.
Loads bypass the first cache, which may hold what lay there before this kernel began.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.lib.copies import clear_numbers
from evoattn.backends.hopper.lib.schedule import CHANGE, Span, change_of, first_row, place, share
from evoattn.backends.hopper.tiles import MMA_M


class LiveRows(namedtuple("LiveRows", "order starts")):
    """The two tensors; None without `skips`."""


class LineSizes(namedtuple("LineSizes", "b n h panels")):
    """The sizes of a line: of b, n and h, and the panels of 64 keys of a head."""


def _load(x: Any, *coord: Any) -> Any:
    return arch.load(x.iterator + cute.crd2idx(coord, x.layout), Int32, cop="cg")


@cute.jit
def line_time(variant, live: LiveRows, sizes: LineSizes, blocks: Int32):
    """The time that all units take, that of a change to another panel, and whether any row is left out of any panel."""
    B, N, H, NK = sizes
    panels = Int64(B * H * NK)
    units, any_skipped, change = panels * N, Boolean(False), Int32(0)
    if const_expr(variant.skips):
        units, used = Int64(0), Int64(0)
        for b in cutlass.range(B, unroll=1):
            units += Int64(H) * _load(live.starts, b, NK)
            if const_expr(variant.timed):
                used += Int64(H) * _load(live.starts, b, NK + 1)
        any_skipped = units < panels * N
        if const_expr(variant.timed):
            panels = used
    if const_expr(variant.timed):
        change = Int32(CHANGE)
        if not any_skipped:
            change = change_of(N, Int32(share(units, blocks)))
        units += panels * change
    return units, change, any_skipped


@cute.jit
def _head_time(variant, starts, b: Int32, NK: Int32, change: Int32) -> Int32:
    """The time of a head of batch b."""
    time = _load(starts, b, NK)
    if const_expr(variant.timed):
        time += change * _load(starts, b, NK + 1)
    return time


@cute.jit
def next_panel(variant, time: Int32, span: Span, live: LiveRows, sizes: LineSizes, lane: Int32):
    """Return the panel that a block comes to at `time`.

    Returns its place i, h and b; the ranks of the first of its rows that the block does in its span, and past the last; the
    time at which its rows begin; and how many rows it has. The block may do none of them.
    """
    (_, end, _, _, change), (_, N, H, NK) = span, sizes
    if const_expr(variant.skips):
        starts = live.starts
        b, start = Int32(0), Int32(0)
        head_time = _head_time(variant, starts, b, NK, change)
        while time >= start + H * head_time:
            start += H * head_time
            b += 1
            head_time = _head_time(variant, starts, b, NK, change)
        h = (time - start) // head_time
        start += h * head_time
        i = Int32(0)
        for x in cutlass.range((NK + 31) // 32, unroll=1):
            next_ = x * 32 + lane + 1
            begun = next_ <= NK and _load(starts, b, cutlass.min(next_, NK)) + change * next_ <= time - start
            i += arch.popc(arch.vote_ballot_sync(begun))
        first = _load(starts, b, i)
        n = _load(starts, b, i + 1) - first
        start += first + change * (i + 1)
    else:
        panel = time // (N + change)
        i, h, b = place(panel, NK, H)
        start, n = first_row(panel, N, change), N
    p0 = cutlass.max(time - start, 0)
    return i, h, b, p0, cutlass.max(cutlass.min(n, end - start), p0), start, n


@cute.jit
def row_at_rank(variant, rank: Int32, b: Int32, live: LiveRows, any_skipped: Boolean) -> Int32:
    """The row of a panel of batch b with that rank; `any_skipped`: whether any row is left out of any panel."""
    n = rank
    if const_expr(variant.skips):
        if any_skipped:
            n = arch.make_warp_uniform(_load(live.order, b, 0, rank))
    return n


@cute.jit
def clear_skipped(live: LiveRows, sizes: LineSizes, zeros: int, copies, mdMask: Any, first: Int32, step: Int32, lane: Int32):
    """Write zeros for all that is not in the line: a warp's share, each `step`-th from `first` on.

    zeros: the tile of shared memory with 16 rows of zeros. copies: of dk and dv; of dq, for empty rows,
    or None; and how many tiles dq has.
    """
    B, N, H, NK = sizes
    order, starts = live
    key_copies, copy_dQ, tiles = copies
    if const_expr(copy_dQ is not None):
        for b in cutlass.range(B, unroll=1):
            for rank in cutlass.range(_load(starts, b, 1) + first, N, step, unroll=1):
                n = _load(order, b, 0, rank)
                for h in cutlass.range(H, unroll=1):
                    for x in cutlass.range(tiles, unroll=1):
                        copy_dQ.store(zeros, (x, h, n, b))
    for panel in cutlass.range(B * NK, unroll=1):
        b, i = panel // NK, panel % NK
        rank = _load(starts, b, i + 1) - _load(starts, b, i) + (first + panel * 31) % step
        while rank < N:
            rows = _load(order, b, 0, cutlass.min(rank + lane * step, N - 1))
            for x in cutlass.range(cutlass.min((N - rank + step - 1) // step, 32), unroll=1):
                n = arch.make_warp_uniform(arch.shuffle_sync(rows, x))
                for h in cutlass.range(H, unroll=1):
                    for copy in key_copies:
                        for w in range_constexpr(MMA_M // 16):
                            copy.store(zeros, (i * (MMA_M // 16) + w, h, n, b))
                    if const_expr(mdMask is not None):
                        clear_numbers(mdMask[b, n, h, None], i * MMA_M, lane)
            rank += 32 * step
    arch.cp_async_bulk_commit_group()
    arch.cp_async_bulk_wait_group(0)
    # where nothing is left to do nobody else waits, and this launch must not end before the one that let it start
    arch.griddepcontrol_wait()
