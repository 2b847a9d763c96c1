"""The statistics: delta, and lse in log2 units; with a gate, dO * sigmoid(gate) and the gradient of the gate."""

from __future__ import annotations

from collections import namedtuple

import triton.language as tl

from evoattn.backends.triton.kernels.backward import PADDED, Stats, gate_gradient, store_statistics
from evoattn.kit.arguments import Number, Pointer, View, kernel
from evoattn.kit.overlap import wait_to_load, wait_to_store
from evoattn.kit.primitives import at, decode, load_view, offsets, sigmoid, store_view

Variant = namedtuple("Variant", "C BLOCK_C BLOCK_Q GRAIN HAS_DLSE HAS_PAIR GATED_DO DGATE LONG WAIT", defaults=[0])
"""Compile-time constants of the kernel. GATED_DO, DGATE: it writes this one."""


@kernel
def statistics_kernel(
    o: View, dO: View, lse: Pointer, ref: Pointer, dlse: View, stats: Stats, gate: View, gated: View, dgate: View,
    n_rows: Number, heads: Number, lq: Number, blocks: Number, V: Variant,
) -> None:  # fmt: skip
    """One program owns BLOCK_Q queries of one (b, n, h).

    It reads o, dO and the gate once and loops over nothing.
    It writes what `store_statistics` says, with GATED_DO dO * sigmoid(gate), with DGATE the gradient of the gate, each once.
    """
    wait_to_load(V.WAIT)
    # Heads run fastest: in the layout bnlhd they are neighbours in memory.
    h, block, n, b = decode(tl.program_id(0), heads, blocks, n_rows)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    line = (b * n_rows + n) * heads + h
    o_in = tl.arange(0, V.BLOCK_Q)
    o_q = offsets(o_in, V.LONG)
    o_c = offsets(tl.arange(0, V.BLOCK_C), V.LONG)
    start = (block * V.BLOCK_Q).to(tl.int64)
    left = lq - block * V.BLOCK_Q
    o = at(o, b, h, V.GRAIN, n=n, first=start)
    dO = at(dO, b, h, V.GRAIN, n=n, first=start)
    b_o = load_view(o.p, o, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)  # [q,c]
    b_do = load_view(dO.p, dO, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)  # [q,c]
    p_dlse = dlse.p + (b * dlse.b + n * dlse.n + h * dlse.h + start * dlse.l)
    p_stats = stats.p + (line * (stats.padded_q * PADDED) + start)
    inside = o_in < stats.padded_q * PADDED - block * V.BLOCK_Q
    first = line * lq + start
    if V.GATED_DO or V.DGATE:
        gate = at(gate, b, h, V.GRAIN, n=n, first=start)
        b_gate = load_view(gate.p, gate, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)  # [q,c]
    wait_to_store(V.WAIT)
    store_statistics(
        p_stats, stats.distant, lse + first, ref + first, p_dlse, b_o, b_do, o_in, left, dlse.l,
        offsets(stats.plane_stride, V.LONG) * PADDED, HAS_DLSE=V.HAS_DLSE, HAS_PAIR=V.HAS_PAIR, inside=inside,
    )  # fmt: skip
    if V.GATED_DO:
        gated = at(gated, b, h, V.GRAIN, n=n, first=start)
        b_gated = b_do.to(tl.float32) * sigmoid(b_gate)  # [q,c]
        store_view(gated, b_gated, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)
    if V.DGATE:
        dgate = at(dgate, b, h, V.GRAIN, n=n, first=start)
        b_dgate = gate_gradient(b_o, b_do, b_gate)  # [q,c]
        store_view(dgate, b_dgate, o_q, o_c, left, COLS=V.C, GRAIN=V.GRAIN, MASK=True)
