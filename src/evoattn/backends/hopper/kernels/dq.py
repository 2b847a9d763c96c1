"""The backward kernel of the queries: dq and d(pair bias).

A persistent block owns a panel, 64 queries of one (b, h), and loops over rows n. Two to four warpgroups split the keys; each
keeps its part of d(pair bias) in registers, so that it is written once a panel and block, and the pair bias itself, in float32,
in shared memory. dq of a row is summed over the warpgroups through shared memory, by one warp while they go on to the next row,
or by themselves in turn (`reduce`).

More keys than a block has room for are split among the blocks of a cluster, which work on the same queries and rows n. dq of a
row goes from the last block to the first, each adding its own part; the first writes it, and the statistics.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.kernels.dq_consumer import (
    QueryRings,
    QueryRow,
    add_part,
    fragments,
    live_tiles,
    load_bias,
    load_pair_bias,
    next_queries,
    release_queries,
    row_tiles,
    scores,
    slice_key,
    store_part,
    sync_cluster,
)
from evoattn.backends.hopper.kernels.dq_producer import produce_keys, produce_rows
from evoattn.backends.hopper.kernels.dq_sum import Sums, leave_dq, sum_in_turn, sum_rows
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.launch import Kernel, floats, lines, live_rows, pair_bias, sizes
from evoattn.backends.hopper.lib.copies import TmaTiles, load_tma, store_tma
from evoattn.backends.hopper.lib.primitives import LOG2E, k_major, mn_major, padded
from evoattn.backends.hopper.lib.ring import Ring, Slot, release
from evoattn.backends.hopper.lib.schedule import change_of, place, reached, share, stretch
from evoattn.backends.hopper.tiles import ROWS, SLICE, query_interleave, query_sums

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class QueryArguments(namedtuple("QueryArguments", "q k pair row lse dlse stats dpair order starts scale row_b row_n")):
    """The arguments of the kernel, but for the tensors that the copy engine reads and writes: v, o, dO and dq.

    q, k: [b,n,h,l,d]. pair: the pair bias, [b|1,h|1,q,k]. row: terms of the key-wise bias, [r, keys * TERMS]; row n of batch b
    has r = b * row_b + n * row_n, which must cover cluster * groups * slices * 32 keys. lse, dlse: [b,n,h,q]. stats: left for
    `dkdv`, [b,n,h,tiles of 64 queries * TILE]. dpair: [b|1,h|1,q,keys], zeroed, its lines a multiple of 4 long; or, with
    `partial`, [(clusters + panels) * cluster, slices * 4, groups * 128, 4] for `bias_sum.PanelSum`. order, starts: [b,2,n] and
    [b, panels + 2] as in `live_rows`, or None.
    """


@dataclasses.dataclass(frozen=True)
class QueryGradients(Kernel):
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

    dtype: Any
    channels: int
    _: dataclasses.KW_ONLY
    pair: bool
    row: bool
    bias: Any = None
    bias_gradient: bool
    dlse: bool = False
    gate: bool = False
    partial: bool = False
    groups: int = 3
    slices: int = 4
    stage: int = 2
    stages: int = 3
    cluster: int = 1
    vector: bool = True
    skips: bool = False
    timed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", self.bias or self.dtype)
        object.__setattr__(self, "timed", self.timed and self.pair and self.cluster == 1)
        if self.exits and self.key_producers < self.groups:
            raise ValueError("a warp that brings in the keys of two warpgroups counts the tiles of one")

    @property
    def steps(self) -> int:
        """Products of 16 channels."""
        return -(-self.channels // 16)

    @property
    def keys(self) -> int:
        """Keys of a stage."""
        return self.stage * SLICE

    @property
    def tiles(self) -> int:
        """Stages of keys of a row, of each warpgroup."""
        return self.slices // self.stage

    @property
    def interleave(self) -> int:
        """Slices that each warpgroup takes in turn, or 0."""
        return query_interleave(self.channels, self.slices, self.stage)

    @property
    def exits(self) -> tuple[int, ...]:
        """Tiles after which a row may end."""
        return tuple(range(-(-self.tiles // 2), self.tiles)) if self.skips and self.interleave else ()

    @property
    def warp_sums_dq(self) -> bool:
        """True if a warp that does nothing else sums dq."""
        return query_sums(self.channels, self.pair, self.groups, self.slices, self.cluster)

    @property
    def key_producers(self) -> int:
        """Warps that load keys. One for the queries follows, and one that sums dq if `warp_sums_dq`."""
        return 2 if self.warp_sums_dq or self.groups == 4 else self.groups

    def layouts(self):
        n = self.groups * self.stages
        return (
            k_major(self.dtype, ROWS, padded(self.channels), 4),  # q, o, do of two rows
            k_major(self.dtype, self.keys, padded(self.channels), n),  # k and v
            mn_major(self.dtype, padded(self.channels), self.keys, n),  # k as the right side of dS K
            k_major(self.dtype, 16, padded(self.channels), 4 if self.warp_sums_dq else self.groups * 4),  # dq, a warp's rows
        )

    @cute.jit
    def __call__(
        self, q, k, v, o, do, pair, row, lse, dlse, stats, dq, dpair, order, starts, scale, row_b, row_n, blocks,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel; `QueryArguments` explains the tensors."""
        lq, lk, _, lo = self.layouts()
        tma_Q, tma_dO, tma_O = (load_tma(x, lq, (ROWS, padded(self.channels))) for x in (q, do, o))
        tma_K, tma_V = (load_tma(x, lk, (self.keys, padded(self.channels))) for x in (k, v))
        tma_dQ = store_tma(dq, lo, (16, padded(self.channels)))
        args = QueryArguments(q, k, pair, row, lse, dlse, stats, dpair, order, starts, scale, row_b, row_n)
        self.kernel(tma_Q, tma_dO, tma_O, tma_K, tma_V, tma_dQ, args).launch(
            grid=(blocks, 1, 1),
            block=((self.groups + 1) * 128, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.row,
        )

    @cute.kernel
    def kernel(self, tma_Q, tma_dO, tma_O, tma_K, tma_V, tma_dQ, args):
        """The roles of a block's warps, after its shared memory and its share of the work.

        One long function: if its parts move into others, address arithmetic moves too, and ptxas schedules the loops anew.
        """
        if const_expr(not self.skips):
            arch.griddepcontrol_launch_dependents()  # `dkdv` comes to each processor that is through
        D, ST, WG, CL = padded(self.channels), self.stages, self.groups, self.cluster
        registers = {2: (240, 24), 3: (160, 32), 4: (112, 32)}[WG]  # of a consumer's thread, and of a producer's
        B, N, H, LQ, _ = args.q.shape
        LK = args.k.shape[3]
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
        sB = smem.allocate_array(self.dtype, WG * ST * unit if self.row else 8, byte_alignment=128)
        pN = smem.allocate_array(Float32, 3 * ROWS, byte_alignment=128)  # -lse, -delta, dlse of a row's queries
        # The rows n that consumers work on, whether another one of the panel follows, and their live tiles of keys: four, since
        # row it + 4 comes when all have taken it + 3, and so left it + 2, for which what was left of it + 1 had to be summed.
        work = cute.make_tensor(smem.allocate_array(Int32, 12), cute.make_layout((4, 3)))
        rings = QueryRings(Ring.allocate(smem, WG * ST, sleeps=True), Ring.allocate(smem, 1, sleeps=True))
        summed, arrived, passed = (smem.allocate_array(Int64, 1) for _ in range(3))
        left = smem.allocate_array(Int64, 1) if const_expr(self.warp_sums_dq) else None
        sums = Sums(part, inbox, left, summed, arrived, passed)
        if tid == 0:
            rings.keys.initialize(consumers=4)
            rings.queries.initialize(consumers=WG * 4)
            arch.mbarrier_init(summed, 1 if self.warp_sums_dq else 4)
            if const_expr(self.warp_sums_dq):
                arch.mbarrier_init(left, WG * 4)
            if const_expr(CL > 1):
                arch.mbarrier_init(arrived, 1)
                arch.mbarrier_init(passed, 4)
        arch.mbarrier_init_fence()
        sync_cluster(self)
        # ---- work: an equal share of the time that all (panel, n) take
        scale, pair, dpair = args.scale, args.pair, args.dpair
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

        copy_Q, copy_dO, copy_O = (TmaTiles.of(x, (ROWS, D), sQ) for x in (tma_Q, tma_dO, tma_O))
        copy_K, copy_V = TmaTiles.of(tma_K, (self.keys, D), sK), TmaTiles.of(tma_V, (self.keys, D), sV)
        copy_dQ = TmaTiles.of(tma_dQ, (16, D), sX)
        if wid >= WG * 4:
            # ================= warps that bring in keys, one for queries, and perhaps one that sums dq
            arch.setmaxregister_decrease(registers[1])
            s = wid - WG * 4
            span, sizes = (begin, end, bid, each, change), (N, H, NQ, LQ)
            if s < self.key_producers:
                produce_keys(self, s, rank, lane, args, span, sizes, sB, rings.keys, (copy_K, copy_V))
            elif s == self.key_producers:
                copies = (copy_Q, copy_O, copy_dO)
                produce_rows(self, rank, lane, args, span, sizes, inverse, sN, work, rings.queries, copies)
            elif const_expr(self.warp_sums_dq):
                sum_rows(self, sums, sX, copy_dQ, span, sizes, work, scale, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(registers[0])
            s, w, wt = wid // 4, wid % 4, tid % 128
            g, t4 = lane // 4, lane % 4
            operands, (copy, source, tSrQ, rdO, rO) = fragments(self, (sQ, sK, sV, sKt, sB), inverse, wt, t4)
            db = cute.make_rmem_tensor((16, self.slices if self.bias_gradient else 1), Float32)
            neg_lse, neg_delta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            row = QueryRow(copy, source, tSrQ, rdO, rO, neg_lse, neg_delta, sN)
            slot, qp, it, turn, at = rings.keys.start(), Int32(0), Int32(0), Int32(0), begin
            mine = panel[None, wt, None, s] if const_expr(self.pair) else None
            first_key = slice_key(self, 0, rank * WG + s) + 2 * t4
            while at < end:
                pan, n0, n1 = stretch(at, end, N)
                at += n1 - n0
                i, h, b = place(pan, NQ, H)
                q0 = i * ROWS + w * 16 + g
                if const_expr(self.pair):
                    load_pair_bias(self, mine, pair, b % pair.shape[0], h % pair.shape[1], q0, first_key, LQ, LK, inverse)
                if const_expr(self.bias_gradient):
                    db.fill(0.0)
                here = rings.at(s * ST, ST)
                qp = next_queries(self, row, rings, qp, wid, lane)
                here.keys.consumer_wait(slot)
                load_bias(self, operands.acc_S, mine, 0)
                warpgroup.fence()
                scores(self, operands, qp ^ 1, 0, here.keys, slot.stage)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                rings.queries.consumer_release(0, lane)  # a product has used q: only then has it left shared memory
                more, rows_left = Boolean(True), n1 - n0
                while more:
                    if const_expr(self.skips):
                        more = work[it % 4, 1] > 0
                    else:
                        rows_left -= 1
                        more = rows_left > 0
                    here = rings.at(arch.make_warp_uniform(s * ST), ST)
                    slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
                    tiles = Int32(self.tiles)
                    if const_expr(len(self.exits) > 0):
                        tiles = arch.make_warp_uniform(live_tiles(self, work[it % 4, 2], rank, s))
                    c = scale * LOG2E
                    slot, qp = row_tiles(self, 0, tiles, more, operands, row, db, mine, here, c, slot, qp, LQ, wid, lane)
                    if const_expr(self.warp_sums_dq):
                        leave_dq(self, operands.acc_dQ, sums, s, it, wt)
                        release_queries(self, rings, more, lane)
                        arch.sync_warp()
                        release(left, lane)
                    else:
                        to, acc_dQ = (i * 4 + w, h, work[it % 4, 0], b), operands.acc_dQ
                        sum_in_turn(self, acc_dQ, sums, rings, sX, copy_dQ, to, scale, s, turn, it, more, rank, wid, wt, lane)
                        turn += 1
                        if turn == WG:
                            turn = Int32(0)
                    it += 1
                if const_expr(self.bias_gradient):
                    if const_expr(self.partial):
                        store_part(self, db, dpair, (bid + pan) * CL + rank, tid)
                    else:
                        add_part(self, db, dpair, b % dpair.shape[0], h % dpair.shape[1], q0, first_key, LQ, LK, t4)
            if const_expr(not self.warp_sums_dq):
                arch.cp_async_bulk_wait_group(0)
        if const_expr(CL > 1):
            sync_cluster(self)  # no block leaves while another one may still write to its shared memory

    def arguments(self) -> tuple[Any, ...]:
        B, N, H, LQ, LK, words = sizes(6)
        q, k, v, o, do, dq = (lines(self.dtype, B, N, H, length, self.channels) for length in (LQ, LK, LK, LQ, LQ, LQ))
        pair = pair_bias(self.bias, LQ, LK, vector=self.vector)
        lse, dlse, stats = floats(B, N, H, LQ), floats(B, N, H, LQ), floats(B, N, H, words, align=16)
        dpair = floats(*sizes(2), LQ, *sizes(1), align=16)
        if self.partial:
            dpair = floats(*sizes(1), self.slices * 4, self.groups * 128, 4, align=16)
        live = live_rows() if self.skips else (None, None)
        numbers = (Float32(0), Int32(0), Int32(0), Int32(0))
        return q, k, v, o, do, pair, lines(self.dtype, *sizes(2)), lse, dlse, stats, dq, dpair, *live, *numbers
