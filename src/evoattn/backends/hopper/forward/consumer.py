"""A row in the forward kernel: a warpgroup goes through its keys, and on to the next row; then o and the LSE leave."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warp, warpgroup

from evoattn.backends.hopper.forward.exact import WARP_QUERIES, ExactPath
from evoattn.backends.hopper.forward.mma import CHAIN, HALVES, ForwardMma
from evoattn.backends.hopper.forward.producer import STREAMS
from evoattn.backends.hopper.kernels.primitives import LOWEST
from evoattn.backends.hopper.kernels.schedule import Schedule, place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import ROWS

__all__ = ["ForwardConsumer"]


class ForwardConsumer(ForwardMma):
    """What a consumer warpgroup does with a row; `Forward` says what the attributes are."""

    odd: bool
    ceiling: float
    schedule: Schedule
    exact_path: ExactPath

    @cute.jit
    def keys_of_row(
        self,
        operands,
        arriving,
        turn: cute.Tensor,
        bars,
        c: Float32,
        s: Int32,
        half: Int32,
        rounds: Int32,
        st: Int32,
        ph: Int32,
        qph: Int32,
        count: Int32,
        blocks: Int32,
        lane: Int32,
    ):
        """All keys of the row that is `rounds` in stream s; then the next row's first scores are on their way.

        Returns st, ph, qph and count as they are then: the stage and its phase, that of queries, and how many rows are left.
        """
        rQ, fQ, frags, S0, S1, O, fV, m, l = operands
        full, empty, pfull, pempty, qempty = bars
        # A shuffle hides that these do not change (or, st, cycle) over the loop: otherwise the compiler hoists
        # some 50 matrix descriptors out of it, cannot keep them in uniform registers, and spills.
        hf, so, st = arch.make_warp_uniform(half), arch.make_warp_uniform(s * self.stages), arch.make_warp_uniform(st)
        for x in range_constexpr(4):
            l[x] = Float32(0.0)
        for x in range_constexpr(2):
            m[x] = Float32(-3e38)
        slices, whole = 2 * blocks, blocks
        if const_expr(self.row):
            slices = turn[s, rounds, 1]
            # With 48 channels, which of the two a shuffle hides decides whether ptxas serialises the products.
            if const_expr(self.odd or self.pair):
                slices = arch.make_warp_uniform(slices)
            whole = cutlass.max(slices >> 1, 1)
            if const_expr(not (self.odd or self.pair)):
                whole = arch.make_warp_uniform(whole)
        left = whole
        prev = st
        before, _ = self.slot(s, rounds + 1, qph)
        of_chain = (full, empty, pfull, pempty, qempty + before)
        queries = self.queries(rQ, fQ, s, half, rounds)
        count -= 1
        if const_expr(not self.long):
            st, ph, prev = self.chain(
                0, left, whole, queries, frags, S0, S1, O, fV, m, l, c, hf, so, st, ph, prev, of_chain, lane
            )
        else:
            while left > 0:
                hf, so, st = arch.make_warp_uniform(hf), arch.make_warp_uniform(so), arch.make_warp_uniform(st)
                st, ph, prev = self.chain(
                    0, left, whole, queries, frags, S0, S1, O, fV, m, l, c, hf, so, st, ph, prev, of_chain, lane
                )
                left -= CHAIN
                if left > 0:
                    self.arrived(full, pfull, so, st, ph)
                    warpgroup.fence()
                    self.scores(queries, frags, S0, 0, self.tile(0, st, hf), so + st)
                    self.soften(O, fV, m, l, c, S1, 1, so + prev)
                    warpgroup.wait_group(0)
                    self.give_back_keys(empty, pempty, so, prev, lane)
        tail = Int32(1) if const_expr(self.odd) else 1
        if const_expr(self.odd):
            if slices & 1 == 1 and slices > 1:  # a last block of one slice
                self.arrived(full, pfull, so, st, ph)
                self.soften(O, fV, m, l, c, S1, 1, so + prev)
                self.scores(queries, frags, S1, 0, self.tile(slices >> 1, st, hf), so + st)
                warpgroup.wait_group(0)
                self.give_back_keys(empty, pempty, so, prev, lane)
                tail, prev = Int32(0), st
                st += 1
                if st == self.stages:
                    st = Int32(0)
                    ph ^= 1
        # the row's last slice; the first scores of the next row are on their way meanwhile
        if count > 0:
            self.take(arriving, s, half, rounds + 1, qph)
            qph ^= 1
            self.arrived(full, pfull, so, st, ph)
        warpgroup.fence()
        queries = self.queries(rQ, fQ, s, hf, rounds + 1)
        self.scores(queries, frags, S0, 0, self.tile(0, st, hf), so + st)
        self.soften(O, fV, m, l, c, S1, tail, so + prev)
        warpgroup.wait_group(0)
        self.give_back_keys(empty, pempty, so, prev, lane)
        if count > 0:
            self.taken(qempty + s, lane)
        return st, ph, qph, count

    @cute.jit
    def pass_by(
        self,
        turn: cute.Tensor,
        bars,
        s: Int32,
        rounds: Int32,
        st: Int32,
        ph: Int32,
        qph: Int32,
        count: Int32,
        lane: Int32,
    ):
        """Give back what comes for `count` rows, for a warpgroup that has no queries of a last panel.

        Returns rounds, st, ph and qph as they are then.
        """
        full, empty, pfull, pempty, qfull, qempty = bars
        while count > 0:
            slot, phase = self.slot(s, rounds, qph)
            arch.mbarrier_wait(qfull + slot, phase)
            qph ^= 1
            slices = turn[s, rounds, 1]
            rounds = (rounds + 1) & 3
            arch.sync_warp()
            if const_expr(self.slots == 1):
                self.taken(qempty + s, lane)
            else:
                before, _ = self.slot(s, rounds, qph)
                self.give_back(qempty + before, lane)
            for _ in cutlass.range((slices + 1) // 2, unroll=1):
                arch.mbarrier_wait(full + s * self.stages + st, ph)
                # not by `release`: with it ptxas gives other registers to some kernels
                if lane == 0:
                    arch.mbarrier_arrive(empty + s * self.stages + st)
                if const_expr(self.streamed):
                    arch.mbarrier_wait(pfull + st, ph)
                    if lane == 0:
                        arch.mbarrier_arrive(pempty + st)
                st += 1
                if st == self.stages:
                    st = Int32(0)
                    ph ^= 1
            count -= 1
        return rounds, st, ph, qph

    @cute.jit
    def leave(
        self,
        row,
        at,
        out,
        floor: Float32,
        again: Boolean,
        queries: Int32,
        count: Int32,
        mine: Any,
        statistic,
        g: Int32,
        t4: Int32,
        lane: Int32,
    ):
        """Write a row's o, LSE and reference, those of `queries`, but for queries that `exact` has to make again.

        Their LSE is NaN if what scores were measured from was wrong, and +inf if biases may have swallowed them.

        Args:
            row: O, m and l.
            at: the tile of 16 queries, h, n, b, and where o leaves from.
            out: what copies o.
            again: whether that was wrong, in a row before; or in this one, as it is returned.
            count, mine: how many rows come after, and what the warp keeps in shared memory.
            statistic: lse and reference, and what the pair bias of the warp's queries is measured from.
        """
        (O, m, l), (tile, h, nn, b, ot), (sO, aO, oS, oG) = row, at, out
        lse, reference, origins = statistic
        for x in range_constexpr(2):
            l[x] = arch.warp_reduction_sum(l[2 * x] + l[2 * x + 1], threads_in_group=4)
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        dead = (m[0] < floor, m[1] < floor)
        factors = [cutlass.select_(dead[x], Float32(0.0), arch.rcp_approx(l[x])) for x in range(2)]
        for x in range_constexpr(self.steps):
            e = cute.make_rmem_tensor(8, Float32)
            for y in range_constexpr(8):
                e[y] = O[8 * x + y] * factors[y // 2 % 2]
            eb = cute.make_rmem_tensor(8, self.dtype)
            eb.store(e.load().to(self.dtype))
            dst = cute.local_tile(sO[None, None, ot], (1, 8), (lane % 16, 2 * x + lane // 16))
            cute.copy(stm, eb, dst[0, None])
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        # The second stream repeats the last of an odd number of rows, to stay in step, and writes nothing.
        limit = queries
        if const_expr(self.streamed):
            if count == 0 and mine[5] == 1:
                limit = Int32(0)
            if limit > 0:
                cute.copy(aO, oS[None, ot], oG[None, tile, h, nn, b])
        else:
            cute.copy(aO, oS[None, ot], oG[None, tile, h, nn, b])
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
                lse[b, nn, h, i] = cutlass.select_(good, value, Float32.nan)
                reference[b, nn, h, i] = origin
        return again

    @cute.jit
    def repair(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        row: Any,
        deep: Any,
        given: Any,
        o: cute.Tensor,
        lse: cute.Tensor,
        reference: cute.Tensor,
        shifts: Any,
        row_b: Int32,
        row_n: Int32,
        scale: Float32,
        interleave: Int32,
        block: Int32,
        sizes,
        s: Int32,
        half: Int32,
        w: Int32,
    ):
        """Do again what this warp marked with an LSE of NaN or +inf."""
        _, _, panels, N, LQ = sizes
        H = q.shape[2]
        arch.sync_warp()
        unit, last = self.schedule.start(block, *sizes), self.schedule.start(block + 1, *sizes)
        while unit < last:
            pan, p0, p1 = stretch(unit, last, N)
            phase = self.schedule.phase(pan, *sizes)
            ib, h, b = place(pan, panels, H)
            i0 = (ib * HALVES + half) * ROWS + w * WARP_QUERIES
            i = cutlass.min(i0 + arch.lane_idx() % WARP_QUERIES, LQ - 1)
            p = p0 + s
            while p < p1:
                n = self.schedule.row(p, phase, interleave, N)
                value = lse[b, n, h, i]
                if i0 < LQ and arch.vote_any_sync(value != value or value == Float32.inf):
                    r = b * row_b + n * row_n
                    self.exact_path(q, k, v, row, deep, given, o, lse, reference, shifts, b, n, h, i0, r, scale)
                p += STREAMS
            unit += p1 - p0
