"""The backward kernel of the queries: dq and d(pair bias).

A persistent block owns a panel, 64 queries of one (b, h), and loops over rows n. Two to four warpgroups split the keys; each
keeps its part of d(pair bias) in registers, so that it is written once a panel and block, and the pair bias itself, in float32,
in shared memory. dq of a row is summed over the warpgroups through shared memory, by one warp while they go on to the next row,
or by themselves in turn (`reduce`).

More keys than a block has room for are split among the blocks of a cluster, which work on the same queries and rows n. dq of a
row goes from the last block to the first, each adding its own part; the first writes it, and the statistics.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.backward.common import fake_pair, fake_words, narrow, tile_copy, tile_parts, unseen
from evoattn.backends.hopper.backward.dq.producer import QueryProducer
from evoattn.backends.hopper.backward.dq.reduce import QueryReduce
from evoattn.backends.hopper.backward.schedule import change_of, reached, share
from evoattn.backends.hopper.backward.variants import query_interleave, query_sums
from evoattn.backends.hopper.host.launch import Kernel, channels, live_rows, terms
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.primitives import LOG2E, coefficients, k_major, mn_major, multiply, packed, padded, release
from evoattn.backends.hopper.kernels.schedule import place, stretch
from evoattn.backends.hopper.kernels.tile_sizes import ROWS, SLICE

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class QueryGradients(QueryReduce, QueryProducer, Kernel):
    """One variant of the kernel. Sizes, strides and scale are known when it runs.

    Args:
        dtype: cutlass type of q, k and v.
        channels: D.
        pair, row: whether there is a pair bias, a key-wise bias.
        bias: cutlass type of the pair bias, if it is not dtype.
        bias_gradient: whether d(pair bias) is needed.
        groups, slices: warpgroups, and slices of 32 keys of each: groups * slices * 32 keys of a block at most.
        stage, stages: slices of a stage of keys, and stages of a warpgroup.
        cluster: blocks that share the keys.
        dlse: whether lse has a gradient.
        gate: whether a gate multiplies O. Then `gate.GatePass` has found delta, which comes with dlse, and o is not read.
        partial: whether each block leaves its part of d(pair bias) instead of adding it to what the others found.
        vector: whether lines of the pair bias start on 4 bytes, and the number of keys is even.
        skips: whether rows whose keys are all masked are left out, except the first of a block's stretch. `dkdv` leaves them
            out too, and clears their dq. If keys are interleaved (`query_interleave`), a row that a mask cuts short can end
            early: after half of a warpgroup's tiles or any later tile (`exits`).
        timed: whether blocks count the time in which they change to another panel (`schedule`), where there is a pair bias.
            Clusters do not: they gained nothing, and wait for L2, and for their rows in step.
    """

    def __init__(
        self,
        dtype: Any,
        channels: int,
        *,
        pair: bool,
        row: bool,
        bias: Any = None,
        bias_gradient: bool,
        dlse: bool = False,
        gate: bool = False,
        partial: bool = False,
        groups: int = 3,
        slices: int = 4,
        stage: int = 2,
        stages: int = 3,
        cluster: int = 1,
        vector: bool = True,
        skips: bool = False,
        timed: bool = True,
    ):
        self.dtype, self.channels, self.pair, self.row, self.bias_gradient = dtype, channels, pair, row, bias_gradient
        self.bias = dtype if bias is None else bias
        self.groups, self.slices, self.stage, self.stages, self.vector = groups, slices, stage, stages, vector
        self.cluster = cluster
        self.D, self.steps = padded(channels), -(-channels // 16)
        self.width = 16 * self.steps
        self.keys = stage * SLICE
        self.tiles = slices // stage
        self.interleave = query_interleave(channels, slices, stage)
        # tiles a row may end after
        self.exits = tuple(range(-(-self.tiles // 2), self.tiles)) if skips and self.interleave else ()
        self.warp_sums_dq = query_sums(channels, pair, groups, slices, cluster)
        # Warps that bring in keys. One for the queries follows, and one that sums dq if `warp_sums_dq`.
        self.key_producers = 2 if self.warp_sums_dq or groups == 4 else groups
        if self.exits and self.key_producers < groups:
            raise ValueError("a warp that brings in the keys of two warpgroups counts the tiles of one")
        self.gated = gate
        self.dlse, self.partial, self.skips = dlse, partial, skips
        self.timed = timed and pair and cluster == 1
        self.threads = (groups + 1) * 128
        self.registers = {2: (240, 24), 3: (160, 32), 4: (112, 32)}[groups]
        options = {"pair": pair, "row": row, "bias_gradient": bias_gradient, "dlse": dlse, "partial": partial, "skips": skips}
        options["gate"] = gate
        tiles = {"groups": groups, "slices": slices, "stage": stage, "stages": stages, "cluster": cluster}
        other = None if self.bias is dtype else self.bias
        self.name_after(dtype, channels=channels, **options, bias=other, **tiles, vector=vector, timed=self.timed)

    def layouts(self):
        n = self.groups * self.stages
        return (
            k_major(self.dtype, ROWS, self.D, 4),  # q, o, do of two rows
            k_major(self.dtype, self.keys, self.D, n),  # k and v
            mn_major(self.dtype, self.D, self.keys, n),  # k as the right side of dS K
            k_major(self.dtype, 16, self.D, 4 if self.warp_sums_dq else self.groups * 4),  # dq, a warp's rows
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        do: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        stats: cute.Tensor,
        dq: cute.Tensor,
        dpair: cute.Tensor,
        order: Any,
        starts: Any,
        scale: Float32,
        row_b: Int32,
        row_n: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        """q, k, v, o, do, dq [b,n,h,l,d]; pair [b|1,h|1,q,k]; row [r, keys * TERMS]; lse, dlse [b,n,h,q].

        Row n of batch b has the key-wise bias r = b * row_b + n * row_n, which must cover cluster * groups * slices * 32 keys.
        stats [b,n,h,tiles of 64 queries * TILE] is left for `dkdv`. dpair [b|1,h|1,q,keys], zeroed, its lines a multiple of
        4 long; or, with `partial`, [(clusters + panels) * cluster, slices * 4, groups * 128, 4] for `bias_sum.PanelSum`.
        order [b,2,n] and starts [b, panels + 2] as in `live_rows`, or None.
        """
        lq, lk, _, lo = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        aQ, tQ = tile_copy(load, q, lq, (ROWS, self.D))
        aG, tG = tile_copy(load, do, lq, (ROWS, self.D))
        aO, tO = tile_copy(load, o, lq, (ROWS, self.D))
        aK, tK = tile_copy(load, k, lk, (self.keys, self.D))
        aV, tV = tile_copy(load, v, lk, (self.keys, self.D))
        aR, tR = tile_copy(store, dq, lo, (16, self.D))
        tiles = (aQ, tQ, aG, tG, aO, tO, aK, tK, aV, tV, aR, tR)
        self.kernel(*tiles, q, k, pair, row, lse, dlse, stats, dpair, order, starts, scale, row_b, row_n).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.row,
        )

    @cute.kernel
    def kernel(
        self,
        aQ: cute.CopyAtom,
        tQ: cute.Tensor,
        aG: cute.CopyAtom,
        tG: cute.Tensor,
        aO: cute.CopyAtom,
        tO: cute.Tensor,
        aK: cute.CopyAtom,
        tK: cute.Tensor,
        aV: cute.CopyAtom,
        tV: cute.Tensor,
        aR: cute.CopyAtom,
        tR: cute.Tensor,
        gQ: cute.Tensor,
        gK: cute.Tensor,
        pair: cute.Tensor,
        row: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor,
        stats: cute.Tensor,
        dpair: cute.Tensor,
        order: Any,
        starts: Any,
        scale: Float32,
        row_b: Int32,
        row_n: Int32,
    ):
        if const_expr(not self.skips):
            arch.griddepcontrol_launch_dependents()  # `dkdv` comes to each processor that is through
        D, ST, WG, SL, CL = self.D, self.stages, self.groups, self.stage, self.cluster
        B, N, H, LQ, _ = gQ.shape
        LK = gK.shape[3]
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        rank = Int32(0)  # of the block in its cluster; what follows numbers clusters where it says blocks
        if const_expr(CL > 1):
            rank = arch.make_warp_uniform(arch.block_idx_in_cluster())
            bid, blocks = bid // CL, blocks // CL
        wid = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()
        # ---- shared memory
        smem = SmemAllocator()
        lq, lk, lkt, lo = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sK, sV, sX = new(lq), new(lk), new(lk), new(lo)
        sKt = cute.make_tensor(sK.iterator, lkt.outer)
        panel: Any = (
            smem.allocate_tensor(
                Float32, cute.make_layout((4, 128, 4 * self.slices, WG), stride=(1, 4, 512, 2048 * self.slices)), 128
            )
            if const_expr(self.pair)
            else None
        )
        across = self.channels // 8
        parts = WG if self.warp_sums_dq else WG - 1
        part = smem.allocate_tensor(Float32, cute.make_layout((4, 128, across, parts), stride=(1, 4, 512, 512 * across)), 128)
        inbox = smem.allocate_array(Float32, 512 * across if CL > 1 else 4, byte_alignment=128)
        unit = self.keys * TERMS
        pR = smem.allocate_array(self.dtype, WG * ST * unit if self.row else 8, byte_alignment=128)
        pN = smem.allocate_array(Float32, 3 * ROWS, byte_alignment=128)  # -lse, -delta, dlse of a row's queries
        # The rows n that consumers work on, whether another one of the panel follows, and their live tiles of keys: four, since
        # row it + 4 comes when all have taken it + 3, and so left it + 2, for which what was left of it + 1 had to be summed.
        work = cute.make_tensor(smem.allocate_array(Int32, 12), cute.make_layout((4, 3)))
        full = smem.allocate_array(Int64, WG * ST)
        empty = smem.allocate_array(Int64, WG * ST)
        qfull = smem.allocate_array(Int64, 1)
        qempty = smem.allocate_array(Int64, 1)
        summed = smem.allocate_array(Int64, 1)  # the parts of dq of a row have been read
        arrived = smem.allocate_array(Int64, 1)  # dq from the next block of the cluster
        passed = smem.allocate_array(Int64, 1)  # the block before has taken dq over
        left = smem.allocate_array(Int64, 1) if const_expr(self.warp_sums_dq) else None  # all parts of dq of a row are there
        if tid == 0:
            for i in range_constexpr(WG * ST):
                arch.mbarrier_init(full + i, 1)
                arch.mbarrier_init(empty + i, 4)
            arch.mbarrier_init(qfull, 1)
            arch.mbarrier_init(qempty, WG * 4)
            arch.mbarrier_init(summed, 1 if self.warp_sums_dq else 4)
            if const_expr(self.warp_sums_dq):
                arch.mbarrier_init(left, WG * 4)
            if const_expr(CL > 1):
                arch.mbarrier_init(arrived, 1)
                arch.mbarrier_init(passed, 4)
        arch.mbarrier_init_fence()
        self.meet()
        # ---- work: an equal share of the time that all (panel, n) take
        inverse = Float32(1.0) / scale
        NQ = (LQ + ROWS - 1) // ROWS
        panels, change = Int64(B * H * NQ), Int32(0)
        total = panels * N
        each = Int32(share(total, blocks))
        if const_expr(self.timed):
            change = change_of(N, each)
            total += panels * change
            each = Int32(share(total, blocks))
        begin, end = (Int32(cutlass.min(Int64(x) * each, total)) for x in (bid, bid + 1))
        if const_expr(self.timed):
            begin, end = reached(begin, N, change), reached(end, N, change)

        sN = cute.make_tensor(pN, cute.make_layout((ROWS, 3)))

        qS, qG = tile_parts(aQ, tQ, (ROWS, D), sQ)
        gS, gG = tile_parts(aG, tG, (ROWS, D), sQ)
        oS, oG = tile_parts(aO, tO, (ROWS, D), sQ)
        kS, kG = tile_parts(aK, tK, (self.keys, D), sK)
        vS, vG = tile_parts(aV, tV, (self.keys, D), sV)
        xS, xG = tile_parts(aR, tR, (16, D), sX)
        if wid >= WG * 4:
            # ================= warps that bring in keys, one for queries, and perhaps one that sums dq
            arch.setmaxregister_decrease(self.registers[1])
            s = wid - WG * 4
            span, sizes, live = (begin, end, bid, each, change), (N, H, NQ, LQ), (order, starts)
            if s < self.key_producers:
                of_keys = ((aK, kG, kS), (aV, vG, vS))
                self.produce_keys(s, rank, lane, span, sizes, row, row_b, row_n, live, pR, full, empty, of_keys)
            elif s == self.key_producers:
                of_rows = ((aQ, qG, qS), (aO, oG, oS), (aG, gG, gS))
                self.produce_rows(rank, lane, span, sizes, live, lse, dlse, stats, inverse, sN, work, qfull, qempty, of_rows)
            elif const_expr(self.warp_sums_dq):
                self.sum_rows((part, left, summed), (sX, aR, xS, xG), span, sizes, work, scale, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(self.registers[0])
            s, w, wt = wid // 4, wid % 4, tid % 128
            g, t4 = lane // 4, lane % 4
            S_K, P_D = multiply(self.dtype, False, K, SLICE), multiply(self.dtype, False, MN, self.width)
            fK = S_K.make_fragment_B(S_K.get_slice(wt).partition_B(cute.local_tile(sK, (SLICE, D), (None, 0, None))))
            S_S = multiply(self.dtype, True, K, SLICE)
            fG = S_S.make_fragment_A(S_S.get_slice(wt).partition_A(sQ))
            fV = S_K.make_fragment_B(S_K.get_slice(wt).partition_B(cute.local_tile(sV, (SLICE, D), (None, 0, None))))
            fKt = P_D.make_fragment_B(P_D.get_slice(wt).partition_B(narrow(sKt, self.width)))
            fR = None
            if const_expr(self.row):
                # a key's terms fill 8 of 16 channels; the other 8 read the same numbers again and meet zeros
                sT = cute.make_tensor(
                    pR,
                    cute.make_layout(
                        ((8, 4), (8, 2), (SL, WG * ST)), stride=((TERMS, 8 * TERMS), (1, 0), (SLICE * TERMS, unit))
                    ),
                )
                fR = S_K.make_fragment_B(S_K.get_slice(wt).partition_B(sT))
            S = S_K.make_fragment_C(S_K.partition_shape_C((ROWS, SLICE)))
            T = S_K.make_fragment_C(S_K.partition_shape_C((ROWS, SLICE)))
            R = P_D.make_fragment_C(P_D.partition_shape_C((ROWS, self.width)))
            rQ, rG, rO = (S_K.make_fragment_A(S_K.partition_shape_A((ROWS, D))) for _ in range(3))
            ones = S_K.make_fragment_A(S_K.partition_shape_A((ROWS, 16)))
            coefficients(ones, inverse, t4, self.dtype)
            # a zero that the compiler cannot see through: a shared known zero costs 3 instructions a slice in another product
            words = packed(ones)
            words[2] = words[3] = unseen(Int32(0))
            ldm = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), S_K).get_slice(wt)
            rows = ldm.partition_S(sQ)
            db = cute.make_rmem_tensor((16, self.slices if self.bias_gradient else 1), Float32)
            nl, nd = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            st, ph, qp, it, turn, at = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), begin
            mine = panel[None, wt, None, s] if const_expr(self.pair) else None
            operands = (S, T, R, rQ, fG, ones, fK, fV, fKt, fR)
            arriving, bars = (ldm, rows, rQ, rG, rO, nl, nd, sN), (full, empty, qfull)
            first_key = self.key(0, rank * WG + s) + 2 * t4
            while at < end:
                pan, n0, n1 = stretch(at, end, N)
                at += n1 - n0
                i, h, b = place(pan, NQ, H)
                q0 = i * ROWS + w * 16 + g
                if const_expr(self.pair):
                    self.load_panel(mine, pair, b % pair.shape[0], h % pair.shape[1], q0, first_key, LQ, LK, inverse)
                if const_expr(self.bias_gradient):
                    db.fill(0.0)
                qp = self.next_rows(arriving, qfull, qp, wid, lane)
                arch.mbarrier_wait(full + s * ST + st, ph)
                self.preload(S, mine, 0)
                warpgroup.fence()
                self.scores(S, T, rQ, fG[None, None, None, 2 + (qp ^ 1)], ones, fK, fV, fR, 0, s * ST + st)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                release(qempty, lane)  # a product has used q: only then has it left shared memory
                more, rows_left = Boolean(True), n1 - n0
                while more:
                    if const_expr(self.skips):
                        more = work[it % 4, 1] > 0
                    else:
                        rows_left -= 1
                        more = rows_left > 0
                    so, st = arch.make_warp_uniform(s * ST), arch.make_warp_uniform(st)
                    tiles = Int32(self.tiles)
                    if const_expr(len(self.exits) > 0):
                        tiles = arch.make_warp_uniform(self.live_tiles(work[it % 4, 2], rank, s))
                    st, ph, qp = self.tiles_of_row(
                        0, tiles, more, operands, arriving, db, mine, bars, scale * LOG2E, so, st, ph, qp, LQ, wid, lane
                    )
                    if const_expr(self.warp_sums_dq):
                        self.leave_part(R, part, summed, s, it, wt)
                        self.give_back_queries(qempty, more, lane)
                        arch.sync_warp()
                        release(left, lane)
                    else:
                        to, out = (i * 4 + w, h, work[it % 4, 0], b), (sX, aR, xS, xG)
                        sums = (part, summed, inbox, arrived, passed)
                        self.sum_in_turn(R, sums, qempty, out, to, scale, s, turn, it, more, rank, wid, wt, lane)
                        turn += 1
                        if turn == WG:
                            turn = Int32(0)
                    it += 1
                if const_expr(self.bias_gradient):
                    if const_expr(self.partial):
                        self.leave(db, dpair, (bid + pan) * CL + rank, tid)
                    else:
                        self.flush(db, dpair, b % dpair.shape[0], h % dpair.shape[1], q0, first_key, LQ, LK, t4)
            if const_expr(not self.warp_sums_dq):
                arch.cp_async_bulk_wait_group(0)
        if const_expr(CL > 1):
            self.meet()  # no block leaves while another one may still write to its shared memory

    def arguments(self) -> tuple[Any, ...]:
        """What stands for the arguments of `__call__` when it is compiled, without the stream."""
        size = cute.sym_int
        B, N, H, Q, KL = (size() for _ in range(5))
        q, k, v, o, do, dq = (channels(self.dtype, (B, N, H, length), self.channels) for length in (Q, KL, KL, Q, Q, Q))
        lse, dlse = fake_words((B, N, H, Q)), fake_words((B, N, H, Q))
        dpair = fake_words((size(), size(), Q, size()), 16)
        if self.partial:
            dpair = fake_words((size(), self.slices * 4, self.groups * 128, 4), 16)
        return (
            *(q, k, v, o, do),
            *(fake_pair(self.bias, Q, KL, self.vector), terms(self.dtype), lse, dlse, fake_words((B, N, H, size()), 16)),
            *(dq, dpair, *(live_rows() if self.skips else (None, None))),
            *(Float32(0), Int32(0), Int32(0), Int32(0)),
        )
