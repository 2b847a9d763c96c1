"""Pieces that the backward kernels share: exact splits of a float32, fragments, stores."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warp

from evoattn.backends.hopper.backward.schedule import row
from evoattn.backends.hopper.host.launch import Stand, free, size
from evoattn.backends.hopper.kernels.primitives import VETO, mma_m16n8k16, packed, three_terms
from evoattn.backends.hopper.kernels.tile_sizes import ROWS, SLICE

TILE = 4 * ROWS  # words of statistics of 64 queries, see write_statistics
NEVER = -1e30  # in place of -lse where a query has no probabilities
STEP = 16.0  # float16 takes -lse / scale in these: a pair bias brings it to -524,032, and a little beyond


def key_of_slice(u: Any, group: Any, groups: int, slices: int, interleave: int) -> Any:
    """The first key of slice u of a warpgroup in `dq`.

    A warpgroup's keys lie side by side if `interleave` is 0. Else warpgroups take `interleave` slices each in turn.
    """
    return (
        ((u // interleave * groups + group) * interleave + u % interleave) * SLICE
        if interleave
        else (group * slices + u) * SLICE
    )


def row_at(position: Any, n: Any, panel: tuple[Any, ...]) -> Any:
    """`schedule.row`, once: without the shuffle the compiler works it out anew for each copy that a warp starts."""
    return arch.make_warp_uniform(row(position, n, panel))


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
    return 1.0 if dtype is BFloat16 else STEP


def write_statistics(to: Any, q: Any, low: Any, delta: Any, alpha: Any, dtype: Any) -> None:
    """Write the statistics of query q of a tile for `dkdv`, as eight channels of its products: l0 l1 l2 u w u d0 d1.

    l are terms of -LSE / scale, from `low` times alpha = 1 / scale; u meets the terms of a key's bias; d are terms of -delta,
    d2 stands in w in bfloat16. float16 has VETO there, which meets a masked key.
    """
    step = step_of(dtype)
    low = arch.fmax(low * alpha * Float32(1.0 / step), Float32(NEVER if dtype is BFloat16 else -65504.0))
    u, (d0, d1, d2) = dtype(step), delta_terms(delta, dtype)
    w = d2 if dtype is BFloat16 else dtype(VETO)
    terms = cute.make_rmem_tensor(8, dtype)
    for x, term in enumerate((*three_terms(low, dtype), u, w, u, d0, d1)):
        terms[x] = term
    cute.autovec_copy(cute.recast_tensor(terms, Float32), cute.local_tile(to, (4,), (q,)))


def row_products(dtype: Any, x: Any, y: Any, lane: Any) -> Any:
    """Return sum_d x * y of this thread's rows g and g + 8: the diagonal of x y^T.

    x and y are A fragments [rows, k] of the same 16 rows a warp; 4 small products instead of 60 instructions."""
    xs, ys = packed(x), packed(y)
    low = high = [Float32(0.0)] * 4
    for k in range(cute.size(xs) // 4):
        a = [xs[4 * k + i] for i in range(4)]
        low = mma_m16n8k16(dtype, low, a, [ys[4 * k], ys[4 * k + 2]])
        high = mma_m16n8k16(dtype, high, a, [ys[4 * k + 1], ys[4 * k + 3]])
    odd = (lane & 4) != 0
    source = (lane & 28) | (lane >> 3)
    first = cutlass.select_(odd, low[1], low[0])
    second = cutlass.select_(odd, high[3], high[2])
    return arch.shuffle_sync(first, source), arch.shuffle_sync(second, source)


def unseen(word: Any) -> Any:
    """The same 32 bits, whose origin the compiler cannot see."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


def narrow(tile: Any, width: int) -> Any:
    """A tile [D, rows] as a right side without the channels that only fill it up."""
    if cute.size(tile, mode=[0]) == width:
        return tile
    return cute.local_tile(tile, (width, tile.shape[1], tile.shape[2]), (0, 0, 0))


def store_rows(values: Any, factor: Any, tile: Any, lane: Any, dtype: Any) -> None:
    """A warp's 16 rows of an accumulator, times factor, into a swizzled 16-row tile."""
    stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    for x in range(cute.size(values) // 8):
        scaled = cute.make_rmem_tensor(8, Float32)
        for y in range(8):
            scaled[y] = values[8 * x + y] * factor
        short = cute.make_rmem_tensor(8, dtype)
        short.store(scaled.load().to(dtype))
        to = cute.local_tile(tile, (1, 8), (lane % 16, 2 * x + lane // 16))
        cute.copy(stm, short, to[0, None])


@cute.jit
def fill_zeros(tile: cute.Tensor, tid: Int32, threads: cutlass.Constexpr) -> None:
    """Zeros in a tile of shared memory, by all threads of a block, for the copy engine to take from there."""
    width = cute.size(tile, mode=[1])
    for x in cutlass.range(tid, cute.size(tile), threads):
        tile[x // width, x % width] = tile.element_type(0.0)
    arch.fence_proxy("async.shared", space="cta")


@cute.jit
def clear_rows(to: cute.Tensor, first: Int32, lane: Int32) -> None:
    """Zeros in 64 rows of a tensor [l,d], or as many as there are from `first` on, by a warp."""
    each = cute.size(to, mode=[1]) // 8
    held = cute.make_rmem_tensor(8, to.element_type)
    held.fill(0.0)
    for x in range_constexpr(ROWS * each // 32):
        line, part = (x * 32 + lane) // each, (x * 32 + lane) % each
        if first + line < to.shape[0]:
            cute.autovec_copy(held, cute.local_tile(to[first + line, None], (8,), (part,)))


@cute.jit
def clear_numbers(to: cute.Tensor, first: Int32, lane: Int32) -> None:
    """Zeros in 64 numbers of a tensor [l], or as many as there are from `first` on, by a warp."""
    for x in range_constexpr(ROWS // 32):
        if first + x * 32 + lane < to.shape[0]:
            to[first + x * 32 + lane] = Float32(0.0)


def add_four(pointer: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Four float32 reductions in one instruction, to a 16-byte boundary of global memory."""
    arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer.toint(), a, b, c, d]
    )


def store_remote(address: Any, four: Any, barrier: Any) -> None:
    """Four float32 to another block's shared memory; a barrier there counts their bytes."""
    arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *four, barrier],
    )


def exp2(x: Any) -> Any:
    """2^x to about 2 units in the last place; one instruction."""
    return arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def fake_words(sizes: tuple[Any, ...], align: int = 4) -> Any:
    """A stand-in for a float32 tensor whose last axis is contiguous, and whose lines start on `align` bytes."""
    strides = tuple(cute.sym_int64(divisibility=align // 4) for _ in sizes[1:])
    return Stand(Float32, sizes, (*strides, 1), align)


def fake_pair(dtype: Any, queries: Any, keys: Any, vector: bool) -> Any:
    """A stand-in for a pair bias [b|1,h|1,q,k]: of any strides, or of lines that start on two numbers."""
    strides = tuple(cute.sym_int64(divisibility=2 if vector else 1) for _ in range(3))
    last = 1 if vector else free()
    align = (2 if vector else 1) * dtype.width // 8
    return Stand(dtype, (size(), size(), queries, keys), (*strides, last), align)
