"""The backward kernel of the queries: dq and d(pair bias).

A persistent block owns a panel at a time: 64 queries of one (b, h). It loops over the rows n of the panel, and over all keys of
a row. It writes dq and the statistics of each row once, and its part of d(pair bias) once a panel.

Two to four warpgroups split the keys. Each holds its part of d(pair bias) in registers, and the pair bias in shared memory in
float32. dq of a row is summed over the warpgroups through shared memory: by one warp while they go on to the next row, or by
themselves in turn (`dq_sum`).

If a block has no room for all keys, the blocks of a cluster split them, and work on the same queries and rows n. dq of a row
goes from the last block to the first, and each adds its part. The first block writes it, and the statistics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.kernels import dq_consumer as consumer
from evoattn.backends.hopper.kernels.dq_producer import produce_keys, produce_rows
from evoattn.backends.hopper.kernels.dq_sum import QuerySizes, Sums, sum_rows
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.launch import KernelVariant, Tensors, select
from evoattn.backends.hopper.lib.copies import TmaTiles, load_tma, store_tma
from evoattn.backends.hopper.lib.primitives import block_and_thread, k_major, mn_major
from evoattn.backends.hopper.lib.ring import Ring
from evoattn.backends.hopper.lib.schedule import Span, change_of, count_units, share
from evoattn.backends.hopper.tiles import MMA_M, SLICE, pad_channels, query_interleave, query_sums

PARAMETERS = "mQ mK mPair mTerms mLSE mdLSE mStats mSums mParts mOrder mStarts scale stride_b stride_n"
"""Those of `QueryGradients.arguments` that the kernel itself reads or writes."""


@dataclasses.dataclass(frozen=True)
class QueryGradients(KernelVariant):
    """One variant of the kernel. Sizes, strides and scale are known when it runs."""

    dtype: Any  # cutlass type of q, k and v
    channels: int  # D
    _: dataclasses.KW_ONLY
    pair: bool  # whether there is a pair bias
    key_bias: bool  # whether there is a key bias
    bias: Any = None  # cutlass type of the pair bias, if it is not dtype
    bias_gradient: bool  # whether d(pair bias) is needed
    dlse: bool = False  # whether lse has a gradient
    # whether a gate multiplies O. Then `GatePass` has found delta, which comes with dlse, and o is not read.
    gate: bool = False
    partial: bool = False  # whether each block leaves its part of d(pair bias) instead of adding it to what the others found
    groups: int = 3  # warpgroups; a block has room for groups * slices * 32 keys
    slices: int = 4  # slices of 32 keys of a warpgroup
    stage_slices: int = 2  # slices of a stage of its ring of keys
    stages: int = 3  # stages of that ring
    cluster: int = 1  # blocks that share the keys
    vector: bool = True  # whether lines of the pair bias start on 4 bytes, and the number of keys is even
    # whether empty rows are skipped, except the first of a block's stretch. `KeyGradients` skips them too,
    # and clears their dq. If keys are interleaved (`query_interleave`), a row that a mask cuts short can end early: after half
    # of a warpgroup's tiles or any later tile (`exits`).
    skips: bool = False
    # whether blocks count the time in which they change to another panel (`schedule`), where there is a pair bias. Clusters
    # do not: they gained nothing, and wait for L2, and for their rows in step.
    timed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", self.bias or self.dtype)
        object.__setattr__(self, "timed", self.timed and self.pair and self.cluster == 1)
        if self.exits and self.key_producers < self.groups:
            raise ValueError("a warp that brings in the keys of two warpgroups counts the tiles of one")

    @property
    def keys(self) -> int:
        """Keys of a stage."""
        return self.stage_slices * SLICE

    @property
    def tiles(self) -> int:
        """Stages of keys of a row, of each warpgroup."""
        return self.slices // self.stage_slices

    @property
    def interleave(self) -> int:
        """Slices that each warpgroup takes in turn, or 0."""
        return query_interleave(self.channels, self.slices, self.stage_slices)

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
            k_major(self.dtype, MMA_M, pad_channels(self.channels), 4),  # q, o, do of two rows
            k_major(self.dtype, self.keys, pad_channels(self.channels), n),  # k and v
            mn_major(self.dtype, pad_channels(self.channels), self.keys, n),  # k as the right side of dS K
            k_major(
                self.dtype, 16, pad_channels(self.channels), 4 if self.warp_sums_dq else self.groups * 4
            ),  # dq, a warp's rows
        )

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        lq, lk, _, lo = self.layouts()
        tma_Q, tma_dO, tma_O = (load_tma(x, lq, (MMA_M, pad_channels(self.channels))) for x in (args.mQ, args.mdO, args.mO))
        tma_K, tma_V = (load_tma(x, lk, (self.keys, pad_channels(self.channels))) for x in (args.mK, args.mV))
        tma_dQ = store_tma(args.mdQ, lo, (16, pad_channels(self.channels)))
        self.kernel(tma_Q, tma_dO, tma_O, tma_K, tma_V, tma_dQ, select(args, PARAMETERS)).launch(
            grid=(args.blocks, 1, 1), block=((self.groups + 1) * 128, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None, stream=stream, min_blocks_per_mp=1,
            use_pdl=self.key_bias,
        )  # fmt: skip

    def allocate(self):
        """The shared memory of a block: tiles, terms of the key bias, rings, sums of dq, and the rows n that are done."""
        ST, WG = self.stages, self.groups
        smem = SmemAllocator()
        lq, lk, lkt, lo = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sK, sV, sdQ = new(lq), new(lk), new(lk), new(lo)
        sKt = cute.make_tensor(sK.iterator, lkt.outer)
        pair_layout = cute.make_layout((4, 128, 4 * self.slices, WG), stride=(1, 4, 512, 2048 * self.slices))
        sPair: Any = smem.allocate_tensor(Float32, pair_layout, 128) if const_expr(self.pair) else None
        across = self.channels // 8
        part_count = WG if self.warp_sums_dq else WG - 1
        part_layout = cute.make_layout((4, 128, across, part_count), stride=(1, 4, 512, 512 * across))
        parts = smem.allocate_tensor(Float32, part_layout, 128)
        inbox = smem.allocate_array(Float32, 512 * across if self.cluster > 1 else 4, byte_alignment=128)
        unit = self.keys * TERMS
        sTerms = smem.allocate_array(self.dtype, WG * ST * unit if self.key_bias else 8, byte_alignment=128)
        stats = smem.allocate_array(Float32, 3 * MMA_M, byte_alignment=128)  # -lse, -delta, dlse of a row's queries
        # Of each row n that consumers work on: n, whether another one of the panel follows, and its live tiles of keys. There
        # are four slots: the producer writes row r + 4 when every consumer has read row r + 3. Then row r + 1 is summed.
        sWork = smem.allocate_tensor(Int32, cute.make_layout((4, 3)))
        rings = consumer.QueryRings(Ring.allocate(smem, WG * ST, sleeps=True), Ring.allocate(smem, 1, sleeps=True))
        parts_empty, inbox_full, inbox_empty = (smem.allocate_array(Int64, 1) for _ in range(3))
        parts_full = smem.allocate_array(Int64, 1) if const_expr(self.warp_sums_dq) else None
        sums = Sums(parts, inbox, parts_full, parts_empty, inbox_full, inbox_empty)
        return consumer.QueryShared(sQ, sK, sV, sKt, sTerms, sdQ, stats, sPair), sTerms, rings, sums, sWork

    @cute.kernel
    def kernel(self, tma_Q, tma_dO, tma_O, tma_K, tma_V, tma_dQ, args):
        """The roles of a block's warps, after its shared memory and its share of the work.

        More than 60 lines: the roles share the memory, the rings, the copies and the sizes.
        """
        if const_expr(not self.skips):
            arch.griddepcontrol_launch_dependents()  # `KeyGradients` comes to each processor that is through
        D, WG, CL = pad_channels(self.channels), self.groups, self.cluster
        registers = {2: (240, 24), 3: (160, 32), 4: (112, 32)}[WG]  # of a consumer's thread, and of a producer's
        B, N, H, LQ, _ = args.mQ.shape
        LK = args.mK.shape[3]
        bid, blocks, tid, warp_idx, lane = block_and_thread()
        rank = Int32(0)  # of the block in its cluster; what follows numbers clusters where it says blocks
        if const_expr(CL > 1):
            rank = arch.make_warp_uniform(arch.block_idx_in_cluster())
            bid, blocks = bid // CL, blocks // CL
        shared, sTerms, rings, sums, sWork = self.allocate()
        if tid == 0:
            rings.keys.initialize(consumers=4)
            rings.queries.initialize(consumers=WG * 4)
            arch.mbarrier_init(sums.parts_empty, 1 if self.warp_sums_dq else 4)
            if const_expr(self.warp_sums_dq):
                arch.mbarrier_init(sums.parts_full, WG * 4)
            if const_expr(CL > 1):
                arch.mbarrier_init(sums.inbox_full, 1)
                arch.mbarrier_init(sums.inbox_empty, 4)
        arch.mbarrier_init_fence()
        consumer.sync_cluster(self)
        # ---- work: an equal share of the time that all (panel, n) take
        inverse = Float32(1.0) / args.scale
        NQ = (LQ + MMA_M - 1) // MMA_M
        panels, change = Int64(B * H * NQ), Int32(0)
        total = panels * N
        each = Int32(share(total, blocks))
        if const_expr(self.timed):
            change = change_of(N, each)
            total += panels * change
            each = Int32(share(total, blocks))
        begin, end = (Int32(cutlass.min(Int64(x) * each, total)) for x in (bid, bid + 1))
        if const_expr(self.timed):
            begin, end = count_units(begin, N, change), count_units(end, N, change)

        sStats = cute.make_tensor(shared.stats, cute.make_layout((MMA_M, 3)))

        copy_Q, copy_dO, copy_O = (TmaTiles.of(x, (MMA_M, D), shared.sQ) for x in (tma_Q, tma_dO, tma_O))
        copy_K, copy_V = TmaTiles.of(tma_K, (self.keys, D), shared.sK), TmaTiles.of(tma_V, (self.keys, D), shared.sV)
        copy_dQ = TmaTiles.of(tma_dQ, (16, D), shared.sdQ)
        sizes, span = QuerySizes(N, H, NQ, LQ), Span(begin, end, bid, each, change)
        if warp_idx >= WG * 4:
            # ================= warps that load keys, one that loads queries, and perhaps one that sums dq
            arch.setmaxregister_decrease(registers[1])
            producer = warp_idx - WG * 4
            if producer < self.key_producers:
                produce_keys(self, producer, rank, lane, args, span, sizes, sTerms, rings.keys, (copy_K, copy_V))
            elif producer == self.key_producers:
                copies = (copy_Q, copy_O, copy_dO)
                produce_rows(self, rank, lane, args, span, sizes, inverse, sStats, sWork, rings.queries, copies)
            elif const_expr(self.warp_sums_dq):
                sum_rows(self, sums, shared.sdQ, copy_dQ, span, sizes, sWork, args.scale, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(registers[0])
            thread = (tid, warp_idx, lane)
            consumer.consume(self, args, span, sizes, shared, sStats, rings, sums, sWork, copy_dQ, inverse, rank, LK, thread)
        if const_expr(CL > 1):
            consumer.sync_cluster(self)  # no block leaves while another one may still write to its shared memory

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        return {
            "mQ": t.lines("bnhq", self.channels),
            "mK": t.lines("bnhk", self.channels),
            "mV": t.lines("bnhk", self.channels),
            "mO": t.lines("bnhq", self.channels),
            "mdO": t.lines("bnhq", self.channels),
            "mPair": t.pair_bias(self.bias, vector=self.vector),
            # terms of the key bias [r, keys * TERMS], of at least cluster * groups * slices * 32 keys; row n of batch b has
            # r = b * stride_b + n * stride_n
            "mTerms": t.lines("??"),
            "mLSE": t.floats("bnhq"),
            "mdLSE": t.floats("bnhq"),
            "mStats": t.floats("bnh?", align=16),  # for `KeyGradients`: [b,n,h,tiles of 64 queries * TILE_WORDS]
            "mdQ": t.lines("bnhq", self.channels),
            # d(pair bias) [b|1,h|1,q,keys], zeroed, lines a multiple of 4 long; or parts of it, for `PanelSum`:
            # [(clusters + panels) * cluster, slices * 4, groups * 128, 4]
            "mSums": None if self.partial else t.floats("??q?", align=16),
            "mParts": t.floats("?", self.slices * 4, self.groups * 128, 4, align=16) if self.partial else None,
            **(t.live_rows() if self.skips else {"mOrder": None, "mStarts": None}),
            "scale": Float32(0),
            "stride_b": Int32(0),
            "stride_n": Int32(0),
            "blocks": Int32(0),
        }
