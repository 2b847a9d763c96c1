"""A consumer warpgroup of `KeyGradients`. `FusedGradients` shares its products.

It owns 64 keys of each panel of its block. It loops over the rows n of its stream, and 32 queries at a time. It writes dk, dv
and its head's part of d(mask bias) of each row.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.statistics import TILE_WORDS, delta_units, step_of
from evoattn.backends.hopper.lib.copies import store_accumulator, store_tile
from evoattn.backends.hopper.lib.live_rows import LineSizes, LiveRows, next_panel
from evoattn.backends.hopper.lib.primitives import (
    exp2,
    hide,
    make_finite,
    make_wgmma,
    narrow,
    pin_registers,
    select_quad,
    three_terms,
)
from evoattn.backends.hopper.lib.ring import Ring, Slot, sleep_until
from evoattn.backends.hopper.lib.schedule import Span
from evoattn.backends.hopper.tiles import MMA_M, SLICE, pad_channels
from evoattn.core.numerics import LOG2E

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class KeyOperands(
    namedtuple("KeyOperands", "acc_S acc_dP acc_dK acc_dV tSrK tdPrV tSrKeyTerms tdPrUnits tSrQ tdPrdO tdKrQ tdVrdO "
        "tSrStats")
):  # fmt: skip
    """Accumulators of S^T, dP^T, dk and dv, and the operands of K Q^T, V dO^T, dS^T Q and P^T dO, as fragments of a thread.

    tSrKeyTerms and tdPrUnits meet the statistics of the queries, tSrStats, in S and dP.
    """


class KeyRow(namedtuple("KeyRow", "copy source rTerms")):
    """The copy of a row's k and v into registers, and the terms of the key bias of a thread's two keys."""


@dataclasses.dataclass(frozen=True)
class KeyRings:
    """The rings of q, dO and statistics of each stream of rows, of k and v, one row a stream, and of tiles of the pair bias."""

    queries: Ring
    keys: Ring
    bias: Ring

    def at(self, first: Any, stages: int) -> KeyRings:
        """The rings of the stream whose first stage has this number."""
        return dataclasses.replace(self, queries=self.queries.at(first, stages))


def make_fragments(variant, shared, buffers, wg_tid, t4, lane):
    """The operands of the products, and a `KeyRow`; `shared` is a `KeyShared` or `FusedShared`."""
    mma_S, mma_dK = make_wgmma(variant.dtype, False, K, SLICE), make_wgmma(variant.dtype, False, MN, 16 * variant.steps)
    tSrQ, tdPrdO = (
        mma_S.make_fragment_B(
            mma_S.get_slice(wg_tid).partition_B(cute.local_tile(x, (SLICE, pad_channels(variant.channels)), (None, 0, None)))
        )
        for x in (shared.sQ, shared.sdO)
    )
    tdKrQ, tdVrdO = (
        mma_dK.make_fragment_B(mma_dK.get_slice(wg_tid).partition_B(narrow(x, 16 * variant.steps)))
        for x in (shared.sQt, shared.sdOt)
    )
    # the words of a query fill 8 of 16 channels; the other 8 are the same again, see `load_keys`
    words = cute.make_tensor(
        cute.recast_ptr(shared.sStats, dtype=variant.dtype),
        cute.make_layout(((8, 4), (8, 2), (2, buffers)), stride=((8, 64), (1, 0), (8 * SLICE, 2 * TILE_WORDS))),
    )
    tSrStats = mma_S.make_fragment_B(mma_S.get_slice(wg_tid).partition_B(words))
    acc_S, acc_dP = (mma_S.make_fragment_C(mma_S.partition_shape_C((MMA_M, SLICE))) for _ in range(2))
    acc_dK, acc_dV = (mma_dK.make_fragment_C(mma_dK.partition_shape_C((MMA_M, 16 * variant.steps))) for _ in range(2))
    tSrK, tdPrV = (mma_S.make_fragment_A(mma_S.partition_shape_A((MMA_M, pad_channels(variant.channels)))) for _ in range(2))
    tSrKeyTerms, tdPrUnits = (mma_S.make_fragment_A(mma_S.partition_shape_A((MMA_M, 16))) for _ in range(2))
    fill_delta_units(variant, tdPrUnits, t4, lane)
    ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), variant.dtype)
    loads = cute.make_tiled_copy_A(ldmatrix, mma_S).get_slice(wg_tid)
    row = KeyRow(loads, loads.partition_S(shared.sK), cute.make_rmem_tensor(6, Int32))
    row.rTerms.fill(0)
    right = (tSrQ, tdPrdO, tdKrQ, tdVrdO, tSrStats)
    return KeyOperands(acc_S, acc_dP, acc_dK, acc_dV, tSrK, tdPrV, tSrKeyTerms, tdPrUnits, *right), row


def load_key_bias(variant, rTerms, mTerms, bias_row, first_key):
    """Load the terms of the key bias of this thread's two keys: words hi mid, lo hi, and veto veto."""
    words = cute.recast_tensor(mTerms, Int32)
    for x in range(2):
        for y, word in enumerate((0, 1) if variant.dtype is BFloat16 else (0, 1, 3)):
            rTerms[3 * x + y] = words[bias_row, (first_key + 8 * x) * (TERMS // 2) + word]


def load_keys(variant, operands, row, tiles, t4, inverse):
    """Load k and v of 64 keys, in two tiles of `sK` in shared memory, into registers, and what meets a query's channels.

    The product with a query's eight words (`write_statistics`), which it reads twice, adds the key bias and -LSE to S.
    Another product subtracts delta from dP.

    channel           0   1   2   3   4     5   6   7
    query             l0  l1  l2  u   w     u   d0  d1    w is d2 in bfloat16, and VETO in float16
    key for S         1   1   1   t0  veto  t2  0   0
    key for S again   0   0   0   t1  veto  0   0   0
    key for dP        0   0   0   0   u2    0   u0  u1    `fill_delta_units`; the second time all are 0

    t are terms of the key's bias / scale; veto is 0 in bfloat16. float16 counts l and t in steps of FLOAT16_STEP, which also
    stands for 1.
    """
    rTerms, tSrKeyTerms = row.rTerms, operands.tSrKeyTerms
    for tile, to in zip(tiles, (operands.tSrK, operands.tdPrV), strict=True):
        cute.copy(row.copy, row.source[None, None, None, tile], row.copy.retile(to))
    step, zero = step_of(variant.dtype), variant.dtype(0.0)
    # The next row is loaded early. The compiler would unpack it right after the load, and so wait for memory there.
    words = cute.make_rmem_tensor(6, Int32)
    for x in range(6):
        words[x] = hide(rTerms[x])
    one, parts = variant.dtype(step), cute.recast_tensor(words, variant.dtype)
    for x in range(2):
        hi, mid, lo, veto = (parts[6 * x + y] for y in (0, 1, 2, 4))
        bias = (hi.to(Float32) + mid.to(Float32) + lo.to(Float32)) * (inverse * Float32(1.0 / step))
        if variant.dtype is not BFloat16:
            bias = Float32(cutlass.select_(bias < -65504.0, Float32(-65504.0), bias))
        t0, t1, t2 = three_terms(bias, variant.dtype)
        first = ((one, one), (one, t0), (veto, t2), (zero, zero))
        second = ((zero, zero), (zero, t1), (veto, zero), (zero, zero))
        for y, columns in enumerate((first, second)):
            for z in range(2):
                tSrKeyTerms[2 * x + 4 * y + z] = select_quad(t4, *(column[z] for column in columns))


def fill_delta_units(variant, tdPrUnits, t4, lane):
    """Fill in what meets a query's channels in V dO^T, so that delta is subtracted; see the table in `load_keys`."""
    u0, u1, u2 = (variant.dtype(x) for x in delta_units(variant.dtype))
    zero = variant.dtype(0.0)
    tdPrUnits.fill(zero)
    tdPrUnits[0] = tdPrUnits[2] = cutlass.select_(t4 == 2, u2, cutlass.select_(t4 == 3, u0, zero))
    tdPrUnits[1] = tdPrUnits[3] = cutlass.select_(t4 == 3, u1, zero)
    pin_registers(tdPrUnits, lane)


def load_pair_bias(thread_bias, mPair, u, b, h, first_key, t4, LQ, LK, inverse):
    """Load this thread's part of slice u of the pair bias, as the accumulators of the scores hold it."""
    b, h = b % mPair.shape[0], h % mPair.shape[1]
    for x in range(4):
        values = cute.make_rmem_tensor(4, Float32)
        for y in range(4):
            key, q = first_key + y // 2 * 8, u * SLICE + 8 * x + 2 * t4 + y % 2
            bias = mPair[b, h, cutlass.min(q, LQ - 1), cutlass.min(key, LK - 1)].to(Float32)
            values[y] = make_finite(bias) * inverse
        cute.autovec_copy(values, thread_bias[None, 4 * u + x])


def load_bias(variant, acc_S, bias, u, inverse):
    """Start the accumulators from slice u of a pair bias that stays, or of a tile of one that streams."""
    if variant.pair:
        for x in range(4):
            four = cute.make_rmem_tensor(4, bias.element_type)
            cute.autovec_copy(bias[None, 4 * u + x], four)
            for y in range(4):
                acc_S[4 * x + y] = four[y] if bias.element_type is Float32 else four[y].to(Float32) * inverse


def issue_scores(variant, operands, part, stage):
    """Issue S^T and dP^T of slice `part` of a stage; with a pair bias acc_S starts from it."""
    acc_S, acc_dP, _, _, tSrK, tdPrV, tSrKeyTerms, tdPrUnits, tSrQ, tdPrdO, _, _, tSrStats = operands
    # S^T = K Q^T + pair bias
    for step in range(variant.steps):
        op = make_wgmma(variant.dtype, False, K, SLICE, step > 0 or variant.pair)
        cute.gemm(op, acc_S, tSrK[None, None, step], tSrQ[None, None, step, part, stage], acc_S)
    # S^T += key bias - LSE
    op = make_wgmma(variant.dtype, False, K, SLICE)
    cute.gemm(op, acc_S, tSrKeyTerms[None, None, 0], tSrStats[None, None, 0, (part, stage)], acc_S)
    # dP^T = V dO^T - delta
    op = make_wgmma(variant.dtype, False, K, SLICE, False)
    cute.gemm(op, acc_dP, tdPrUnits[None, None, 0], tSrStats[None, None, 0, (part, stage)], acc_dP)
    for step in range(variant.steps):
        op = make_wgmma(variant.dtype, False, K, SLICE)
        cute.gemm(op, acc_dP, tdPrV[None, None, step], tdPrdO[None, None, step, part, stage], acc_dP)


def issue_dkdv(variant, operands, P, dS, u, stage, started):
    """Issue dV and dK of slice u of a stage."""
    # dV += P^T dO, dK += dS^T Q
    for acc, left, right in ((operands.acc_dV, P, operands.tdVrdO), (operands.acc_dK, dS, operands.tdKrQ)):
        for step in range(2):
            op = make_wgmma(variant.dtype, False, MN, 16 * variant.steps, True if u > 0 or step > 0 else started)
            cute.gemm(op, acc, left[step][None, None, 0], right[None, None, u * 2 + step, stage], acc)


def compute_dscores(variant, operands, scale, sums):
    """Return P^T and dS^T of a slice [k,q], in the dtype of a product's left side.

    `sums` grow by dS of this thread's two keys, unrounded, where the mask bias has a gradient."""
    acc_S, acc_dP = operands.acc_S, operands.acc_dP
    p, d = cute.make_rmem_tensor(16, Float32), cute.make_rmem_tensor(16, Float32)
    for y in range(16):
        p[y] = exp2(acc_S[y] * (scale * LOG2E))
    for y in range(16):
        d[y] = p[y] * acc_dP[y]
        if variant.mask_gradient:
            sums[y // 2 % 2] += d[y]
    return make_left_sides(variant, p), make_left_sides(variant, d)


def make_left_sides(variant, values):
    """Convert a slice's 32 columns into two left sides of a product."""
    mma_dK = make_wgmma(variant.dtype, False, MN, 16 * variant.steps)
    operand = []
    for step in range(2):
        a = mma_dK.make_fragment_A(mma_dK.partition_shape_A((MMA_M, 16)))
        half = cute.make_tensor(values.iterator + 8 * step, cute.make_layout(8))
        cute.make_tensor(a.iterator, cute.make_layout(8)).store(half.load().to(variant.dtype))
        operand.append(a)
    return operand


@cute.jit
def store_mask_gradient(sums: cute.Tensor, to: cute.Tensor, key: Int32, t4: Int32):
    """Store the sums of a quad's two keys, each over the four threads that hold its queries; `key` is the first."""
    for x in range_constexpr(2):
        for offset in (1, 2):
            sums[x] += arch.shuffle_sync_bfly(sums[x], offset)
    key += 8 * t4
    if t4 < 2 and key < to.shape[0]:
        to[key] = cutlass.select_(t4 == 0, sums[0], sums[1])


@cute.jit
def do_row(
    variant, operands, row, bias: Any, sums: cute.Tensor, rings, scales, more: Boolean, stream: Int32, row_count: Int32, slot,
    bias_slot, NT: Int32, t4: Int32, lane: Int32,
):  # fmt: skip
    """Do all tiles of a row's queries, of which the first scores are there; then start those of the next row, if `more`.

    `bias` is this thread's part of a pair bias that stays, or the tiles of one that streams and the thread's place there.
    Returns the next slots of queries, and of a pair bias that streams.
    """
    (scale, inverse), unreleased = scales, slot.stage
    sums.fill(0.0)
    for j in cutlass.range(NT, unroll=1):
        stream_rings = rings.at(arch.make_warp_uniform(stream * variant.stages), variant.stages)
        slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
        old_stage = slot.stage
        for u in range_constexpr(2):
            P, dS = compute_dscores(variant, operands, scale, sums)
            next_slice = 2 * j + u + 1
            if const_expr(u == 1):
                slot = stream_rings.queries.advance(slot)
                last = j + 1 == NT
                if last:
                    next_slice = Int32(0)
                    if more:
                        rings.keys.consumer_wait(Slot(stream, (row_count + 1) & 1))
                        load_keys(variant, operands, row, (2 * stream, 2 * stream + 1), t4, inverse)
                if const_expr(variant.streamed):
                    rings.bias.consumer_release(bias_slot.stage, lane)
                    bias_slot = rings.bias.advance(bias_slot)
                if not last or more:
                    stream_rings.queries.consumer_wait(slot)
                    if const_expr(variant.streamed):
                        rings.bias.consumer_wait(bias_slot)
            if const_expr(u == 1 and variant.overlapped > 0):
                warpgroup.wait_group(0)
            elif const_expr(u == 0 and variant.overlapped == 2):
                if j > 0:
                    warpgroup.wait_group(0)
                    stream_rings.queries.consumer_release(unreleased, lane)
            # After the last row both start from what is there, perhaps in the middle of a copy, and nobody reads the
            # outcome: a branch around this would make each product wait for the one before.
            if const_expr(variant.streamed):
                tiles, wg_tid = bias
                load_bias(variant, operands.acc_S, tiles[None, wg_tid, None, bias_slot.stage], 1 - u, inverse)
            else:
                load_bias(variant, operands.acc_S, bias, next_slice, inverse)
            warpgroup.fence()
            issue_scores(variant, operands, 1 - u, stream_rings.queries.index(slot.stage))
            warpgroup.commit_group()
            issue_dkdv(variant, operands, P, dS, u, stream_rings.queries.index(old_stage), j > 0)
            warpgroup.commit_group()
            warpgroup.wait_group(1 if u < variant.overlapped else 0)
        if const_expr(variant.overlapped == 2):
            unreleased = old_stage
        else:
            stream_rings.queries.consumer_release(old_stage, lane)
    if const_expr(variant.overlapped == 2):
        warpgroup.wait_group(0)
        rings.at(stream * variant.stages, variant.stages).queries.consumer_release(unreleased, lane)
    return slot, bias_slot


class KeyShared(namedtuple("KeyShared", "sQ sdO sQt sdOt sStats sK sOut sPair sPairTiles")):
    """Shared memory: q, dO, both transposed, statistics, k with v, dk and dv, and the pair bias that stays or streams."""


@cute.jit
def consume(
    variant, args, span: Span, sizes: LineSizes, lengths, shared, rings, sRows: cute.Tensor, copies, inverse: Float32,
    NT: Int32, thread,
):  # fmt: skip
    """Do the rows of this warpgroup's stream, panel after panel.

    `time` counts as in `schedule`, and `row_count` the rows of the stream. `produce` writes `sRows` [4, streams].
    `panel_in_use`: a warpgroup may still read the pair bias of the last panel.

    More than 60 lines: a part of a loop in a function of its own changes what the compiler carries through the loop.
    """
    (LQ, LK), (copy_dK, copy_dV), (tid, warp_idx, lane) = lengths, copies, thread
    NS, ST, live = variant.streams, variant.stages, LiveRows(args.mOrder, args.mStarts)
    scale, stride_b, stride_n = args.scale, args.stride_b, args.stride_n
    stream, wg_warp, wg_tid = warp_idx // 4, warp_idx % 4, tid % 128
    g, t4 = lane // 4, lane % 4
    operands, row = make_fragments(variant, shared, NS * ST, wg_tid, t4, lane)
    slot, row_count, time, panel_in_use = rings.queries.start(), Int32(0), span.begin, Boolean(False)
    rows = sRows[None, stream]
    thread_bias = shared.sPair[None, wg_tid, None] if const_expr(variant.resident) else None
    sums = cute.make_rmem_tensor(2, Float32)
    bias = (shared.sPairTiles, wg_tid) if const_expr(variant.streamed) else thread_bias
    bias_slot = rings.bias.start()
    while time < span.end:
        i, h, b, p0, p1, start, length = next_panel(variant, time, span, live, sizes, lane)
        time = cutlass.min(start + length, span.end)
        first_key = i * MMA_M + wg_warp * 16 + g
        if const_expr(variant.resident):
            if panel_in_use:
                arch.barrier(barrier_id=1, number_of_threads=NS * 128)
            for u in cutlass.range(stream, 2 * NT, NS, unroll=2):
                load_pair_bias(thread_bias, args.mPair, u, b, h, first_key, t4, LQ, LK, inverse)
            arch.barrier(barrier_id=1, number_of_threads=NS * 128)
            panel_in_use = Boolean(True)
        position, count = stream, p1 - p0
        if position < count:
            if const_expr(variant.key_bias):
                arch.griddepcontrol_wait()
                rings.keys.consumer_wait(Slot(stream, row_count & 1))
                load_key_bias(variant, row.rTerms, args.mTerms, b * stride_b + rows[row_count & 3] * stride_n, first_key)
            rings.keys.consumer_wait(Slot(stream, row_count & 1))
            load_keys(variant, operands, row, (2 * stream, 2 * stream + 1), t4, inverse)
            stream_rings = rings.at(stream * ST, ST)
            stream_rings.queries.consumer_wait(slot)
            if const_expr(variant.streamed):
                rings.bias.consumer_wait(bias_slot)
            first = shared.sPairTiles[None, wg_tid, None, bias_slot.stage] if const_expr(variant.streamed) else thread_bias
            load_bias(variant, operands.acc_S, first, 0, inverse)
            warpgroup.fence()
            issue_scores(variant, operands, 0, stream_rings.queries.index(slot.stage))
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            rings.keys.consumer_release(stream, lane)  # a product has used k and v: only then have they left shared memory
        while position < count:
            more = position + NS < count
            if const_expr(variant.key_bias):
                if more:
                    bias_row = b * stride_b + rows[(row_count + 1) & 3] * stride_n
                    load_key_bias(variant, row.rTerms, args.mTerms, bias_row, first_key)
            slot, bias_slot = do_row(
                variant, operands, row, bias, sums, rings, (scale, inverse), more, stream, row_count, slot, bias_slot, NT,
                t4, lane,
            )  # fmt: skip
            if more:
                rings.keys.consumer_release(stream, lane)
            n = rows[row_count & 3]
            if const_expr(variant.mask_gradient):
                store_mask_gradient(sums, args.mdMask[b, n, h, None], first_key, t4)
            arch.cp_async_bulk_wait_group(0, read=True)
            arch.sync_warp()
            store_accumulator(operands.acc_dK, (scale, scale), shared.sOut[None, None, warp_idx], lane, variant.dtype)
            store_tile(copy_dK, warp_idx, (i * 4 + wg_warp, h, n, b))
            tile = warp_idx + NS * 4 if variant.own_tiles else warp_idx
            if const_expr(not variant.own_tiles):
                arch.cp_async_bulk_wait_group(0, read=True)
                arch.sync_warp()
            store_accumulator(operands.acc_dV, (Float32(1.0),) * 2, shared.sOut[None, None, tile], lane, variant.dtype)
            store_tile(copy_dV, tile, (i * 4 + wg_warp, h, n, b))
            position, row_count = position + NS, row_count + 1
        if const_expr(variant.streamed):
            # True if the last round has no row for this stream. It still gives the tiles of the bias back.
            # Example of 4 rows and 3 streams: stream 0 does rows 0 and 3, and ends at position 6, not below 4 + 0. Stream 1
            # does row 1, and ends at position 4, below 5.
            if position < count + stream:
                for _ in cutlass.range(NT, unroll=1):
                    sleep_until(rings.bias.full_barrier(bias_slot.stage), bias_slot.phase)
                    rings.bias.consumer_release(bias_slot.stage, lane)
                    bias_slot = rings.bias.advance(bias_slot)
    arch.cp_async_bulk_wait_group(0)
