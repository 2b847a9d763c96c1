"""The forward pass: o, lse and reference of every query."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from evoattn.kit.arguments import Number, PairView, Pointer, RowView, Sizes, View, kernel
from evoattn.kit.halves import split_tile
from evoattn.kit.overlap import wait_to_load, wait_to_store
from evoattn.kit.primitives import (
    FLOOR,
    HALVES,
    LN2,
    LOG2E,
    NEAR,
    add_values,
    at,
    decode,
    finish,
    load_tile,
    load_view,
    offsets,
    online_softmax,
    pair_at,
    row_at,
    scores,
    sigmoid,
    store_tile,
    subtract_reference,
    to_float32,
)

MOST_TRUSTED = tl.constexpr(256.0)
"""If a query's largest score is beyond this, in log2 units, its pair bias may have rounded all scores away: repeat them."""

Variant = namedtuple(
    "Variant",
    "D C BLOCK_D BLOCK_C BLOCK_Q BLOCK_K TAIL_K STAGES GRAIN GRAIN_PAIR GRAIN_GATE HAS_PAIR HAS_KEY_BIAS HAS_GATE EVEN_K "
    "HEADS_INSIDE TENSOR_MAP FOLD PRECISION LONG WAIT",
    defaults=[0],
)
"""Compile-time constants of the kernel.

D and C are channels of keys and values, BLOCK_D and BLOCK_C the powers of two that hold them. TAIL_K: keys of the ragged last
tile. HEADS_INSIDE: o is [b,n,q,h,c] in memory. FOLD: see `scores`. LONG: offsets are 64 bits long. WAIT: see `overlap`.
"""


Place = namedtuple("Place", "b h q o_q")
"""The pair bias of a program: its (b, h) and first query in a tensor map, and the offsets of queries elsewhere."""


@triton.jit
def _load_pair(pair, place, step_q, first_k, start, left, V, BLOCK_K: tl.constexpr, TAIL: tl.constexpr):
    """[q,k] of the pair bias from key first_k on, in its own dtype; 0 past the last key. step_q: its stride."""
    if V.TENSOR_MAP:
        b_pair = pair.p.load([place.b, place.h, place.q, first_k]).reshape([V.BLOCK_Q, V.BLOCK_K])
        if BLOCK_K < V.BLOCK_K:  # a map loads tiles of one size: of two halves the first
            b_pair, _ = tl.split(b_pair.reshape([V.BLOCK_Q, 2, BLOCK_K]).permute(0, 2, 1))
    else:
        o_k = offsets(tl.arange(0, BLOCK_K), V.LONG)
        p_tile = pair.p + start * pair.k
        b_pair = load_tile(p_tile, place.o_q, o_k, step_q, pair.k, 0, left, MASK_ROWS=False, MASK_COLS=TAIL)
    return b_pair


@triton.jit
def _step(
    b_q, b_acc, b_max, b_sum, k, v, key_bias, pair, place, first_k, unit, lk, V,
    BLOCK_K: tl.constexpr, TAIL: tl.constexpr, b_ref=None,
):  # fmt: skip
    """Fold the tile of keys that starts at first_k into (b_acc, b_max, b_sum).

    TAIL: the tile may reach past lk. With b_ref [q] the pair bias is measured from it.
    """
    step_k, step_v, step_q = k.l * V.GRAIN, v.l * V.GRAIN, pair.q * V.GRAIN_PAIR
    o_in = tl.arange(0, BLOCK_K)
    o_k = offsets(o_in, V.LONG)
    o_d = offsets(tl.arange(0, V.BLOCK_D), V.LONG)
    o_c = offsets(tl.arange(0, V.BLOCK_C), V.LONG)
    start = tl.cast(first_k, tl.int64) if V.LONG else first_k
    left = lk - first_k
    b_k = load_view(k.p + start * step_k, k, o_k, o_d, left, COLS=V.D, GRAIN=V.GRAIN, MASK=TAIL)  # [k,d]
    b_v = load_view(v.p + start * step_v, v, o_k, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=TAIL)  # [k,c]
    b_pair = 0.0
    b_key_bias = 0.0
    if V.HAS_PAIR:
        b_pair = _load_pair(pair, place, step_q, first_k, start, left, V, BLOCK_K=BLOCK_K, TAIL=TAIL)  # [q,k]
        if b_ref is not None:
            b_pair = subtract_reference(b_pair, b_ref[:, None])
    if V.HAS_KEY_BIAS:
        b_key_bias = tl.load(key_bias.p + first_k + o_in)  # [k]
    b_s = scores(
        b_q, b_k, b_pair, b_key_bias, unit,
        FOLD=V.FOLD, HAS_PAIR=V.HAS_PAIR, HAS_KEY_BIAS=V.HAS_KEY_BIAS, PRECISION=V.PRECISION,
    )  # [q,k]  # fmt: skip
    if TAIL and not V.HAS_KEY_BIAS:
        b_s = tl.where((o_in < left)[None, :], b_s, float("-inf"))
    b_p, b_acc, b_max, b_sum = online_softmax(b_s, b_acc, b_max, b_sum, factor=unit if V.FOLD else 1.0)
    # O += P V
    b_acc = add_values(b_acc, b_p, b_v, V.PRECISION)  # [q,c]
    return b_acc, b_max, b_sum


@triton.jit
def _apply_gate(b_o, gate, o_q, left, V):
    """b_o [q,c] * sigmoid(gate); gate begins at the first query."""
    o_c = offsets(tl.arange(0, V.BLOCK_C), V.LONG)
    b_gate = load_view(gate.p, gate, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN_GATE, MASK=True)
    return b_o * sigmoid(b_gate)  # [q,c]


@triton.jit
def _largest_bias(b_top, key_bias, pair, place, first_k, unit, lk, V):
    """b_top [q] and the largest sum of pair bias and key bias of the keys from first_k on, in natural units."""
    step_q = pair.q * V.GRAIN_PAIR
    o_in = tl.arange(0, V.BLOCK_K)
    start = tl.cast(first_k, tl.int64) if V.LONG else first_k
    b_bias = to_float32(_load_pair(pair, place, step_q, first_k, start, lk - first_k, V, BLOCK_K=V.BLOCK_K, TAIL=True))  # [q,k]
    if V.HAS_KEY_BIAS:
        b_bias += (tl.load(key_bias.p + first_k + o_in) * ((unit if V.FOLD else 1.0) * LN2))[None, :]
    return tl.maximum(b_top, tl.max(tl.where((o_in < lk - first_k)[None, :], b_bias, float("-inf")), 1))


@kernel
def forward_kernel(
    q: View, k: View, v: View, key_bias: RowView, runs: RowView, pair: PairView, out: Pointer, lse: Pointer, ref: Pointer,
    gate: View, sizes: Sizes, first_q: Number, blocks: Number, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_Q queries of one (b, n, h): of those from first_q on, in `blocks` blocks.

    It loops over the live key tiles of its row, run by run, with the online softmax; a ragged last tile comes after the loop.
    It writes o, gated if there is a gate, lse and reference once. Queries whose pair bias rounds their scores away are computed
    and written again.

    More than 60 lines: its parts share the tiles that stay in registers over the loops, and their offsets.
    """
    block, n, h, b = decode(tl.program_id(0), blocks, sizes.n, sizes.h)
    lk = sizes.lk
    start_q = first_q + block * V.BLOCK_Q
    left_q = sizes.lq - start_q
    pair_b = tl.where(pair.b == 0, 0, b)
    pair_h = tl.where(pair.h == 0, 0, h)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    o_in = tl.arange(0, V.BLOCK_Q)
    o_q = offsets(o_in, V.LONG)
    o_d = offsets(tl.arange(0, V.BLOCK_D), V.LONG)
    unit = sizes.scale * LOG2E

    q = at(q, b, h, V.GRAIN, n=n, first=start_q)
    k = at(k, b, h, V.GRAIN, n=n)
    v = at(v, b, h, V.GRAIN, n=n)
    key_bias = row_at(key_bias, b, n)
    runs = row_at(runs, b, n)
    if not V.TENSOR_MAP:
        pair = pair_at(pair, b, h, V.GRAIN_PAIR, first_q=start_q)
    # Queries past the end read the last one's bias: nothing of theirs is stored, and no mask slows the loop down.
    place = Place(pair_b, pair_h, start_q, tl.minimum(o_q, left_q - 1))

    b_q = load_view(q.p, q, o_q, o_d, left_q, COLS=V.D, GRAIN=V.GRAIN, MASK=True)  # [q,d]
    if V.PRECISION == HALVES:
        b_q = split_tile(b_q, 1)
    b_acc = tl.zeros([V.BLOCK_Q, V.BLOCK_C], tl.float32)  # [q,c]
    b_max = tl.full([V.BLOCK_Q], FLOOR, tl.float32)
    b_sum = tl.zeros([V.BLOCK_Q], tl.float32)
    wait_to_load(V.WAIT)

    full = lk // V.BLOCK_K
    count = 1
    end = tl.cdiv(lk, V.BLOCK_K)
    if V.HAS_KEY_BIAS:
        count = tl.load(runs.p)
        end = 0
    for run in tl.range(0, count, num_stages=1):
        begin = 0
        stop = full
        if V.HAS_KEY_BIAS:
            begin = tl.load(runs.p + 1 + 2 * run)
            end = tl.load(runs.p + 2 + 2 * run)
            stop = tl.minimum(end, full)
        for tile in tl.range(begin, stop, num_stages=V.STAGES):
            b_acc, b_max, b_sum = _step(
                b_q, b_acc, b_max, b_sum, k, v, key_bias, pair, place, tile * V.BLOCK_K, unit, lk, V,
                BLOCK_K=V.BLOCK_K, TAIL=False,
            )  # fmt: skip
    if not V.EVEN_K:  # noqa: SIM102 (this one is resolved when the kernel is compiled, the next one when it runs)
        if end > full:
            b_acc, b_max, b_sum = _step(
                b_q, b_acc, b_max, b_sum, k, v, key_bias, pair, place, full * V.BLOCK_K, unit, lk, V,
                BLOCK_K=V.TAIL_K, TAIL=True,
            )  # fmt: skip

    wait_to_store(V.WAIT)
    b_o, b_lse = finish(b_acc, b_max, b_sum)
    if V.HAS_GATE:
        gate = at(gate, b, h, V.GRAIN_GATE, n=n, first=start_q)
        b_o = _apply_gate(b_o, gate, o_q, left_q, V)
    line = (b * sizes.n + n) * sizes.h + h
    p_lse = lse + (line * sizes.lq + start_q)
    p_ref = ref + (line * sizes.lq + start_q)
    tl.store(p_lse + o_in, b_lse, mask=o_in < left_q)
    tl.store(p_ref + o_in, tl.zeros([V.BLOCK_Q], tl.float32), mask=o_in < left_q)
    stride_o = V.C
    first = line * sizes.lq + start_q
    if V.HEADS_INSIDE:
        stride_o = V.C * sizes.h
        first = ((b * sizes.n + n) * sizes.lq + start_q) * sizes.h + h
    o_c = tl.arange(0, V.BLOCK_C)
    store_tile(out + first * V.C, b_o, o_in, o_c, stride_o, 1, left_q, V.C, MASK_ROWS=True, MASK_COLS=V.C != V.BLOCK_C)
    if V.HAS_PAIR:
        # A query that attends to nothing so far may have biases that were infinite only in other units.
        repeats = tl.max(((tl.abs(b_max) > MOST_TRUSTED) & (o_in < left_q)).to(tl.int32), 0)
        if repeats * count > 0:
            b_top = tl.full([V.BLOCK_Q], float("-inf"), tl.float32)  # [q]
            for tile in tl.range(0, tl.cdiv(lk, V.BLOCK_K), num_stages=1):
                b_top = _largest_bias(b_top, key_bias, pair, place, tile * V.BLOCK_K, unit, lk, V)
            b_size = tl.abs(b_top)
            b_ref = tl.where((b_size > NEAR) & (b_size < float("inf")), b_top, 0.0)  # [q]
            b_acc = tl.zeros([V.BLOCK_Q, V.BLOCK_C], tl.float32)  # [q,c]
            b_max = tl.full([V.BLOCK_Q], FLOOR, tl.float32)
            b_sum = tl.zeros([V.BLOCK_Q], tl.float32)
            for tile in tl.range(0, tl.cdiv(lk, V.BLOCK_K), num_stages=1):
                b_acc, b_max, b_sum = _step(
                    b_q, b_acc, b_max, b_sum, k, v, key_bias, pair, place, tile * V.BLOCK_K, unit, lk, V,
                    BLOCK_K=V.BLOCK_K, TAIL=True, b_ref=b_ref,
                )  # fmt: skip
            b_o, b_lse = finish(b_acc, b_max, b_sum)
            if V.HAS_GATE:
                b_o = _apply_gate(b_o, gate, o_q, left_q, V)
            b_distant = (b_ref != 0.0) & (o_in < left_q)
            tl.debug_barrier()  # another thread may have stored the same element before
            tl.store(p_lse + o_in, b_lse, mask=b_distant)
            tl.store(p_ref + o_in, b_ref, mask=b_distant)
            p_tile = out + first * V.C + o_in[:, None] * stride_o + o_c[None, :]
            tl.store(p_tile, b_o.to(out.dtype.element_ty), mask=b_distant[:, None] & (o_c < V.C)[None, :])
