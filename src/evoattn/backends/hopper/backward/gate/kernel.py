"""The gate in the backward: what the other kernels read in the place of dO and of dLSE, and the gradient of the gate."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.backward.common import fake_words
from evoattn.backends.hopper.host.launch import Kernel, Stand, channels, free
from evoattn.backends.hopper.kernels.primitives import LN2, VECTOR, lanes, sigmoid
from evoattn.backends.hopper.kernels.schedule import place

__all__ = ["GatePass"]

_THREADS = 128


class GatePass(Kernel):
    """o, do, gate [b,n,h,q,c], dlse [b,n,h,q] -> do * sigmoid(gate), dlse - LN2 * delta, do * o * (1 - sigmoid(gate)).

    o is the gated one, so delta is the sum over c of o * do. A thread has 8 channels of one query, and neighbours have the
    others: a block reads and writes whole rows, once.

    Args:
        dtype: cutlass type of o, do and the gate.
        channels: C.
        dlse: whether lse has a gradient.
        passes: whether the first two results are wanted.
        gradient: whether the third is.
    """

    def __init__(self, dtype: Any, channels: int, *, dlse: bool, passes: bool, gradient: bool):
        self.dtype, self.channels, self.dlse, self.passes, self.gradient = dtype, channels, dlse, passes, gradient
        self.lanes = lanes(channels)
        self.queries = _THREADS // self.lanes
        self.name_after(dtype, channels=channels, dlse=dlse, passes=passes, gradient=gradient)

    @cute.jit
    def __call__(self, o, do, gate, dlse, gated, delta, dgate, stream: cuda.CUstream):
        B, N, H, LQ, _ = o.shape
        self.kernel(o, do, gate, dlse, gated, delta, dgate).launch(
            grid=(B * N * H, (LQ + self.queries - 1) // self.queries, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, o, do, gate, dlse, gated, delta, dgate):
        tid, _, _ = arch.thread_idx()
        row, x, _ = arch.block_idx()
        h, n, b = place(row, o.shape[2], o.shape[1])
        q, part = x * self.queries + tid // self.lanes, tid % self.lanes
        total = Float32(0.0)
        if q < o.shape[3] and part < self.channels // VECTOR:
            of_o, of_do, of_gate, out = (cute.make_rmem_tensor(VECTOR, self.dtype) for _ in range(4))
            for given, held in ((o, of_o), (do, of_do), (gate, of_gate)):
                cute.autovec_copy(cute.local_tile(given[b, n, h, q, None], (VECTOR,), (part,)), held)
            for i in range_constexpr(VECTOR):
                total = total + of_o[i].to(Float32) * of_do[i].to(Float32)
            if const_expr(self.passes):
                for i in range_constexpr(VECTOR):
                    out[i] = (of_do[i].to(Float32) * sigmoid(of_gate[i].to(Float32))).to(self.dtype)
                cute.autovec_copy(out, cute.local_tile(gated[b, n, h, q, None], (VECTOR,), (part,)))
            if const_expr(self.gradient):
                for i in range_constexpr(VECTOR):
                    whole = of_do[i].to(Float32) * of_o[i].to(Float32)
                    out[i] = (whole * sigmoid(-of_gate[i].to(Float32))).to(self.dtype)
                cute.autovec_copy(out, cute.local_tile(dgate[b, n, h, q, None], (VECTOR,), (part,)))
        if const_expr(self.passes):
            total = arch.warp_reduction_sum(total, threads_in_group=self.lanes)
            if q < o.shape[3] and part == 0:
                value = -total * LN2
                if const_expr(self.dlse):
                    value = value + dlse[b, n, h, q]
                delta[b, n, h, q] = value

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__` when it is compiled, without the stream."""
        sizes = tuple(cute.sym_int() for _ in range(4))
        o, do, gate, gated, dgate = (channels(self.dtype, sizes, self.channels) for _ in range(5))
        dlse = Stand(Float32, sizes, (free(), free(), free(), free()), 4) if self.dlse else None
        gated, delta = (gated, fake_words(sizes)) if self.passes else (None, None)
        return o, do, gate, dlse, gated, delta, dgate if self.gradient else None
