"""The pair bias of a panel of queries, brought into shared memory once for all rows n.

All threads load it with ordinary instructions, so that any strides and any length will do; the tensor memory accelerator would
want rows that start on 16 bytes.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, const_expr, cute, range_constexpr

from evoattn.backends.hopper.primitives import finite

__all__ = ["KEYS", "ROWS", "load_panel"]

ROWS = 64
"""Queries of a tile: those of a warpgroup."""

KEYS = 64
"""Keys of a tile: those of a stage."""

_AT_ONCE = 4  # tiles of keys that are on their way together


@cute.jit
def load_panel(
    pair: cute.Tensor,
    tiles: cute.Tensor,
    b: Int32,
    h: Int32,
    first: Int32,
    queries: cutlass.Constexpr,
    blocks: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
    width: cutlass.Constexpr,
):
    """pair [b|1,h|1,q,k] from query `first` on -> tiles [ROWS, KEYS, blocks * queries / ROWS], zero past the end."""
    b, h = cutlass.min(b, pair.shape[0] - 1), cutlass.min(h, pair.shape[1] - 1)
    if const_expr(width == 8):
        _load_wide(pair, tiles, b, h, first, queries, blocks, thread, threads)
    else:
        _load_single(pair, tiles, b, h, first, queries, blocks, thread, threads)


@cute.jit
def _load_wide(
    pair: cute.Tensor, tiles: cute.Tensor, b: Int32, h: Int32, first: Int32, queries: cutlass.Constexpr, blocks: Int32,
    thread: Int32, threads: cutlass.Constexpr,
):  # fmt: skip
    """Eight elements a load; rows start on 16 bytes."""
    dtype, halves, across = pair.element_type, queries // ROWS, KEYS // 8
    each = queries * across // threads
    for j0 in cutlass.range(0, blocks, _AT_ONCE, unroll=1):
        held = [cute.make_rmem_tensor(8, dtype) for _ in range(_AT_ONCE * each)]
        for u in range_constexpr(_AT_ONCE * each):
            x = thread + (u % each) * threads
            i, key = first + x // across, (j0 + u // each) * KEYS + x % across * 8
            held[u].fill(dtype(0.0))
            if i < pair.shape[2] and key < pair.shape[3]:
                start = (pair.iterator + cute.crd2idx((b, h, i, key), pair.layout)).align(16)
                cute.autovec_copy(cute.make_tensor(start, cute.make_layout(8)), held[u])
        for u in range_constexpr(_AT_ONCE * each):
            x = thread + (u % each) * threads
            r, j = x // across, j0 + u // each
            if j < blocks:
                for y in range_constexpr(8):
                    held[u][y] = _clean(held[u][y], dtype)
                target = cute.local_tile(tiles[None, None, j * halves + r // ROWS], (1, 8), (r % ROWS, x % across))
                cute.autovec_copy(held[u], target[0, None])


@cute.jit
def _load_single(
    pair: cute.Tensor, tiles: cute.Tensor, b: Int32, h: Int32, first: Int32, queries: cutlass.Constexpr, blocks: Int32,
    thread: Int32, threads: cutlass.Constexpr,
):  # fmt: skip
    """One element a load; any strides."""
    dtype, halves, step = pair.element_type, queries // ROWS, threads // KEYS
    for j in cutlass.range(blocks, unroll=1):
        held = cute.make_rmem_tensor(queries // step, dtype)
        held.fill(dtype(0.0))
        key = j * KEYS + thread % KEYS
        for u in range_constexpr(queries // step):
            i = first + thread // KEYS + u * step
            if i < pair.shape[2] and key < pair.shape[3]:
                held[u] = pair[b, h, i, key]
        for u in range_constexpr(queries // step):
            r = thread // KEYS + u * step
            tiles[r % ROWS, thread % KEYS, j * halves + r // ROWS] = _clean(held[u], dtype)


def _clean(value: Any, dtype: Any) -> Any:
    """Finite where bfloat16 has room for it; float16's -inf ends in NaN and so in `redo`."""
    return finite(value.to(Float32)).to(dtype) if dtype is BFloat16 else value
