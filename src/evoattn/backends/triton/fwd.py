"""The forward pass: o, lse and reference of every query."""

from __future__ import annotations

import dataclasses
import functools

import triton
import triton.language as tl

from evoattn.backends import GATED_FORWARD, Description, Plan
from evoattn.backends.triton import launch
from evoattn.backends.triton.few import plan_forward_few
from evoattn.backends.triton.launch import Kernel, Launch, Layout, Strided, layout_for, strided
from evoattn.backends.triton.overlap import overlap, wait_to_load, wait_to_store
from evoattn.backends.triton.prepare import COPIED, RowBias, copied, loads_wide, needs_copy, plan_rows
from evoattn.backends.triton.primitives import (
    FLOOR,
    LN2,
    LOG2E,
    NEAR,
    decode,
    finish,
    load_pair_bias,
    load_row_bias,
    load_tile,
    measured,
    natural,
    online_softmax,
    scores,
    sigmoid,
    store_tile,
    wide,
)
from evoattn.backends.triton.release import TENSOR_MAPS
from evoattn.inputs import Inputs, Outputs
from evoattn.problem import Problem, describe
from evoattn.tuning import user
from evoattn.tuning.config import Config
from evoattn.tuning.heuristics import LEFT_OVER_WARPS, ForwardTiles, forward_tiles
from evoattn.tuning.heuristics_few import few_tiles
from evoattn.tuning.sizes import MIN_TILE

__all__ = ["forward_kernel", "plan_forward"]

_LOG2E = 1.4426950408889634

_PAIR_ARGUMENT = 5
"""Where p_pair stands among the kernel's arguments."""

FAR = tl.constexpr(256.0)
"""If a query's largest score, in log2 units, is beyond this, a pair bias may have swallowed them all: they are made again."""


@triton.jit
def _load_pair(
    p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, start, stride_pair_q, stride_pair_k, left,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MAP_K: tl.constexpr, TAIL: tl.constexpr, TENSOR_MAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """[q,k] of the pair bias from key first_k on, in its own dtype; 0 past the last key."""
    if TENSOR_MAP:
        b_pair = p_pair.load([pair_b, pair_h, pair_q, first_k]).reshape([BLOCK_Q, MAP_K])
        if BLOCK_K < MAP_K:  # a map loads tiles of one size: of two halves the first
            b_pair, _ = tl.split(b_pair.reshape([BLOCK_Q, 2, BLOCK_K]).permute(0, 2, 1))
    else:
        o_k = wide(tl.arange(0, BLOCK_K), WIDE)
        p_tile = p_pair + start * stride_pair_k
        b_pair = load_pair_bias(p_tile, o_pair_q, o_k, stride_pair_q, stride_pair_k, 0, left, False, TAIL)
    return b_pair


@triton.jit
def _step(
    b_q, b_acc, b_max, b_sum, b_ref, p_k, p_v, p_row, p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, unit,
    stride_k, stride_kd, stride_v, stride_vc, stride_pair_q, stride_pair_k, lk,
    D: tl.constexpr, C: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, MAP_K: tl.constexpr,
    HAS_PAIR: tl.constexpr, HAS_ROW: tl.constexpr, TAIL: tl.constexpr, TENSOR_MAP: tl.constexpr, FOLD: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Fold the tile of keys that starts at first_k into (b_acc, b_max, b_sum).

    TAIL: the tile may reach past lk. SHIFTED: the pair bias is measured from b_ref [q].
    """
    o_in = tl.arange(0, BLOCK_K)
    o_k = wide(o_in, WIDE)
    o_d = wide(tl.arange(0, BLOCK_D), WIDE)
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    start = tl.cast(first_k, tl.int64) if WIDE else first_k
    left = lk - first_k
    b_k = load_tile(p_k + start * stride_k, o_k, o_d, stride_k, stride_kd, left, D, TAIL, D != BLOCK_D)  # [k,d]
    b_v = load_tile(p_v + start * stride_v, o_k, o_c, stride_v, stride_vc, left, C, TAIL, C != BLOCK_C)  # [k,c]
    b_pair = 0.0
    b_row = 0.0
    if HAS_PAIR:
        b_pair = _load_pair(
            p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, start, stride_pair_q, stride_pair_k, left,
            BLOCK_Q, BLOCK_K, MAP_K, TAIL, TENSOR_MAP, WIDE,
        )  # [q,k]  # fmt: skip
        if SHIFTED:
            b_pair = measured(b_pair, b_ref[:, None])
    if HAS_ROW:
        b_row = load_row_bias(p_row + first_k, o_in)  # [k]
    b_s = scores(b_q, b_k, b_pair, b_row, unit, FOLD, HAS_PAIR, HAS_ROW, PRECISION, ROW_FOLDED=True)  # [q,k]
    if TAIL and not HAS_ROW:
        b_s = tl.where((o_in < left)[None, :], b_s, float("-inf"))
    factor = unit if FOLD else 1.0
    b_p, b_acc, b_max, b_sum = online_softmax(b_s, b_acc, b_max, b_sum, factor)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)  # [q,c]
    return b_acc, b_max, b_sum


@triton.jit
def _gated(
    b_o, p_gate, o_q, stride_q, stride_c, left, C: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """b_o [q,c] * sigmoid(gate); p_gate points at the first query."""
    o_c = wide(tl.arange(0, BLOCK_C), WIDE)
    return b_o * sigmoid(load_tile(p_gate, o_q, o_c, stride_q, stride_c, left, C, True, C != BLOCK_C))  # [q,c]


@triton.jit
def _largest_bias(
    b_top, p_row, p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, unit, stride_pair_q, stride_pair_k, lk,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_ROW: tl.constexpr, TENSOR_MAP: tl.constexpr, FOLD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """b_top [q] and the largest sum of pair bias and row bias of the keys from first_k on, in natural units."""
    o_in = tl.arange(0, BLOCK_K)
    start = tl.cast(first_k, tl.int64) if WIDE else first_k
    b_bias = natural(
        _load_pair(
            p_pair, pair_b, pair_h, pair_q, o_pair_q, first_k, start, stride_pair_q, stride_pair_k, lk - first_k,
            BLOCK_Q, BLOCK_K, BLOCK_K, True, TENSOR_MAP, WIDE,
        )
    )  # [q,k]  # fmt: skip
    if HAS_ROW:
        b_bias += (load_row_bias(p_row + first_k, o_in) * ((unit if FOLD else 1.0) * LN2))[None, :]
    return tl.maximum(b_top, tl.max(tl.where((o_in < lk - first_k)[None, :], b_bias, float("-inf")), 1))


# Everything that a new length or a new batch changes is left unspecialised, so nothing is compiled again for it.
@Kernel
@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qn", "stride_qh", "stride_ql", "stride_kb", "stride_kn", "stride_kh", "stride_kl",
        "stride_vb", "stride_vn", "stride_vh", "stride_vl", "stride_pair_b", "stride_pair_h", "stride_pair_q",
        "stride_row_b", "stride_row_n", "stride_runs_b", "stride_runs_n", "n_rows", "heads", "lq", "lk", "first_q", "blocks",
        "stride_gb", "stride_gn", "stride_gh", "stride_gl",
    ]
)  # fmt: skip
def forward_kernel(
    p_q, p_k, p_v, p_row, p_runs, p_pair, p_o, p_lse, p_ref, p_gate, scale,
    stride_qb, stride_qn, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vl, stride_vc,
    stride_pair_b, stride_pair_h, stride_pair_q, stride_pair_k,
    stride_row_b, stride_row_n, stride_runs_b, stride_runs_n,
    n_rows, heads, lq, lk, first_q, blocks,
    stride_gb, stride_gn, stride_gh, stride_gl, stride_gc,
    D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr, STAGES: tl.constexpr,
    GRAIN: tl.constexpr, GRAIN_PAIR: tl.constexpr, GRAIN_GATE: tl.constexpr,
    HAS_PAIR: tl.constexpr, HAS_ROW: tl.constexpr, HAS_GATE: tl.constexpr, EVEN_K: tl.constexpr, HEADS_INSIDE: tl.constexpr,
    TENSOR_MAP: tl.constexpr, FOLD: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_Q queries of one (b, n, h).

    It loops over the live key tiles of its row, run by run, with the online softmax; a ragged last tile comes after the loop.
    It writes o, gated if there is a gate, lse and reference once. Queries whose pair bias swallows their scores are computed
    and written again.
    """
    block, n, h, b = decode(tl.program_id(0), blocks, n_rows, heads)
    start_q = first_q + block * BLOCK_Q
    left_q = lq - start_q
    pair_b = tl.where(stride_pair_b == 0, 0, b)
    pair_h = tl.where(stride_pair_h == 0, 0, h)
    b = b.to(tl.int64)
    n = n.to(tl.int64)
    h = h.to(tl.int64)
    o_in = tl.arange(0, BLOCK_Q)
    o_q = wide(o_in, WIDE)
    o_d = wide(tl.arange(0, BLOCK_D), WIDE)
    unit = scale * LOG2E

    p_q += (b * stride_qb + n * stride_qn + h * stride_qh + start_q.to(tl.int64) * stride_ql) * GRAIN
    p_k += (b * stride_kb + n * stride_kn + h * stride_kh) * GRAIN
    p_v += (b * stride_vb + n * stride_vn + h * stride_vh) * GRAIN
    p_row += b * stride_row_b + n * stride_row_n
    p_runs += b * stride_runs_b + n * stride_runs_n
    if not TENSOR_MAP:
        p_pair += (b * stride_pair_b + h * stride_pair_h + start_q.to(tl.int64) * stride_pair_q) * GRAIN_PAIR
    # Rows past the end read the last row's bias: nothing of them is stored, and no mask slows the loop down.
    o_pair_q = tl.minimum(o_q, left_q - 1)

    b_q = load_tile(p_q, o_q, o_d, stride_ql * GRAIN, stride_qd, left_q, D, True, D != BLOCK_D)  # [q,d]
    b_acc = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)  # [q,c]
    b_max = tl.full([BLOCK_Q], FLOOR, tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    wait_to_load(WAIT)

    whole = lk // BLOCK_K
    runs = 1
    end = tl.cdiv(lk, BLOCK_K)
    if HAS_ROW:
        runs = tl.load(p_runs)
        end = 0
    for run in tl.range(0, runs, num_stages=1):
        begin = 0
        stop = whole
        if HAS_ROW:
            begin = tl.load(p_runs + 1 + 2 * run)
            end = tl.load(p_runs + 2 + 2 * run)
            stop = tl.minimum(end, whole)
        for tile in tl.range(begin, stop, num_stages=STAGES):
            b_acc, b_max, b_sum = _step(
                b_q, b_acc, b_max, b_sum, 0.0, p_k, p_v, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, tile * BLOCK_K,
                unit, stride_kl * GRAIN, stride_kd, stride_vl * GRAIN, stride_vc, stride_pair_q * GRAIN_PAIR, stride_pair_k, lk,
                D, C, BLOCK_Q, BLOCK_D, BLOCK_C, BLOCK_K, BLOCK_K, HAS_PAIR, HAS_ROW, False, TENSOR_MAP, FOLD, PRECISION,
                WIDE, False,
            )  # fmt: skip
    if not EVEN_K:  # noqa: SIM102 (this one is resolved when the kernel is compiled, the next one when it runs)
        if end > whole:
            b_acc, b_max, b_sum = _step(
                b_q, b_acc, b_max, b_sum, 0.0, p_k, p_v, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, whole * BLOCK_K,
                unit, stride_kl * GRAIN, stride_kd, stride_vl * GRAIN, stride_vc, stride_pair_q * GRAIN_PAIR, stride_pair_k, lk,
                D, C, BLOCK_Q, BLOCK_D, BLOCK_C, TAIL_K, BLOCK_K, HAS_PAIR, HAS_ROW, True, TENSOR_MAP, FOLD, PRECISION,
                WIDE, False,
            )  # fmt: skip

    wait_to_store(WAIT)
    b_o, b_lse = finish(b_acc, b_max, b_sum)
    if HAS_GATE:
        p_gate += (b * stride_gb + n * stride_gn + h * stride_gh + start_q.to(tl.int64) * stride_gl) * GRAIN_GATE
        b_o = _gated(b_o, p_gate, o_q, stride_gl * GRAIN_GATE, stride_gc, left_q, C, BLOCK_C, WIDE)
    row = (b * n_rows + n) * heads + h
    p_lse += row * lq + start_q
    p_ref += row * lq + start_q
    tl.store(p_lse + o_in, b_lse, mask=o_in < left_q)
    tl.store(p_ref + o_in, tl.zeros([BLOCK_Q], tl.float32), mask=o_in < left_q)
    stride_o = C
    first = row * lq + start_q
    if HEADS_INSIDE:
        stride_o = C * heads
        first = ((b * n_rows + n) * lq + start_q) * heads + h
    o_c = tl.arange(0, BLOCK_C)
    store_tile(p_o + first * C, b_o, o_in, o_c, stride_o, 1, left_q, C, True, C != BLOCK_C)
    if HAS_PAIR:
        # A query that attends to nothing so far may have biases that were infinite only in other units.
        far = tl.max(((tl.abs(b_max) > FAR) & (o_in < left_q)).to(tl.int32), 0)
        if far * runs > 0:
            b_top = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # [q]
            for tile in tl.range(0, tl.cdiv(lk, BLOCK_K), num_stages=1):
                b_top = _largest_bias(
                    b_top, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, tile * BLOCK_K, unit,
                    stride_pair_q * GRAIN_PAIR, stride_pair_k, lk, BLOCK_Q, BLOCK_K, HAS_ROW, TENSOR_MAP, FOLD, WIDE,
                )  # fmt: skip
            b_size = tl.abs(b_top)
            b_ref = tl.where((b_size > NEAR) & (b_size < float("inf")), b_top, 0.0)  # [q]
            b_acc = tl.zeros([BLOCK_Q, BLOCK_C], tl.float32)  # [q,c]
            b_max = tl.full([BLOCK_Q], FLOOR, tl.float32)
            b_sum = tl.zeros([BLOCK_Q], tl.float32)
            for tile in tl.range(0, tl.cdiv(lk, BLOCK_K), num_stages=1):
                b_acc, b_max, b_sum = _step(
                    b_q, b_acc, b_max, b_sum, b_ref, p_k, p_v, p_row, p_pair, pair_b, pair_h, start_q, o_pair_q, tile * BLOCK_K,
                    unit, stride_kl * GRAIN, stride_kd, stride_vl * GRAIN, stride_vc, stride_pair_q * GRAIN_PAIR, stride_pair_k,
                    lk, D, C, BLOCK_Q, BLOCK_D, BLOCK_C, BLOCK_K, BLOCK_K, HAS_PAIR, HAS_ROW, True, TENSOR_MAP, FOLD, PRECISION,
                    WIDE, True,
                )  # fmt: skip
            b_o, b_lse = finish(b_acc, b_max, b_sum)
            if HAS_GATE:
                b_o = _gated(b_o, p_gate, o_q, stride_gl * GRAIN_GATE, stride_gc, left_q, C, BLOCK_C, WIDE)
            b_again = (b_ref != 0.0) & (o_in < left_q)
            tl.debug_barrier()  # another thread may have stored the same element before
            tl.store(p_lse + o_in, b_lse, mask=b_again)
            tl.store(p_ref + o_in, b_ref, mask=b_again)
            p_tile = p_o + first * C + o_in[:, None] * stride_o + o_c[None, :]
            tl.store(p_tile, b_o.to(p_o.dtype.element_ty), mask=b_again[:, None] & (o_c < C)[None, :])


@dataclasses.dataclass(frozen=True)
class Forward:
    """The launches of a call. Call it with the tensors, and with o, lse and reference to write.

    Args:
        tiles: of the kernel.
        tuned: whether `evoattn tune` found them on this machine.
        rows: makes the row bias, where there is a mask or a mask bias.
        pair: the pair bias as it is given.
        copy_pair: with rows that load wide, where it is copied to such rows first.
        launches: of the kernel.
        gate: what it does with a gate, where there is one.
    """

    tiles: ForwardTiles
    tuned: bool
    rows: RowBias | None
    pair: Strided | None
    copy_pair: Strided | None
    launches: tuple[Launch, ...]
    gate: str | None

    def describe(self) -> Description:
        """See `evoattn.backends`."""
        tiles = self.tiles
        config = Config(block_q=tiles.block_q, block_k=tiles.block_k, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
        copies = () if self.copy_pair is None else (COPIED,)
        return Description(config, copies=copies, gate=self.gate, tuned="forward" if self.tuned else None)

    def __call__(self, inputs: Inputs, outputs: Outputs) -> None:
        q, k, v, mask, mask_bias, pair_bias, gate = inputs
        o, lse, reference = outputs
        p_pair = q
        if pair_bias is not None:
            p_pair = pair_bias
            if self.copy_pair is not None and self.pair is not None:
                p_pair = launch.empty(self.copy_pair, q.device)
                p_pair.copy_(pair_bias.as_strided(self.pair.shape, self.pair.stride))
        row = runs = lse  # stands in for what is not given: never read
        if self.rows is not None:
            row, runs = self.rows(mask, mask_bias)
        for start in self.launches:
            start(q, k, v, row, runs, p_pair, o, lse, reference, o if gate is None else gate)


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """What computes o [b,n,h,q,c], contiguous in `layout`, lse and reference [b,n,h,q] of tensors that lie like these."""
    q, k, v, mask, mask_bias, pair_bias, gate = inputs
    n, lk = q.shape[1], k.shape[-2]
    if q.shape[:-1].numel() == 0 or lk == 0:
        return Plan(_nothing if q.shape[:-1].numel() == 0 else _no_keys, Description)
    pair = None if pair_bias is None else strided(pair_bias)
    copy_pair = copied(pair) if pair is not None and needs_copy(pair, n) else None
    fold = launch.folds(scale)
    told = None if gate is None else GATED_FORWARD
    problem = dataclasses.replace(describe(inputs), capability=launch.capability(q.device))
    few = few_tiles("forward", problem, config)
    if few is not None:
        run = plan_forward_few(inputs, few, scale=scale, layout=layout)
        return Plan(run, functools.partial(Description, Config(num_warps=few.num_warps), gate=told))
    tiles = forward_tiles(problem, config, launch.shared_memory_limit(q.device))
    rows = None
    if mask is not None or mask_bias is not None:
        rows = plan_rows(mask, mask_bias, lk, q.device, tiles.block_k, unit=scale * _LOG2E if fold else 1.0)
    launches = _launches(
        problem,
        tiles,
        (strided(q), strided(k), strided(v)),
        copy_pair or pair,
        None if gate is None else strided(gate),
        rows,
        scale,
        fold,
        heads_inside=layout == "bnlhd",
    )
    row = None if rows is None else rows.launch
    overlap(q.device, (row, ()), *((start, (row,)) for start in launches))
    tuned = user.is_tuned("triton", "forward", problem, config)
    forward = Forward(tiles, tuned, rows, pair, copy_pair, launches, told)
    return Plan(forward, forward.describe)


def _launches(
    problem: Problem,
    tiles: ForwardTiles,
    qkv: tuple[Strided, Strided, Strided],
    pair: Strided | None,
    gate: Strided | None,
    rows: RowBias | None,
    scale: float,
    fold: bool,
    *,
    heads_inside: bool,
) -> tuple[Launch, ...]:
    b, n, h, lq, lk, d, c = problem.b, problem.n, problem.h, problem.lq, problem.lk, problem.d, problem.c
    grain = launch.grain(*qkv)
    maps = (
        TENSOR_MAPS
        and problem.capability is not None
        and problem.capability[0] == 9
        and pair is not None
        and loads_wide(pair)
        and pair.shape[-2:] == (lq, lk)
        and pair.stride[-2] > 0
    )
    grain_pair = 1 if maps else launch.grain(pair)  # a map needs none: one variant less for every length
    of_gate = Layout(1, (0,) * 5, False) if gate is None else layout_for(gate)
    constants = {
        "D": d,
        "C": c,
        "BLOCK_D": launch.head_block(d),
        "BLOCK_C": launch.head_block(c),
        "BLOCK_K": tiles.block_k,
        "STAGES": tiles.num_stages,
        "GRAIN": grain,
        "GRAIN_PAIR": grain_pair,
        "GRAIN_GATE": of_gate.grain,
        "HAS_PAIR": pair is not None,
        "HAS_ROW": rows is not None,
        "HAS_GATE": gate is not None,
        "EVEN_K": lk % tiles.block_k == 0,
        "HEADS_INSIDE": heads_inside,
        "TENSOR_MAP": maps,
        "FOLD": fold,
        "PRECISION": launch.split_precision(problem.dtype, max(d, c)),
        "WIDE": launch.is_wide(*qkv, pair, gate),
        "num_stages": tiles.num_stages,
    }
    # A pair bias that no map brings takes more registers, for addresses: with a limit they would spill.
    limit = {"maxnreg": tiles.max_registers} if tiles.max_registers and (pair is None or maps) else {}
    strides = sum((launch.units(x, 5, grain) for x in qkv), ()) + launch.units(pair, 4, grain_pair)
    row_strides = (0, 0, 0, 0) if rows is None else rows.strides
    launches = []
    for first_q, queries, block_q in launch.split(lq, tiles.block_q):
        blocks = -(-queries // block_q)
        through_map = None
        if pair is not None and maps:
            through_map = (_PAIR_ARGUMENT, launch.tensor_map(pair, (1, 1, block_q, tiles.block_k)))
        whole = block_q == tiles.block_q
        start = forward_kernel.plan(
            blocks * n * h * b, scale, *strides, *row_strides, n, h, lq, lk, first_q, blocks, *of_gate.strides,
            **constants, **(limit if whole else {}), BLOCK_Q=block_q, TAIL_K=_tail(lk, tiles) if whole else tiles.block_k,
            num_warps=tiles.warps(block_q, LEFT_OVER_WARPS), through_map=through_map,
        )  # fmt: skip
        launches.append(start)
    return tuple(launches)


def _tail(lk: int, tiles: ForwardTiles) -> int:
    """Keys of the ragged last tile: half of a whole one where that holds what is left over.

    Not where warps share queries: the half could then break the rule of `tuning.validity`.
    """
    half = tiles.block_k // 2
    halves = half >= MIN_TILE and 0 < lk % tiles.block_k <= half and tiles.block_q >= MIN_TILE * tiles.num_warps
    return half if halves else tiles.block_k


def _nothing(inputs: Inputs, outputs: Outputs) -> None:
    """No query: nothing to write."""


def _no_keys(inputs: Inputs, outputs: Outputs) -> None:
    """Queries that attend to nothing, for want of keys."""
    outputs.o.zero_()
    outputs.lse.fill_(float("-inf"))
    outputs.reference.zero_()
