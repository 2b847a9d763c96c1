"""Triton kernels for rows that a mask bias masks at every key (the formulas are in `means`).

Each program returns at once if its row is not empty, so a mask without empty rows costs a launch. All tensors are
`[b,n,h,l,c]` with any strides; the mask bias is `[b,n,k]`. A row's number is b * N + n.

Names: `p_` pointer, `o_` offsets along one axis, `b_` tile in registers; the axes of a tile stand in a comment, `# [l,c]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoattn.backends.triton.kernels.primitives import load_tile, sigmoid
from evoattn.backends.triton.launch import Kernel, launch_kernel

_FLAGS = 128
_SIZES = ["n_rows", "heads", "lq", "lk", "total"]


class Rows(NamedTuple):
    """The fully masked rows of a mask bias.

    Args:
        alive: bool `[b,n,k]`, False at every key of an empty row. In other rows False where the mask bias is so low that it
            leaves a key no weight, whatever the scores: the attention then skips keys, and answers the same.
        stats: float32 `[2, b * n]`. First the weight of each key that counts in an empty row, 0 for other rows. Then the
            smallest mask bias of a key that counts.
    """

    alive: Tensor
    stats: Tensor


@triton.jit
def load_gated(
    p, p_gate, o_l, o_c, stride_l, stride_c, stride_gate_l, stride_gate_c, rows, COLS: tl.constexpr, GATED: tl.constexpr
):
    """[l,c] of dO, times sigmoid(gate) if there is a gate."""
    b_do = load_tile(p, o_l, o_c, stride_l, stride_c, rows, COLS, True, True)
    if GATED:
        b_gate = load_tile(p_gate, o_l, o_c, stride_gate_l, stride_gate_c, rows, COLS, True, True)
        b_do = (b_do.to(tl.float32) * sigmoid(b_gate)).to(b_do.dtype)
    return b_do


@triton.jit
def add_tile(p, b_tile, o_l, o_c, stride_l, stride_c, rows, cols):
    """Add a float32 tile [l,c] to memory, rounded once."""
    inside = (o_l < rows)[:, None] & (o_c < cols)[None, :]
    p_tile = p + o_l[:, None] * stride_l + o_c[None, :] * stride_c
    b_tile += tl.load(p_tile, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_tile, b_tile.to(p.dtype.element_ty), mask=inside)


@triton.jit
def load_keys(p_mask, o_k, stride_k, lk):
    """[k] of a mask bias in float32, -inf past the end."""
    return tl.load(p_mask + o_k * stride_k, mask=o_k < lk, other=float("-inf")).to(tl.float32)


@triton.jit
def load_apart(p_v, p_mask, b_mean, floor, o_k, o_c, stride_l, stride_c, stride_k, lk, C: tl.constexpr):
    """V' [k,c]: the values less their mean, 0 for keys that do not count."""
    b_v = load_tile(p_v, o_k, o_c, stride_l, stride_c, lk, C, True, True)  # [k,c]
    b_counts = (load_keys(p_mask, o_k, stride_k, lk) >= floor) & (o_k < lk)  # [k]
    return tl.where(b_counts[:, None], b_v.to(tl.float32) - b_mean[None, :], 0.0).to(b_v.dtype)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def find_kernel(
    p_mask, p_alive, p_stats, limit, equal, stride_b, stride_n, stride_k, n_rows, lk, total, BLOCK_K: tl.constexpr
):  # fmt: skip
    """One program owns a row of keys.

    It loops over the mask bias for its largest number, and again to count the keys of an empty row.
    It writes the row of `Rows.alive` and its two numbers once.
    """
    row = tl.program_id(0).to(tl.int64)
    p_mask += (row // n_rows) * stride_b + (row % n_rows) * stride_n
    o_in = tl.arange(0, BLOCK_K).to(tl.int64)
    b_top = tl.full([BLOCK_K], float("-inf"), tl.float32)  # [k]
    b_alive = tl.zeros([BLOCK_K], tl.int32)  # [k]
    for start in range(0, lk, BLOCK_K):
        b_keys = load_keys(p_mask, start + o_in, stride_k, lk)
        b_top = tl.maximum(b_top, b_keys)
        b_alive = tl.maximum(b_alive, tl.where(b_keys <= limit, 0, 1))  # NaN has to reach the output: it is alive
    alive = tl.max(b_alive, 0)
    floor = tl.max(b_top, 0) * equal
    b_count = tl.zeros([BLOCK_K], tl.int32)  # [k]
    for start in range(0, lk * (1 - alive), BLOCK_K):
        o_k = start + o_in
        b_count += tl.where((load_keys(p_mask, o_k, stride_k, lk) >= floor) & (o_k < lk), 1, 0)
    count = tl.sum(b_count, 0).to(tl.float32)
    tl.store(p_stats + row, tl.where(alive != 0, 0.0, 1.0 / tl.maximum(count, 1.0)))
    tl.store(p_stats + total + row, floor)
    p_alive += row * lk
    for start in range(0, lk, BLOCK_K):
        o_k = start + o_in
        b_counts = tl.where(load_keys(p_mask, o_k, stride_k, lk) <= 2 * limit, 0, alive)
        tl.store(p_alive + o_k, b_counts.to(tl.uint8), mask=o_k < lk)


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def fill_kernel(
    p_v, p_o, p_gate, p_means, p_mask, p_stats,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_ob, stride_on, stride_oh, stride_ol, stride_oc,
    stride_gate_b, stride_gate_n, stride_gate_h, stride_gate_l, stride_gate_c,
    stride_mask_b, stride_mask_n, stride_mask_k,
    n_rows, heads, lq, lk, total,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One program owns a row and a head.

    It loops over the keys for the mean of v, and then over the queries.
    It writes the mean once, and to each query's output once, times sigmoid(gate) if there is a gate.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // heads
    weight = tl.load(p_stats + row)
    if weight == 0.0:
        return
    floor = tl.load(p_stats + total + row)
    b, n, h = row // n_rows, row % n_rows, pid % heads
    p_v += b * stride_vb + n * stride_vn + h * stride_vh
    p_o += b * stride_ob + n * stride_on + h * stride_oh
    p_mask += b * stride_mask_b + n * stride_mask_n
    o_in = tl.arange(0, BLOCK_L).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C).to(tl.int64)
    b_sum = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)  # [k,c]
    for start in range(0, lk, BLOCK_L):
        o_k = start + o_in
        b_v = load_tile(p_v, o_k, o_c, stride_vl, stride_vc, lk, C, True, True).to(tl.float32)  # [k,c]
        b_counts = (load_keys(p_mask, o_k, stride_mask_k, lk) >= floor) & (o_k < lk)  # [k]
        b_sum += tl.where(b_counts[:, None], b_v, 0.0)
    b_mean = (tl.sum(b_sum, 0) * weight).to(p_means.dtype.element_ty)  # [c]
    tl.store(p_means + pid * C + o_c, b_mean, mask=o_c < C)
    b_ones = tl.full([BLOCK_L, BLOCK_C], 1.0, tl.float32)
    p_gate += b * stride_gate_b + n * stride_gate_n + h * stride_gate_h
    for start in range(0, lq, BLOCK_L):
        o_q = start + o_in
        b_o = b_mean.to(tl.float32)[None, :] * b_ones  # [q,c]
        if GATED:
            b_o *= sigmoid(load_tile(p_gate, o_q, o_c, stride_gate_l, stride_gate_c, lq, C, True, True))
        p_tile = p_o + o_q[:, None] * stride_ol + o_c[None, :] * stride_oc
        tl.store(p_tile, b_o.to(p_o.dtype.element_ty), mask=(o_q < lq)[:, None] & (o_c < C)[None, :])


@Kernel
@triton.jit(do_not_specialize=_SIZES)
def inputs_kernel(
    p_q, p_k, p_v, p_gate, p_do, p_dq, p_dk, p_dv, p_dgate, p_mask, p_stats, p_means, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_gate_b, stride_gate_n, stride_gate_h, stride_gate_l, stride_gate_c,
    stride_dob, stride_don, stride_doh, stride_dol, stride_doc,
    stride_dqb, stride_dqn, stride_dqh, stride_dql, stride_dqd,
    stride_dkb, stride_dkn, stride_dkh, stride_dkl, stride_dkd,
    stride_dvb, stride_dvn, stride_dvh, stride_dvl, stride_dvc,
    stride_dgate_b, stride_dgate_n, stride_dgate_h, stride_dgate_l, stride_dgate_c,
    stride_mask_b, stride_mask_n, stride_mask_k,
    n_rows, heads, lq, lk, total,
    D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCKS_D: tl.constexpr, NEEDS_Q: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_V: tl.constexpr, NEEDS_GATE: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One program owns a row, a head and BLOCK_D channels of q and k; the first of them also owns dV and the gate's gradient.

    It loops over the queries (sum of dO, dO^T Q), over the keys (V'^T K), and over the queries again.
    It writes the gate's gradient in the first loop, and adds to dK and dV in the second and to dQ in the third, to each element
    once.
    """
    pid = tl.program_id(0).to(tl.int64)
    row = pid // (heads * BLOCKS_D)
    weight = tl.load(p_stats + row)
    if weight == 0.0:
        return
    floor = tl.load(p_stats + total + row)
    b, n, h, block_d = row // n_rows, row % n_rows, pid // BLOCKS_D % heads, pid % BLOCKS_D
    p_q += b * stride_qb + n * stride_qn + h * stride_qh
    p_k += b * stride_kb + n * stride_kn + h * stride_kh
    p_v += b * stride_vb + n * stride_vn + h * stride_vh
    p_gate += b * stride_gate_b + n * stride_gate_n + h * stride_gate_h
    p_do += b * stride_dob + n * stride_don + h * stride_doh
    p_dq += b * stride_dqb + n * stride_dqn + h * stride_dqh
    p_dk += b * stride_dkb + n * stride_dkn + h * stride_dkh
    p_dv += b * stride_dvb + n * stride_dvn + h * stride_dvh
    p_dgate += b * stride_dgate_b + n * stride_dgate_n + h * stride_dgate_h
    p_mask += b * stride_mask_b + n * stride_mask_n
    o_in = tl.arange(0, BLOCK_L).to(tl.int64)
    o_d = block_d * BLOCK_D + tl.arange(0, BLOCK_D).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C).to(tl.int64)
    dtype = p_q.dtype.element_ty
    p_means += (row * heads + h) * C
    b_mean = tl.load(p_means + o_c, mask=o_c < C, other=0.0).to(tl.float32)  # [c], as the forward rounded it

    b_total = tl.zeros([BLOCK_C], tl.float32)  # [c]
    b_left = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)  # [c,d]
    if NEEDS_K or NEEDS_V or NEEDS_GATE:
        for start in range(0, lq, BLOCK_L):
            o_q = start + o_in
            if NEEDS_GATE and block_d == 0:
                b_open = load_tile(p_gate, o_q, o_c, stride_gate_l, stride_gate_c, lq, C, True, True).to(tl.float32)  # [q,c]
                b_open = sigmoid(b_open) * sigmoid(-b_open)
                b_open *= load_tile(p_do, o_q, o_c, stride_dol, stride_doc, lq, C, True, True).to(tl.float32) * b_mean[None, :]
                p_tile = p_dgate + o_q[:, None] * stride_dgate_l + o_c[None, :] * stride_dgate_c
                tl.store(p_tile, b_open.to(p_dgate.dtype.element_ty), mask=(o_q < lq)[:, None] & (o_c < C)[None, :])
            b_do = load_gated(
                p_do, p_gate, o_q, o_c, stride_dol, stride_doc, stride_gate_l, stride_gate_c, lq, C, GATED
            )  # [q,c]
            b_total += tl.sum(b_do.to(tl.float32), 0)
            if NEEDS_K:
                b_q = load_tile(p_q, o_q, o_d, stride_ql, stride_qd, lq, D, True, True)  # [q,d]
                b_left = tl.dot(tl.trans(b_do), b_q, b_left, input_precision="ieee")

    b_right = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)  # [c,d]
    for start in range(0, lk, BLOCK_L):
        o_k = start + o_in
        if NEEDS_Q or NEEDS_K:
            b_apart = load_apart(p_v, p_mask, b_mean, floor, o_k, o_c, stride_vl, stride_vc, stride_mask_k, lk, C)  # [k,c]
        if NEEDS_K:
            b_dk = tl.dot(b_apart, b_left.to(dtype), input_precision="ieee") * (scale * weight)  # [k,d]
            add_tile(p_dk, b_dk, o_k, o_d, stride_dkl, stride_dkd, lk, D)
        if NEEDS_V and block_d == 0:
            b_counts = (load_keys(p_mask, o_k, stride_mask_k, lk) >= floor) & (o_k < lk)  # [k]
            b_dv = tl.where(b_counts[:, None], b_total[None, :] * weight, 0.0)  # [k,c]
            add_tile(p_dv, b_dv, o_k, o_c, stride_dvl, stride_dvc, lk, C)
        if NEEDS_Q:
            b_k = load_tile(p_k, o_k, o_d, stride_kl, stride_kd, lk, D, True, True)  # [k,d]
            b_right = tl.dot(tl.trans(b_apart), b_k, b_right, input_precision="ieee")

    if NEEDS_Q:
        b_mixed = (b_right * weight).to(dtype)  # [c,d]
        for start in range(0, lq, BLOCK_L):
            o_q = start + o_in
            b_do = load_gated(
                p_do, p_gate, o_q, o_c, stride_dol, stride_doc, stride_gate_l, stride_gate_c, lq, C, GATED
            )  # [q,c]
            b_dq = tl.dot(b_do, b_mixed, input_precision="ieee") * scale  # [q,d]
            add_tile(p_dq, b_dq, o_q, o_d, stride_dql, stride_dqd, lq, D)


@Kernel
@triton.jit(do_not_specialize=[*_SIZES, "each", "blocks_q", "blocks_k"])
def pairs_kernel(
    p_v, p_gate, p_do, p_dpair, p_mask, p_stats, p_means,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_gate_b, stride_gate_n, stride_gate_h, stride_gate_l, stride_gate_c,
    stride_dob, stride_don, stride_doh, stride_dol, stride_doc,
    stride_pair_b, stride_pair_n, stride_pair_h, stride_pair_q, stride_pair_k,
    stride_mask_b, stride_mask_n, stride_mask_k,
    n_rows, heads, lq, lk, total, each, blocks_q, blocks_k,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, FLAGS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries and keys of one (b, h) of the pair bias, which `each` rows share.

    It loops over FLAGS rows at a time, and over the empty ones among them in their order.
    It adds its sum to the gradient once, if there was an empty row.
    """
    pid = tl.program_id(0).to(tl.int64)
    o_k = pid % blocks_k * BLOCK_L + tl.arange(0, BLOCK_L)
    rest = pid // blocks_k
    o_q = rest % blocks_q * BLOCK_L + tl.arange(0, BLOCK_L)
    rest = rest // blocks_q
    h = rest % heads
    first = rest // heads * each
    o_c = tl.arange(0, BLOCK_C).to(tl.int64)
    o_row = tl.arange(0, FLAGS)
    b_sum = tl.zeros([BLOCK_L, BLOCK_L], tl.float32)  # [q,k]
    any_row = 0
    for start in range(0, each, FLAGS):
        b_weight = tl.load(p_stats + first + start + o_row, mask=start + o_row < each, other=0.0)  # [row]
        left = tl.sum(tl.where(b_weight != 0.0, 1, 0), 0)
        any_row += left
        row_in = -1
        for _ in range(left):
            row_in = tl.min(tl.where((b_weight != 0.0) & (o_row > row_in), o_row, FLAGS), 0)
            row = first + start + row_in
            weight = tl.load(p_stats + row)
            floor = tl.load(p_stats + total + row)
            b, n = row // n_rows, row % n_rows
            p_mean = p_means + (row.to(tl.int64) * heads + h) * C + o_c
            b_mean = tl.load(p_mean, mask=o_c < C, other=0.0).to(tl.float32)  # [c]
            p_here = p_do + b * stride_dob + n * stride_don + h * stride_doh
            p_open = p_gate + b * stride_gate_b + n * stride_gate_n + h * stride_gate_h
            b_do = load_gated(
                p_here, p_open, o_q, o_c, stride_dol, stride_doc, stride_gate_l, stride_gate_c, lq, C, GATED
            )  # [q,c]
            p_keys = p_mask + b * stride_mask_b + n * stride_mask_n
            p_here = p_v + b * stride_vb + n * stride_vn + h * stride_vh
            b_apart = load_apart(p_here, p_keys, b_mean, floor, o_k, o_c, stride_vl, stride_vc, stride_mask_k, lk, C)  # [k,c]
            b_sum += tl.dot(b_do, tl.trans(b_apart), input_precision="ieee") * weight
    if any_row > 0:
        p_dpair += rest // heads * stride_pair_b + h * stride_pair_h
        add_tile(p_dpair, b_sum, o_q, o_k, stride_pair_q, stride_pair_k, lq, lk)


def find(mask_bias: Tensor, limit: float, equal: float) -> Rows:
    """Find the rows of `[b,n,k]` that are `limit` or below at every key; keys down to `equal` times the largest count."""
    b, n, lk = mask_bias.shape
    alive = torch.empty(b, n, lk, dtype=torch.uint8, device=mask_bias.device)
    stats = torch.empty(2, b * n, dtype=torch.float32, device=mask_bias.device)
    block_k = min(1024, max(16, triton.next_power_of_2(lk)))
    numbers = (limit, equal, *mask_bias.stride(), n, lk, b * n)
    launch_kernel(find_kernel, b * n, (mask_bias, alive, stats), *numbers, BLOCK_K=block_k, num_warps=4)
    return Rows(alive.view(torch.bool), stats)


def fill(o: Tensor, v: Tensor, gate: Tensor | None, mask_bias: Tensor, stats: Tensor) -> Tensor:
    """Write the mean of v `[b,n,h,k,c]` to the empty rows of o `[b,n,h,q,c]`, times sigmoid(gate) if there is a gate.

    Returns:
        The means `[b,n,h,c]`, of empty rows alone.
    """
    b, n, h, lq, c = o.shape
    _, block_c, block_l, warps = _blocks(c, c)
    means = torch.empty(b, n, h, c, dtype=o.dtype, device=o.device)
    gate_or_o = o if gate is None else gate
    numbers = (*v.stride(), *o.stride(), *gate_or_o.stride(), *mask_bias.stride(), n, h, lq, v.shape[-2], b * n)
    tiles = {"C": c, "BLOCK_C": block_c, "BLOCK_L": block_l, "GATED": gate is not None, "num_warps": warps}
    launch_kernel(fill_kernel, b * n * h, (v, o, gate_or_o, means, mask_bias, stats), *numbers, **tiles)
    return means


def add_to_inputs(
    inputs: tuple[Tensor, Tensor, Tensor],
    gate: Tensor | None,
    do: Tensor,
    gradients: tuple[Tensor | None, ...],
    mask_bias: Tensor,
    stats: Tensor,
    means: Tensor,
    scale: float,
) -> None:
    """Add the gradients of empty rows to dq, dk and dv, and write those of the gate to dgate, if they are given."""
    q, _, v = inputs
    dq, dk, _, _ = gradients
    b, n, h, lq, d = q.shape
    lk, c = v.shape[-2:]
    block_d, block_c, block_l, warps = _blocks(d, c)
    blocks_d = triton.cdiv(d, block_d) if dq is not None or dk is not None else 1
    tensors = (*inputs, do if gate is None else gate, do, *(q if x is None else x for x in gradients))
    strides = [step for x in (*tensors, mask_bias) for step in x.stride()]
    tiles = {"D": d, "C": c, "BLOCK_D": block_d, "BLOCK_C": block_c, "BLOCK_L": block_l, "BLOCKS_D": blocks_d}
    needs = {f"NEEDS_{name}": x is not None for name, x in zip(("Q", "K", "V", "GATE"), gradients, strict=True)}
    needs["GATED"] = gate is not None
    numbers = (scale, *strides, n, h, lq, lk, b * n)
    options = {**tiles, **needs, "num_warps": warps, "num_stages": 1}
    launch_kernel(inputs_kernel, b * n * h * blocks_d, (*tensors, mask_bias, stats, means), *numbers, **options)


def add_to_pairs(
    v: Tensor, gate: Tensor | None, do: Tensor, dpair: Tensor, mask_bias: Tensor, stats: Tensor, means: Tensor
) -> None:
    """Add the gradient of empty rows to that of a pair bias `[b|1,1,h,q,k]`, in a fixed order."""
    b, n, h, lq, c = do.shape
    gate_or_do = do if gate is None else gate
    lk = v.shape[-2]
    _, block_c, block_l, warps = _blocks(c, c)
    blocks_q, blocks_k = triton.cdiv(lq, block_l), triton.cdiv(lk, block_l)
    strides = [step for x in (v, gate_or_do, do, dpair, mask_bias) for step in x.stride()]
    programs = dpair.shape[0] * h * blocks_q * blocks_k
    numbers = (*strides, n, h, lq, lk, b * n, b * n // dpair.shape[0], blocks_q, blocks_k)
    tiles = {"C": c, "BLOCK_C": block_c, "BLOCK_L": block_l, "FLAGS": _FLAGS, "GATED": gate is not None}
    tensors = (v, gate_or_do, do, dpair, mask_bias, stats, means)
    launch_kernel(pairs_kernel, programs, tensors, *numbers, **tiles, num_warps=warps, num_stages=1)


def _blocks(d: int, c: int) -> tuple[int, int, int, int]:
    """Tiles of q's channels, of v's channels and of a length, and warps: so that 256 float32 channels fit in 99 KiB."""
    block_c = max(16, triton.next_power_of_2(c))
    block_d = min(64 if block_c <= 128 else 32, max(16, triton.next_power_of_2(d)))
    return block_d, block_c, 64 if block_c <= 128 else 32, 4 if block_c <= 64 else 8
