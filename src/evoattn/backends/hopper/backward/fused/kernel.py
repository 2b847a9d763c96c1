"""The backward without a pair bias in one kernel: dq, dk, dv and each head's part of the gradient of the mask bias.

Nothing is shared between rows n then, so a persistent block takes one (b, n, h) at a time and computes each score once, where
`dq` and `dkdv` compute it twice. All queries of a row stay in shared memory: q, do, what each query brings to the
products, and dq in float32. Three warpgroups take 64 keys each and go through all tiles of 64 queries, on transposed scores as
`dkdv` does; dS goes through shared memory into the product for dq.

The warpgroups begin at different tiles, and add to each tile's dq in turn, always in the same order: warpgroup s after s + 1,
cyclically. Each begins with a third of the tiles of its own, where there are three, to which it is the first to add.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.backward.common import TILE, fake_words, narrow, tile_copy, tile_parts
from evoattn.backends.hopper.backward.fused.mma import FIRST, GROUPS, LAST
from evoattn.backends.hopper.backward.fused.producer import FusedProducer
from evoattn.backends.hopper.host.launch import Kernel, channels, ends, terms
from evoattn.backends.hopper.kernels.primitives import k_major, mn_major, multiply, padded, release
from evoattn.backends.hopper.kernels.schedule import place
from evoattn.backends.hopper.kernels.tile_sizes import QUERIES, ROWS, SLICE

K, MN = OperandMajorMode.K, OperandMajorMode.MN


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
        self,
        dtype: Any,
        channels: int,
        *,
        row: bool,
        mask_gradient: bool = False,
        dlse: bool = False,
        gate: bool = False,
        tiles: int = 8,
    ):
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
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        do: cute.Tensor,
        row: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dmask: Any,
        ends: Any,
        scale: Float32,
        row_b: Int32,
        row_n: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        """q, k, v, o, do, dq, dk, dv [b,n,h,l,d]; row [r, keys * TERMS]; lse, dlse [b,n,h,q]; dmask float32 [b,n,h,k], or None.

        Row n of batch b has the key-wise bias r = b * row_b + n * row_n, which must cover whole tiles of 64 keys. ends [r]: how
        many keys it has up to the last that is not masked; tiles beyond are cleared, all but the first.
        """
        lk, _, lq, _, _, _ = self.layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        aK, tK = tile_copy(load, k, lk, (ROWS, self.D))
        aV, tV = tile_copy(load, v, lk, (ROWS, self.D))
        aQ, tQ = tile_copy(load, q, lq, (QUERIES, self.D))
        aG, tG = tile_copy(load, do, lq, (QUERIES, self.D))
        tiles = (aK, tK, aV, tV, aQ, tQ, aG, tG)
        self.kernel(*tiles, o, do, k, row, lse, dlse, dq, dk, dv, dmask, ends, scale, row_b, row_n).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=self.row
        )

    @cute.kernel
    def kernel(
        self,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aG: cute.CopyAtom,
        tG: cute.Tensor,
        o: cute.Tensor,
        do: cute.Tensor,
        gK: cute.Tensor,
        row: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dmask: Any,
        ends: Any,
        scale: Float32,
        row_b: Int32,
        row_n: Int32,
    ):
        D, QT = self.D, self.tiles
        B, N, H, LQ, _ = o.shape
        LK = gK.shape[3]
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        wid = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()
        # ---- shared memory
        smem = SmemAllocator()
        lk, lkt, lq, lqt, ls, lst = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sG, sK, sS = new(lq), new(lq), new(lk), new(ls)
        sQt, sGt = cute.make_tensor(sQ.iterator, lqt.outer), cute.make_tensor(sG.iterator, lqt.outer)
        sKt, sSt = cute.make_tensor(sK.iterator, lkt.outer), cute.make_tensor(sS.iterator, lst.outer)
        across = self.width // 8
        # dq of a tile, as the accumulators hold it, each warp's part in one piece
        sums = smem.allocate_tensor(
            Float32, cute.make_layout((4, 32, across, 4, QT), stride=(1, 4, 128, 128 * across, 512 * across)), 128
        )
        pS = smem.allocate_array(Float32, QT * TILE, byte_alignment=128)
        full = smem.allocate_array(Int64, QT)  # a tile of queries is there
        empty = smem.allocate_array(Int64, QT)
        kfull = smem.allocate_array(Int64, 2 * GROUPS)
        kempty = smem.allocate_array(Int64, 2 * GROUPS)
        vempty = smem.allocate_array(Int64, GROUPS)
        added = smem.allocate_array(Int64, GROUPS * QT)  # a warpgroup has added to dq of a tile
        book = cute.make_tensor(smem.allocate_array(Int32, GROUPS * 32), cute.make_layout((GROUPS * 4, 8), stride=(8, 1)))
        if tid == 0:
            for i in range_constexpr(QT):
                arch.mbarrier_init(full + i, 2)
                arch.mbarrier_init(empty + i, GROUPS * 4)
            for i in range_constexpr(2 * GROUPS):
                arch.mbarrier_init(kfull + i, 1)
                arch.mbarrier_init(kempty + i, 4)
            for i in range_constexpr(GROUPS):
                arch.mbarrier_init(vempty + i, 4)
            for i in range_constexpr(GROUPS * QT):
                arch.mbarrier_init(added + i, 4)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        inverse = Float32(1.0) / scale
        # ---- work: rows (b, n, h), one after the other
        NK = (LK + ROWS - 1) // ROWS
        NT = (LQ + QUERIES - 1) // QUERIES
        items = B * N * H
        thirds = (NT // 3, 2 * NT // 3, NT)  # of the tiles of queries: past the last of each

        kS, kG = tile_parts(aK, tK, (ROWS, D), sK)
        vS, vG = tile_parts(aV, tV, (ROWS, D), sK)
        qS, qG = tile_parts(aQ, tQ, (QUERIES, D), sQ)
        gS, gG = tile_parts(aG, tG, (QUERIES, D), sG)
        sizes, where = (N, H, NK, NT, LQ, thirds), (ends, row_b, row_n)
        if wid >= GROUPS * 4:
            # ================= one warp brings in, three find the statistics of a third of the tiles each
            arch.setmaxregister_decrease(56)
            s = wid - GROUPS * 4
            if s == GROUPS:
                copies = ((aK, kG, kS), (aV, vG, vS), (aQ, qG, qS), (aG, gG, gS))
                self.produce(bid, blocks, items, sizes, where, copies, (full, empty, kfull, kempty, vempty))
            else:
                gradients = (dk, dv, dmask)
                self.produce_statistics(
                    s, bid, blocks, items, sizes, where, o, do, lse, dlse, gradients, inverse, pS, full, empty, lane
                )
        else:
            # ================= consumers
            arch.setmaxregister_increase(152)
            s, w, wt = wid // 4, wid % 4, tid % 128
            g, t4 = lane // 4, lane % 4
            S_K = multiply(self.dtype, False, K, SLICE)
            D_K = self.transposed(True)
            fQ, fG, fQt, fGt, f1 = self.right_sides(sQ, sG, sQt, sGt, pS, QT, wt)
            fS = D_K.make_fragment_A(D_K.get_slice(wt).partition_A(sSt))
            fKt = D_K.make_fragment_B(D_K.get_slice(wt).partition_B(narrow(sKt, self.width)))
            R = D_K.make_fragment_C(D_K.partition_shape_C((QUERIES, self.width)))
            S, T, X, Y = self.accumulators()
            rK, rV, rR, rD = self.left_sides(t4, lane)
            ldm = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), S_K).get_slice(wt)
            rows = ldm.partition_S(sK)
            own = cute.make_rmem_tensor(6, Int32)
            own.fill(0)
            of_mask = cute.make_rmem_tensor(2, Float32)
            begin, _ = self.third(s, thirds)
            # What the loop over tiles does not need lives in shared memory: the row, how many rows and how many tiles of keys
            # came before, the round, h, n and b, and how many rounds came before.
            mine = book[wid, None]
            if lane == 0:
                mine[0], mine[1], mine[2], mine[7] = bid, Int32(0), Int32(0), Int32(0)
            arch.sync_warp()
            at = Int32(0)  # tiles of scores so far
            if const_expr(self.row):
                arch.griddepcontrol_wait()
            while mine[0] < items:
                if lane == 0:
                    mine[3] = Int32(0)
                    mine[4], mine[5], mine[6] = place(mine[0], H, N)
                arch.sync_warp()
                live = self.live_tiles(mine[5], mine[6], where, NK)
                rounds = (live + GROUPS - 1) // GROUPS
                while mine[3] < rounds:
                    r, count, done = mine[3], mine[1], mine[2]
                    flags = Int32(cutlass.select_(r == 0, FIRST, 0)) | Int32(cutlass.select_(r == rounds - 1, LAST, 0))
                    flags = flags | (mine[7] & 1)
                    ph = count & 1
                    if r * GROUPS + s < live:
                        buffer = arch.make_warp_uniform(3 * s + (done & 1))
                        if const_expr(self.row):
                            self.load_row(own, row, mine[6] * row_b + mine[5] * row_n, (r * GROUPS + s) * ROWS + w * 16 + g)
                        barrier = kfull + 2 * s + (done & 1)
                        self.take_rows(ldm, rows, ((buffer, rK), (3 * s + 2, rV)), own, rR, t4, inverse, barrier, done >> 1 & 1)
                        of_mask.fill(0.0)
                        j = begin
                        for t in cutlass.range(NT, unroll=1):
                            j = arch.make_warp_uniform(j)
                            at, buffer = arch.make_warp_uniform(at), arch.make_warp_uniform(buffer)
                            to = sS[None, None, (2 * s + (at & 1)) * 4 + w]
                            arch.mbarrier_wait(full + j, ph)
                            warpgroup.fence()
                            self.scores(S, T, rK, rV, rR, rD, fQ, fG, f1, 0, j)
                            warpgroup.commit_group()
                            warpgroup.wait_group(0)
                            if t == 0:
                                release(vempty + s, lane)  # a product has used v: only then has it left shared memory
                            # ---- the first half of the tile's queries
                            P, dS = self.gradient(S, T, scale, of_mask)
                            self.leave(dS, to, 0, lane)
                            warpgroup.fence()
                            self.scores(S, T, rK, rV, rR, rD, fQ, fG, f1, 1, j)
                            warpgroup.commit_group()
                            self.products(P, dS, X, Y, fQt, fGt, 0, j, t > 0)
                            warpgroup.commit_group()
                            warpgroup.wait_group(1)
                            # ---- the second half, and dq of the tile
                            P, dS = self.gradient(S, T, scale, of_mask)
                            self.leave(dS, to, 1, lane)
                            arch.fence_proxy("async.shared", space="cta")
                            warpgroup.wait_group(0)
                            warpgroup.fence()
                            self.products(P, dS, X, Y, fQt, fGt, 1, j, True)
                            arch.barrier(barrier_id=1 + s, number_of_threads=128)
                            self.query_products(R, fS, fKt, 2 * s + (at & 1), buffer)
                            warpgroup.commit_group()
                            warpgroup.wait_group(0)
                            self.add_up(
                                R, flags, s, j, NT, sums[None, lane, None, w, j], added, empty, dq, mine, w, scale, lane
                            )
                            at += 1
                            j += 1
                            if j == NT:
                                j = Int32(0)
                        release(kempty + 2 * s + (mine[2] & 1), lane)
                        # ---- dk and dv go through what the next tile's dS will overwrite, and nobody reads any more
                        h, n, b = mine[4], mine[5], mine[6]
                        first = (mine[3] * GROUPS + s) * ROWS + w * 16
                        if const_expr(self.mask_gradient):
                            self.store_sums(of_mask, dmask[b, n, h, None], first + g, t4)
                        room = cute.recast_ptr(sS[None, None, (2 * s + (at & 1)) * 4 + w].iterator, dtype=self.dtype)
                        self.write(X, scale, room, dk[b, n, h, None, None], first, lane)
                        self.write(Y, Float32(1.0), room, dv[b, n, h, None, None], first, lane)
                        if lane == 0:
                            mine[2] = mine[2] + 1
                    else:
                        # no keys are left for this warpgroup: it adds nothing, in its turn
                        j = begin
                        for _ in cutlass.range(NT, unroll=1):
                            arch.mbarrier_wait(full + j, ph)
                            self.add_up(
                                None, flags, s, j, NT, sums[None, lane, None, w, j], added, empty, dq, mine, w, scale, lane
                            )
                            j += 1
                            if j == NT:
                                j = Int32(0)
                    arch.sync_warp()
                    if lane == 0:
                        mine[3] = mine[3] + 1
                        mine[7] = mine[7] + 1
                    arch.sync_warp()
                if lane == 0:
                    mine[0] = mine[0] + blocks
                    mine[1] = mine[1] + 1
                arch.sync_warp()

    def arguments(self) -> tuple[Any, ...]:
        """What stands for the arguments of `__call__` when it is compiled, without the stream."""
        size = cute.sym_int
        B, N, H, Q, KL = (size() for _ in range(5))
        of_q = [channels(self.dtype, (B, N, H, length), self.channels) for length in (Q, KL, KL, Q, Q, Q, KL, KL)]
        lse, dlse = fake_words((B, N, H, Q)), fake_words((B, N, H, Q))
        dmask = fake_words((B, N, H, KL)) if self.mask_gradient else None
        numbers = (Float32(0), Int32(0), Int32(0), Int32(0))
        of_rows = ends() if self.row else None
        return *of_q[:5], terms(self.dtype), lse, dlse, *of_q[5:], dmask, of_rows, *numbers
