"""The forward kernel: O, the LSE and the reference of every query.

A persistent block owns a panel at a time: 128 queries of one (b, h). It loops over the rows n of the panel, and over the
blocks of 64 keys of a row. It writes O, the LSE and the reference of each row once.

Two streams of rows run at a time, each with two warpgroups of 64 queries and one producer warp. Keys and values stream. All
rows of a panel share its pair bias:

pair bias   channels   keys         `resident`   in shared memory
none        any        up to 512    True         none
16 bits     8 to 32    up to 512    True         of the whole panel
16 bits     others     others       False        tiles that stream, once for two rows
float32     any        any          False        tiles of `PairBiasTiles` that stream, once for two rows

The queries of a row are held in registers. With 64 channels there is no room, and the tensor cores read them from shared
memory at every step.

Scores reach the registers complete. Q K^T, the pair bias (through an identity matrix) and the key bias (as extra channels) all
come from the tensor cores. 8 channels fill half of the 16 of a product. The other half holds the rest of the scale, where its
inverse, which a pair bias meets, is rounded. The softmax measures from the largest score of the first 32 keys, and not from a
running maximum. A query for which that overflows shows in its sum, and `repair` does it again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.kernels.forward_consumer import ForwardTiles, Thread, consume
from evoattn.backends.hopper.kernels.forward_mma import ForwardRings
from evoattn.backends.hopper.kernels.forward_producer import produce
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.repair import WARP_QUERIES
from evoattn.backends.hopper.launch import KernelVariant, Tensors, select
from evoattn.backends.hopper.lib.copies import TmaTiles, load_tma, store_tma
from evoattn.backends.hopper.lib.primitives import block_and_thread, k_major, mn_major
from evoattn.backends.hopper.lib.ring import Ring
from evoattn.backends.hopper.lib.schedule import ForwardSizes, units_of
from evoattn.backends.hopper.tiles import CHAIN, CONSUMERS, FORWARD_QUERIES, HALVES, KEYS, MMA_M, SLICE, STREAMS, pad_channels

THREADS = (CONSUMERS + 1) * 128


PARAMETERS = (
    "mTerms mEnds mKeyBias mRawPair mPair mQ mK mV mO mLSE mReference mPairReference stride_b stride_n scale interleave"
)
"""Those of `Forward.arguments` that the kernel itself reads or writes."""


@dataclasses.dataclass(frozen=True)
class Forward(KernelVariant):
    """One variant of the kernel. Sizes, strides and scale are known when it runs."""

    dtype: Any  # cutlass type of q, k and v, and of the pair bias if it is not float32
    channels: int  # D = C
    _: dataclasses.KW_ONLY
    pair: bool  # whether there is a pair bias
    key_bias: bool  # whether there is a key bias; a length that is no multiple of 64 needs one for its end
    # whether 1 / scale is a number of dtype; otherwise it is taken in two terms, so that a pair bias is added exactly. With 8
    # channels it need not be: one term is taken, and q makes up for it.
    exact: bool
    resident: bool  # whether the pair bias of a panel stays in shared memory
    # whether the pair bias is float32: it streams, over scale, as the accumulators hold it (`PairBiasTiles`).
    float32_pair: bool = False

    @property
    def streamed(self) -> bool:
        """True if there is a pair bias that streams."""
        return self.pair and not self.resident

    @property
    def keys_twice(self) -> bool:
        """True if a product's 16 channels meet the 8 of a key twice."""
        return self.channels == 8

    @property
    def key_width(self) -> int:
        """Channels of a key in shared memory."""
        return 8 if self.keys_twice else pad_channels(self.channels)

    @property
    def dependent(self) -> bool:
        """True if a kernel of key_bias.py or pair_bias.py comes before; this one starts while it runs."""
        return self.key_bias or self.streamed

    @property
    def query_stages(self) -> int:
        """Stages of a stream's queries."""
        return 1 if self.channels < 64 else 2

    @property
    def half_blocks(self) -> bool:
        """True if a row may end in a block of one slice: more channels leave no registers for that."""
        return self.key_bias and self.channels < 48

    @property
    def stages(self) -> int:
        """Stages of a stream's keys."""
        if self.float32_pair:
            return {16: 4, 32: 3, 64: 2}[pad_channels(self.channels)]
        return 3 if self.resident and self.pair else {16: 5, 32: 5, 64: 3}[pad_channels(self.channels)]

    @property
    def terms(self) -> int:
        """Terms of 1 / scale."""
        return 1 if self.exact or self.keys_twice else 2

    @property
    def pair_tiles(self) -> int:
        """Tiles of the pair bias that lie in shared memory."""
        return HALVES * (CHAIN if self.resident else self.stages) if self.pair else 1

    def arguments(self) -> dict[str, Any]:
        t, pair = Tensors(self.dtype), dict[str, Any].fromkeys(("mRawPair", "mPair", "mPairReference"))
        if self.pair:
            # the user's pair bias [b|1,h|1,q,k]; what `PairBias` makes of it, or the tiles of `PairBiasTiles`; references
            pair["mRawPair"] = t.strided("????", Float32 if self.float32_pair else self.dtype)
            pair["mPair"] = t.lines("????", MMA_M * KEYS, dtype=Float32) if self.float32_pair else t.lines("????")
            pair["mPairReference"] = t.floats("???")
        return {
            "mQ": t.lines("bnhq", self.channels),
            "mK": t.lines("bnhk", self.channels),
            "mV": t.lines("bnhk", self.channels),
            # the key bias as `KeyBias` writes it; row n of batch b has r = b * stride_b + n * stride_n
            "mTerms": t.lines("??") if self.key_bias else None,  # [r, keys * TERMS]
            "mEnds": t.ends() if self.key_bias else None,  # [r]
            "mKeyBias": t.floats("??") if self.key_bias and self.pair else None,  # [r, keys]
            "mRawPair": pair["mRawPair"],
            "mPair": pair["mPair"],
            "mO": t.lines("bnhq", self.channels),
            "mLSE": t.floats("bnhq"),
            "mReference": t.floats("bnhq"),
            "mPairReference": pair["mPairReference"],
            "stride_b": Int32(0),
            "stride_n": Int32(0),
            "scale": Float32(0.0),
            "interleave": Int32(0),
            "blocks": Int32(0),
        }

    def layouts(self):
        return (
            k_major(self.dtype, MMA_M, pad_channels(self.channels), self.query_stages * CONSUMERS),  # q
            k_major(self.dtype, KEYS, self.key_width, STREAMS * self.stages),  # k
            mn_major(self.dtype, pad_channels(self.channels), KEYS, STREAMS * self.stages),  # v
            k_major(self.dtype, MMA_M, KEYS, self.pair_tiles),  # pair bias
            k_major(self.dtype, SLICE, SLICE, self.terms),  # identity / scale
            k_major(self.dtype, 16, pad_channels(self.channels), self.query_stages * CONSUMERS * 4),  # o, a warp's rows
        )

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        lq, lk, lv, lp, _, lo = self.layouts()
        tma_Q = load_tma(args.mQ, lq, (MMA_M, pad_channels(self.channels)))
        tma_K = load_tma(args.mK, lk, (KEYS, self.key_width))
        tma_V = load_tma(args.mV, lv, (pad_channels(self.channels), KEYS), (4, 3, 2, 1, 0))
        tma_O = store_tma(args.mO, lo, (16, pad_channels(self.channels)))
        tma_pair = tma_Q
        if const_expr(self.streamed and not self.float32_pair):
            tma_pair = load_tma(args.mPair, lp, (MMA_M, KEYS), (2, 3, 1, 0))
        self.kernel(tma_Q, tma_K, tma_V, tma_pair, tma_O, select(args, PARAMETERS)).launch(
            grid=(args.blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=self.dependent
        )

    def allocate(self):
        """The shared memory of a block: tiles, terms of the key bias, rings, and what warps exchange and remember."""
        ST = self.stages
        smem = SmemAllocator()
        lq, lk, lv, lp, li, lo = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        if const_expr(self.float32_pair):
            layout = cute.make_layout((4, 128, 8, self.pair_tiles), stride=(1, 4, 512, MMA_M * KEYS))
            sPair = smem.allocate_tensor(Float32, layout, 1024)
        else:
            sPair = new(lp)
        sK, sV, sQ = new(lk), new(lv), new(lq)
        sO = new(lo) if const_expr(self.query_stages == 1) else cute.make_tensor(sQ.iterator, lo.outer)
        sIdentity = new(li)
        sTerms = smem.allocate_array(self.dtype, STREAMS * ST * KEYS * TERMS, byte_alignment=128)
        rings = ForwardRings(
            Ring.allocate(smem, STREAMS * ST), Ring.allocate(smem, ST), Ring.allocate(smem, STREAMS * self.query_stages)
        )
        sState = smem.allocate_tensor(Int32, cute.make_layout((CONSUMERS * 4, 8), stride=(8, 1)))
        # The references of the pair bias, of each warp's queries.
        sReference = smem.allocate_tensor(Float32, cute.make_layout((WARP_QUERIES, CONSUMERS * 4)))
        # What a stream's producer tells its consumers of each turn: ROW and SLICES, the row n and its slices of keys.
        sWork = smem.allocate_tensor(Int32, cute.make_layout((STREAMS, 4, 2), stride=(8, 2, 1)))
        return ForwardTiles(sQ, sK, sV, sPair, sIdentity, sTerms, sO), sTerms, rings, (sWork, sState, sReference)

    @cute.kernel
    def kernel(self, tma_Q, tma_K, tma_V, tma_pair, tma_O, args):
        """The roles of a block's warps, after its shared memory and its share of the work."""
        D, ST = pad_channels(self.channels), self.stages
        B, N, H, LQ, _ = args.mQ.shape
        key_blocks = (args.mK.shape[3] + KEYS - 1) // KEYS
        bid, blocks, tid, warp_idx, lane = block_and_thread()
        shared, sTerms, rings, exchange = self.allocate()
        if tid == 0:
            rings.keys.initialize(consumers=HALVES * 4)
            rings.pair.initialize(consumers=CONSUMERS * 4)
            rings.queries.initialize(consumers=HALVES * 4)
        arch.mbarrier_init_fence()
        if const_expr(self.pair and not self.float32_pair):
            fill_identity(self, shared.sIdentity, args.scale, tid)
        arch.sync_threads()
        # ---- this block's share: units (panel, n) from first to last
        panels = (LQ + FORWARD_QUERIES - 1) // FORWARD_QUERIES
        sizes = ForwardSizes(blocks, B * H, panels, N, LQ)
        units = units_of(bid, sizes)
        copy_Q = TmaTiles.of(tma_Q, (MMA_M, D), shared.sQ)
        copy_K = TmaTiles.of(tma_K, (KEYS, self.key_width), shared.sK)
        copy_V = TmaTiles.of(tma_V, (D, KEYS), shared.sV, (0, None, None, None, None))
        copy_O = TmaTiles.of(tma_O, (16, D), shared.sO)
        copy_pair = None
        if const_expr(self.streamed and not self.float32_pair):
            copy_pair = TmaTiles.of(tma_pair, (MMA_M, KEYS), shared.sPair, (None, None, None, None))
        if warp_idx >= CONSUMERS * 4:
            # ================= producers: one warp a stream
            arch.setmaxregister_decrease(32)
            s = warp_idx - CONSUMERS * 4
            if const_expr(self.dependent):
                arch.griddepcontrol_wait()
            if s < STREAMS:
                pair_tiles = cute.make_tensor(shared.sPair.iterator, cute.make_layout((MMA_M * KEYS, self.pair_tiles)))
                copies = (copy_Q, copy_K, copy_V, copy_pair)
                produce(self, s, args, units, sizes, key_blocks, exchange[0], pair_tiles, sTerms, rings.stream(s, ST), copies)
        else:
            # ================= consumers
            arch.setmaxregister_increase(112)
            wg = warp_idx // 4
            thread = Thread(wg // HALVES, wg % HALVES, warp_idx % 4, tid % 128, lane, lane // 4, lane % 4, tid, warp_idx, wg)
            stream_rings = rings.stream(thread.stream, ST)
            consume(self, thread, bid, args, units, sizes, key_blocks, shared, copy_O, stream_rings, *exchange)


@cute.jit
def fill_identity(variant, sIdentity: cute.Tensor, scale: Float32, tid: Int32):
    """Write the identity over scale, which a pair bias is multiplied by, in terms of dtype."""
    for i in cutlass.range(tid, SLICE * SLICE, THREADS):
        remainder = Float32(1.0) / scale
        for y in range_constexpr(variant.terms):
            alpha = remainder.to(variant.dtype)
            remainder = remainder - alpha.to(Float32)
            sIdentity[i // SLICE, i % SLICE, y] = cutlass.select_(i // SLICE == i % SLICE, alpha, variant.dtype(0.0))
    arch.fence_proxy("async.shared", space="cta")
