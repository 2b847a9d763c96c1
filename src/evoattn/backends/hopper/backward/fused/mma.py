"""The steps of `fused` that it does not share with `dkdv`: dq of a tile of 64 queries, and what leaves the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from evoattn.backends.hopper.backward.dkdv.mma import KeyMma
from evoattn.backends.hopper.kernels.ring import Ring, release
from evoattn.backends.hopper.kernels.tile_sizes import QUERIES, ROWS

MN = OperandMajorMode.MN
GROUPS = 3  # warpgroups
FIRST, LAST = 2, 4  # rounds of a row: flags beside a bit of the number of rounds


@dataclasses.dataclass(frozen=True)
class Rings:
    """The rings of tiles of q, dO and statistics, and of keys with values, two stages of each warpgroup.

    values_empty: barriers of the one stage that a warpgroup has for values. added: a warpgroup has added to dq of a tile.
    """

    queries: Ring
    keys: Ring
    values_empty: Any
    added: Any


class FusedMma(KeyMma):
    """The steps of `FusedGradients` that know nothing of the producers."""

    channels: int
    tiles: int

    def transposed(self, accumulate: Any) -> Any:
        """The product for dq: both sides in shared memory, of the left one [q,k] the queries are contiguous."""
        source = warpgroup.OperandSource.SMEM
        operation = warpgroup.MmaF16BF16Op(self.dtype, Float32, (QUERIES, self.width, 16), source, MN, MN)
        tiled = cute.make_tiled_mma(operation)
        tiled.set(warpgroup.Field.ACCUMULATE, accumulate)
        return tiled

    def query_products(self, acc_dQ, tdQrS, tdQrK, left, right):
        """Issue dQ = dS K of a tile of queries and this warpgroup's keys."""
        for kk in range(ROWS // 16):
            op = self.transposed(kk > 0)
            cute.gemm(op, acc_dQ, tdQrS[None, None, kk, left], tdQrK[None, None, kk, right], acc_dQ)

    def leave(self, dS, tile, u, lane):
        """dS^T of half a tile of queries, a warp's 16 keys, in shared memory"""
        stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        for kk in range(2):
            to = cute.local_tile(tile, (1, 8), (lane % 16, 4 * u + 2 * kk + lane // 16))
            cute.copy(stm, cute.make_tensor(dS[kk].iterator, cute.make_layout(8)), to[0, None])

    @cute.jit
    def add_up(
        self, acc_dQ, flags: Int32, s: Int32, j: Int32, NT: Int32, tile, rings, dq: cute.Tensor, book, w: Int32, scale: Float32,
        lane: Int32,
    ):  # fmt: skip
        """Add to dq of tile j after the warpgroup before; the last one writes it. Then the tile's queries are given back."""
        before = Int32(cutlass.select_(s == 2, Int32(0), s + 1))
        # the third that the tile lies in, where this warpgroup begins and where it ends
        z = Int32(cutlass.select_(3 * j + 3 <= NT, Int32(0), cutlass.select_(3 * j + 3 <= 2 * NT, Int32(1), Int32(2))))
        own = Int32(cutlass.select_(z == s, Int32(1), Int32(0)))
        arch.mbarrier_wait(rings.added + before * self.tiles + j, (flags ^ own) & 1)
        total = cute.make_rmem_tensor(4 * (self.width // 8), Float32)
        if flags & FIRST == 0 or own == 0:
            for x in range_constexpr(self.width // 8):
                cute.autovec_copy(tile[None, x], cute.make_tensor(total.iterator + 4 * x, cute.make_layout(4)))
        else:
            total.fill(0.0)
        if const_expr(acc_dQ is not None):
            for x in range_constexpr(cute.size(total)):
                total[x] = total[x] + acc_dQ[x]
        if flags & LAST != 0 and z == Int32(cutlass.select_(s == 0, Int32(2), s - 1)):
            arch.sync_warp()
            h, n, b = book[4], book[5], book[6]
            room = cute.recast_ptr(tile.iterator - lane * 4, dtype=self.dtype)
            self.write(total, scale, room, dq[b, n, h, None, None], j * QUERIES + w * 16, lane)
        else:
            for x in range_constexpr(self.width // 8):
                cute.autovec_copy(cute.make_tensor(total.iterator + 4 * x, cute.make_layout(4)), tile[None, x])
        arch.sync_warp()
        release(rings.added + s * self.tiles + j, lane)
        if flags & LAST != 0:
            rings.queries.consumer_release(j, lane)

    @cute.jit
    def write(self, values, factor: Float32, room: cute.Pointer, to: cute.Tensor, first: Int32, lane: Int32):
        """A warp's 16 rows of an accumulator, times factor, to memory in 16 bytes a thread, by way of its own room"""
        stm = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        pitch = self.width + 8
        for x in range_constexpr(self.width // 16):
            short = cute.make_rmem_tensor(8, self.dtype)
            for y in range_constexpr(8):
                short[y] = (values[8 * x + y] * factor).to(self.dtype)
            at = (room + (lane % 16) * pitch + 16 * x + 8 * (lane // 16)).align(16)
            cute.copy(stm, short, cute.make_tensor(at, cute.make_layout(8)))
        arch.sync_warp()
        each = self.channels // 8
        for x in range_constexpr(-(-16 * each // 32)):
            c = x * 32 + lane
            line, part = c // each, c % each
            if line < 16 and first + line < to.shape[0]:
                held = cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(cute.make_tensor((room + line * pitch + 8 * part).align(16), cute.make_layout(8)), held)
                cute.autovec_copy(held, cute.local_tile(to[first + line, None], (8,), (part,)))
        arch.sync_warp()
