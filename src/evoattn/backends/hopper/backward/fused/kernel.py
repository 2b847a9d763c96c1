"""The backward without a pair bias in one kernel: dq, dk, dv and each head's part of the gradient of the mask bias.

Nothing is shared between rows n then, so a persistent block takes one (b, n, h) at a time and computes each score once, where
`dq` and `dkdv` compute it twice. All queries of a row stay in shared memory: q, do, what each query brings to the
products, and dq in float32. Three warpgroups take 64 keys each and go through all tiles of 64 queries, on transposed scores as
`dkdv` does; dS goes through shared memory into the product for dq.

The warpgroups begin at different tiles, and add to each tile's dq in turn, always in the same order: warpgroup s after s + 1,
cyclically. Each begins with a third of the tiles of its own, where there are three, to which it is the first to add.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.backward.common import TILE, fake_words, narrow
from evoattn.backends.hopper.backward.fused.mma import FIRST, GROUPS, LAST, Rings
from evoattn.backends.hopper.backward.fused.producer import FusedProducer
from evoattn.backends.hopper.host.launch import Kernel, channels, ends, terms
from evoattn.backends.hopper.kernels.primitives import k_major, mn_major, padded
from evoattn.backends.hopper.kernels.ring import Ring, Slot, release
from evoattn.backends.hopper.kernels.schedule import place
from evoattn.backends.hopper.kernels.tile_sizes import QUERIES, ROWS
from evoattn.backends.hopper.kernels.tma import TmaTiles, load_tma


class Arguments(namedtuple("Arguments", "o do k row lse dlse dq dk dv dmask ends scale row_b row_n")):
    """The arguments of the kernel, but for q and v, which the copy engine alone reads.

    o, do, k, dq, dk, dv: [b,n,h,l,d]. row: terms of the key-wise bias, [r, keys * TERMS]; row n of batch b has
    r = b * row_b + n * row_n, which must cover whole tiles of 64 keys. lse, dlse: [b,n,h,q]. dmask: float32 [b,n,h,k], or None.
    ends [r]: the number of keys up to the last that is not masked; tiles beyond are cleared, all but the first.
    """


class FusedGradients(FusedProducer, Kernel):
    """One variant of the kernel. Sizes, strides and scale are known when it runs.

    Args:
        dtype: cutlass type of q, k and v.
        channels: D, 32 at most.
        row: whether there is a key-wise bias.
        mask_gradient: whether the gradient of the mask bias is wanted.
        dlse: whether lse has a gradient.
        gate: whether a gate multiplies O. Then `gate.GatePass` has found delta, which comes with dlse, and o is not read.
        tiles: tiles of 64 queries that there is room for.
    """

    def __init__(
        self, dtype: Any, channels: int, *, row: bool, mask_gradient: bool = False, dlse: bool = False, gate: bool = False,
        tiles: int = 8,
    ):  # fmt: skip
        self.dtype, self.channels, self.row = dtype, channels, row
        self.mask_gradient, self.dlse, self.tiles, self.pair = mask_gradient, dlse, tiles, False
        self.gated = gate
        self.D, self.steps = padded(channels), -(-channels // 16)
        self.width = 16 * self.steps
        self.threads = (GROUPS + 1) * 128
        self.name_after(dtype, channels=channels, row=row, mask_gradient=mask_gradient, dlse=dlse, gate=gate, tiles=tiles)

    def layouts(self):
        return (
            k_major(self.dtype, ROWS, self.D, 3 * GROUPS),  # k twice and v, of each warpgroup
            mn_major(self.dtype, self.D, ROWS, 3 * GROUPS),  # the same as right side of dS k
            k_major(self.dtype, QUERIES, self.D, self.tiles),  # q, do
            mn_major(self.dtype, self.D, QUERIES, self.tiles),  # the same as right sides of dS^T q and P^T do
            k_major(self.dtype, 16, QUERIES, 2 * GROUPS * 4),  # dS^T, a warp's 16 keys, twice
            mn_major(self.dtype, QUERIES, ROWS, 2 * GROUPS),  # the same as left side of dS k
        )

    @cute.jit
    def __call__(
        self, q, k, v, o, do, row, lse, dlse, dq, dk, dv, dmask, ends, scale, row_b, row_n, blocks, stream: cuda.CUstream
    ):
        """Launch the kernel; `Arguments` explains the tensors."""
        lk, _, lq, _, _, _ = self.layouts()
        tma_K, tma_V = (load_tma(x, lk, (ROWS, self.D)) for x in (k, v))
        tma_Q, tma_dO = (load_tma(x, lq, (QUERIES, self.D)) for x in (q, do))
        args = Arguments(o, do, k, row, lse, dlse, dq, dk, dv, dmask, ends, scale, row_b, row_n)
        self.kernel(tma_K, tma_V, tma_Q, tma_dO, args).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=self.row
        )

    @cute.kernel
    def kernel(self, tma_K, tma_V, tma_Q, tma_dO, args):
        """The roles of a block's warps, after its shared memory and its share of the work.

        One long function: if its parts move into others, address arithmetic moves too, and ptxas schedules the loops anew.
        """
        D, QT = self.D, self.tiles
        B, N, H, LQ, _ = args.o.shape
        LK = args.k.shape[3]
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        wid = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()
        # ---- shared memory
        smem = SmemAllocator()
        lk, lkt, lq, lqt, ls, lst = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sdO, sK, sdS = new(lq), new(lq), new(lk), new(ls)
        sQt, sdOt = cute.make_tensor(sQ.iterator, lqt.outer), cute.make_tensor(sdO.iterator, lqt.outer)
        sKt, sdSt = cute.make_tensor(sK.iterator, lkt.outer), cute.make_tensor(sdS.iterator, lst.outer)
        across = self.width // 8
        # dq of a tile, as the accumulators hold it, each warp's part in one piece
        sums = smem.allocate_tensor(
            Float32, cute.make_layout((4, 32, across, 4, QT), stride=(1, 4, 128, 128 * across, 512 * across)), 128
        )
        sS = smem.allocate_array(Float32, QT * TILE, byte_alignment=128)
        queries, keys = (Ring.allocate(smem, stages, sleeps=True) for stages in (QT, 2 * GROUPS))
        values_empty, added = (smem.allocate_array(Int64, x) for x in (GROUPS, GROUPS * QT))
        rings = Rings(queries, keys, values_empty, added)
        books = cute.make_tensor(smem.allocate_array(Int32, GROUPS * 32), cute.make_layout((GROUPS * 4, 8), stride=(8, 1)))
        if tid == 0:
            queries.initialize(producers=2, consumers=GROUPS * 4)
            keys.initialize(consumers=4)
            for i in range_constexpr(GROUPS):
                arch.mbarrier_init(values_empty + i, 4)
            for i in range_constexpr(GROUPS * QT):
                arch.mbarrier_init(added + i, 4)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        scale, row_b, row_n, dmask, dq = args.scale, args.row_b, args.row_n, args.dmask, args.dq
        inverse = Float32(1.0) / scale
        # ---- work: rows (b, n, h), one after the other
        NK = (LK + ROWS - 1) // ROWS
        NT = (LQ + QUERIES - 1) // QUERIES
        items = B * N * H
        thirds = (NT // 3, 2 * NT // 3, NT)  # of the tiles of queries: past the last of each

        copy_K, copy_V = (TmaTiles.of(x, (ROWS, D), sK) for x in (tma_K, tma_V))
        copy_Q, copy_dO = TmaTiles.of(tma_Q, (QUERIES, D), sQ), TmaTiles.of(tma_dO, (QUERIES, D), sdO)
        sizes = (N, H, NK, NT, LQ, thirds)
        if wid >= GROUPS * 4:
            # ================= one warp brings in, three find the statistics of a third of the tiles each
            arch.setmaxregister_decrease(56)
            s = wid - GROUPS * 4
            if s == GROUPS:
                self.produce(bid, blocks, items, args, sizes, (copy_K, copy_V, copy_Q, copy_dO), rings)
            else:
                self.produce_statistics(s, bid, blocks, items, args, sizes, inverse, sS, queries, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(152)
            s, w, wt = wid // 4, wid % 4, tid % 128
            g, t4 = lane // 4, lane % 4
            mma_dQ = self.transposed(True)
            operands, row = self.fragments((sQ, sdO, sQt, sdOt, sS, sK), QT, wt, t4, lane)
            tdQrS = mma_dQ.make_fragment_A(mma_dQ.get_slice(wt).partition_A(sdSt))
            tdQrK = mma_dQ.make_fragment_B(mma_dQ.get_slice(wt).partition_B(narrow(sKt, self.width)))
            acc_dQ = mma_dQ.make_fragment_C(mma_dQ.partition_shape_C((QUERIES, self.width)))
            of_mask = cute.make_rmem_tensor(2, Float32)
            begin, _ = self.third(s, thirds)
            # What the loop over tiles does not need lives in shared memory: the row, how many rows and how many tiles of keys
            # came before, the round, h, n and b, and how many rounds came before.
            book = books[wid, None]
            if lane == 0:
                book[0], book[1], book[2], book[7] = bid, Int32(0), Int32(0), Int32(0)
            arch.sync_warp()
            at = Int32(0)  # tiles of scores so far
            if const_expr(self.row):
                arch.griddepcontrol_wait()
            while book[0] < items:
                if lane == 0:
                    book[3] = Int32(0)
                    book[4], book[5], book[6] = place(book[0], H, N)
                arch.sync_warp()
                live = self.live_tiles(book[5], book[6], args, NK)
                rounds = (live + GROUPS - 1) // GROUPS
                while book[3] < rounds:
                    r, count, done = book[3], book[1], book[2]
                    flags = Int32(cutlass.select_(r == 0, FIRST, 0)) | Int32(cutlass.select_(r == rounds - 1, LAST, 0))
                    flags = flags | (book[7] & 1)
                    ph = count & 1
                    if r * GROUPS + s < live:
                        buffer = arch.make_warp_uniform(3 * s + (done & 1))
                        if const_expr(self.row):
                            line, first = book[6] * row_b + book[5] * row_n, (r * GROUPS + s) * ROWS + w * 16 + g
                            self.load_row(row.terms, args.row, line, first)
                        keys.consumer_wait(Slot(2 * s + (done & 1), done >> 1 & 1))
                        self.load_keys(operands, row, (buffer, 3 * s + 2), t4, inverse)
                        of_mask.fill(0.0)
                        j = begin
                        for t in cutlass.range(NT, unroll=1):
                            j = arch.make_warp_uniform(j)
                            at, buffer = arch.make_warp_uniform(at), arch.make_warp_uniform(buffer)
                            to = sdS[None, None, (2 * s + (at & 1)) * 4 + w]
                            queries.consumer_wait(Slot(j, ph))
                            warpgroup.fence()
                            self.scores(operands, 0, j)
                            warpgroup.commit_group()
                            warpgroup.wait_group(0)
                            if t == 0:
                                release(values_empty + s, lane)  # a product has used v: only then has it left shared memory
                            # ---- the first half of the tile's queries
                            P, dS = self.gradient(operands, scale, of_mask)
                            self.leave(dS, to, 0, lane)
                            warpgroup.fence()
                            self.scores(operands, 1, j)
                            warpgroup.commit_group()
                            self.products(operands, P, dS, 0, j, t > 0)
                            warpgroup.commit_group()
                            warpgroup.wait_group(1)
                            # ---- the second half, and dq of the tile
                            P, dS = self.gradient(operands, scale, of_mask)
                            self.leave(dS, to, 1, lane)
                            arch.fence_proxy("async.shared", space="cta")
                            warpgroup.wait_group(0)
                            warpgroup.fence()
                            self.products(operands, P, dS, 1, j, started=True)
                            arch.barrier(barrier_id=1 + s, number_of_threads=128)
                            self.query_products(acc_dQ, tdQrS, tdQrK, 2 * s + (at & 1), buffer)
                            warpgroup.commit_group()
                            warpgroup.wait_group(0)
                            tile = sums[None, lane, None, w, j]
                            self.add_up(acc_dQ, flags, s, j, NT, tile, rings, dq, book, w, scale, lane)
                            at += 1
                            j += 1
                            if j == NT:
                                j = Int32(0)
                        keys.consumer_release(2 * s + (book[2] & 1), lane)
                        # ---- dk and dv go through what the next tile's dS will overwrite, and nobody reads any more
                        h, n, b = book[4], book[5], book[6]
                        first = (book[3] * GROUPS + s) * ROWS + w * 16
                        if const_expr(self.mask_gradient):
                            self.store_sums(of_mask, dmask[b, n, h, None], first + g, t4)
                        room = cute.recast_ptr(sdS[None, None, (2 * s + (at & 1)) * 4 + w].iterator, dtype=self.dtype)
                        self.write(operands.acc_dK, scale, room, args.dk[b, n, h, None, None], first, lane)
                        self.write(operands.acc_dV, Float32(1.0), room, args.dv[b, n, h, None, None], first, lane)
                        if lane == 0:
                            book[2] = book[2] + 1
                    else:
                        # no keys are left for this warpgroup: it adds nothing, in its turn
                        j = begin
                        for _ in cutlass.range(NT, unroll=1):
                            queries.consumer_wait(Slot(j, ph))
                            tile = sums[None, lane, None, w, j]
                            self.add_up(None, flags, s, j, NT, tile, rings, dq, book, w, scale, lane)
                            j += 1
                            if j == NT:
                                j = Int32(0)
                    arch.sync_warp()
                    if lane == 0:
                        book[3] = book[3] + 1
                        book[7] = book[7] + 1
                    arch.sync_warp()
                if lane == 0:
                    book[0] = book[0] + blocks
                    book[1] = book[1] + 1
                arch.sync_warp()

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__` when it is compiled, without the stream."""
        size = cute.sym_int
        B, N, H, Q, KL = (size() for _ in range(5))
        of_q = [channels(self.dtype, (B, N, H, length), self.channels) for length in (Q, KL, KL, Q, Q, Q, KL, KL)]
        lse, dlse = fake_words((B, N, H, Q)), fake_words((B, N, H, Q))
        dmask = fake_words((B, N, H, KL)) if self.mask_gradient else None
        numbers = (Float32(0), Int32(0), Int32(0), Int32(0))
        of_rows = ends() if self.row else None
        return *of_q[:5], terms(self.dtype), lse, dlse, *of_q[5:], dmask, of_rows, *numbers
