"""d(pair bias) from the parts that the blocks of `bwd_dq` left, in a fixed order: the same bits on every run."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.bwd_steps import ROWS, SLICE


class PanelSum:
    """partials [slot, fragment, thread, 4] -> d(pair bias) [b,h,q,k]. A block writes one fragment of a panel: 64 queries of some keys.

    Args:
        dtype: cutlass type of d(pair bias).
        groups, slices, cluster: as the variant of `QueryGradients` that left the parts.
    """

    def __init__(self, dtype: Any, *, groups: int = 3, slices: int = 4, cluster: int = 2):
        self.dtype, self.groups, self.slices, self.cluster = dtype, groups, slices, cluster

    @cute.jit
    def __call__(self, partials: cute.Tensor, dpair: cute.Tensor, n: Int32, blocks: Int32, stream: cuda.CUstream):
        """n: rows of a (b, h); blocks: what `QueryGradients` was launched with."""
        B, H, LQ, _ = dpair.shape
        panels = B * H * ((LQ + ROWS * self.cluster - 1) // (ROWS * self.cluster)) * self.cluster
        self.kernel(partials, dpair, n, blocks).launch(
            grid=(panels, 4 * self.slices, 1), block=(self.groups * 128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, dpair: cute.Tensor, n: Int32, blocks: Int32):
        tid, _, _ = arch.thread_idx()
        panel, x, _ = arch.block_idx()
        B, H, LQ, LK = dpair.shape
        CL = self.cluster
        NQ = (LQ + ROWS * CL - 1) // (ROWS * CL)
        clusters, pan, rank = blocks // CL, panel // CL, panel % CL
        total = Int64(B * H * NQ) * n
        first = Int32(((Int64(pan) * n + 1) * clusters - 1) // total)
        last = Int32(((Int64(pan) + 1) * n * clusters - 1) // total)
        sums = cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        for c in cutlass.range(first, last + 1):
            part = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(partials[(c + pan) * CL + rank, x, tid, None], part)
            for y in range_constexpr(4):
                sums[y] = sums[y] + part[y]
        s, wt = tid // 128, tid % 128
        q = (pan % NQ * CL + rank) * ROWS + wt // 32 * 16 + wt % 32 // 4
        k = (s * self.slices + x // 4) * SLICE + x % 4 * 8 + wt % 4 * 2
        for y in range_constexpr(4):
            if q + y // 2 * 8 < LQ and k + y % 2 < LK:
                dpair[pan // NQ // H, pan // NQ % H, q + y // 2 * 8, k + y % 2] = sums[y].to(self.dtype)


def compile_sum(variant: PanelSum, options: str = "--enable-tvm-ffi --gpu-arch=sm_90a"):
    """Compile without a GPU; sizes and strides stay open."""
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    threads, long = variant.groups * 128, cute.sym_int64
    partials = make_fake_tensor(
        Float32, (cute.sym_int(), variant.slices * 4, threads, 4), (variant.slices * 16 * threads, 4 * threads, 4, 1), assumed_align=16
    )
    shape = tuple(cute.sym_int() for _ in range(4))
    dpair = make_fake_tensor(variant.dtype, shape, (long(), long(), long(), 1), assumed_align=2)
    return cute.compile(variant, partials, dpair, Int32(0), Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
