"""The pair bias of a panel of queries, brought into shared memory once for all rows n.

All threads load it with ordinary instructions, 16 bytes at a time. A line of keys of an odd length starts anywhere; the words
that contain it are aligned all the same, and two neighbours of them, shifted, are eight keys.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch

from evoattn.backends.hopper.primitives import finite_two

__all__ = ["KEYS", "ROWS", "load_panel"]

ROWS = 64
"""Queries of a tile: those of a warpgroup."""

KEYS = 64
"""Keys of a tile: those of a stage."""

_WIDE = 8  # elements of 16 bytes


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
    aligned: cutlass.Constexpr,
):
    """pair [b|1,h|1,q,k] from query `first` on -> tiles [ROWS, KEYS, blocks * queries / ROWS], zero past the end.

    Keys lie one after another. `aligned`: each line of them starts on 16 bytes and has a multiple of 8. Nothing is read but
    16-byte words that contain an element of pair.
    """
    b, h = cutlass.min(b, pair.shape[0] - 1), cutlass.min(h, pair.shape[1] - 1)
    dtype, halves, across = pair.element_type, queries // ROWS, KEYS // _WIDE
    each = queries * across // threads
    at_once = 4 if const_expr(aligned) else 3  # tiles of keys that are on their way together
    column = thread % across
    rows = [(thread + x * threads) // across for x in range(each)]
    lines = [_line(pair, b, h, cutlass.min(first + row, pair.shape[2] - 1)) for row in rows]
    keys = [Int32(cutlass.select_(first + row < pair.shape[2], pair.shape[3], 0)) for row in rows]
    for j0 in cutlass.range(0, blocks, at_once, unroll=1):
        held = [cute.make_rmem_tensor(4 if const_expr(aligned) else 8, Int32) for _ in range(at_once * each)]
        for u in range_constexpr(at_once * each):
            (start, skip), word = lines[u % each], (j0 + u // each) * across + column
            end = (skip // 2 + pair.shape[3] - 1) // _WIDE
            source = cute.make_tensor(start, (4, end + 1))
            if const_expr(aligned):
                held[u].fill(0)
                if word * _WIDE < keys[u % each]:
                    cute.autovec_copy(source[None, word], held[u])
            else:
                for x in range_constexpr(2):
                    half = cute.make_tensor(held[u].iterator + 4 * x, 4)
                    cute.autovec_copy(source[None, cutlass.min(word + x, end)], half)
        for u in range_constexpr(at_once * each):
            j = j0 + u // each
            if j < blocks:
                if const_expr(not aligned):
                    _shift(held[u], lines[u % each][1])
                    _cut(held[u], keys[u % each] - (j * across + column) * _WIDE)
                if const_expr(dtype is BFloat16):  # float16's -inf ends in NaN and so in `redo`
                    for y in range_constexpr(4):
                        held[u][y] = finite_two(held[u][y])
                row = rows[u % each]
                target = cute.local_tile(tiles[None, None, j * halves + row // ROWS], (1, _WIDE), (row % ROWS, column))
                eight = cute.recast_tensor(cute.make_tensor(held[u].iterator, 4), dtype)
                cute.autovec_copy(eight, target[0, None])


def _line(pair: cute.Tensor, b: Any, h: Any, i: Any) -> tuple[Any, Int32]:
    """The word of 16 bytes in which a line of keys starts, and after how many bytes of it."""
    start = (pair.iterator + cute.crd2idx((b, h, i, 0), pair.layout)).toint()
    return cute.make_ptr(Int32, start & ~15, cute.AddressSpace.gmem, assumed_align=16), Int32(start) & 15


@cute.jit
def _shift(words: cute.Tensor, start: Int32):
    """Bring the 16 bytes from `start` on to the front."""
    for step in (2, 1):
        for y in range_constexpr(4 + step):
            words[y] = Int32(cutlass.select_((start & (4 * step)) != 0, words[y + step], words[y]))
    for y in range_constexpr(4):
        words[y] = arch.shf(words[y], words[y + 1], (start & 2) * 8, "r")


@cute.jit
def _cut(words: cute.Tensor, keys: Int32):
    """Zero what is not among the first `keys` elements."""
    if keys < _WIDE:
        for y in range_constexpr(4):
            kept = cutlass.min(cutlass.max(keys - 2 * y, 0), 2) * 16
            words[y] = words[y] & arch.shf(Int32(-1), Int32(0), kept, "clamp_left")
