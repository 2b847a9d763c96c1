"""Code and arguments that the kernels of the backward share."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from evoattn.kit.arguments import Number, Pointer
from evoattn.kit.primitives import DISTANT, LOG2E, scores, sigmoid

PAD = 16
"""Padded lengths are multiples of this. Kernels take them, and strides over them, in units of it, so that loads are aligned."""

PADDED = tl.constexpr(PAD)
"""The same for kernels."""

CallConstants = namedtuple(
    "CallConstants",
    "D C BLOCK_D BLOCK_C BLOCK_Q BLOCK_K STAGES GRAIN HAS_KEY_BIAS EVEN_Q EVEN_K FOLD PRECISION HEADS_INSIDE LONG",
)
"""Constants of dQ, of dK with dV, and of the pair-bias gradient.

D and C are channels of keys and values, BLOCK_D and BLOCK_C the powers of two that hold them. EVEN_Q, EVEN_K: no tile reaches
past the end. FOLD: see `scores`. HEADS_INSIDE: gradients are [b,n,l,h,c] in memory. LONG: offsets are 64 bits long.
"""


DISTANT_LSE, REFERENCE = tl.constexpr(2), tl.constexpr(3)
"""Planes of statistics that come after those of lse and delta if there is a pair bias: of distant queries, see `Stats`."""


class Stats(NamedTuple):
    """The statistics of each query (`store_statistics`), and a number that says if one is distant.

    They lie in planes: lse, delta and, with a pair bias, lse and reference of distant queries. `padded_q` is the queries of a
    row, and `plane_stride` the distance from one plane to the next, both in units of PAD.
    """

    p: Pointer
    distant: Pointer
    padded_q: Number
    plane_stride: Number


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
    b_lse, b_delta = without_empty_queries(b_lse, b_delta)
    if HAS_PAIR:
        b_ref = tl.load(p_ref + o_in, mask=o_in < left, other=0.0)  # [q]
        b_distant_lse = tl.where(b_ref == 0.0, float("inf"), b_lse)
        b_lse = tl.where(b_ref == 0.0, b_lse, DISTANT)
    if inside is None:
        inside = tl.full(o_in.shape, True, tl.int1)
    tl.store(p_stats + o_in, b_lse, mask=inside)
    tl.store(p_stats + plane + o_in, b_delta, mask=inside)
    if HAS_PAIR:
        tl.store(p_stats + DISTANT_LSE * plane + o_in, b_distant_lse, mask=inside)
        tl.store(p_stats + REFERENCE * plane + o_in, b_ref, mask=inside)
        tl.store(p_distant + o_in * 0, 1.0, mask=b_ref != 0.0)


@triton.jit
def without_empty_queries(b_lse, b_delta):
    """lse [q] and delta [q] such that a query that attends to nothing, whose lse is -inf, has P = 0 and dS = 0."""
    b_empty = b_lse == float("-inf")
    return tl.where(b_empty, float("inf"), b_lse), tl.where(b_empty, 0.0, b_delta)


@triton.jit
def gate_gradient(b_o, b_do, b_gate):
    """do * o * (1 - sigmoid(gate)) in float32, of the gated o."""
    return b_do.to(tl.float32) * b_o.to(tl.float32) * sigmoid(-b_gate.to(tl.float32))


@triton.jit
def score_gradient(b_q, b_do, b_k, b_v, b_lse, b_delta, b_pair, b_key_bias, unit, T, HAS_PAIR: tl.constexpr):
    """dS [q,k] = P (dP - delta), P recomputed from the saved statistic."""
    b_s = scores(
        b_q, b_k, b_pair, b_key_bias, unit,
        FOLD=T.FOLD, HAS_PAIR=HAS_PAIR, HAS_KEY_BIAS=T.HAS_KEY_BIAS, PRECISION=T.PRECISION,
    )  # [q,k]  # fmt: skip
    # dP = dO V^T
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=T.PRECISION)  # [q,k]
    b_p = tl.math.exp2(b_s * (unit if T.FOLD else 1.0) - b_lse[:, None])  # [q,k]
    return b_p * (b_dp - b_delta[:, None])
