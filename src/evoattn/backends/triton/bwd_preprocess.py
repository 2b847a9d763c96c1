"""What the backward makes once a call and its kernels read often: row statistics, packed pair bias, spans of live rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from evoattn.backends.triton import launch
from evoattn.backends.triton.arguments import Constant, Number, Pointer, View, kernel
from evoattn.backends.triton.launch import Kernel, Launch, Strided, contiguous, layout_for
from evoattn.backends.triton.overlap import wait_to_load, wait_to_store
from evoattn.backends.triton.prepare import RowBias
from evoattn.backends.triton.primitives import DISTANT, LOG2E, at, decode, load_rows, sigmoid, store_rows, wide

__all__ = [
    "PAD",
    "GatePass",
    "Saved",
    "Stats",
    "gate_gradient",
    "plan_pack",
    "plan_row_spans",
    "plan_statistics",
    "store_statistics",
    "without_empty_rows",
]

PAD = 16
"""Padded lengths are multiples of this. Kernels take them, and strides over them, in units of it, so that rows load wide."""

_STATISTICS_ROWS = 64
_GATE_ELEMENTS = 2048
"""Of a tile, at most, where the statistics' launch has a gate too: with more, 128 channels spill on every card."""

_PACK_TILE = 64
_ROWS_AT_ONCE = 256
_WARPS_AT_ONCE = 16


class Stats(NamedTuple):
    """What the backward's kernels read of each query (`store_statistics`), and a number that says if one is distant.

    Args:
        padded_q: queries of a row, in units of PAD.
        half: what lies between an lse and its delta, in units of PAD.
    """

    p: Pointer
    distant: Pointer
    padded_q: Number
    half: Number


class Saved(NamedTuple):
    """What the forward saved of each query `[b,n,h,q]`, and the cotangent of lse with its strides."""

    lse: Pointer
    ref: Pointer
    dlse: Pointer
    b: Number
    n: Number
    h: Number
    q: Number


@triton.jit
def store_statistics(
    p_stats, p_distant, p_lse, p_ref, p_dlse, b_o, b_do, o_in, left, stride_dlse, plane,
    HAS_DLSE: tl.constexpr, HAS_PAIR: tl.constexpr, inside=None,
):  # fmt: skip
    """Write what the backward's kernels read of each query: lse, delta = sum_c o dO - dlse log2 e and, with a pair bias, more.

    All pointers point at the first query. lse is +inf for a query that attends to nothing and past the end, and then delta is
    0: whatever dlse comes in there, nothing may go out. A query with a reference has DISTANT there; its lse and reference
    come after delta, and the number at p_distant says that there is one. inside [q]: what is written, if not all.
    """
    b_lse = tl.load(p_lse + o_in, mask=o_in < left, other=float("-inf"))  # [q]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [q]
    if HAS_DLSE:
        b_delta -= tl.load(p_dlse + o_in.to(tl.int64) * stride_dlse, mask=o_in < left, other=0.0) * LOG2E
    b_lse, b_delta = without_empty_rows(b_lse, b_delta)
    if HAS_PAIR:
        b_ref = tl.load(p_ref + o_in, mask=o_in < left, other=0.0)  # [q]
        b_far = tl.where(b_ref == 0.0, float("inf"), b_lse)
        b_lse = tl.where(b_ref == 0.0, b_lse, DISTANT)
    if inside is None:
        inside = tl.full(o_in.shape, True, tl.int1)
    tl.store(p_stats + o_in, b_lse, mask=inside)
    tl.store(p_stats + plane + o_in, b_delta, mask=inside)
    if HAS_PAIR:
        tl.store(p_stats + 2 * plane + o_in, b_far, mask=inside)
        tl.store(p_stats + 3 * plane + o_in, b_ref, mask=inside)
        tl.store(p_distant + o_in * 0, 1.0, mask=b_ref != 0.0)


@triton.jit
def without_empty_rows(b_lse, b_delta):
    """lse [q] and delta [q] such that a query that attends to nothing, whose lse is -inf, has P = 0 and dS = 0."""
    b_empty = b_lse == float("-inf")
    return tl.where(b_empty, float("inf"), b_lse), tl.where(b_empty, 0.0, b_delta)


class Sizes(NamedTuple):
    """Sizes of a launch."""

    n: Number
    h: Number
    lq: Number
    blocks: Number


class Variant(NamedTuple):
    """What the kernel is compiled for. GATED_DO, DGATE: which of the two it writes."""

    C: Constant
    BLOCK_C: Constant
    BLOCK_Q: Constant
    PAD: Constant
    GRAIN: Constant
    HAS_DLSE: Constant
    HAS_PAIR: Constant
    GATED_DO: Constant
    DGATE: Constant
    WIDE: Constant
    WAIT: Constant = 0


@kernel
def statistics_kernel(
    o: View, dO: View, saved: Saved, stats: Stats, gate: View, gated: View, dgate: View, sizes: Sizes, V: Variant
) -> None:
    """One program owns BLOCK_Q queries of one (b, n, h).

    It reads o, dO and the gate once and loops over nothing.
    It writes what `store_statistics` says, with GATED_DO dO * sigmoid(gate), with DGATE the gradient of the gate, each once.
    """
    wait_to_load(V.WAIT)
    # Heads run fastest: in the layout bnlhd they are neighbours in memory.
    h, block, n, b = decode(tl.program_id(0), sizes.h, sizes.blocks, sizes.n)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    line = (b * sizes.n + n) * sizes.h + h
    o_in = tl.arange(0, V.BLOCK_Q)
    o_q = wide(o_in, V.WIDE)
    o_c = wide(tl.arange(0, V.BLOCK_C), V.WIDE)
    start = (block * V.BLOCK_Q).to(tl.int64)
    left = sizes.lq - block * V.BLOCK_Q
    o = at(o, b, h, V.GRAIN, n=n, first=start)
    dO = at(dO, b, h, V.GRAIN, n=n, first=start)
    b_o = load_rows(o.p, o, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)  # [q,c]
    b_do = load_rows(dO.p, dO, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)  # [q,c]
    p_dlse = saved.dlse + (b * saved.b + n * saved.n + h * saved.h + start * saved.q)
    p_stats = stats.p + (line * (stats.padded_q * V.PAD) + start)
    inside = o_in < stats.padded_q * V.PAD - block * V.BLOCK_Q
    first = line * sizes.lq + start
    if V.GATED_DO or V.DGATE:
        gate = at(gate, b, h, V.GRAIN, n=n, first=start)
        b_gate = load_rows(gate.p, gate, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)  # [q,c]
    wait_to_store(V.WAIT)
    store_statistics(
        p_stats, stats.distant, saved.lse + first, saved.ref + first, p_dlse, b_o, b_do, o_in, left, saved.q,
        wide(stats.half, V.WIDE) * V.PAD, HAS_DLSE=V.HAS_DLSE, HAS_PAIR=V.HAS_PAIR, inside=inside,
    )  # fmt: skip
    if V.GATED_DO:
        gated = at(gated, b, h, V.GRAIN, n=n, first=start)
        b_gated = b_do.to(tl.float32) * sigmoid(b_gate)  # [q,c]
        store_rows(gated, b_gated, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)
    if V.DGATE:
        dgate = at(dgate, b, h, V.GRAIN, n=n, first=start)
        b_dgate = gate_gradient(b_o, b_do, b_gate)  # [q,c]
        store_rows(dgate, b_dgate, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)


@triton.jit
def gate_gradient(b_o, b_do, b_gate):
    """do * o * (1 - sigmoid(gate)) in float32, of the gated o."""
    return b_do.to(tl.float32) * b_o.to(tl.float32) * sigmoid(-b_gate.to(tl.float32))


class GatePass(NamedTuple):
    """What the pass that makes the statistics does with a gate besides. All are [b,n,h,q,c].

    Args:
        gate: before the sigmoid.
        do: the cotangent of the gated o.
        gated_do: do * sigmoid(gate), which the kernels after it read in the place of do.
        dgate: the gradient of the gate.
        needs_do, needs_dgate: which of the two are written.
    """

    gate: Strided
    do: Strided
    gated_do: Strided
    dgate: Strided
    needs_do: bool
    needs_dgate: bool


def plan_statistics(stats: Strided, o: Strided, do: Strided, dlse: Strided | None, gate: GatePass | None = None) -> Launch:
    """Of (o, do, lse, reference, dlse or lse, stats, distant, gate, gated do, dgate): fills `stats`
    [2 or 4, b, n, h, padded_q].

    The first two are lse and delta, the others, with a pair bias, are for queries with a reference (`store_statistics`). It
    touches of the last three tensors what `gate` asks for.
    """
    b, n, h, lq, c = o.shape
    padded_q = stats.shape[-1]
    layout = layout_for(o, do) if gate is None else layout_for(o, gate.do, gate.gate, gate.gated_do, gate.dgate)
    views = [View(None, *layout.strides[i : i + 5]) for i in range(0, len(layout.strides), 5)]
    of_o, of_do, of_gate, gated, dgate = (*views, *[View(None, 0, 0, 0, 0, 0)] * 3)[:5]
    rows = _STATISTICS_ROWS if gate is None else max(PAD, min(_STATISTICS_ROWS, _GATE_ELEMENTS // launch.head_block(c)))
    blocks = -(-padded_q // rows)
    return statistics_kernel.plan(
        blocks * n * h * b,
        o=of_o,
        dO=of_do,
        saved=Saved(None, None, None, *launch.strides(dlse, 4)),
        stats=Stats(None, None, padded_q // PAD, b * n * h * padded_q // PAD),
        gate=of_gate,
        gated=gated,
        dgate=dgate,
        sizes=Sizes(n, h, lq, blocks),
        V=Variant(
            C=c,
            BLOCK_C=launch.head_block(c),
            BLOCK_Q=rows,
            PAD=PAD,
            GRAIN=layout.grain,
            HAS_DLSE=dlse is not None,
            HAS_PAIR=stats.shape[0] == 4,
            GATED_DO=gate is not None and gate.needs_do,
            DGATE=gate is not None and gate.needs_dgate,
            WIDE=layout.wide or launch.far_apart(stats),
        ),
        num_warps=4 if c <= 128 else 8,  # with 4, 256 channels of float32 spill 208 bytes on 8.6
    )


@Kernel
@triton.jit(
    do_not_specialize=["stride_b", "stride_h", "stride_q", "heads", "lq", "lk", "units_q", "units_k", "blocks_q", "blocks_k"]
)
def pack_kernel(
    p_pair,
    p_packed,
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    heads,
    lq,
    lk,
    units_q,
    units_k,
    blocks_q,
    blocks_k,
    BLOCK: tl.constexpr,
    GRAIN: tl.constexpr,
    PAD: tl.constexpr,
    EVEN: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    WAIT: tl.constexpr,
):
    """One program owns a BLOCK x BLOCK tile of one (b, h) of the pair bias.

    It loops over nothing.
    It writes the tile once, transposed or not, with zeros past the ends.
    """
    wait_to_load(WAIT)
    block_q, block_k, h, b = decode(tl.program_id(0), blocks_q, blocks_k, heads)
    o_q = (block_q * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    o_k = (block_k * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    padded_q = units_q.to(tl.int64) * PAD
    padded_k = units_k.to(tl.int64) * PAD
    p_tile = p_pair + (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h) * GRAIN
    p_tile += o_q[:, None] * stride_q * GRAIN + o_k[None, :] * stride_k
    p_packed += (b * heads + h).to(tl.int64) * padded_q * padded_k
    if TRANSPOSE:
        p_packed += o_k[None, :] * padded_q + o_q[:, None]
    else:
        p_packed += o_q[:, None] * padded_k + o_k[None, :]
    if EVEN:
        b_pair = tl.load(p_tile)  # [q,k]
        wait_to_store(WAIT)
        tl.store(p_packed, b_pair)
    else:
        b_pair = tl.load(p_tile, mask=(o_q[:, None] < lq) & (o_k[None, :] < lk), other=0.0)  # [q,k]
        wait_to_store(WAIT)
        tl.store(p_packed, b_pair, mask=(o_q[:, None] < padded_q) & (o_k[None, :] < padded_k))


def plan_pack(pair_bias: Strided, padded_q: int, padded_k: int, *, transpose: bool) -> tuple[Strided, Launch]:
    """A copy of a full pair bias [b,h,q,k] whose tiles load wide and unmasked: zeros up to padded_q and padded_k.

    Args:
        pair_bias: any strides.
        padded_q, padded_k: sizes of the last two axes of the result, multiples of PAD.
        transpose: lay it out in memory as [b,h,k,q]; the axes of the result stay [b,h,q,k].

    Returns:
        The copy, and the launch of (pair_bias, copy) that fills it.
    """
    b, h, lq, lk = pair_bias.shape
    area = padded_q * padded_k
    stride = (h * area, area, 1, padded_q) if transpose else (h * area, area, padded_k, 1)
    blocks_q, blocks_k = -(-padded_q // _PACK_TILE), -(-padded_k // _PACK_TILE)
    layout = layout_for(pair_bias)
    fill = pack_kernel.plan(
        blocks_q * blocks_k * h * b,
        *layout.strides,
        h,
        lq,
        lk,
        padded_q // PAD,
        padded_k // PAD,
        blocks_q,
        blocks_k,
        BLOCK=_PACK_TILE,
        GRAIN=layout.grain,
        PAD=PAD,
        EVEN=(padded_q, padded_k) == (lq, lk) and lq % _PACK_TILE == 0 and lk % _PACK_TILE == 0,
        TRANSPOSE=transpose,
        num_warps=4,
    )
    return Strided((b, h, padded_q, padded_k), stride, pair_bias.dtype), fill


@Kernel
@triton.jit(do_not_specialize=["stride_row_b", "stride_row_n", "n_rows", "tiles"])
def row_spans_kernel(
    p_row, p_spans, stride_row_b, stride_row_n, n_rows, tiles, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr
):
    """One program owns one key tile of one b.

    It loops over the rows n, BLOCK_N at a time.
    It writes the first row that has a live key in the tile, and the last plus one.
    """
    wait_to_load(WAIT)
    pid = tl.program_id(0)
    o_in = tl.arange(0, BLOCK_N)
    p_tile = p_row + (pid // tiles).to(tl.int64) * stride_row_b + (pid % tiles) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    b_first = tl.full([BLOCK_N], 2147483647, tl.int32)
    b_end = tl.zeros([BLOCK_N], tl.int32)
    for first in tl.range(0, n_rows, BLOCK_N):
        o_n = first + o_in
        p_here = p_tile + o_n.to(tl.int64)[:, None] * stride_row_n
        b_row = tl.load(p_here, mask=o_n[:, None] < n_rows, other=float("-inf"))  # [n,k]
        b_live = tl.max((b_row != float("-inf")).to(tl.int32), 1) != 0  # [n]
        b_first = tl.where(b_live, tl.minimum(b_first, o_n), b_first)
        b_end = tl.where(b_live, o_n + 1, b_end)
    # A tile without a live row spans 0 to 0. Were it 2**31 - 1 to 0, a pipelined loop would count past 2**31 before it looks.
    end = tl.max(b_end, 0)
    wait_to_store(WAIT)
    tl.store(p_spans + 2 * pid, tl.minimum(tl.min(b_first, 0), end))
    tl.store(p_spans + 2 * pid + 1, end)


def plan_row_spans(rows: RowBias, b: int, n: int, block_k: int) -> tuple[Strided, Launch]:
    """int32 `[b, tiles, 2]`, and the launch of (row bias, spans) that fills it.

    For each key tile it has the first row n with a live key in it, and the last plus one.
    """
    tiles = rows.bias.shape[-1] // block_k
    fill = row_spans_kernel.plan(
        b * tiles,
        *rows.strides[:2],
        n,
        tiles,
        BLOCK_K=block_k,
        BLOCK_N=_ROWS_AT_ONCE,
        num_warps=_WARPS_AT_ONCE,
    )
    return contiguous((b, tiles, 2), torch.int32), fill
