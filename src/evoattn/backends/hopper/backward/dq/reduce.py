"""dq of a row in the kernel of the queries: the sum of what its warpgroups, and the blocks of a cluster, have found.

Each warpgroup leaves its part in shared memory and goes on to the next row, while a warp that does nothing else sums them:
warpgroups that do so in turn wait for one another at every row's end. Where one warp takes longer than a row (`query_sums`)
they do it in turn all the same, and always in a cluster: there a row's sum goes through all blocks before the next can be left.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.backward.common import store_remote, store_rows
from evoattn.backends.hopper.backward.dq.consumer import QueryConsumer
from evoattn.backends.hopper.kernels.ring import release, sleep_until
from evoattn.backends.hopper.kernels.schedule import place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import ROWS

__all__ = ["QueryReduce", "Sums"]


class Sums(namedtuple("Sums", "part inbox left summed arrived passed")):
    """The warpgroups' parts of dq of a row, and the barriers of their sum.

    left: all parts are there. summed: they have been read. inbox, arrived, passed: dq of the next block of the cluster, the
    barrier that counts its bytes, and the one that says that the block before has taken over that of this block.
    """


class QueryReduce(QueryConsumer):
    """The end of a row; `QueryGradients` explains the attributes."""

    skips: bool

    @cute.jit
    def leave_part(self, acc_dQ, sums, s: Int32, it: Int32, wt: Int32):
        """Leave this warpgroup's part of dq of row `it` at place s, once those of the row before have been read."""
        if it > 0:
            arch.mbarrier_wait(sums.summed, (it - 1) & 1)
        for x in range_constexpr(self.channels // 8):
            cute.autovec_copy(self.four(acc_dQ, x), sums.part[None, wt, x, s])

    @cute.jit
    def sum_rows(self, sums, sX: cute.Tensor, copy_dQ, span, sizes, work: cute.Tensor, scale: Float32, lane: Int32):
        """Sum and write dq of all rows of a block, always in the same order, by one warp."""
        begin, end, *_ = span
        N, H, NQ, _ = sizes
        it, at = Int32(0), begin
        while at < end:
            pan, n0, n1 = stretch(at, end, N)
            at += n1 - n0
            i, h, b = place(pan, NQ, H)
            more, rows_left = Boolean(True), n1 - n0
            while more:
                sleep_until(sums.left, it & 1)
                n = work[it % 4, 0]
                if const_expr(self.skips):
                    more = work[it % 4, 1] > 0
                else:
                    rows_left -= 1
                    more = rows_left > 0
                arch.cp_async_bulk_wait_group(0, read=True)
                arch.sync_warp()
                for w in cutlass.range(4, unroll=1):
                    for y in range_constexpr(self.steps):
                        tile = cute.local_tile(sX[None, None, w], (16, 16), (0, y))
                        store_rows(self.sum_of(sums.part, w * 32 + lane, y), scale, tile, lane, self.dtype)
                arch.sync_warp()
                release(sums.summed, lane)
                arch.fence_proxy("async.shared", space="cta")
                arch.sync_warp()
                for w in range_constexpr(4):
                    copy_dQ.store(w, (i * 4 + w, h, n, b))
                arch.cp_async_bulk_commit_group()
                it += 1
        arch.cp_async_bulk_wait_group(0)

    def sum_of(self, part: cute.Tensor, wt: Any, y: int) -> cute.Tensor:
        """Channels 16 y to 16 y + 15 of dq, as thread wt of a warpgroup holds them: 8 numbers, zero past the channels."""
        dq = cute.make_rmem_tensor(8, Float32)
        dq.fill(0.0)
        for x in range(min(2, self.channels // 8 - 2 * y)):
            cute.autovec_copy(part[None, wt, 2 * y + x, 0], self.four(dq, x))
            for s in range(1, self.groups):
                self.add(dq, x, part[None, wt, 2 * y + x, s])
        return dq

    def four(self, R, x):
        """Four neighbours of an accumulator."""
        return cute.make_tensor(R.iterator + 4 * x, cute.make_layout(4))

    def add(self, R, x, others):
        """Four more numbers of dq."""
        other = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(others, other)
        for z in range(4):
            R[4 * x + z] = R[4 * x + z] + other[z]

    @cute.jit
    def sum_in_turn(
        self, acc_dQ, sums, rings, sX: cute.Tensor, copy_dQ, to, scale: Float32, s: Int32, turn: Int32, it: Int32,
        more: Boolean, rank: Int32, wid: Int32, wt: Int32, lane: Int32,
    ):  # fmt: skip
        """One warpgroup in turn adds what the others of its block leave, and what the next block of the cluster has found."""
        WG = self.groups
        if s != turn:
            slot = s - turn - 1
            if slot < 0:
                slot += WG
            self.leave_part(acc_dQ, sums, slot, it, wt)
            self.release_queries(rings, more, lane)
            arch.barrier_arrive(barrier_id=1 + turn, number_of_threads=WG * 128)
        else:
            self.release_queries(rings, more, lane)
            arch.barrier(barrier_id=1 + turn, number_of_threads=WG * 128)
            for y in range_constexpr(WG - 1):
                for x in range_constexpr(self.channels // 8):
                    self.add(acc_dQ, x, sums.part[None, wt, x, y])
            arch.cp_async_bulk_wait_group(0, read=True)
            arch.sync_warp()
            release(sums.summed, lane)
            if const_expr(self.cluster > 1):
                if rank < self.cluster - 1:
                    self.receive(acc_dQ, sums, rank, it, wt, lane)
                if rank > 0:
                    self.pass_on(acc_dQ, sums, rank, it, wt)
            if rank == 0:
                store_rows(acc_dQ, scale, sX[None, None, wid], lane, self.dtype)
                arch.fence_proxy("async.shared", space="cta")
                arch.sync_warp()
                copy_dQ.store(wid, to)
                arch.cp_async_bulk_commit_group()

    @cute.jit
    def receive(self, acc_dQ, sums, rank: Int32, it: Int32, wt: Int32, lane: Int32):
        """Add dq of the next block of the cluster."""
        if wt == 0:
            arch.mbarrier_arrive_and_expect_tx(sums.arrived, ROWS * self.channels * 4)
        arch.mbarrier_wait(sums.arrived, it & 1)
        for x in range_constexpr(self.channels // 8):
            self.add(acc_dQ, x, cute.make_tensor((sums.inbox + (x * 128 + wt) * 4).align(16), cute.make_layout(4)))
        arch.sync_warp()
        if lane == 0:
            arch.mbarrier_arrive(sums.passed, rank + 1)

    @cute.jit
    def pass_on(self, acc_dQ, sums, rank: Int32, it: Int32, wt: Int32):
        """Give dq to the block before, once that has taken over the row before."""
        if it > 0:
            arch.mbarrier_wait(sums.passed, (it - 1) & 1)
        to = arch.map_dsmem_ptr(sums.inbox, rank - 1).toint()
        barrier = arch.map_dsmem_ptr(sums.arrived, rank - 1).toint()
        for x in range_constexpr(self.channels // 8):
            store_remote(to + (x * 128 + wt) * 16, [acc_dQ[4 * x + z] for z in range(4)], barrier)
