"""The steps of a row in a consumer warpgroup of the forward: scores, softmax and output, one block of keys after another."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from evoattn.backends.hopper.lib.primitives import fma, make_wgmma
from evoattn.backends.hopper.lib.ring import Ring, Slot
from evoattn.backends.hopper.tiles import CHAIN, HALVES, MMA_M, SLICE

K, MN = OperandMajorMode.K, OperandMajorMode.MN
_LOW_REFERENCE = -256.0  # a reference below, in units of log2, may be one of keys that a finite bias masks
ROW, SLICES = range(2)  # of `sWork`: what a producer tells its consumers of a turn, the row n and its slices of keys


@dataclasses.dataclass(frozen=True)
class ForwardRings:
    """The rings of keys (with values and key bias), of the pair bias, which uses the same slots, and of queries."""

    keys: Ring
    pair: Ring
    queries: Ring

    def stream(self, stream: Any, stages: int) -> ForwardRings:
        """The rings of a stream."""
        return dataclasses.replace(self, keys=self.keys.of(stream, stages))

    def at(self, first: Any) -> ForwardRings:
        """The rings of the stream whose first stage has this number."""
        return dataclasses.replace(self, keys=self.keys.at(first, self.keys.stages))


class ForwardRow(namedtuple("ForwardRow", "acc_S0 acc_S1 acc_O m l")):
    """Registers of a row: scores of two slices, the output, the references in units of log2, and the sums of probabilities."""


class ForwardOperands(namedtuple("ForwardOperands", "tSrQ tSsQ tSrAlpha tSrK tSrTerms tSrPair tSrIdentity tOrV")):
    """Operands of the products, as fragments of a thread.

    tSrQ, tSsQ: queries in registers, and in shared memory. tSrAlpha, tSrTerms: coefficients and terms of the key bias.
    tSrPair, tSrIdentity: the pair bias, and the identity over scale. tSrK, tOrV: keys and values.
    """


class QueryCopy(namedtuple("QueryCopy", "atom source target excess")):
    """The copy of a row's queries into registers; `excess` is the part of the scale that 8 channels take besides."""


def query_slot(variant, stream, turn, phase):
    """The slot of the row that is `turn` in a stream.

    With one slot the queries go on into registers, and the caller counts the phase. With two, for want of registers,
    the tensor cores read them from the slot at every step, and o leaves from there.
    """
    return Slot(stream, phase) if variant.query_stages == 1 else Slot(stream * 2 + turn % 2, turn // 2 % 2)


def query_operand(variant, operands, stream, half, turn):
    """A row's queries as an operand."""
    if variant.query_stages == 1:
        return operands.tSrQ
    return operands.tSsQ[None, None, None, query_slot(variant, stream, turn, 0).stage * HALVES + half]


@cute.jit
def load_queries(variant, rings, copy, tSrQ, stream: Int32, half: Int32, turn: Int32, phase: Int32):
    """Wait for a row's queries. With 8 channels the other 8 are q times the excess of the scale."""
    rings.queries.consumer_wait(query_slot(variant, stream, turn, phase))
    if const_expr(variant.query_stages == 1):
        cute.copy(copy.atom, copy.source[None, None, None, stream * HALVES + half], copy.target)
        if const_expr(variant.keys_twice):
            for x in range_constexpr(4):
                tSrQ[4 + x] = (tSrQ[x].to(Float32) * copy.excess).to(variant.dtype)


@cute.jit
def release_registers(variant, rings, stream: Int32, lane: Int32):
    """Release the slot of queries that went into registers, once a product has used these.

    Earlier, loads might still be on their way: an arrival may overtake them.
    """
    if const_expr(variant.query_stages == 1):
        rings.queries.consumer_release(stream, lane)


@cute.jit
def release_output(rings, stage: Int32, lane: Int32):
    """Release the slot from which the o of the row before has left."""
    arch.cp_async_bulk_wait_group(0, read=True)
    arch.sync_warp()
    rings.queries.consumer_release(stage, lane)


def wait_keys(variant, rings, slot):
    """Wait for a block of keys, and for the pair bias of it."""
    rings.keys.consumer_wait(slot)
    if variant.streamed:
        rings.pair.consumer_wait(slot)


@cute.jit
def release_keys(variant, rings, stage: Int32, lane: Int32):
    """Release a block of keys, and the pair bias of it."""
    if lane == 0:
        arch.mbarrier_arrive(rings.keys.empty_barrier(stage))
        if const_expr(variant.streamed):
            arch.mbarrier_arrive(rings.pair.empty_barrier(stage))


@cute.jit
def do_chain(
    variant, j: cutlass.Constexpr, left: Int32, key_blocks: Int32, queries, operands, row, c: Float32, half: Int32, slot,
    old_stage: Int32, output: Int32, rings, lane: Int32,
):  # fmt: skip
    """Do blocks j, j + 1, ... of a row's `key_blocks`, up to CHAIN of those that are left.

    acc_S1 has scores of the block in `old_stage`. The function calls itself for the next block: recursion unrolls the blocks
    when the kernel is compiled.

    `output` is the stage of queries from which the o of the row before leaves. Returns the next slot of keys, and the stage
    of the block whose second half is still to be done.
    """
    warpgroup.fence()
    issue_scores(variant, queries, operands, row.acc_S1, 1, j, slot, half, rings)
    if const_expr(j > 0):
        warpgroup.wait_group(1)
        release_keys(variant, rings, old_stage, lane)
    adds = left != key_blocks if const_expr(j == 0 and not variant.resident) else j > 0
    softmax(variant, row, operands, c, row.acc_S0, 0, rings.keys.index(slot.stage), adds)
    if const_expr(variant.query_stages == 2 and j == 0):
        if left == key_blocks:
            release_output(rings, output, lane)
    old_stage, slot = slot.stage, rings.keys.advance(slot)
    if const_expr(j + 1 < CHAIN):
        if j + 1 < left:
            wait_keys(variant, rings, slot)
            warpgroup.fence()
            issue_scores(variant, queries, operands, row.acc_S0, 0, j + 1, slot, half, rings)
            warpgroup.wait_group(1)
            softmax(variant, row, operands, c, row.acc_S1, 1, rings.keys.index(old_stage))
            slot, old_stage = do_chain(
                variant, j + 1, left, key_blocks, queries, operands, row, c, half, slot, old_stage, output, rings, lane
            )
        else:
            warpgroup.wait_group(0)
    else:
        warpgroup.wait_group(0)
    return slot, old_stage


def issue_scores(variant, queries, operands, acc_S, part, j, slot, half, rings):
    """Issue S = Q K^T + key bias + pair bias for slice `part` of block j, which lies in a slot of keys: one wgmma group.

    With a float32 pair bias the accumulators start from it.
    """
    _, _, tSrAlpha, tSrK, tSrTerms, tSrPair, tSrIdentity, _ = operands
    tile, stage = (j if variant.resident else slot.stage) * HALVES + half, rings.keys.index(slot.stage)
    if variant.float32_pair:
        for x in range(4):
            four = cute.make_tensor(acc_S.iterator + 4 * x, cute.make_layout(4))
            cute.autovec_copy(tSrPair[None, 4 * part + x, tile], four)
        warpgroup.fence()
    # S = Q K^T
    for step in range(variant.steps):
        tiled = make_wgmma(variant.dtype, variant.query_stages == 2, K, SLICE, variant.float32_pair or step > 0)
        cute.gemm(tiled, acc_S, queries[None, None, step], tSrK[None, None, step, part, stage], acc_S)
    # S += key bias
    if variant.key_bias:
        tiled = make_wgmma(variant.dtype, False, K, SLICE)
        cute.gemm(tiled, acc_S, tSrAlpha[None, None, 0], tSrTerms[None, None, 0, part, stage], acc_S)
    # S += pair bias (identity / scale)
    if variant.pair and not variant.float32_pair:
        for term in range(variant.terms):
            for x in range(2):
                tiled = make_wgmma(variant.dtype, True, K, SLICE)
                cute.gemm(tiled, acc_S, tSrPair[None, None, part * 2 + x, tile], tSrIdentity[None, None, x, term], acc_S)
    warpgroup.commit_group()


def softmax(variant, row, operands, c, acc_S, part, stage, adds: Any = True):
    """P = exp2(S c - m), its sums, and issue O += P V, or O = P V if a row begins: one wgmma group.

    `adds` must be the same for all warps: if one adds to O and its neighbours do not, all get garbage.
    """
    _, _, acc_O, m, l = row
    choose_reference(variant, acc_S, acc_O, m, l, c)
    tOrP = []
    for step in range(2):
        e = cute.make_rmem_tensor(8, Float32)
        for y in range(8):
            value = cute.math.exp2(fma(acc_S[8 * step + y], c, -m[y // 2 % 2]), fastmath=True)
            e[y] = value
            l[y % 4] = l[y % 4] + value
        tiled = make_wgmma(variant.dtype, False, MN, 16 * variant.steps)
        p = tiled.make_fragment_A(tiled.partition_shape_A((MMA_M, 16)))
        cute.make_tensor(p.iterator, cute.make_layout(8)).store(e.load().to(variant.dtype))
        tOrP.append(p)
    warpgroup.fence()
    # O += P V
    for step in range(2):
        tiled = make_wgmma(variant.dtype, False, MN, 16 * variant.steps, True if step > 0 else adds)
        cute.gemm(tiled, acc_O, tOrP[step][None, None, 0], operands.tOrV[None, None, part * 2 + step, stage], acc_O)
    warpgroup.commit_group()


@cute.jit
def choose_reference(variant, acc_S: cute.Tensor, acc_O: cute.Tensor, m: cute.Tensor, l: cute.Tensor, c: Float32):
    """Choose the references of a row, if only masked keys came before.

    O and l then hold nothing, or too little to count.
    """
    offset = 0.0 if variant.dtype is BFloat16 else 8.0  # float16 leaves room for larger probabilities
    if arch.vote_all_sync(arch.fmax(m[0], m[1]) < _LOW_REFERENCE):
        top = cute.make_rmem_tensor(2, Float32)
        for r in range_constexpr(2):
            a = acc_S[2 * r]
            for i in range_constexpr(SLICE // 8):
                a = arch.fmax(a, arch.fmax(acc_S[4 * i + 2 * r], acc_S[4 * i + 2 * r + 1]))
            top[r] = arch.warp_reduction_max(a, threads_in_group=4) * c + offset
        # A sum that has met NaN stays as it is, so that `repair` finds it.
        finite = l[0] + l[1] + l[2] + l[3] < Float32.inf
        if arch.vote_all_sync(finite and arch.fmin(top[0] - m[0], top[1] - m[1]) > 100.0):
            for r in range_constexpr(2):
                m[r] = top[r]
            for x in range_constexpr(4):
                l[x] = Float32(0.0)
            for x in range_constexpr(8 * variant.steps):
                acc_O[x] = Float32(0.0)
