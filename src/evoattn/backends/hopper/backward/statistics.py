"""The statistics of every query where `dq`, which also finds them, does not run: terms of -lse / scale, and of -delta."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.backward.common import NEVER, TILE, fake_words, write_statistics
from evoattn.backends.hopper.host.launch import Kernel, channels
from evoattn.backends.hopper.kernels.primitives import LN2, LOG2E
from evoattn.backends.hopper.kernels.schedule import place
from evoattn.backends.hopper.kernels.tile_sizes import ROWS

_THREADS = ROWS


class Statistics(Kernel):
    """o, do [b,n,h,q,c], lse, dlse [b,n,h,q] -> stats [b,n,h,tiles * TILE]. A thread finds those of one query.

    Args:
        dtype: cutlass type of o and do.
        channels: C.
        dlse: whether lse has a gradient.
        gate: whether a gate multiplies O. Then `gate.GatePass` has found delta, which comes with dlse, and o is not read.
    """

    def __init__(self, dtype: Any, channels: int, *, dlse: bool = False, gate: bool = False):
        self.dtype, self.channels, self.dlse, self.gated = dtype, channels, dlse, gate
        self.name_after(dtype, channels=channels, dlse=dlse, gate=gate)

    @cute.jit
    def __call__(self, o, do, lse, dlse, stats, scale, stream: cuda.CUstream):
        B, N, H, words = stats.shape
        self.kernel(o, do, lse, dlse, stats, scale).launch(
            grid=(B * N * H, words // TILE, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, o, do, lse, dlse, stats, scale):
        tid, _, _ = arch.thread_idx()
        row, x, _ = arch.block_idx()
        h, n, b = place(row, o.shape[2], o.shape[1])
        q = x * _THREADS + tid
        of = cute.make_rmem_tensor(2, Float32)
        of[0], of[1] = Float32(NEVER), Float32(0.0)
        if q < o.shape[3]:
            delta = Float32(0.0)
            for j in range_constexpr(0 if self.gated else self.channels // 8):
                one, two = cute.make_rmem_tensor(8, self.dtype), cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(cute.local_tile(o[b, n, h, q, None], (8,), (j,)), one)
                cute.autovec_copy(cute.local_tile(do[b, n, h, q, None], (8,), (j,)), two)
                for y in range_constexpr(8):
                    delta = delta + one[y].to(Float32) * two[y].to(Float32)
            of[1] = -delta
            value = lse[b, n, h, q]
            if value > Float32(-float("inf")):
                of[0] = -value * LN2
                if const_expr(self.dlse):
                    of[1] = dlse[b, n, h, q] * LOG2E - delta
        to = cute.local_tile(stats[b, n, h, None], (TILE,), (x,))
        write_statistics(to, tid, of[0], of[1], Float32(1.0) / scale, self.dtype)

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__` when it is compiled, without the stream."""
        sizes = tuple(cute.sym_int() for _ in range(4))
        o, do = (channels(self.dtype, sizes, self.channels) for _ in range(2))
        return o, do, fake_words(sizes), fake_words(sizes), fake_words((*sizes[:3], cute.sym_int()), 16), Float32(0)
