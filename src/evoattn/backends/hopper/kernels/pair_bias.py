"""Kernels that write the pair bias for a main kernel.

A warp of `PairBias` owns a query, loops over its keys, and writes its pair bias, measured from its reference. A block of
`PairBiasTiles` owns and writes a tile of 64 queries and 64 keys that streams.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.launch import KernelVariant, Tensors
from evoattn.backends.hopper.lib.primitives import LOWEST, MASKED, SHALLOW
from evoattn.backends.hopper.lib.schedule import place
from evoattn.backends.hopper.tiles import KEYS, MMA_M
from evoattn.core.numerics import NEAR

_THREADS = 128
_LINES = _THREADS // 32  # queries of a block that measures a pair bias: a warp each


@dataclasses.dataclass(frozen=True)
class PairBias(KernelVariant):
    """pair_bias [b,h,q,k] of any strides -> the same, measured from the largest of each query if that is far from 0.

    Otherwise a pair bias of -1e9 at all keys of a query would round its scores away. The largest becomes the reference only if
    its subtraction is exact in dtype for all biases less than -LOWEST below it, which holds if they are between half and twice
    the largest. From 2^15 on they always are. Below, float32 scores have digits enough. A mask may switch off the largest key
    itself, so the other keys count. Lines of the result start on 16 bytes, and -inf becomes finite if dtype allows. reference
    [b,h,q] is what was subtracted.
    """

    dtype: Any  # cutlass type of the pair bias
    width: int  # elements that load at a time (1, or as many as 16 bytes hold)
    _: dataclasses.KW_ONLY
    q_dtype: Any  # cutlass type of q. Beside float16 no bias lies below -65,504, where masked keys begin.
    # whether what lies far below the largest is brought to LOWEST, which is as good as masked: `repair` does it in the
    # forward, and this for the backward.
    bounded: bool = False

    @property
    def kept(self) -> int:
        """Vectors that a thread keeps in registers: 1,024 keys of a query, or 512."""
        return 32 // self.width if self.width > 1 else 16

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        pair = t.lines("????") if self.width > 1 else t.strided("????", self.dtype)
        return {"mPair": pair, "mOut": t.lines("????"), "mReference": t.floats("???")}

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        b, h, q, _ = args.mOut.shape
        blocks = (b * h * q + _LINES - 1) // _LINES  # on one axis: the others end at 65,535
        self.kernel(args).launch(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, args):
        """A warp a query: it finds the largest, holds what fits in registers, and reads the others again."""
        mPair, mOut, mReference = args
        arch.griddepcontrol_launch_dependents()
        tid, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        lane, line = tid % 32, block * _LINES + tid // 32
        if line < mOut.shape[0] * mOut.shape[1] * mOut.shape[2]:
            i, h, b = place(line, mOut.shape[2], mOut.shape[1])
            top, vectors, across = -Float32.inf, mPair.shape[3] // self.width, mOut.shape[3] // self.width
            rPair = [cute.make_rmem_tensor(self.width, self.dtype) for _ in range(self.kept)]
            for u in range_constexpr(self.kept):
                rPair[u].fill(0.0)
                if lane + 32 * u < vectors:
                    cute.autovec_copy(self._vector(mPair, b, h, i, lane + 32 * u), rPair[u])
            for u in range_constexpr(self.kept):
                if lane + 32 * u < vectors:
                    for y in range_constexpr(self.width):
                        top = arch.fmax(top, rPair[u][y].to(Float32))
            for x in cutlass.range(lane + 32 * self.kept, vectors, 32, unroll=1):
                values = self._load(mPair, b, h, i, x)
                for y in range_constexpr(self.width):
                    top = arch.fmax(top, values[y].to(Float32))
            top = arch.warp_reduction_max(top)
            reference = Float32(0.0)
            if cute.math.absf(top) > NEAR and cute.math.absf(top) < Float32.inf:
                depth = -top  # of the lowest that counts
                for u in range_constexpr(self.kept):
                    if lane + 32 * u < vectors:
                        for y in range_constexpr(self.width):
                            depth = self._deeper(depth, rPair[u][y], top)
                for x in cutlass.range(lane + 32 * self.kept, vectors, 32, unroll=1):
                    values = self._load(mPair, b, h, i, x)
                    for y in range_constexpr(self.width):
                        depth = self._deeper(depth, values[y], top)
                depth = arch.warp_reduction_max(depth)
                if depth <= Float32(cutlass.select_(top > 0.0, -0.5 * top, -2.0 * top)):
                    reference = top
            for u in range_constexpr(self.kept):
                if lane + 32 * u < across:
                    if lane + 32 * u < vectors:
                        for y in range_constexpr(self.width):
                            rPair[u][y] = self._clean(rPair[u][y], reference)
                    cute.autovec_copy(rPair[u], self._vector(mOut, b, h, i, lane + 32 * u))
            for x in cutlass.range(lane + 32 * self.kept, across, 32, unroll=1):
                values = cute.make_rmem_tensor(self.width, self.dtype)
                values.fill(0.0)
                if x < vectors:
                    values = self._load(mPair, b, h, i, x)
                    for y in range_constexpr(self.width):
                        values[y] = self._clean(values[y], reference)
                cute.autovec_copy(values, self._vector(mOut, b, h, i, x))
            if lane == 0:
                mReference[b, h, i] = reference

    def _vector(self, x: cute.Tensor, b: Int32, h: Int32, i: Int32, vector: Int32) -> Any:
        """The elements of a vector."""
        start = x.iterator + cute.crd2idx((b, h, i, vector * self.width), x.layout)
        return cute.make_tensor(start.align(self.dtype.width // 8 * self.width), cute.make_layout(self.width))

    def _load(self, mPair: cute.Tensor, b: Int32, h: Int32, i: Int32, vector: Int32) -> Any:
        """The elements of a vector, in registers."""
        values = cute.make_rmem_tensor(self.width, self.dtype)
        cute.autovec_copy(self._vector(mPair, b, h, i, vector), values)
        return values

    def _deeper(self, depth: Float32, value: Any, top: Float32) -> Float32:
        """The larger of a depth and this number's, if it is not too far below the largest to count."""
        x = value.to(Float32)
        return arch.fmax(depth, Float32(cutlass.select_(x > top + LOWEST, -x, -top)))

    def _clean(self, value: Any, reference: Float32) -> Any:
        """A bias measured from the reference, and not too far below it; NaN stays."""
        x = value.to(Float32)
        lowest = LOWEST if self.bounded else SHALLOW if self.q_dtype is BFloat16 else -65504.0
        masked = Float32(-math.inf if self.dtype is Float16 else MASKED)
        near = x - reference
        near = Float32(cutlass.select_(near < lowest, Float32(lowest), near))
        return Float32(cutlass.select_(x == -Float32.inf, masked, near)).to(self.dtype)


@dataclasses.dataclass(frozen=True)
class PairBiasTiles(KernelVariant):
    """pair_bias [b,h,q,k] of any strides -> tiles [b,h,tiles of k,tiles of q,64 * 64], zero past the ends.

    Within a tile it lies as the threads of a warpgroup hold transposed scores: `KeyGradients` reads four numbers at a time. The
    forward hands over [b,h,k,q], and so finds scores that are not transposed.
    """

    dtype: Any  # cutlass type of the pair bias
    _: dataclasses.KW_ONLY
    float32: bool  # whether the tiles are float32, finite and over scale, as the accumulators hold it

    @property
    def tile(self) -> Any:
        """Type of the tiles."""
        return Float32 if self.float32 else self.dtype

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.tile)
        return {"mPair": t.strided("????", self.dtype), "mTiles": t.lines("????", MMA_M * KEYS), "scale": Float32(0)}

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        b, h, tiles_k, tiles_q, _ = args.mTiles.shape
        self.kernel(args.mPair, args.mTiles, Float32(1.0) / args.scale).launch(
            grid=(b * h * tiles_k, tiles_q, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mPair: cute.Tensor, mTiles: cute.Tensor, inverse: Float32):
        tid, _, _ = arch.thread_idx()
        panel, j, _ = arch.block_idx()
        _, H, tiles_k, _, _ = mTiles.shape
        i, h, b = panel % tiles_k, panel // tiles_k % H, panel // tiles_k // H
        key, query = i * 64 + tid // 32 * 16 + tid % 32 // 4, j * 64 + 2 * (tid % 4)
        for x in range_constexpr(8):
            values = cute.make_rmem_tensor(4, self.tile)
            for y in range_constexpr(4):
                k, q = key + y // 2 * 8, query + 8 * x + y % 2
                values[y] = self.tile(0.0)
                if k < mPair.shape[3] and q < mPair.shape[2]:
                    value = mPair[b, h, q, k]
                    if const_expr(self.float32):
                        value = value.to(Float32)
                        value = Float32(cutlass.select_(value == -Float32.inf, Float32(MASKED), value)) * inverse
                    values[y] = value
            cute.autovec_copy(values, cute.local_tile(mTiles[b, h, i, j, None], (4,), (x * _THREADS + tid,)))
