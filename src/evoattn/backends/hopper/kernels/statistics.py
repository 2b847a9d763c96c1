"""The statistics of each query for the backward kernels: terms of -LSE / scale, and of -delta.

A block of `Statistics` owns 64 queries of one (b, n, h), a thread each. A thread loops over the channels and writes the
statistics of its query once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import BFloat16, Float32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.launch import KernelVariant, Tensors
from evoattn.backends.hopper.lib.primitives import VETO, three_terms
from evoattn.backends.hopper.lib.schedule import place
from evoattn.backends.hopper.tiles import MMA_M
from evoattn.core.numerics import LN2, LOG2E

TILE_WORDS = 4 * MMA_M
"""Words of statistics of 64 queries (`write_statistics`)."""

NO_NEG_LSE = -1e30
"""In place of -LSE, for a query that attends to nothing."""

FLOAT16_STEP = 16.0
"""float16 has -LSE / scale in these units: a pair bias brings it to -524,032, and a little beyond."""


def delta_terms(delta: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """delta in terms of dtype, counted in `delta_units`. In float16 off by 2^-23 of it, or 2^-27, and infinite from 2^25 on."""
    if dtype is BFloat16:
        return three_terms(delta, dtype)
    large, small, _ = delta_units(dtype)
    high = (delta * Float32(1.0 / large)).to(dtype)
    return high, ((delta - high.to(Float32) * Float32(large)) * Float32(1.0 / small)).to(dtype), dtype(0.0)


def delta_units(dtype: Any) -> tuple[float, float, float]:
    """The units in which the terms of delta count."""
    return (1.0, 1.0, 1.0) if dtype is BFloat16 else (512.0, 0.25, 0.0)


def step_of(dtype: Any) -> float:
    """The unit of -LSE / scale and of a key's bias / scale in the kernel of the keys."""
    return 1.0 if dtype is BFloat16 else FLOAT16_STEP


def write_statistics(to: Any, q: Any, low: Any, delta: Any, alpha: Any, dtype: Any) -> None:
    """Write the statistics of query q of a tile for `KeyGradients`, as eight channels of its products: l0 l1 l2 u w u d0 d1.

    l are terms of -LSE / scale, from `low` times alpha = 1 / scale; u meets the terms of a key's bias; d are terms of -delta,
    d2 stands in w in bfloat16. float16 has VETO there, which meets a masked key.
    """
    step = step_of(dtype)
    low = arch.fmax(low * alpha * Float32(1.0 / step), Float32(NO_NEG_LSE if dtype is BFloat16 else -65504.0))
    u, (d0, d1, d2) = dtype(step), delta_terms(delta, dtype)
    w = d2 if dtype is BFloat16 else dtype(VETO)
    terms = cute.make_rmem_tensor(8, dtype)
    for x, term in enumerate((*three_terms(low, dtype), u, w, u, d0, d1)):
        terms[x] = term
    cute.autovec_copy(cute.recast_tensor(terms, Float32), cute.local_tile(to, (4,), (q,)))


@dataclasses.dataclass(frozen=True)
class Statistics(KernelVariant):
    """o, do [b,n,h,q,c], lse, dlse [b,n,h,q] -> stats [b,n,h,tiles * TILE_WORDS]. A thread finds those of one query.

    It runs if `QueryGradients`, which also finds them, does not.
    """

    dtype: Any  # cutlass type of o and do
    channels: int  # C
    _: dataclasses.KW_ONLY
    dlse: bool = False  # whether lse has a gradient
    # whether a gate multiplies O. Then `GatePass` has found delta, which comes with dlse, and o is not read.
    gate: bool = False

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        B, N, H, words = args.mStats.shape
        self.kernel(args).launch(grid=(B * N * H, words // TILE_WORDS, 1), block=(MMA_M, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args):
        mO, mdO, mLSE, mdLSE, mStats, scale = args
        tid, _, _ = arch.thread_idx()
        row, x, _ = arch.block_idx()
        h, n, b = place(row, mO.shape[2], mO.shape[1])
        q = x * MMA_M + tid
        both = cute.make_rmem_tensor(2, Float32)  # -LSE and -delta
        both[0], both[1] = Float32(NO_NEG_LSE), Float32(0.0)
        if q < mO.shape[3]:
            delta = Float32(0.0)
            for j in range_constexpr(0 if self.gate else self.channels // 8):
                rO, rdO = cute.make_rmem_tensor(8, self.dtype), cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(cute.local_tile(mO[b, n, h, q, None], (8,), (j,)), rO)
                cute.autovec_copy(cute.local_tile(mdO[b, n, h, q, None], (8,), (j,)), rdO)
                for y in range_constexpr(8):
                    delta = delta + rO[y].to(Float32) * rdO[y].to(Float32)
            both[1] = -delta
            value = mLSE[b, n, h, q]
            if value > Float32(-float("inf")):
                both[0] = -value * LN2
                if const_expr(self.dlse):
                    both[1] = mdLSE[b, n, h, q] * LOG2E - delta
        to = cute.local_tile(mStats[b, n, h, None], (TILE_WORDS,), (x,))
        write_statistics(to, tid, both[0], both[1], Float32(1.0) / scale, self.dtype)

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        o, do = (t.lines("bnhq", self.channels) for _ in range(2))
        statistics = {"mLSE": t.floats("bnhq"), "mdLSE": t.floats("bnhq"), "mStats": t.floats("bnh?", align=16)}
        return {"mO": o, "mdO": do, **statistics, "scale": Float32(0)}
