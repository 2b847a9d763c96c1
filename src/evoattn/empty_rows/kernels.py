"""Triton kernels for rows that a mask bias masks at every key (the formulas are in `means`).

Each program returns at once if its row is not empty, so a mask without empty rows costs a launch. All tensors are
`[b,n,h,l,c]` with any strides; the mask bias is `[b,n,1,1,k]`. A row's number is b * N + n. The number of a program and the
offsets along each axis have 64 bits, and so have their products with strides.

Names: `p_` pointer, `o_` offsets along one axis, `b_` tile in registers; the axes of a tile stand in a comment, `# [l,c]`.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.kit.arguments import Constant, Number, Pointer, Specialised, kernel
from evoattn.kit.primitives import at, load_tile, sigmoid, store_tile


class Array(NamedTuple):
    """A tensor `[b,n,h,l,c]` with its strides in elements. Unlike those of `arguments.View`, each has variants and no grain."""

    p: Pointer
    b: Specialised
    n: Specialised
    h: Specialised
    l: Specialised
    c: Specialised


RowSizes = namedtuple("RowSizes", "n h lq lk total")
"""Rows of a batch, heads, queries, keys, and rows of all batches."""
FillConstants = namedtuple("FillConstants", "C BLOCK_C BLOCK_L GATED")
"""Constants of `fill_kernel` and `pairs_kernel`. GATED: there is a gate."""
AddConstants = namedtuple("AddConstants", "D C BLOCK_D BLOCK_C BLOCK_L BLOCKS_D GATED NEED_DQ NEED_DK NEED_DV NEED_DGATE")
"""Constants of `inputs_kernel`. NEED_DQ and the like: the gradients that it adds to or, of the gate, writes."""


@triton.jit
def load(x, o_l, o_c, length, C: tl.constexpr):
    """[l,c] of a view, 0 outside of it."""
    return load_tile(x.p, o_l, o_c, x.l, x.c, length, C, True, True)


@triton.jit
def load_gated(x, gate, o_l, o_c, length, C: tl.constexpr, GATED: tl.constexpr):
    """[l,c] of dO, times sigmoid(gate) if there is a gate."""
    b_do = load(x, o_l, o_c, length, C)
    if GATED:
        b_do = (b_do.to(tl.float32) * sigmoid(load(gate, o_l, o_c, length, C))).to(b_do.dtype)
    return b_do


@triton.jit
def add(x, b_tile, o_l, o_c, length, cols):
    """Add a float32 tile [l,c] to a view, rounded once."""
    b_tile += load_tile(x.p, o_l, o_c, x.l, x.c, length, cols, True, True).to(tl.float32)
    store_tile(x.p, b_tile, o_l, o_c, x.l, x.c, length, cols, True, True)


@triton.jit
def load_keys(mask, o_k, lk):
    """[k] of a mask bias in float32, -inf past the end."""
    return tl.load(mask.p + o_k * mask.c, mask=o_k < lk, other=float("-inf")).to(tl.float32)


@triton.jit
def counts(mask, floor, o_k, lk):
    """[k], True for the keys of an empty row that have a weight."""
    return (load_keys(mask, o_k, lk) >= floor) & (o_k < lk)


@triton.jit
def load_centered(v, mask, b_mean, floor, o_k, o_c, lk, C: tl.constexpr):
    """V' [k,c]: the values less their mean, 0 for keys that do not count."""
    b_v = load(v, o_k, o_c, lk, C)  # [k,c]
    return tl.where(counts(mask, floor, o_k, lk)[:, None], b_v.to(tl.float32) - b_mean[None, :], 0.0).to(b_v.dtype)


@kernel
def find_kernel(
    mask: Array, alive: Pointer, stats: Pointer, limit: Number, equal: Number, n_rows: Number, lk: Number, total: Number,
    BLOCK_K: Constant,
) -> None:  # fmt: skip
    """One program owns a row of keys.

    It loops over the mask bias for its largest number, and again to count the keys of an empty row.
    It writes the row of `alive` and its two numbers once.
    """
    row = tl.program_id(0).to(tl.int64)
    mask = at(mask, row // n_rows, 0, 1, row % n_rows)
    o_in = tl.arange(0, BLOCK_K).to(tl.int64)
    b_top = tl.full([BLOCK_K], float("-inf"), tl.float32)  # [k]
    b_alive = tl.zeros([BLOCK_K], tl.int32)  # [k]
    for start in range(0, lk, BLOCK_K):
        b_keys = load_keys(mask, start + o_in, lk)
        b_top = tl.maximum(b_top, b_keys)
        b_alive = tl.maximum(b_alive, tl.where(b_keys <= limit, 0, 1))  # NaN has to reach the output: it is alive
    is_alive = tl.max(b_alive, 0)
    floor = tl.max(b_top, 0) * equal
    b_count = tl.zeros([BLOCK_K], tl.int32)  # [k]
    for start in range(0, lk * (1 - is_alive), BLOCK_K):
        b_count += tl.where(counts(mask, floor, start + o_in, lk), 1, 0)
    count = tl.sum(b_count, 0).to(tl.float32)
    tl.store(stats + row, tl.where(is_alive != 0, 0.0, 1.0 / tl.maximum(count, 1.0)))
    tl.store(stats + total + row, floor)
    for start in range(0, lk, BLOCK_K):
        o_k = start + o_in
        b_counts = tl.where(load_keys(mask, o_k, lk) <= 2 * limit, 0, is_alive)
        tl.store(alive + row * lk + o_k, b_counts.to(tl.uint8), mask=o_k < lk)


@kernel
def fill_kernel(
    v: Array, o: Array, gate: Array, mask: Array, means: Pointer, stats: Pointer, sizes: RowSizes, V: FillConstants,
) -> None:  # fmt: skip
    """One program owns a row and a head.

    It loops over the keys for the mean of v, and then over the queries.
    It writes the mean once, and to each query's output once, times sigmoid(gate) if there is a gate.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // sizes.h
    weight = tl.load(stats + row)
    if weight == 0.0:
        return
    floor = tl.load(stats + sizes.total + row)
    b, n, h = row // sizes.n, row % sizes.n, pid % sizes.h
    v, o, gate, mask = at(v, b, h, 1, n), at(o, b, h, 1, n), at(gate, b, h, 1, n), at(mask, b, 0, 1, n)
    o_in = tl.arange(0, V.BLOCK_L).to(tl.int64)
    o_c = tl.arange(0, V.BLOCK_C).to(tl.int64)
    b_sum = tl.zeros([V.BLOCK_L, V.BLOCK_C], tl.float32)  # [k,c]
    for start in range(0, sizes.lk, V.BLOCK_L):
        o_k = start + o_in
        b_v = load(v, o_k, o_c, sizes.lk, V.C).to(tl.float32)  # [k,c]
        b_sum += tl.where(counts(mask, floor, o_k, sizes.lk)[:, None], b_v, 0.0)
    b_mean = (tl.sum(b_sum, 0) * weight).to(means.dtype.element_ty)  # [c]
    tl.store(means + pid * V.C + o_c, b_mean, mask=o_c < V.C)
    b_ones = tl.full([V.BLOCK_L, V.BLOCK_C], 1.0, tl.float32)
    for start in range(0, sizes.lq, V.BLOCK_L):
        o_q = start + o_in
        b_o = b_mean.to(tl.float32)[None, :] * b_ones  # [q,c]
        if V.GATED:
            b_o *= sigmoid(load(gate, o_q, o_c, sizes.lq, V.C))
        store_tile(o.p, b_o, o_q, o_c, o.l, o.c, sizes.lq, V.C, True, True)


@kernel
def inputs_kernel(
    v: Array, gate: Array, dO: Array, mask: Array, q: Array, k: Array, dq: Array, dk: Array, dv: Array, dgate: Array,
    stats: Pointer, means: Pointer, scale: Number, sizes: RowSizes, V: AddConstants,
) -> None:  # fmt: skip
    """One program owns a row, a head and BLOCK_D channels of q and k; the first of them also owns dV and the gate's gradient.

    It loops over the queries (sum of dO, dO^T Q), over the keys (V'^T K), and over the queries again.
    It writes the gate's gradient in the first loop, and adds once to dK and dV in the second, and to dQ in the third.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // (sizes.h * V.BLOCKS_D)
    weight = tl.load(stats + row)
    if weight == 0.0:
        return
    floor = tl.load(stats + sizes.total + row)
    b, n, h, block_d = row // sizes.n, row % sizes.n, pid // V.BLOCKS_D % sizes.h, pid % V.BLOCKS_D
    q, k, v, gate, dO = at(q, b, h, 1, n), at(k, b, h, 1, n), at(v, b, h, 1, n), at(gate, b, h, 1, n), at(dO, b, h, 1, n)
    dq, dk, dv, dgate = at(dq, b, h, 1, n), at(dk, b, h, 1, n), at(dv, b, h, 1, n), at(dgate, b, h, 1, n)
    mask = at(mask, b, 0, 1, n)
    o_in = tl.arange(0, V.BLOCK_L).to(tl.int64)
    o_d = block_d * V.BLOCK_D + tl.arange(0, V.BLOCK_D).to(tl.int64)
    o_c = tl.arange(0, V.BLOCK_C).to(tl.int64)
    dtype = q.p.dtype.element_ty
    p_mean = means + (row * sizes.h + h) * V.C + o_c
    b_mean = tl.load(p_mean, mask=o_c < V.C, other=0.0).to(tl.float32)  # [c], as the forward rounded it

    b_do_sum = tl.zeros([V.BLOCK_C], tl.float32)  # [c], the sum of dO
    b_do_q = tl.zeros([V.BLOCK_C, V.BLOCK_D], tl.float32)  # [c,d], dO^T Q
    if V.NEED_DK or V.NEED_DV or V.NEED_DGATE:
        for start in range(0, sizes.lq, V.BLOCK_L):
            o_q = start + o_in
            if V.NEED_DGATE and block_d == 0:
                b_dgate = load(gate, o_q, o_c, sizes.lq, V.C).to(tl.float32)  # [q,c]
                b_dgate = sigmoid(b_dgate) * sigmoid(-b_dgate)
                b_dgate *= load(dO, o_q, o_c, sizes.lq, V.C).to(tl.float32) * b_mean[None, :]
                store_tile(dgate.p, b_dgate, o_q, o_c, dgate.l, dgate.c, sizes.lq, V.C, True, True)
            b_do = load_gated(dO, gate, o_q, o_c, sizes.lq, V.C, V.GATED)  # [q,c]
            b_do_sum += tl.sum(b_do.to(tl.float32), 0)
            if V.NEED_DK:
                b_q = load(q, o_q, o_d, sizes.lq, V.D)  # [q,d]
                b_do_q = tl.dot(tl.trans(b_do), b_q, b_do_q, input_precision="ieee")

    b_v_k = tl.zeros([V.BLOCK_C, V.BLOCK_D], tl.float32)  # [c,d], V'^T K
    for start in range(0, sizes.lk, V.BLOCK_L):
        o_k = start + o_in
        if V.NEED_DQ or V.NEED_DK:
            b_centered = load_centered(v, mask, b_mean, floor, o_k, o_c, sizes.lk, V.C)  # [k,c]
        if V.NEED_DK:
            b_dk = tl.dot(b_centered, b_do_q.to(dtype), input_precision="ieee") * (scale * weight)  # [k,d], V' (dO^T Q)
            add(dk, b_dk, o_k, o_d, sizes.lk, V.D)
        if V.NEED_DV and block_d == 0:
            b_dv = tl.where(counts(mask, floor, o_k, sizes.lk)[:, None], b_do_sum[None, :] * weight, 0.0)  # [k,c]
            add(dv, b_dv, o_k, o_c, sizes.lk, V.C)
        if V.NEED_DQ:
            b_k = load(k, o_k, o_d, sizes.lk, V.D)  # [k,d]
            b_v_k = tl.dot(tl.trans(b_centered), b_k, b_v_k, input_precision="ieee")

    if V.NEED_DQ:
        b_v_k = (b_v_k * weight).to(dtype)
        for start in range(0, sizes.lq, V.BLOCK_L):
            o_q = start + o_in
            b_do = load_gated(dO, gate, o_q, o_c, sizes.lq, V.C, V.GATED)  # [q,c]
            b_dq = tl.dot(b_do, b_v_k, input_precision="ieee") * scale  # [q,d], dO (V'^T K)
            add(dq, b_dq, o_q, o_d, sizes.lq, V.D)


@kernel
def pairs_kernel(
    v: Array, gate: Array, dO: Array, mask: Array, dpair: Array, stats: Pointer, means: Pointer,
    sizes: RowSizes, each: Number, blocks_q: Number, blocks_k: Number, V: FillConstants, FLAGS: Constant,
) -> None:  # fmt: skip
    """One program owns a tile of queries and keys of one (b, h) of the pair bias, which `each` rows share.

    It loops over FLAGS rows at a time, and over the empty ones among them in their order.
    It adds its sum to the gradient once, if there was an empty row.
    """
    pid = tl.program_id(0).to(tl.int64)
    o_k = pid % blocks_k * V.BLOCK_L + tl.arange(0, V.BLOCK_L)
    pid = pid // blocks_k
    o_q = pid % blocks_q * V.BLOCK_L + tl.arange(0, V.BLOCK_L)
    pid = pid // blocks_q
    h, first = pid % sizes.h, pid // sizes.h * each
    o_c = tl.arange(0, V.BLOCK_C).to(tl.int64)
    o_row = tl.arange(0, FLAGS)
    b_sum = tl.zeros([V.BLOCK_L, V.BLOCK_L], tl.float32)  # [q,k]
    empty_rows = 0
    for start in range(0, each, FLAGS):
        b_weight = tl.load(stats + first + start + o_row, mask=start + o_row < each, other=0.0)  # [row]
        empty = tl.sum(tl.where(b_weight != 0.0, 1, 0), 0)
        empty_rows += empty
        row_in = -1
        for _ in range(empty):
            row_in = tl.min(tl.where((b_weight != 0.0) & (o_row > row_in), o_row, FLAGS), 0)
            row = first + start + row_in
            weight = tl.load(stats + row)
            floor = tl.load(stats + sizes.total + row)
            b, n = row // sizes.n, row % sizes.n
            b_mean = tl.load(means + (row * sizes.h + h) * V.C + o_c, mask=o_c < V.C, other=0.0).to(tl.float32)  # [c]
            b_do = load_gated(at(dO, b, h, 1, n), at(gate, b, h, 1, n), o_q, o_c, sizes.lq, V.C, V.GATED)  # [q,c]
            v_row, mask_row = at(v, b, h, 1, n), at(mask, b, 0, 1, n)
            b_centered = load_centered(v_row, mask_row, b_mean, floor, o_k, o_c, sizes.lk, V.C)  # [k,c]
            # d(pair bias) += weight dO V'^T
            b_sum += tl.dot(b_do, tl.trans(b_centered), input_precision="ieee") * weight
    if empty_rows > 0:
        add(at(dpair, pid // sizes.h, h, 1), b_sum, o_q, o_k, sizes.lq, sizes.lk)
