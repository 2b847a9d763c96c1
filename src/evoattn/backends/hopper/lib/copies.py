"""Copies between global memory, shared memory and registers: by the copy engine (TMA), and by threads."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warp

from evoattn.backends.hopper.lib.primitives import finite_two
from evoattn.backends.hopper.lib.ring import Ring
from evoattn.backends.hopper.tiles import KEYS, ROWS

_VECTOR = 8  # elements of 16 bytes
_TILES = 4  # tiles of keys of a panel that load together


class Tma(NamedTuple):
    """A copy that is set up by the host: the copy atom, and the tensor as the copy engine addresses it."""

    atom: Any
    tensor: Any


def load_tma(x: Any, layout: Any, tile: tuple[int, ...], axes: tuple[int, ...] = (3, 4, 2, 1, 0)) -> Tma:
    """Set up loads of tiles [l,d] of a tensor [b,n,h,l,d] into shared memory, whose `layout` has several tiles."""
    return _tma(cpasync.CopyBulkTensorTileG2SOp(), x, layout, tile, axes)


def store_tma(x: Any, layout: Any, tile: tuple[int, ...]) -> Tma:
    """Set up stores of tiles [l,d] from shared memory to a tensor [b,n,h,l,d]."""
    return _tma(cpasync.CopyBulkTensorTileS2GOp(), x, layout, tile, (3, 4, 2, 1, 0))


def _tma(operation: Any, x: Any, layout: Any, tile: tuple[int, ...], axes: tuple[int, ...]) -> Tma:
    view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(axes)))
    return Tma(*cpasync.make_tiled_tma_atom(operation, view, cute.slice_(layout, (None, None, 0)), tile))


@dataclasses.dataclass(frozen=True)
class TmaTiles:
    """The tiles of a tensor, by number, h, n and b, and those in shared memory, by number.

    Args:
        atom: copies one.
        gX, sX: the tiles in global memory and in shared memory.
    """

    atom: Any
    gX: Any
    sX: Any

    @classmethod
    def of(cls, tma: Tma, tile: tuple[int, ...], shared: Any, axes: tuple[Any, ...] = (None, 0, None, None, None)) -> TmaTiles:
        """The tiles of a copy that the host has set up; `axes`: None for those that tiles are numbered along."""
        gX = cute.group_modes(cute.local_tile(tma.tensor, tile, axes), 0, 2)
        sX, gX = cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), gX)
        return cls(tma.atom, gX, sX)

    def load(self, at: tuple[Any, ...], to: Any, ring: Ring, stage: Any) -> None:
        """Load the tile at `at` into tile `to` of shared memory, for a stage of a ring, by all threads of a warp."""
        source = (None, *at)
        cute.copy(self.atom, self.gX[source], self.sX[None, to], tma_bar_ptr=ring.barrier(stage))

    def store(self, tile: Any, to: tuple[Any, ...]) -> None:
        """Store a tile of shared memory, by all threads of a warp."""
        target = (None, *to)
        cute.copy(self.atom, self.sX[None, tile], self.gX[target])


def bulk_load(source: Any, target: Any, ring: Ring, stage: Any) -> None:
    """Load a contiguous tensor into shared memory, for a stage of a ring, by one thread."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), target.element_type)
    gX, sX = (cute.group_modes(x, 0, cute.rank(x)) for x in (source, target))
    cute.copy(atom, gX, sX, mbar_ptr=ring.barrier(stage))


@cute.jit
def load_panel(
    pair: cute.Tensor, tiles: cute.Tensor, b: Int32, h: Int32, first: Int32, queries: cutlass.Constexpr, blocks: Int32,
    thread: Int32, threads: cutlass.Constexpr,
):  # fmt: skip
    """Load pair [b|1,h|1,q,k] from query `first` on into tiles [ROWS, KEYS, blocks * queries / ROWS], zero past the end.

    All threads load 16 bytes at a time, once for all rows n. Keys are contiguous; each line of them starts on 16 bytes and has
    a multiple of 8.
    """
    b, h = cutlass.min(b, pair.shape[0] - 1), cutlass.min(h, pair.shape[1] - 1)
    dtype, halves, across = pair.element_type, queries // ROWS, KEYS // _VECTOR
    each = queries * across // threads
    column = thread % across
    rows = [(thread + x * threads) // across for x in range(each)]
    lines = [pair[b, h, cutlass.min(first + row, pair.shape[2] - 1), None] for row in rows]
    keys = [Int32(cutlass.select_(first + row < pair.shape[2], pair.shape[3], 0)) for row in rows]
    for j0 in cutlass.range(0, blocks, _TILES, unroll=1):
        held = [cute.make_rmem_tensor(4, Int32) for _ in range(_TILES * each)]
        for u in range_constexpr(_TILES * each):
            word = (j0 + u // each) * across + column
            held[u].fill(0)
            if word * _VECTOR < keys[u % each]:
                start = cute.recast_ptr((lines[u % each].iterator + word * _VECTOR).align(16), dtype=Int32)
                cute.autovec_copy(cute.make_tensor(start, 4), held[u])
        for u in range_constexpr(_TILES * each):
            j = j0 + u // each
            if j < blocks:
                if const_expr(dtype is BFloat16):  # float16's -inf ends in NaN and so in `repair`
                    for y in range_constexpr(4):
                        held[u][y] = finite_two(held[u][y])
                row = rows[u % each]
                target = cute.local_tile(tiles[None, None, j * halves + row // ROWS], (1, _VECTOR), (row % ROWS, column))
                cute.autovec_copy(cute.recast_tensor(held[u], dtype), target[0, None])


def store_rows(values: Any, factor: Any, tile: Any, lane: Any, dtype: Any) -> None:
    """Store a warp's 16 rows of an accumulator, times factor, in a swizzled tile."""
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
    """Fill a tile of shared memory with zeros that the copy engine stores, by all threads of a block."""
    width = cute.size(tile, mode=[1])
    for x in cutlass.range(tid, cute.size(tile), threads):
        tile[x // width, x % width] = tile.element_type(0.0)
    arch.fence_proxy("async.shared", space="cta")


@cute.jit
def clear_rows(to: cute.Tensor, first: Int32, lane: Int32) -> None:
    """Clear 64 rows of a tensor [l,d], or as many as there are from `first` on, by a warp."""
    each = cute.size(to, mode=[1]) // 8
    held = cute.make_rmem_tensor(8, to.element_type)
    held.fill(0.0)
    for x in range_constexpr(ROWS * each // 32):
        line, part = (x * 32 + lane) // each, (x * 32 + lane) % each
        if first + line < to.shape[0]:
            cute.autovec_copy(held, cute.local_tile(to[first + line, None], (8,), (part,)))


@cute.jit
def clear_numbers(to: cute.Tensor, first: Int32, lane: Int32) -> None:
    """Clear 64 numbers of a tensor [l], or as many as there are from `first` on, by a warp."""
    for x in range_constexpr(ROWS // 32):
        if first + x * 32 + lane < to.shape[0]:
            to[first + x * 32 + lane] = Float32(0.0)
