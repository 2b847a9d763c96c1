"""The backward kernel of the keys: dk, dv, and each head's part of the gradient of the mask bias.

A persistent block owns a panel, 64 keys of one (b, h), and loops over rows n in two or three streams, a warpgroup each. It
works on transposed scores, [k,q], so that dk and dv of a row stay in registers. The pair bias of a panel stays in shared memory
in float32, as the accumulators hold it, or streams, a tile for all streams; q, do and the statistics of each query stream. What
a query brings, -lse and -delta, comes by products too: eight channels of it meet the key-wise bias, or constants.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.kernels.dkdv_consumer import (
    KeyRings,
    fragments,
    load_bias,
    load_key_bias,
    load_keys,
    load_pair_bias,
    row_tiles,
    scores,
    store_mask_gradient,
    store_tile,
)
from evoattn.backends.hopper.kernels.dkdv_producer import produce, produce_bias
from evoattn.backends.hopper.kernels.statistics import TILE
from evoattn.backends.hopper.launch import Kernel, Stand, floats, lines, live_rows, pair_bias, sizes
from evoattn.backends.hopper.lib.copies import TmaTiles, fill_zeros, load_tma, store_rows, store_tma
from evoattn.backends.hopper.lib.live_rows import clear_skipped, line_time, next_panel
from evoattn.backends.hopper.lib.primitives import k_major, mn_major, padded
from evoattn.backends.hopper.lib.ring import Ring, Slot, sleep_until
from evoattn.backends.hopper.lib.schedule import share
from evoattn.backends.hopper.tiles import QUERIES, ROWS


class KeyArguments(namedtuple("KeyArguments", "q k pair row stats dmask added dpair order starts scale row_b row_n")):
    """The arguments of the kernel, but for the tensors that the copy engine alone reads and writes: v, dO, dk, dv and dq.

    q, k: [b,n,h,l,d]. pair: the pair bias, [b|1,h|1,q,k]; or if it streams, [b|1,h|1,tiles of k,tiles of q,64 * 64].
    row, stats: as in `dq`. dmask: float32 [b,n,h,k], each head's part of the gradient of the mask bias, or None. added:
    float32 [fours, 4], the gradient of the pair bias as `dq` has summed it; dpair: [fours, 4], where it is written in its
    final dtype; or None. order, starts: [b,2,n] and [b, panels + 2], as in `live_rows`, or None.
    """


@dataclasses.dataclass(frozen=True)
class KeyGradients(Kernel):
    """One variant of the kernel. Sizes, strides and scale are known when it runs.

    Args:
        dtype: cutlass type of q, k and v.
        channels: D.
        pair, row: whether there is a pair bias, a key-wise bias.
        bias: cutlass type of the pair bias, if it is not dtype.
        mask_gradient: whether the gradient of the mask bias is wanted.
        rounds: whether a warp that has nothing to bring in rounds d(pair bias), which `dq` added up in float32, to dtype.
        skips: whether it does the rows alone that a mask leaves to each panel, which `live_rows` knows.
        clears: whether it also clears dq of the rows that `dq` leaves out then.
        blocks: blocks of 64 queries whose pair bias fits in shared memory: the longest length it takes, where there is one.
        ring: tiles of a pair bias that streams instead, laid out by `pair_bias.Tiles`, and takes any length.
        wide: whether those are float32, as the accumulators hold it.
        streams, stages: rows n at a time, stages of each.
        timed: whether blocks count the time in which they change to another panel (`schedule`), where the pair bias stays.
        own_tiles: whether dk and dv of a row leave from tiles of their own in shared memory. Else they share one, and dv waits
            until dk has left.
    """

    dtype: Any
    channels: int
    _: dataclasses.KW_ONLY
    pair: bool
    row: bool
    bias: Any = None
    mask_gradient: bool = False
    rounds: bool = False
    skips: bool = False
    clears: bool = False
    blocks: int = 6
    ring: int = 0
    wide: bool = False
    streams: int = 3
    stages: int = 3
    timed: bool = True
    own_tiles: bool = False

    def __post_init__(self) -> None:
        # a pair bias that streams comes from `PairBiasTiles`, whatever it was
        object.__setattr__(self, "bias", self.dtype if self.streamed else self.bias or self.dtype)
        object.__setattr__(self, "timed", self.timed and self.resident)
        if self.rounds and self.streams + self.streamed == 4:
            raise ValueError("each warp has something to bring in, none is left to round")

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
        return Float32 if self.wide else self.dtype

    @property
    def leaving(self) -> int:
        """Tiles of 16 keys that dk and dv leave from."""
        return self.streams * 4 * (2 if self.own_tiles else 1)

    @property
    def steps(self) -> int:
        """Products of 16 channels."""
        return -(-self.channels // 16)

    @property
    def run_on(self) -> int:
        """Slices of a stage whose products for dk and dv run on in the next slice's arithmetic.

        That takes registers, and, after the last of a stage, a stage that is given back later.
        """
        return 0 if self.channels == 48 else min(self.stages - 1, 2)

    def layouts(self):
        n = self.streams * self.stages
        return (
            k_major(self.dtype, ROWS, padded(self.channels), 2 * self.streams),  # k, v of a row
            k_major(self.dtype, QUERIES, padded(self.channels), n),  # q and do
            mn_major(self.dtype, padded(self.channels), QUERIES, n),  # the same as right sides of dS^T q and P^T do
            k_major(self.dtype, 16, padded(self.channels), self.leaving + self.skips),  # dk, dv, a warp's rows; zeros
        )

    @cute.jit
    def __call__(
        self, q, k, v, do, pair, row, stats, dk, dv, dmask, added, dpair, dq, order, starts, scale, row_b, row_n, blocks,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel; `KeyArguments` explains the tensors.

        dq: in it the rows that `dq` leaves out are set to zero; or None.
        """
        lk, lq, _, lo = self.layouts()
        tma_K, tma_V = (load_tma(x, lk, (ROWS, padded(self.channels))) for x in (k, v))
        tma_Q, tma_dO = (load_tma(x, lq, (QUERIES, padded(self.channels))) for x in (q, do))
        tma_dK, tma_dV = (store_tma(x, lo, (16, padded(self.channels))) for x in (dk, dv))
        tma_dQ = store_tma(dq, lo, (16, padded(self.channels))) if const_expr(self.clears) else tma_dK
        args = KeyArguments(q, k, pair, row, stats, dmask, added, dpair, order, starts, scale, row_b, row_n)
        self.kernel(tma_K, tma_V, tma_Q, tma_dO, tma_dK, tma_dV, tma_dQ, args).launch(
            grid=(blocks, 1, 1), block=((self.streams + 1) * 128, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tma_K, tma_V, tma_Q, tma_dO, tma_dK, tma_dV, tma_dQ, args):
        """The roles of a block's warps, after its shared memory and its share of the work.

        One long function: if its parts move into others, address arithmetic moves too, and ptxas schedules the loops anew.
        """
        D, ST, NS, RG = padded(self.channels), self.stages, self.streams, self.ring
        registers = {3: (160, 32), 2: (240, 24)}[NS]  # of a consumer's thread, and of a producer's
        B, N, H, LQ, _ = args.q.shape
        LK = args.k.shape[3]
        tid, _, _ = arch.thread_idx()
        bid, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        wid = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()
        # ---- shared memory
        smem = SmemAllocator()
        lk, lq, lqt, lo = self.layouts()
        new = lambda l: smem.allocate_tensor(self.dtype, l.outer, 1024, l.inner)
        sQ, sdO, sK = new(lq), new(lq), new(lk)
        # Not at the end: a product reads their 8 channels twice, where memcheck sees it read 16 that lie side by side.
        sS = smem.allocate_array(Float32, NS * ST * TILE, byte_alignment=128)
        sX = new(lo)
        sQt, sdOt = cute.make_tensor(sQ.iterator, lqt.outer), cute.make_tensor(sdO.iterator, lqt.outer)
        panel: Any = (
            smem.allocate_tensor(Float32, cute.make_layout((4, 128, 8 * self.blocks), stride=(1, 4, 512)), 128)
            if const_expr(self.resident)
            else None
        )
        sP = smem.allocate_array(self.tile, RG * ROWS * QUERIES if self.streamed else 8, byte_alignment=128)
        tiles = cute.make_tensor(sP, cute.make_layout((4, 128, 8, max(RG, 1)), stride=(1, 4, 512, ROWS * QUERIES)))
        queries, keys = (Ring.allocate(smem, stages, sleeps=True) for stages in (NS * ST, NS))
        box = cute.make_tensor(smem.allocate_array(Int32, 4 * NS), cute.make_layout((4, NS)))  # rows n, see `produce`
        rings = KeyRings(queries, keys, Ring.allocate(smem, RG, sleeps=True))
        if tid == 0:
            queries.initialize(consumers=4)
            keys.initialize(consumers=4)
            rings.bias.initialize(consumers=NS * 4)
        arch.mbarrier_init_fence()
        if const_expr(self.skips):
            fill_zeros(sX[None, None, self.leaving], tid, (NS + 1) * 128)
        scale, pair, row_b, row_n, dmask = args.scale, args.pair, args.row_b, args.row_n, args.dmask
        inverse = Float32(1.0) / scale
        arch.sync_threads()
        # ---- work: an equal share of the time that all (panel, n) take
        NK = (LK + ROWS - 1) // ROWS
        NT = (LQ + QUERIES - 1) // QUERIES
        sizes, live = (B, N, H, NK), (args.order, args.starts)
        total, change, some = line_time(self, live, sizes, blocks)
        each = cutlass.max(Int32(share(total, blocks)), 1)
        begin = Int32(cutlass.min(Int64(bid) * each, total))
        end = Int32(cutlass.min(Int64(bid + 1) * each, total))

        copy_K, copy_V = (TmaTiles.of(x, (ROWS, D), sK) for x in (tma_K, tma_V))
        copy_Q, copy_dO = TmaTiles.of(tma_Q, (QUERIES, D), sQ), TmaTiles.of(tma_dO, (QUERIES, D), sdO)
        copy_dK, copy_dV, copy_dQ = (TmaTiles.of(x, (16, D), sX) for x in (tma_dK, tma_dV, tma_dQ))
        if wid >= NS * 4:
            # ================= producers: a warp a stream, one for a pair bias that streams
            arch.setmaxregister_decrease(registers[1])
            s = wid - NS * 4
            busy = (NS + int(self.streamed)) % 4  # the others clear what is left out; if there are none, all do it at last
            span = (begin, end, bid, each, change)
            if s < NS:
                copies = (copy_K, copy_V, copy_Q, copy_dO)
                produce(self, s, args, span, sizes, some, sS, rings, copies, NT, lane, box[None, s])
            elif const_expr(self.streamed):
                if s == NS:
                    produce_bias(self, args, span, sizes, sP, rings.bias, NT, lane)
            if const_expr(self.skips):
                if s >= busy and some:
                    stores = ((copy_dK, copy_dV), copy_dQ if const_expr(self.clears) else None, (LQ + 15) // 16)
                    warps = 4 - busy
                    clear_skipped(self, live, sizes, self.leaving, stores, dmask, bid * warps + 3 - s, blocks * warps, lane)
            if const_expr(self.rounds):
                if s == 3:
                    round_gradient(self, args.added, args.dpair, bid, blocks, lane)
        else:
            # ================= consumers
            arch.setmaxregister_increase(registers[0])
            s, w, wt = wid // 4, wid % 4, tid % 128
            g, t4 = lane // 4, lane % 4
            operands, row = fragments(self, (sQ, sdO, sQt, sdOt, sS, sK), NS * ST, wt, t4, lane)
            slot, turn, at, again = queries.start(), Int32(0), begin, Boolean(False)
            numbers = box[None, s]
            mine = panel[None, wt, None] if const_expr(self.resident) else None
            sums = cute.make_rmem_tensor(2, Float32)
            bias = (tiles, wt) if const_expr(self.streamed) else mine
            bias_slot = rings.bias.start()
            while at < end:
                i, h, b, n0, n1, start, length = next_panel(self, at, end, change, live, sizes, lane)
                at = cutlass.min(start + length, end)
                k0 = i * ROWS + w * 16 + g
                if const_expr(self.resident):
                    if again:
                        arch.barrier(barrier_id=1, number_of_threads=NS * 128)
                    for u in cutlass.range(s, 2 * NT, NS, unroll=2):
                        load_pair_bias(self, mine, pair, u, b % pair.shape[0], h % pair.shape[1], k0, t4, LQ, LK, inverse)
                    arch.barrier(barrier_id=1, number_of_threads=NS * 128)
                    again = Boolean(True)
                m, count = s, n1 - n0
                if m < count:
                    if const_expr(self.row):
                        arch.griddepcontrol_wait()
                        keys.consumer_wait(Slot(s, turn & 1))
                        load_key_bias(self, row.terms, args.row, b * row_b + numbers[turn & 3] * row_n, k0)
                    keys.consumer_wait(Slot(s, turn & 1))
                    load_keys(self, operands, row, (2 * s, 2 * s + 1), t4, inverse)
                    here = rings.at(s * ST, ST)
                    here.queries.consumer_wait(slot)
                    if const_expr(self.streamed):
                        rings.bias.consumer_wait(bias_slot)
                    first = tiles[None, wt, None, bias_slot.stage] if const_expr(self.streamed) else mine
                    load_bias(self, operands.acc_S, first, 0, inverse)
                    warpgroup.fence()
                    scores(self, operands, 0, here.queries.index(slot.stage))
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    keys.consumer_release(s, lane)  # a product has used k and v: only then have they left shared memory
                while m < count:
                    more = m + NS < count
                    if const_expr(self.row):
                        if more:
                            load_key_bias(self, row.terms, args.row, b * row_b + numbers[(turn + 1) & 3] * row_n, k0)
                    slot, bias_slot = row_tiles(
                        self, operands, row, bias, sums, rings, scale, inverse, more, s, turn, slot, bias_slot, NT, t4, lane
                    )
                    if more:
                        keys.consumer_release(s, lane)
                    n = numbers[turn & 3]
                    if const_expr(self.mask_gradient):
                        store_mask_gradient(self, sums, dmask[b, n, h, None], k0, t4)
                    arch.cp_async_bulk_wait_group(0, read=True)
                    arch.sync_warp()
                    store_rows(operands.acc_dK, scale, sX[None, None, wid], lane, self.dtype)
                    store_tile(self, copy_dK, wid, (i * 4 + w, h, n, b))
                    place = wid + NS * 4 if self.own_tiles else wid
                    if const_expr(not self.own_tiles):
                        arch.cp_async_bulk_wait_group(0, read=True)
                        arch.sync_warp()
                    store_rows(operands.acc_dV, Float32(1.0), sX[None, None, place], lane, self.dtype)
                    store_tile(self, copy_dV, place, (i * 4 + w, h, n, b))
                    m, turn = m + NS, turn + 1
                if const_expr(self.streamed):
                    if m < count + s:  # the last round has no row for this stream
                        for _ in cutlass.range(NT, unroll=1):
                            sleep_until(rings.bias.barrier(bias_slot.stage), bias_slot.phase)
                            rings.bias.consumer_release(bias_slot.stage, lane)
                            bias_slot = rings.bias.advance(bias_slot)
            arch.cp_async_bulk_wait_group(0)

    def arguments(self) -> tuple[Any, ...]:
        B, N, H, LQ, LK, words, fours = sizes(7)
        q, k, v, do, dk, dv = (lines(self.dtype, B, N, H, length, self.channels) for length in (LQ, LK, LK, LQ, LK, LK))
        pair = pair_bias(self.bias, LQ, LK, vector=False)
        if self.streamed:
            pair = lines(self.tile, *sizes(4), ROWS * QUERIES)
        dmask = floats(B, N, H, LK) if self.mask_gradient else None
        added = Stand(Float32, (fours, 4), (4, 1), 16) if self.rounds else None
        dpair = Stand(self.dtype, (fours, 4), (4, 1), 8) if self.rounds else None
        dq = lines(self.dtype, B, N, H, LQ, self.channels) if self.clears else None
        live = live_rows() if self.skips else (None, None)
        numbers = (Float32(0), Int32(0), Int32(0), Int32(0))
        row, stats = lines(self.dtype, *sizes(2)), floats(B, N, H, words, align=16)
        return q, k, v, do, pair, row, stats, dk, dv, dmask, added, dpair, dq, *live, *numbers


@cute.jit
def round_gradient(variant, added: cute.Tensor, dpair: cute.Tensor, bid: Int32, blocks: Int32, lane: Int32):
    """Round this block's part of d(pair bias), once `dq` is through."""
    arch.griddepcontrol_wait()
    for x in cutlass.range(bid * 32 + lane, added.shape[0], blocks * 32, unroll=4):
        exact, rounded = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, variant.dtype)
        cute.autovec_copy(added[x, None], exact)
        rounded.store(exact.load().to(variant.dtype))
        cute.autovec_copy(rounded, dpair[x, None])
