"""The steps of `dq`: what a warpgroup does with 64 queries and 32 keys at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections import namedtuple
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode

from evoattn.backends.hopper.backward.common import TILE, add_four, exp2, key_of_slice, row_products, write_statistics
from evoattn.backends.hopper.kernels.primitives import MASKED, finite, fma, multiply, packed
from evoattn.backends.hopper.kernels.ring import Ring
from evoattn.backends.hopper.kernels.tile_sizes import ROWS, SLICE

K, MN = OperandMajorMode.K, OperandMajorMode.MN


@dataclasses.dataclass(frozen=True)
class Rings:
    """The rings of keys (with values and key-wise bias), of each warpgroup, and of q, o and dO, one row at a time."""

    keys: Ring
    queries: Ring

    def at(self, first: Any, stages: int) -> Rings:
        """The rings of the warpgroup whose first stage has this number."""
        return dataclasses.replace(self, keys=self.keys.at(first, stages))


class Operands(namedtuple("Operands", "acc_S acc_dP acc_dQ tSrQ tdPsdO tSrA tSrK tdPrV tdQrK tSrB")):
    """Accumulators of S, dP and dQ, and the operands of their products as fragments of a thread.

    tSrQ, tSrK; tdPsdO, tdPrV; tdQrK: of Q K^T, dO V^T and dS K. tSrA, tSrB: coefficients and terms of the key-wise bias.
    """


class QueryRow(namedtuple("QueryRow", "copy source tSrQ rdO rO neg_lse neg_delta sN")):
    """The copy of a row's q, dO and o into registers, these registers, and the statistics of a thread's two queries.

    neg_lse, neg_delta: -LSE in powers of two, and -delta. sN: -LSE, -delta and dLSE of all queries, in shared memory.
    """


class QueryMma:
    """The steps of `QueryGradients` that know nothing of barriers."""

    dtype: Any
    bias: Any
    channels: int
    D: int
    steps: int
    width: int
    cluster: int
    pair: bool
    row: bool
    dlse: bool
    gated: bool
    bias_gradient: bool
    groups: int
    slices: int
    stage: int
    interleave: int
    tiles: int
    exits: tuple[int, ...]
    vector: bool

    def key(self, u, group=0):
        """The first key of slice u of a warpgroup; of the first, how far behind its slice 0."""
        return key_of_slice(u, group, self.cluster * self.groups, self.slices, self.interleave)

    def tile_of(self, j, group):
        """The number, among all tiles of keys, of tile j of a warpgroup."""
        return j * self.cluster * self.groups + group if self.interleave else group * self.tiles + j

    def live_tiles(self, tiles, rank, s):
        """The number of tiles that warpgroup s goes through in a row with `tiles` tiles up to the last key that counts."""
        around = self.cluster * self.groups
        own = (tiles - rank * self.groups - s + around - 1) // around
        ends = (*self.exits, self.tiles)
        return ends[0] + sum(cutlass.min(cutlass.max(own - x, 0), 1) * (y - x) for x, y in itertools.pairwise(ends))

    @cute.jit
    def keep(self, stats: cute.Tensor, sN: cute.Tensor, low: cute.Tensor, i: Int32, inverse: Float32, lane: Int32):
        """Write the statistics of 64 queries for the other kernel."""
        for x in range_constexpr(2):
            q = x * 32 + lane
            to = cute.local_tile(stats, (TILE,), (i,))
            write_statistics(to, q, low[x], sN[q, 1], inverse, self.dtype)

    @cute.jit
    def load_queries(self, row, buffer: Int32, wid: Int32, lane: Int32):
        """Load q and dO of 64 queries into registers, -LSE in powers of two, and -delta."""
        ldm, rows, tSrQ, rdO, rO, nl, nd, sN = row
        for x, to in ((0, tSrQ), (2 + buffer, rdO)) if self.gated else ((0, tSrQ), (1, rO), (2 + buffer, rdO)):
            cute.copy(ldm, rows[None, None, None, x], ldm.retile(to))
        delta = (Float32(0.0), Float32(0.0)) if self.gated else row_products(self.dtype, rO, rdO, lane)
        for x in range_constexpr(2):
            q = wid % 4 * 16 + lane // 4 + 8 * x
            nl[x] = sN[q, 0]
            nd[x] = -delta[x]
            if const_expr(self.dlse):
                nd[x] = nd[x] + sN[q, 2]
            if wid < 4 and lane % 4 == 0:
                sN[q, 1] = nd[x]

    def load_panel(self, mine, pair, b, h, q0, first_key, LQ, LK, inverse):
        """Load this thread's part of the pair bias, as the accumulators of the scores hold it."""
        lines = [pair[b, h, cutlass.min(q0 + 8 * r, LQ - 1), None] for r in range(2)]
        for u in range(self.slices):
            held = cute.make_rmem_tensor((4, 4), self.bias)
            for x in range(4):
                for r in range(2):
                    key = first_key + self.key(u) + 8 * x
                    if self.vector:
                        two = cute.local_tile(lines[r], (2,), (cutlass.min(key, (LK - 1) // 2 * 2) // 2,))
                        cute.autovec_copy(two, cute.make_tensor(held.iterator + 4 * x + 2 * r, cute.make_layout(2)))
                    else:
                        for y in range(2):
                            held[2 * r + y, x] = lines[r][cutlass.min(key + y, LK - 1)]
            for x in range(4):
                values = cute.make_rmem_tensor(4, Float32)
                for y in range(4):
                    bias = finite(held[y, x].to(Float32)) * inverse
                    values[y] = cutlass.select_(first_key + self.key(u) + 8 * x + y % 2 < LK, bias, Float32(MASKED))
                cute.autovec_copy(values, mine[None, 4 * u + x])

    def late(self, mine, dS, LQ):
        """The same panel, which the compiler cannot read before dS is made: 16 registers less, 6% of the time."""
        if not self.pair:
            return mine
        return cute.make_tensor(mine.iterator + (packed(dS[1])[3] & (LQ >> 31)) * 4, mine.layout)

    def preload(self, S, mine, u, some=None):
        """Start the accumulators from the pair bias of slice u, or of slice 0 if `some` is given and false."""
        if self.pair:
            if some is not None:
                mine, u = cute.make_tensor(mine.iterator + cutlass.select_(some, Int32(u * 2048), Int32(0)), mine.layout), 0
            for x in range(4):
                cute.autovec_copy(mine[None, 4 * u + x], cute.make_tensor(S.iterator + 4 * x, cute.make_layout(4)))

    def scores(self, operands, buffer, part, ring, stage):
        """Issue S = Q K^T + biases and dP = dO V^T of slice `part` of a stage of a ring."""
        acc_S, acc_dP, _, tSrQ, tdPsdO, tSrA, tSrK, tdPrV, _, tSrB = operands
        tdPsdO, stage = tdPsdO[None, None, None, 2 + buffer], ring.index(stage)
        for kk in range(self.steps):
            op = multiply(self.dtype, False, K, SLICE, kk > 0 or self.pair)
            cute.gemm(op, acc_S, tSrQ[None, None, kk], tSrK[None, None, kk, part, stage], acc_S)
        if self.row:
            op = multiply(self.dtype, False, K, SLICE)
            cute.gemm(op, acc_S, tSrA[None, None, 0], tSrB[None, None, 0, (part, stage)], acc_S)
        for kk in range(self.steps):
            op = multiply(self.dtype, True, K, SLICE, kk > 0)
            cute.gemm(op, acc_dP, tdPsdO[None, None, kk], tdPrV[None, None, kk, part, stage], acc_dP)

    def products(self, operands, dS, u, stage):
        """Issue dQ += dS K of slice u."""
        acc_dQ, tdQrK = operands.acc_dQ, operands.tdQrK
        for kk in range(2):
            op = multiply(self.dtype, False, MN, self.width, u > 0 or kk > 0)
            cute.gemm(op, acc_dQ, dS[kk][None, None, 0], tdQrK[None, None, (u % self.stage) * 2 + kk, stage], acc_dQ)

    def gradient(self, operands, row, c, db, u):
        """dS of slice u, in the dtype of a product's left side; its sum over rows n stays in float32."""
        S, T, nl, nd = operands.acc_S, operands.acc_dP, row.neg_lse, row.neg_delta
        P_D = multiply(self.dtype, False, MN, self.width)
        p = cute.make_rmem_tensor(16, Float32)
        for y in range(16):
            p[y] = exp2(fma(S[y], c, nl[y // 2 % 2]))
        out = []
        for kk in range(2):
            d = cute.make_rmem_tensor(8, Float32)
            for y in range(8):
                z = 8 * kk + y
                d[y] = p[z] * (T[z] + nd[y // 2 % 2])
                if self.bias_gradient:
                    db[z, u] = db[z, u] + d[y]
            a = P_D.make_fragment_A(P_D.partition_shape_A((ROWS, 16)))
            cute.make_tensor(a.iterator, cute.make_layout(8)).store(d.load().to(self.dtype))
            out.append(a)
        return out

    def meet(self):
        """Synchronize all threads of the cluster."""
        if self.cluster > 1:
            arch.cluster_arrive()
            arch.cluster_wait()
        else:
            arch.sync_threads()

    @cute.jit
    def flush(self, db, dpair: cute.Tensor, b: Int32, h: Int32, q0: Int32, first_key: Int32, LQ: Int32, LK: Int32, t4: Int32):
        """Add this block's part of d(pair bias): two neighbours exchange halves, so that each adds four numbers of one query"""
        odd = t4 % 2 == 1
        q = q0 + 8 * (t4 % 2)
        line = dpair[b, h, cutlass.min(q, LQ - 1), None].iterator
        for u in range_constexpr(self.slices):
            for x in range_constexpr(4):
                key = first_key + self.key(u) + 8 * x - 2 * (t4 % 2)
                a, e, f, k = (db[4 * x + y, u] for y in range(4))
                first = arch.shuffle_sync_bfly(cutlass.select_(odd, a, f), 1)
                second = arch.shuffle_sync_bfly(cutlass.select_(odd, e, k), 1)
                if key < LK and q < LQ:
                    add_four(
                        line + key,
                        cutlass.select_(odd, first, a),
                        cutlass.select_(odd, second, e),
                        cutlass.select_(odd, f, first),
                        cutlass.select_(odd, k, second),
                    )

    @cute.jit
    def leave(self, db, partials: cute.Tensor, slot: Int32, tid: Int32):
        """Leave this block's part of d(pair bias) as it lies in the registers, for `bias_sum.PanelSum`."""
        for u in range_constexpr(self.slices):
            for x in range_constexpr(4):
                four = cute.make_rmem_tensor(4, Float32)
                for y in range_constexpr(4):
                    four[y] = db[4 * x + y, u]
                cute.autovec_copy(four, partials[slot, 4 * u + x, tid, None])
