"""d(pair bias) from the parts that the blocks of `dq` left, in a fixed order: the same bits on every run."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.backward.common import fake_pair, fake_words, key_of_slice
from evoattn.backends.hopper.backward.schedule import change_of, first_row, share
from evoattn.backends.hopper.host.launch import Kernel
from evoattn.backends.hopper.kernels.tile_sizes import ROWS


class PanelSum(Kernel):
    """partials [slot, fragment, thread, 4] -> d(pair bias) [b,h,q,k]. A block sums one fragment of a panel of 64 queries.

    Args:
        dtype: cutlass type of d(pair bias).
        groups, slices, cluster, interleave, timed: as the variant of `QueryGradients` that left the parts.
        vector: whether rows of d(pair bias) start on 4 bytes.
    """

    def __init__(
        self, dtype: Any, *, groups: int = 3, slices: int = 4, cluster: int = 1, interleave: int = 0, vector: bool = True,
        timed: bool = True,
    ):  # fmt: skip
        self.dtype, self.groups, self.slices, self.cluster = dtype, groups, slices, cluster
        self.interleave, self.vector, self.timed = interleave, vector, timed and cluster == 1
        self.name_after(
            dtype, groups=groups, slices=slices, cluster=cluster, interleave=interleave or None, vector=vector, timed=self.timed
        )

    @cute.jit
    def __call__(self, partials: cute.Tensor, dpair: cute.Tensor, n: Int32, blocks: Int32, stream: cuda.CUstream):
        """n: rows of a (b, h); blocks: clusters that `QueryGradients` was launched with."""
        B, H, LQ, _ = dpair.shape
        panels = B * H * ((LQ + ROWS - 1) // ROWS)
        self.kernel(partials, dpair, n, blocks).launch(
            grid=(panels, 4 * self.slices, self.cluster), block=(self.groups * 128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, dpair: cute.Tensor, n: Int32, blocks: Int32):
        tid, _, _ = arch.thread_idx()
        pan, x, rank = arch.block_idx()
        B, H, LQ, LK = dpair.shape
        NQ = (LQ + ROWS - 1) // ROWS
        panels, change = Int64(B * H * NQ), Int32(0)
        each = Int32(share(panels * n, blocks))
        if const_expr(self.timed):
            change = change_of(n, each)
            each = Int32(share(panels * (n + change), blocks))
        start = first_row(pan, n, change)
        first, last = start // each, (start + n - 1) // each
        sums = cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        for c in cutlass.range(first, last + 1):
            part = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(partials[(c + pan) * self.cluster + rank, x, tid, None], part)
            for y in range_constexpr(4):
                sums[y] = sums[y] + part[y]
        s, wt = tid // 128, tid % 128
        q = pan % NQ * ROWS + wt // 32 * 16 + wt % 32 // 4
        key = key_of_slice(x // 4, rank * self.groups + s, self.cluster * self.groups, self.slices, self.interleave)
        k = key + x % 4 * 8 + wt % 4 * 2
        for r in range_constexpr(2):
            if q + 8 * r < LQ and k < LK:
                line = dpair[pan // NQ // H, pan // NQ % H, q + 8 * r, None]
                if const_expr(self.vector):
                    two = cute.make_rmem_tensor(2, self.dtype)
                    two[0], two[1] = sums[2 * r].to(self.dtype), sums[2 * r + 1].to(self.dtype)
                    cute.autovec_copy(two, cute.local_tile(line, (2,), (k // 2,)))
                else:
                    line[k] = sums[2 * r].to(self.dtype)
                    if k + 1 < LK:
                        line[k + 1] = sums[2 * r + 1].to(self.dtype)

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__` when it is compiled, without the stream."""
        partials = fake_words((cute.sym_int(), self.slices * 4, self.groups * 128, 4), 16)
        return partials, fake_pair(self.dtype, cute.sym_int(), cute.sym_int(), self.vector), Int32(0), Int32(0)
