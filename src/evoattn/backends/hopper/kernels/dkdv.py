"""The backward kernel of the keys: dk, dv, and each head's part of the gradient of the mask bias.

A persistent block owns a panel at a time: 64 keys of one (b, h). It loops over the rows n of the panel, and over the tiles of
queries of a row. It writes dk, dv and its part of d(mask bias) of each row once.

Two or three streams of rows run at a time, a warpgroup each. Scores are transposed, [k,q], so that dk and dv of a row stay in
registers. The pair bias of a panel stays in shared memory in float32, as the accumulators hold it, or streams, a tile for all
streams. q, dO and the statistics of the queries stream. -LSE and -delta of a query come by products too: eight channels of it
meet the key bias, or constants (table in `dkdv_consumer.load_keys`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.kernels import dkdv_consumer as consumer
from evoattn.backends.hopper.kernels.dkdv_producer import produce, produce_bias
from evoattn.backends.hopper.kernels.statistics import TILE_WORDS
from evoattn.backends.hopper.launch import KernelVariant, Tensors, select
from evoattn.backends.hopper.lib.copies import TmaTiles, fill_zeros, load_tma, store_tma
from evoattn.backends.hopper.lib.live_rows import LineSizes, LiveRows, clear_skipped, line_time
from evoattn.backends.hopper.lib.primitives import block_and_thread, k_major, mn_major
from evoattn.backends.hopper.lib.ring import Ring
from evoattn.backends.hopper.lib.schedule import Span, share
from evoattn.backends.hopper.tiles import MMA_M, QUERIES, pad_channels

PARAMETERS = "mQ mK mPair mTiles mTerms mStats mdMask mSums mdPair mOrder mStarts scale stride_b stride_n"
"""Those of `KeyGradients.arguments` that the kernel itself reads or writes."""


@dataclasses.dataclass(frozen=True)
class KeyGradients(KernelVariant):
    """One variant of the kernel. Sizes, strides and scale are known when it runs."""

    dtype: Any  # cutlass type of q, k and v
    channels: int  # D
    _: dataclasses.KW_ONLY
    pair: bool  # whether there is a pair bias
    key_bias: bool  # whether there is a key bias
    bias: Any = None  # cutlass type of the pair bias, if it is not dtype
    mask_gradient: bool = False  # whether the gradient of the mask bias is wanted
    # whether a warp that loads nothing rounds d(pair bias), which `QueryGradients` added up in float32, to dtype.
    rounds: bool = False
    skips: bool = False  # whether it does the rows alone that a mask leaves to each panel, which `live_rows` knows
    clears: bool = False  # whether it also clears dq of the rows that `QueryGradients` leaves out then
    # blocks of 64 queries whose pair bias fits in shared memory: the longest length it takes, where there is one.
    blocks: int = 6
    ring: int = 0  # tiles of a pair bias that streams instead, laid out by `PairBiasTiles`, and takes any length
    float32_tiles: bool = False  # whether those are float32, as the accumulators hold it
    streams: int = 3  # rows n at a time
    stages: int = 3  # stages of a stream
    # whether blocks count the time in which they change to another panel (`schedule`), where the pair bias stays.
    timed: bool = True
    # whether dk and dv of a row leave from tiles of their own in shared memory. Else they share one, and dv waits until dk
    # has left.
    own_tiles: bool = False

    def __post_init__(self) -> None:
        # a pair bias that streams comes from `PairBiasTiles`, whatever it was
        object.__setattr__(self, "bias", self.dtype if self.streamed else self.bias or self.dtype)
        object.__setattr__(self, "timed", self.timed and self.resident)
        if self.rounds and self.streams + self.streamed == 4:  # each producer warp loads, so none is free to round
            raise ValueError(f"rounds=True needs streams + streamed < 4, got {self.streams} + {int(self.streamed)}")

    @property
    def resident(self) -> bool:
        """True if there is a pair bias that stays in shared memory."""
        return self.pair and self.ring == 0

    @property
    def streamed(self) -> bool:
        """True if there is a pair bias that streams."""
        return self.pair and self.ring > 0

    @property
    def tile(self) -> Any:
        """Type of the tiles of a pair bias that streams."""
        return Float32 if self.float32_tiles else self.dtype

    @property
    def output_tiles(self) -> int:
        """Tiles of 16 keys in shared memory that dk and dv are copied from."""
        return self.streams * 4 * (2 if self.own_tiles else 1)

    @property
    def overlapped(self) -> int:
        """Slices of a stage whose products for dk and dv run on in the next slice's arithmetic.

        That takes registers, and, after the last of a stage, a stage that is given back later.
        """
        return 0 if self.channels == 48 else min(self.stages - 1, 2)

    def layouts(self):
        n = self.streams * self.stages
        return (
            k_major(self.dtype, MMA_M, pad_channels(self.channels), 2 * self.streams),  # k, v of a row
            k_major(self.dtype, QUERIES, pad_channels(self.channels), n),  # q and do
            mn_major(self.dtype, pad_channels(self.channels), QUERIES, n),  # the same as right sides of dS^T q and P^T do
            k_major(
                self.dtype, 16, pad_channels(self.channels), self.output_tiles + self.skips
            ),  # dk, dv, a warp's rows; zeros
        )

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        lk, lq, _, lo = self.layouts()
        tma_K, tma_V = (load_tma(x, lk, (MMA_M, pad_channels(self.channels))) for x in (args.mK, args.mV))
        tma_Q, tma_dO = (load_tma(x, lq, (QUERIES, pad_channels(self.channels))) for x in (args.mQ, args.mdO))
        tma_dK, tma_dV = (store_tma(x, lo, (16, pad_channels(self.channels))) for x in (args.mdK, args.mdV))
        tma_dQ = store_tma(args.mdQ, lo, (16, pad_channels(self.channels))) if const_expr(self.clears) else tma_dK
        self.kernel(tma_K, tma_V, tma_Q, tma_dO, tma_dK, tma_dV, tma_dQ, select(args, PARAMETERS)).launch(
            grid=(args.blocks, 1, 1), block=((self.streams + 1) * 128, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    def allocate(self):
        """The shared memory of a block: tiles, statistics, the pair bias that streams, rings, and the rows n of each stream."""
        NS, RG, buffers = self.streams, self.ring, self.streams * self.stages
        smem = SmemAllocator()
        lk, lq, lqt, lo = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sdO, sK = new(lq), new(lq), new(lk)
        # Not at the end: a product reads their 8 channels twice, where memcheck sees it read 16 that lie side by side.
        sStats = smem.allocate_array(Float32, buffers * TILE_WORDS, byte_alignment=128)
        sOut = new(lo)
        sQt, sdOt = cute.make_tensor(sQ.iterator, lqt.outer), cute.make_tensor(sdO.iterator, lqt.outer)
        pair_layout = cute.make_layout((4, 128, 8 * max(self.blocks, 1)), stride=(1, 4, 512))
        sPair: Any = smem.allocate_tensor(Float32, pair_layout, 128) if const_expr(self.resident) else None
        pair_ring = smem.allocate_array(self.tile, RG * MMA_M * QUERIES if self.streamed else 8, byte_alignment=128)
        sPairTiles = cute.make_tensor(pair_ring, cute.make_layout((4, 128, 8, max(RG, 1)), stride=(1, 4, 512, MMA_M * QUERIES)))
        queries, keys = (Ring.allocate(smem, stages, sleeps=True) for stages in (buffers, NS))
        sRows = smem.allocate_tensor(Int32, cute.make_layout((4, NS)))  # rows n, see `produce`
        rings = consumer.KeyRings(queries, keys, Ring.allocate(smem, RG, sleeps=True))
        shared = consumer.KeyShared(sQ, sdO, sQt, sdOt, sStats, sK, sOut, sPair, sPairTiles)
        return shared, sStats, pair_ring, rings, sRows

    @cute.kernel
    def kernel(self, tma_K, tma_V, tma_Q, tma_dO, tma_dK, tma_dV, tma_dQ, args):
        """The roles of a block's warps, after its shared memory and its share of the work."""
        D, NS = pad_channels(self.channels), self.streams
        registers = {3: (160, 32), 2: (240, 24)}[NS]  # of a consumer's thread, and of a producer's
        B, N, H, LQ, _ = args.mQ.shape
        LK = args.mK.shape[3]
        bid, blocks, tid, warp_idx, lane = block_and_thread()
        shared, sStats, pair_ring, rings, sRows = self.allocate()
        if tid == 0:
            rings.queries.initialize(consumers=4)
            rings.keys.initialize(consumers=4)
            rings.bias.initialize(consumers=NS * 4)
        arch.mbarrier_init_fence()
        if const_expr(self.skips):
            fill_zeros(shared.sOut[None, None, self.output_tiles], tid, (NS + 1) * 128)
        inverse = Float32(1.0) / args.scale
        arch.sync_threads()
        # ---- work: an equal share of the time that all (panel, n) take
        NK = (LK + MMA_M - 1) // MMA_M
        NT = (LQ + QUERIES - 1) // QUERIES
        sizes, live = LineSizes(B, N, H, NK), LiveRows(args.mOrder, args.mStarts)
        total, change, skips_rows = line_time(self, live, sizes, blocks)
        each = cutlass.max(Int32(share(total, blocks)), 1)
        begin, end = (Int32(cutlass.min(Int64(x) * each, total)) for x in (bid, bid + 1))

        copy_K, copy_V = (TmaTiles.of(x, (MMA_M, D), shared.sK) for x in (tma_K, tma_V))
        copy_Q, copy_dO = TmaTiles.of(tma_Q, (QUERIES, D), shared.sQ), TmaTiles.of(tma_dO, (QUERIES, D), shared.sdO)
        copy_dK, copy_dV, copy_dQ = (TmaTiles.of(x, (16, D), shared.sOut) for x in (tma_dK, tma_dV, tma_dQ))
        span = Span(begin, end, bid, each, change)
        if warp_idx >= NS * 4:
            # ================= producers: a warp a stream, one for a pair bias that streams
            arch.setmaxregister_decrease(registers[1])
            producer = warp_idx - NS * 4
            busy = (NS + int(self.streamed)) % 4  # the others clear what is left out; if there are none, all do it at last
            if producer < NS:
                copies = (copy_K, copy_V, copy_Q, copy_dO)
                produce(self, producer, args, span, sizes, skips_rows, sStats, rings, copies, NT, lane, sRows[None, producer])
            elif const_expr(self.streamed):
                if producer == NS:
                    produce_bias(self, args, span, sizes, pair_ring, rings.bias, NT, lane)
            if const_expr(self.skips):
                if producer >= busy and skips_rows:
                    clears = ((copy_dK, copy_dV), copy_dQ if const_expr(self.clears) else None, (LQ + 15) // 16)
                    warps = 4 - busy
                    clear_skipped(
                        live, sizes, self.output_tiles, clears, args.mdMask, bid * warps + 3 - producer,
                        blocks * warps, lane,
                    )  # fmt: skip
            if const_expr(self.rounds):
                if producer == 3:
                    round_gradient(self, args.mSums, args.mdPair, bid, blocks, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(registers[0])
            thread, stores = (tid, warp_idx, lane), (copy_dK, copy_dV)
            consumer.consume(self, args, span, sizes, (LQ, LK), shared, rings, sRows, stores, inverse, NT, thread)

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        return {
            "mQ": t.lines("bnhq", self.channels),
            "mK": t.lines("bnhk", self.channels),
            "mV": t.lines("bnhk", self.channels),
            "mdO": t.lines("bnhq", self.channels),
            # the pair bias; or tiles of one that streams, [b|1,h|1,tiles of k,tiles of q,64 * 64]
            "mPair": None if self.streamed else t.pair_bias(self.bias, vector=False),
            "mTiles": t.lines("????", MMA_M * QUERIES, dtype=self.tile) if self.streamed else None,
            "mTerms": t.lines("??"),  # as in `QueryGradients`
            "mStats": t.floats("bnh?", align=16),
            "mdK": t.lines("bnhk", self.channels),
            "mdV": t.lines("bnhk", self.channels),
            "mdMask": t.floats("bnhk") if self.mask_gradient else None,  # each head's part of d(mask bias)
            "mSums": t.fours("f", Float32) if self.rounds else None,  # d(pair bias) as `QueryGradients` has summed it
            "mdPair": t.fours("f", self.dtype) if self.rounds else None,  # the same in its final dtype
            "mdQ": t.lines("bnhq", self.channels) if self.clears else None,  # of which skipped rows are set to zero
            **(t.live_rows() if self.skips else {"mOrder": None, "mStarts": None}),
            "scale": Float32(0),
            "stride_b": Int32(0),
            "stride_n": Int32(0),
            "blocks": Int32(0),
        }


@cute.jit
def round_gradient(variant, mSums: cute.Tensor, mdPair: cute.Tensor, bid: Int32, blocks: Int32, lane: Int32):
    """Round this block's part of d(pair bias), once `QueryGradients` is through."""
    arch.griddepcontrol_wait()
    for x in cutlass.range(bid * 32 + lane, mSums.shape[0], blocks * 32, unroll=4):
        sums, rounded = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, variant.dtype)
        cute.autovec_copy(mSums[x, None], sums)
        rounded.store(sums.load().to(variant.dtype))
        cute.autovec_copy(rounded, mdPair[x, None])
