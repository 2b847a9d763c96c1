"""The pair bias of a panel of queries, brought into shared memory once for all rows n.

All threads load it with ordinary instructions, 16 bytes at a time.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Int32, const_expr, cute, range_constexpr

from evoattn.backends.hopper.kernels.primitives import finite_two
from evoattn.backends.hopper.kernels.tile_sizes import KEYS, ROWS

__all__ = ["load_panel"]

_WIDE = 8  # elements of 16 bytes
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
):
    """pair [b|1,h|1,q,k] from query `first` on -> tiles [ROWS, KEYS, blocks * queries / ROWS], zero past the end.

    Keys lie one after another; each line of them starts on 16 bytes and has a multiple of 8.
    """
    b, h = cutlass.min(b, pair.shape[0] - 1), cutlass.min(h, pair.shape[1] - 1)
    dtype, halves, across = pair.element_type, queries // ROWS, KEYS // _WIDE
    each = queries * across // threads
    column = thread % across
    rows = [(thread + x * threads) // across for x in range(each)]
    lines = [pair[b, h, cutlass.min(first + row, pair.shape[2] - 1), None] for row in rows]
    keys = [Int32(cutlass.select_(first + row < pair.shape[2], pair.shape[3], 0)) for row in rows]
    for j0 in cutlass.range(0, blocks, _AT_ONCE, unroll=1):
        held = [cute.make_rmem_tensor(4, Int32) for _ in range(_AT_ONCE * each)]
        for u in range_constexpr(_AT_ONCE * each):
            word = (j0 + u // each) * across + column
            held[u].fill(0)
            if word * _WIDE < keys[u % each]:
                start = cute.recast_ptr((lines[u % each].iterator + word * _WIDE).align(16), dtype=Int32)
                cute.autovec_copy(cute.make_tensor(start, 4), held[u])
        for u in range_constexpr(_AT_ONCE * each):
            j = j0 + u // each
            if j < blocks:
                if const_expr(dtype is BFloat16):  # float16's -inf ends in NaN and so in `exact`
                    for y in range_constexpr(4):
                        held[u][y] = finite_two(held[u][y])
                row = rows[u % each]
                target = cute.local_tile(tiles[None, None, j * halves + row // ROWS], (1, _WIDE), (row % ROWS, column))
                cute.autovec_copy(cute.recast_tensor(held[u], dtype), target[0, None])
