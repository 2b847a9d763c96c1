"""The gate, in a pass over all channels: after the forward kernel, and before the kernels of the backward.

A block owns some queries of one (b, n, h). It reads and writes each of their channels once, 16 bytes a thread, without a loop.
The product with sigmoid(gate) in the last step of the forward kernel takes longer (notes/gate.md): its warpgroups wait for the
gate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.launch import KernelVariant, Tensors
from evoattn.backends.hopper.lib.primitives import sigmoid
from evoattn.backends.hopper.lib.schedule import place
from evoattn.core.numerics import LN2

_THREADS = 128
_VECTOR = 8  # channels of a thread: 16 bytes


def _lanes(channels: int) -> int:
    """The threads of a query: a power of two, so that a warp has all of some queries."""
    return 1 << (channels // _VECTOR - 1).bit_length()


def _grid(mO: Any, channels: int) -> tuple[Any, Any, int]:
    """A row of blocks for each (b, n, h) of [b,n,h,q,c]."""
    B, N, H, LQ, _ = mO.shape
    queries = _THREADS // _lanes(channels)
    return B * N * H, (LQ + queries - 1) // queries, 1


def _own_vector(mO: Any, channels: int) -> tuple[Any, ...]:
    """b, n, h, q of this thread, and the number of its vector of channels, which may lie past the last."""
    tid, _, _ = arch.thread_idx()
    row, x, _ = arch.block_idx()
    h, n, b = place(row, mO.shape[2], mO.shape[1])
    lanes = _lanes(channels)
    return b, n, h, x * (_THREADS // lanes) + tid // lanes, tid % lanes


def _vector(x: Any, b: Any, n: Any, h: Any, q: Any, part: Any) -> Any:
    return cute.local_tile(x[b, n, h, q, None], (_VECTOR,), (part,))


@dataclasses.dataclass(frozen=True)
class GateProduct(KernelVariant):
    """o, gate [b,n,h,q,c]: o <- o * sigmoid(gate). A block reads and writes the channels of its queries once."""

    dtype: Any  # cutlass type of o and the gate
    channels: int  # C

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        self.kernel(args).launch(grid=_grid(args.mO, self.channels), block=(_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args):
        mO, mGate = args
        b, n, h, q, part = _own_vector(mO, self.channels)
        if q < mO.shape[3] and part < self.channels // _VECTOR:
            rO, rG = (cute.make_rmem_tensor(_VECTOR, self.dtype) for _ in range(2))
            gO, gG = (_vector(x, b, n, h, q, part) for x in (mO, mGate))
            cute.autovec_copy(gO, rO)
            cute.autovec_copy(gG, rG)
            for i in range_constexpr(_VECTOR):
                rO[i] = (rO[i].to(Float32) * sigmoid(rG[i].to(Float32))).to(self.dtype)
            cute.autovec_copy(rO, gO)

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        return {"mO": t.lines("bnhq", self.channels), "mGate": t.lines("bnhq", self.channels)}


@dataclasses.dataclass(frozen=True)
class GatePass(KernelVariant):
    """o, do, gate [b,n,h,q,c], dlse [b,n,h,q] -> do * sigmoid(gate), dlse - LN2 * delta, do * o * (1 - sigmoid(gate)).

    o is the gated one, so delta is the sum over c of o * do. A block reads and writes the channels of its queries once.
    """

    dtype: Any  # cutlass type of o, do and the gate
    channels: int  # C
    _: dataclasses.KW_ONLY
    dlse: bool  # whether lse has a gradient
    passes: bool  # whether the first two results are wanted
    gradient: bool  # whether the third is

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        self.kernel(args).launch(grid=_grid(args.mO, self.channels), block=(_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args):
        mO, mdO, mGate, mdLSE, mGated, mDelta, mdGate = args
        b, n, h, q, part = _own_vector(mO, self.channels)
        total = Float32(0.0)
        if q < mO.shape[3] and part < self.channels // _VECTOR:
            rO, rdO, rG, out = (cute.make_rmem_tensor(_VECTOR, self.dtype) for _ in range(4))
            for x, to in ((mO, rO), (mdO, rdO), (mGate, rG)):
                cute.autovec_copy(_vector(x, b, n, h, q, part), to)
            for i in range_constexpr(_VECTOR):
                total = total + rO[i].to(Float32) * rdO[i].to(Float32)
            if const_expr(self.passes):
                for i in range_constexpr(_VECTOR):
                    out[i] = (rdO[i].to(Float32) * sigmoid(rG[i].to(Float32))).to(self.dtype)
                cute.autovec_copy(out, _vector(mGated, b, n, h, q, part))
            if const_expr(self.gradient):
                for i in range_constexpr(_VECTOR):
                    product = rdO[i].to(Float32) * rO[i].to(Float32)
                    out[i] = (product * sigmoid(-rG[i].to(Float32))).to(self.dtype)
                cute.autovec_copy(out, _vector(mdGate, b, n, h, q, part))
        if const_expr(self.passes):
            total = arch.warp_reduction_sum(total, threads_in_group=_lanes(self.channels))
            if q < mO.shape[3] and part == 0:
                value = -total * LN2
                if const_expr(self.dlse):
                    value = value + mdLSE[b, n, h, q]
                mDelta[b, n, h, q] = value

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        return {
            "mO": t.lines("bnhq", self.channels),
            "mdO": t.lines("bnhq", self.channels),
            "mGate": t.lines("bnhq", self.channels),
            "mdLSE": t.strided("bnhq", Float32) if self.dlse else None,
            "mGated": t.lines("bnhq", self.channels) if self.passes else None,
            "mDelta": t.floats("bnhq") if self.passes else None,
            "mdGate": t.lines("bnhq", self.channels) if self.gradient else None,
        }
