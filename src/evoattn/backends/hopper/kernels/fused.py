"""The backward without a pair bias in one kernel: dq, dk, dv and each head's part of the gradient of the mask bias.

A persistent block owns one (b, n, h) at a time: without a pair bias, rows n share nothing. It loops over the tiles of keys,
and over all tiles of queries. It writes each gradient once. Each score is computed once, where `QueryGradients` and
`KeyGradients` compute it twice.

All queries of a row stay in shared memory: q, dO, their statistics, and dq in float32. Three warpgroups take 64 keys each and
go through all tiles of 64 queries, on transposed scores as in `KeyGradients`. dS goes through shared memory into the product
for dq.

The warpgroups begin at different tiles, and add to dq of each tile in turn, always in the same order: warpgroup s after s + 1,
cyclically. Each begins with a third of the tiles, to which it is the first to add.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute, range_constexpr
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.kernels import fused_consumer as consumer
from evoattn.backends.hopper.kernels.fused_producer import GROUPS, FusedSizes, produce, produce_statistics
from evoattn.backends.hopper.kernels.statistics import TILE_WORDS
from evoattn.backends.hopper.launch import KernelVariant, Tensors, select
from evoattn.backends.hopper.lib.copies import TmaTiles, load_tma
from evoattn.backends.hopper.lib.primitives import block_and_thread, k_major, mn_major
from evoattn.backends.hopper.lib.ring import Ring
from evoattn.backends.hopper.tiles import MMA_M, QUERIES, pad_channels

PARAMETERS = "mO mdO mK mTerms mLSE mdLSE mdQ mdK mdV mdMask mEnds scale stride_b stride_n"
"""Those of `FusedGradients.arguments` that the kernel itself reads or writes."""


@dataclasses.dataclass(frozen=True)
class FusedGradients(KernelVariant):
    """One variant of the kernel. Sizes, strides and scale are known when it runs."""

    dtype: Any  # cutlass type of q, k and v
    channels: int  # D, 32 at most
    _: dataclasses.KW_ONLY
    key_bias: bool  # whether there is a key bias
    mask_gradient: bool = False  # whether the gradient of the mask bias is wanted
    dlse: bool = False  # whether lse has a gradient
    # whether a gate multiplies O. Then `GatePass` has found delta, which comes with dlse, and o is not read.
    gate: bool = False
    tiles: int = 8  # tiles of 64 queries that there is room for
    pair: ClassVar[bool] = False

    def layouts(self):
        return (
            k_major(self.dtype, MMA_M, pad_channels(self.channels), 3 * GROUPS),  # k twice and v, of each warpgroup
            mn_major(self.dtype, pad_channels(self.channels), MMA_M, 3 * GROUPS),  # the same as right side of dS k
            k_major(self.dtype, QUERIES, pad_channels(self.channels), self.tiles),  # q, do
            mn_major(
                self.dtype, pad_channels(self.channels), QUERIES, self.tiles
            ),  # the same as right sides of dS^T q and P^T do
            k_major(self.dtype, 16, QUERIES, 2 * GROUPS * 4),  # dS^T, a warp's 16 keys, twice
            mn_major(self.dtype, QUERIES, MMA_M, 2 * GROUPS),  # the same as left side of dS k
        )

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        lk, _, lq, _, _, _ = self.layouts()
        tma_K, tma_V = (load_tma(x, lk, (MMA_M, pad_channels(self.channels))) for x in (args.mK, args.mV))
        tma_Q, tma_dO = (load_tma(x, lq, (QUERIES, pad_channels(self.channels))) for x in (args.mQ, args.mdO))
        self.kernel(tma_K, tma_V, tma_Q, tma_dO, select(args, PARAMETERS)).launch(
            grid=(args.blocks, 1, 1), block=((GROUPS + 1) * 128, 1, 1), stream=stream, min_blocks_per_mp=1,
            use_pdl=self.key_bias,
        )  # fmt: skip

    def allocate(self):
        """The shared memory of a block: tiles, statistics, sums of dq, what a warp remembers of its rows, and rings."""
        QT = self.tiles
        smem = SmemAllocator()
        lk, lkt, lq, lqt, ls, lst = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sdO, sK, sdS = new(lq), new(lq), new(lk), new(ls)
        sQt, sdOt = cute.make_tensor(sQ.iterator, lqt.outer), cute.make_tensor(sdO.iterator, lqt.outer)
        sKt, sdSt = cute.make_tensor(sK.iterator, lkt.outer), cute.make_tensor(sdS.iterator, lst.outer)
        across = 16 * self.steps // 8
        # dq of a tile, as the accumulators hold it, each warp's part in one piece
        dq_layout = cute.make_layout((4, 32, across, 4, QT), stride=(1, 4, 128, 128 * across, 512 * across))
        sdQ = smem.allocate_tensor(Float32, dq_layout, 128)
        sStats = smem.allocate_array(Float32, QT * TILE_WORDS, byte_alignment=128)
        queries, keys = (Ring.allocate(smem, stages, sleeps=True) for stages in (QT, 2 * GROUPS))
        values_empty, added = (smem.allocate_array(Int64, x) for x in (GROUPS, GROUPS * QT))
        rings = consumer.FusedRings(queries, keys, values_empty, added)
        sState = smem.allocate_tensor(Int32, cute.make_layout((GROUPS * 4, 8), stride=(8, 1)))
        return consumer.FusedShared(sQ, sdO, sQt, sdOt, sStats, sK, sKt, sdS, sdSt, sdQ, sState), rings

    @cute.kernel
    def kernel(self, tma_K, tma_V, tma_Q, tma_dO, args):
        """The roles of a block's warps, after its shared memory and its share of the work."""
        D = pad_channels(self.channels)
        B, N, H, LQ, _ = args.mO.shape
        LK = args.mK.shape[3]
        bid, blocks, tid, warp_idx, lane = block_and_thread()
        shared, rings = self.allocate()
        if tid == 0:
            rings.queries.initialize(producers=2, consumers=GROUPS * 4)
            rings.keys.initialize(consumers=4)
            for i in range_constexpr(GROUPS):
                arch.mbarrier_init(rings.values_empty + i, 4)
            for i in range_constexpr(GROUPS * self.tiles):
                arch.mbarrier_init(rings.added + i, 4)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        inverse = Float32(1.0) / args.scale
        # ---- work: rows (b, n, h), one after the other
        NK = (LK + MMA_M - 1) // MMA_M
        NT = (LQ + QUERIES - 1) // QUERIES
        items = B * N * H
        thirds = (NT // 3, 2 * NT // 3, NT)  # of the tiles of queries: past the last of each

        copy_K, copy_V = (TmaTiles.of(x, (MMA_M, D), shared.sK) for x in (tma_K, tma_V))
        copy_Q, copy_dO = TmaTiles.of(tma_Q, (QUERIES, D), shared.sQ), TmaTiles.of(tma_dO, (QUERIES, D), shared.sdO)
        sizes = FusedSizes(N, H, NK, NT, LQ, thirds)
        if warp_idx >= GROUPS * 4:
            # ================= one warp loads, three find the statistics of a third of the tiles each
            arch.setmaxregister_decrease(56)
            wg = warp_idx - GROUPS * 4
            if wg == GROUPS:
                produce(self, bid, blocks, items, args, sizes, (copy_K, copy_V, copy_Q, copy_dO), rings)
            else:
                produce_statistics(self, wg, bid, blocks, items, args, sizes, inverse, shared.sStats, rings.queries, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(152)
            consumer.consume(self, bid, blocks, items, args, sizes, shared, rings, inverse, tid, warp_idx, lane)

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        return {
            "mQ": t.lines("bnhq", self.channels),
            "mK": t.lines("bnhk", self.channels),
            "mV": t.lines("bnhk", self.channels),
            "mO": t.lines("bnhq", self.channels),
            "mdO": t.lines("bnhq", self.channels),
            "mTerms": t.lines("??"),  # as in `QueryGradients`, of whole tiles of 64 keys
            "mLSE": t.floats("bnhq"),
            "mdLSE": t.floats("bnhq"),
            "mdQ": t.lines("bnhq", self.channels),
            "mdK": t.lines("bnhk", self.channels),
            "mdV": t.lines("bnhk", self.channels),
            "mdMask": t.floats("bnhk") if self.mask_gradient else None,  # each head's part of d(mask bias)
            # the gradients of tiles of keys beyond the end of a row are cleared, except of the first tile
            "mEnds": t.ends() if self.key_bias else None,
            "scale": Float32(0),
            "stride_b": Int32(0),
            "stride_n": Int32(0),
            "blocks": Int32(0),
        }
