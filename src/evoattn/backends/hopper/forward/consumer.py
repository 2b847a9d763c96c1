"""A row in the forward kernel: a warpgroup goes through its keys, and on to the next row; then o and the LSE leave."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warp, warpgroup

from evoattn.backends.hopper.forward.exact import WARP_QUERIES, ExactPath
from evoattn.backends.hopper.forward.mma import CHAIN, HALVES, ForwardMma
from evoattn.backends.hopper.forward.producer import STREAMS
from evoattn.backends.hopper.kernels.primitives import LOWEST
from evoattn.backends.hopper.kernels.ring import Slot
from evoattn.backends.hopper.kernels.schedule import Schedule, place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import ROWS

__all__ = ["ForwardConsumer", "Thread"]


class Thread(namedtuple("Thread", "s half w wt lane g t4 tid wid wg")):
    """A thread's place.

    s, half, w, wt: its stream, its warpgroup of the stream, its warp and its number there. lane, g, t4: its number, row and
    column in the warp. tid, wid, wg: its number, its warp's and its warpgroup's in
    the block.
    """


class ForwardConsumer(ForwardMma):
    """A consumer warpgroup's way through a row; `ForwardVariant` explains the attributes."""

    odd: bool
    ceiling: float
    schedule: Schedule
    exact_path: ExactPath

    @cute.jit
    def keys_of_row(
        self, operands, row, copy, turns: cute.Tensor, rings, c: Float32, thread, turn: Int32, slot, query_phase: Int32,
        count: Int32, blocks: Int32,
    ):  # fmt: skip
        """Do all keys of the row that is `turn` in a stream; then the next row's first scores are on their way.

        Returns the slots of keys and queries to come, and how many rows are left.
        """
        s, half, _, _, lane, *_ = thread
        # A shuffle hides that these do not change (or, the stage, cycle) over the loop: otherwise the compiler hoists
        # some 50 matrix descriptors out of it, cannot keep them in uniform registers, and spills.
        hf, first = arch.make_warp_uniform(half), arch.make_warp_uniform(s * self.stages)
        slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
        for x in range_constexpr(4):
            row.l[x] = Float32(0.0)
        for x in range_constexpr(2):
            row.m[x] = Float32(-3e38)
        slices, whole = 2 * blocks, blocks
        if const_expr(self.row):
            slices = turns[s, turn, 1]
            # With 48 channels, which of the two a shuffle hides decides whether ptxas serialises the products.
            if const_expr(self.odd or self.pair):
                slices = arch.make_warp_uniform(slices)
            whole = cutlass.max(slices >> 1, 1)
            if const_expr(not (self.odd or self.pair)):
                whole = arch.make_warp_uniform(whole)
        left = whole
        before = slot.stage
        output = self.query_slot(s, turn + 1, query_phase).stage
        queries = self.queries(operands, s, half, turn)
        count -= 1
        if const_expr(not self.long):
            here = rings.at(first)
            slot, before = self.chain(0, left, whole, queries, operands, row, c, hf, slot, before, output, here, lane)
        else:
            while left > 0:
                hf, first = arch.make_warp_uniform(hf), arch.make_warp_uniform(first)
                slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
                here = rings.at(first)
                slot, before = self.chain(0, left, whole, queries, operands, row, c, hf, slot, before, output, here, lane)
                left -= CHAIN
                if left > 0:
                    self.wait_keys(here, slot)
                    warpgroup.fence()
                    self.scores(queries, operands, row.acc_S0, 0, self.pair_tile(0, slot, hf), here.keys.index(slot.stage))
                    self.softmax(row, operands, c, row.acc_S1, 1, here.keys.index(before))
                    warpgroup.wait_group(0)
                    self.release_keys(here, before, lane)
        rings = rings.at(first)
        tail = Int32(1) if const_expr(self.odd) else 1
        if const_expr(self.odd):
            if slices & 1 == 1 and slices > 1:  # a last block of one slice
                self.wait_keys(rings, slot)
                self.softmax(row, operands, c, row.acc_S1, 1, rings.keys.index(before))
                self.scores(
                    queries, operands, row.acc_S1, 0, self.pair_tile(slices >> 1, slot, hf), rings.keys.index(slot.stage)
                )
                warpgroup.wait_group(0)
                self.release_keys(rings, before, lane)
                tail = Int32(0)
                before, slot = slot.stage, rings.keys.advance(slot)
        # the row's last slice; the first scores of the next row are on their way meanwhile
        if count > 0:
            self.load_queries(rings, copy, operands.tSrQ, s, half, turn + 1, query_phase)
            query_phase ^= 1
            self.wait_keys(rings, slot)
        warpgroup.fence()
        queries = self.queries(operands, s, hf, turn + 1)
        self.scores(queries, operands, row.acc_S0, 0, self.pair_tile(0, slot, hf), rings.keys.index(slot.stage))
        self.softmax(row, operands, c, row.acc_S1, tail, rings.keys.index(before))
        warpgroup.wait_group(0)
        self.release_keys(rings, before, lane)
        if count > 0:
            self.release_registers(rings, s, lane)
        return slot, query_phase, count

    @cute.jit
    def pass_by(self, turns: cute.Tensor, rings, thread, turn: Int32, slot, query_phase: Int32, count: Int32):
        """Release what comes for `count` rows, for a warpgroup that has no queries of a last panel.

        Returns the turn and the slots of keys and queries to come.
        """
        s, _, _, _, lane, *_ = thread
        while count > 0:
            rings.queries.consumer_wait(self.query_slot(s, turn, query_phase))
            query_phase ^= 1
            slices = turns[s, turn, 1]
            turn = (turn + 1) & 3
            arch.sync_warp()
            if const_expr(self.slots == 1):
                self.release_registers(rings, s, lane)
            else:
                self.release_output(rings, self.query_slot(s, turn, query_phase).stage, lane)
            for _ in cutlass.range((slices + 1) // 2, unroll=1):
                rings.keys.consumer_wait(slot)
                # not by `release`: with it ptxas gives other registers to some kernels
                if lane == 0:
                    arch.mbarrier_arrive(rings.keys.emptied(slot.stage))
                if const_expr(self.streamed):
                    rings.pair.consumer_wait(slot)
                    if lane == 0:
                        arch.mbarrier_arrive(rings.pair.emptied(slot.stage))
                slot = rings.keys.advance(slot)
            count -= 1
        return turn, slot, query_phase

    @cute.jit
    def store_row(
        self, row, args, at, sO: cute.Tensor, copy, floor: Float32, again: Boolean, count: Int32, book: Any,
        origins: cute.Tensor, thread,
    ):  # fmt: skip
        """Write a row's o, LSE and reference, but for queries that `exact` has to do again.

        Their LSE is NaN if what scores were measured from was wrong, and +inf if biases may have swallowed them.

        Args:
            row: acc_O, m and l.
            args: arguments of the kernel.
            at: the tile of 16 queries, h, n, b, and the tile of shared memory from which o leaves.
            sO, copy: those tiles, and the copy of o to global memory.
            floor: queries with a lower reference attend to nothing.
            again: whether a row before has to be done again.
            count: how many rows come after.
            book: what the warp keeps in shared memory.
            origins: what the pair bias of the warp's queries is measured from.

        Returns:
            Whether this row, or one before, has to be done again.
        """
        (_, _, acc_O, m, l), (tile, h, n, b, output), (_, _, _, _, lane, g, t4, *_) = row, at, thread
        lse, reference = args.lse, args.reference
        for x in range_constexpr(2):
            l[x] = arch.warp_reduction_sum(l[2 * x] + l[2 * x + 1], threads_in_group=4)
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        dead = (m[0] < floor, m[1] < floor)
        factors = [cutlass.select_(dead[x], Float32(0.0), arch.rcp_approx(l[x])) for x in range(2)]
        for x in range_constexpr(self.steps):
            e = cute.make_rmem_tensor(8, Float32)
            for y in range_constexpr(8):
                e[y] = acc_O[8 * x + y] * factors[y // 2 % 2]
            short = cute.make_rmem_tensor(8, self.dtype)
            short.store(e.load().to(self.dtype))
            target = cute.local_tile(sO[None, None, output], (1, 8), (lane % 16, 2 * x + lane // 16))
            cute.copy(stmatrix, short, target[0, None])
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        # The second stream repeats the last of an odd number of rows, to stay in step, and writes nothing.
        limit = args.q.shape[3]
        if const_expr(self.streamed):
            if count == 0 and book[5] == 1:
                limit = Int32(0)
            if limit > 0:
                copy.store(output, (tile, h, n, b))
        else:
            copy.store(output, (tile, h, n, b))
        arch.cp_async_bulk_commit_group()
        for x in range_constexpr(2):
            i = tile * 16 + g + 8 * x
            good = l[x] < self.ceiling
            far = Boolean(False)
            if const_expr(self.pair):
                far = (m[x] < LOWEST) & (m[x] >= floor)
            again = again | (not good) | far
            if t4 == 0 and i < limit:
                value = m[x] + cute.math.log2(l[x], fastmath=True)
                value = cutlass.select_(dead[x], -Float32.inf, value)
                origin = Float32(0.0)
                if const_expr(self.pair):
                    origin = origins[g + 8 * x]
                    value = cutlass.select_(far, Float32.inf, value)
                lse[b, n, h, i] = cutlass.select_(good, value, Float32.nan)
                reference[b, n, h, i] = origin
        return again

    @cute.jit
    def repair(self, args, block: Int32, sizes, thread):
        """Do the queries again that this warp marked with an LSE of NaN or +inf."""
        _, _, panels, N, LQ = sizes
        s, half, w, *_ = thread
        arch.sync_warp()
        unit, last = self.schedule.start(block, *sizes), self.schedule.start(block + 1, *sizes)
        while unit < last:
            panel, p0, p1 = stretch(unit, last, N)
            phase = self.schedule.phase(panel, *sizes)
            ib, h, b = place(panel, panels, args.q.shape[2])
            i0 = (ib * HALVES + half) * ROWS + w * WARP_QUERIES
            i = cutlass.min(i0 + arch.lane_idx() % WARP_QUERIES, LQ - 1)
            p = p0 + s
            while p < p1:
                n = self.schedule.row(p, phase, args.interleave, N)
                value = args.lse[b, n, h, i]
                if i0 < LQ and arch.vote_any_sync(value != value or value == Float32.inf):
                    self.exact_path(args, b, n, h, i0)
                p += STREAMS
            unit += p1 - p0
