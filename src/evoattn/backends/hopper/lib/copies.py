"""Copies between global memory, shared memory and registers: by the copy engine (TMA), and by threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warp

from evoattn.backends.hopper.lib.primitives import broadcast_index, make_finite_two
from evoattn.backends.hopper.lib.ring import Ring
from evoattn.backends.hopper.tiles import KEYS, MMA_M

_VECTOR = 8  # elements of 16 bytes
_TILES_AT_A_TIME = 4  # tiles of keys of a panel that load together


def load_tma(x: Any, layout: Any, tile: tuple[int, ...], axes: tuple[int, ...] = (3, 4, 2, 1, 0)) -> Any:
    """Set up loads of tiles [l,d] of a tensor [b,n,h,l,d] into shared memory, whose `layout` has several tiles."""
    return _tma(cpasync.CopyBulkTensorTileG2SOp(), x, layout, tile, axes)


def store_tma(x: Any, layout: Any, tile: tuple[int, ...]) -> Any:
    """Set up stores of tiles [l,d] from shared memory to a tensor [b,n,h,l,d]."""
    return _tma(cpasync.CopyBulkTensorTileS2GOp(), x, layout, tile, (3, 4, 2, 1, 0))


def _tma(operation: Any, x: Any, layout: Any, tile: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """The copy atom, and the tensor as the copy engine addresses it."""
    view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(axes)))
    return tuple(cpasync.make_tiled_tma_atom(operation, view, cute.slice_(layout, (None, None, 0)), tile))


@dataclasses.dataclass(frozen=True)
class TmaTiles:
    """The tiles of a tensor, by number, h, n and b, and those in shared memory, by number; `atom` copies one."""

    atom: Any
    gX: Any
    sX: Any

    @classmethod
    def of(cls, tma: Any, tile: tuple[int, ...], shared: Any, axes: tuple[Any, ...] = (None, 0, None, None, None)) -> TmaTiles:
        """The tiles of a copy that the host has set up; `axes`: None for those that tiles are numbered along."""
        atom, tensor = tma
        gX = cute.group_modes(cute.local_tile(tensor, tile, axes), 0, 2)
        sX, gX = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), gX)
        return cls(atom, gX, sX)

    def load(self, coord: tuple[Any, ...], tile: Any, ring: Ring, stage: Any) -> None:
        """Load the tile at `coord` into tile `tile` of shared memory, for a stage of a ring, by all threads of a warp."""
        source = (None, *coord)
        cute.copy(self.atom, self.gX[source], self.sX[None, tile], tma_bar_ptr=ring.full_barrier(stage))

    def store(self, tile: Any, coord: tuple[Any, ...]) -> None:
        """Store a tile of shared memory, by all threads of a warp."""
        target = (None, *coord)
        cute.copy(self.atom, self.sX[None, tile], self.gX[target])


def bulk_load(source: Any, target: Any, ring: Ring, stage: Any) -> None:
    """Load a contiguous tensor into shared memory, for a stage of a ring, by one thread."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), target.element_type)
    gX, sX = (cute.group_modes(x, 0, cute.rank(x)) for x in (source, target))
    cute.copy(atom, gX, sX, mbar_ptr=ring.full_barrier(stage))


@cute.jit
def load_panel(
    mPair: cute.Tensor, sPair: cute.Tensor, b: Int32, h: Int32, first: Int32, queries: cutlass.Constexpr, blocks: Int32,
    thread: Int32, threads: cutlass.Constexpr,
):  # fmt: skip
    """Load pair [b|1,h|1,q,k] from query `first` on into tiles [MMA_M, KEYS, blocks * queries / MMA_M], zero past the end.

    All threads load 16 bytes at a time, once for all rows n. Keys are contiguous; each line of them starts on 16 bytes and has
    a multiple of 8.
    """
    b, h = broadcast_index(mPair, b, h)
    dtype, halves, across = mPair.element_type, queries // MMA_M, KEYS // _VECTOR
    vectors = queries * across // threads
    column = thread % across
    rows = [(thread + x * threads) // across for x in range(vectors)]
    lines = [mPair[b, h, cutlass.min(first + row, mPair.shape[2] - 1), None] for row in rows]
    keys = [Int32(cutlass.select_(first + row < mPair.shape[2], mPair.shape[3], 0)) for row in rows]
    for j0 in cutlass.range(0, blocks, _TILES_AT_A_TIME, unroll=1):
        rPair = [cute.make_rmem_tensor(4, Int32) for _ in range(_TILES_AT_A_TIME * vectors)]
        for u in range_constexpr(_TILES_AT_A_TIME * vectors):
            word = (j0 + u // vectors) * across + column
            rPair[u].fill(0)
            if word * _VECTOR < keys[u % vectors]:
                start = cute.recast_ptr((lines[u % vectors].iterator + word * _VECTOR).align(16), dtype=Int32)
                cute.autovec_copy(cute.make_tensor(start, 4), rPair[u])
        for u in range_constexpr(_TILES_AT_A_TIME * vectors):
            j = j0 + u // vectors
            if j < blocks:
                if const_expr(dtype is BFloat16):  # float16's -inf ends in NaN and so in `repair`
                    for y in range_constexpr(4):
                        rPair[u][y] = make_finite_two(rPair[u][y])
                row = rows[u % vectors]
                target = cute.local_tile(sPair[None, None, j * halves + row // MMA_M], (1, _VECTOR), (row % MMA_M, column))
                cute.autovec_copy(cute.recast_tensor(rPair[u], dtype), target[0, None])


def store_tile(copy: TmaTiles, tile: Any, coord: tuple[Any, ...]) -> None:
    """Store a tile that this warp has written, as a group of copies of its own."""
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()
    copy.store(tile, coord)
    arch.cp_async_bulk_commit_group()


def store_accumulator(acc: Any, factors: Any, tile: Any, lane: Any, dtype: Any) -> None:
    """Store a warp's 16 lines of an accumulator in a swizzled tile, each times the factor of its line; a thread has two."""
    stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    for x in range(cute.size(acc) // 8):
        scaled = cute.make_rmem_tensor(8, Float32)
        for y in range(8):
            scaled[y] = acc[8 * x + y] * factors[y // 2 % 2]
        short = cute.make_rmem_tensor(8, dtype)
        short.store(scaled.load().to(dtype))
        target = cute.local_tile(tile, (1, 8), (lane % 16, 2 * x + lane // 16))
        cute.copy(stm, short, target[0, None])


@cute.jit
def fill_zeros(tile: cute.Tensor, tid: Int32, threads: cutlass.Constexpr) -> None:
    """Fill a tile of shared memory with zeros that the copy engine stores, by all threads of a block."""
    width = cute.size(tile, mode=[1])
    for x in cutlass.range(tid, cute.size(tile), threads):
        tile[x // width, x % width] = tile.element_type(0.0)
    arch.fence_proxy("async.shared", space="cta")


@cute.jit
def clear_lines(mX: cute.Tensor, first: Int32, lane: Int32) -> None:
    """Clear 64 rows of a tensor [l,d], or as many as there are from `first` on, by a warp."""
    vectors = cute.size(mX, mode=[1]) // 8
    zeros = cute.make_rmem_tensor(8, mX.element_type)
    zeros.fill(0.0)
    for x in range_constexpr(MMA_M * vectors // 32):
        line, part = (x * 32 + lane) // vectors, (x * 32 + lane) % vectors
        if first + line < mX.shape[0]:
            cute.autovec_copy(zeros, cute.local_tile(mX[first + line, None], (8,), (part,)))


@cute.jit
def clear_numbers(mX: cute.Tensor, first: Int32, lane: Int32) -> None:
    """Clear 64 numbers of a tensor [l], or as many as there are from `first` on, by a warp."""
    for x in range_constexpr(MMA_M // 32):
        if first + x * 32 + lane < mX.shape[0]:
            mX[first + x * 32 + lane] = Float32(0.0)
