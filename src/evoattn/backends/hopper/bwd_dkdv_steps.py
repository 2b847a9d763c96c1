"""The steps of `bwd_dkdv`: what a warpgroup does with 64 keys and 32 queries at a time."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode

from evoattn.backends.hopper.bwd_steps import ROWS, SLICE, exp2
from evoattn.backends.hopper.prepare import TERMS
from evoattn.backends.hopper.primitives import LOG2E, MASKED, fma, multiply, packed

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class KeySteps:
    """The part of `KeyGradients` that knows nothing of the queries' barriers."""

    dtype: Any
    D: int
    steps: int
    width: int
    resident: bool
    streamed: bool
    mask_gradient: bool

    def send(self, atom, tile, to):
        """16 rows from shared memory to their place"""
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        cute.copy(atom, tile, to)
        arch.cp_async_bulk_commit_group()

    def load_row(self, own, row, r, k0):
        """the terms of the key-wise bias of this thread's two keys: words hi mid, lo hi, and veto veto"""
        words = cute.recast_tensor(row, Int32)
        for x in range(2):
            for y, word in enumerate((0, 1) if self.dtype is BFloat16 else (0, 1, 3)):
                own[3 * x + y] = words[r, (k0 + 8 * x) * (TERMS // 2) + word]

    def take_rows(self, ldm, rows, s, rK, rV, own, rR, t4, kfull, kp):
        """k and v of 64 keys into registers, and what meets a query's words: 1 1 1 hi hi hi lo veto, 0 0 0 mid mid 0 0 veto

        In float16 the first three are STEP.
        """
        arch.mbarrier_wait(kfull + s, kp)
        for x, to in enumerate((rK, rV)):
            cute.copy(ldm, rows[None, None, None, 2 * s + x], ldm.retile(to))
        one = 0x3F80 if self.dtype is BFloat16 else 0x4C00  # the bits of 1, and of STEP
        pick = lambda *of: cutlass.select_(
            t4 == 0, of[0], cutlass.select_(t4 == 1, of[1], cutlass.select_(t4 == 2, of[2], of[3]))
        )
        for x in range(2):
            high, middle = own[3 * x] & 0xFFFF, own[3 * x] & Int32(-65536)
            low, veto = own[3 * x + 1] & 0xFFFF, own[3 * x + 2] & Int32(-65536)
            above = high << 16
            packed(rR)[x] = pick(Int32(one | one << 16), above | one, above | high, low | veto)
            packed(rR)[2 + x] = pick(Int32(0), middle, (middle >> 16) & 0xFFFF, veto)

    def load_panel(self, mine, pair, u, b, h, k0, t4, LQ, LK, inverse):
        """this thread's part of slice u of the pair bias, as the accumulators of the scores hold it"""
        for x in range(4):
            values = cute.make_rmem_tensor(4, Float32)
            for y in range(4):
                key, q = k0 + y // 2 * 8, u * SLICE + 8 * x + 2 * t4 + y % 2
                bias = pair[b, h, cutlass.min(q, LQ - 1), cutlass.min(key, LK - 1)].to(Float32)
                values[y] = arch.fmax(bias, Float32(MASKED)) * inverse
            cute.autovec_copy(values, mine[None, 4 * u + x])

    def preload(self, S, mine, u):
        """start the accumulators of slice u from the pair bias"""
        if self.resident:
            for x in range(4):
                cute.autovec_copy(mine[None, 4 * u + x], cute.make_tensor(S.iterator + 4 * x, cute.make_layout(4)))

    def take_bias(self, bias, bias_tiles, tile, u, wt):
        """this thread's part of slice u of a tile of the pair bias, as `prepare.Tiles` laid it out"""
        for x in range(2):
            cute.autovec_copy(
                bias_tiles[None, wt, 2 * u + x, tile], cute.make_tensor(bias.iterator + 8 * x, cute.make_layout(8))
            )

    def scores(self, S, T, rK, rV, rR, fQ, fG, f1, sl, i):
        """S = K Q^T + biases and T = V dO^T of slice sl of stage i"""
        for kk in range(self.steps):
            op = multiply(self.dtype, False, K, SLICE, kk > 0 or self.resident)
            cute.gemm(op, S, rK[None, None, kk], fQ[None, None, kk, sl, i], S)
        cute.gemm(multiply(self.dtype, False, K, SLICE), S, rR[None, None, 0], f1[None, None, 0, (sl, i)], S)
        for kk in range(self.steps):
            cute.gemm(multiply(self.dtype, False, K, SLICE, kk > 0), T, rV[None, None, kk], fG[None, None, kk, sl, i], T)

    def products(self, P, dS, X, Y, fQt, fGt, u, i, started):
        """dv += P dO and dk += dS Q of slice u of stage i"""
        for to, left, right in ((Y, P, fGt), (X, dS, fQt)):
            for kk in range(2):
                op = multiply(self.dtype, False, MN, self.width, True if u > 0 or kk > 0 else started)
                cute.gemm(op, to, left[kk][None, None, 0], right[None, None, u * 2 + kk, i], to)

    def gradient(self, S, T, deltas, scale, bias, sums):
        """P and dS of a slice [k,q], in the dtype of a product's left side; `bias` is still to be added where it streams.

        `sums` grow by dS of this thread's two keys, unrounded, where the mask bias has a gradient."""
        p, d = cute.make_rmem_tensor(16, Float32), cute.make_rmem_tensor(16, Float32)
        for y in range(16):
            p[y] = exp2(fma(S[y], scale, bias[y].to(Float32)) * LOG2E if self.streamed else S[y] * (scale * LOG2E))
        for x in range(4):
            two = cute.make_rmem_tensor(2, Float32)  # -delta of two queries
            cute.autovec_copy(deltas[None, x], two)
            for y in range(4):
                d[4 * x + y] = p[4 * x + y] * (T[4 * x + y] + two[y % 2])
                if self.mask_gradient:
                    sums[y // 2] += d[4 * x + y]
        return self.halves(p), self.halves(d)

    @cute.jit
    def store_sums(self, sums: cute.Tensor, to: cute.Tensor, key: Int32, t4: Int32):
        """the sums of a quad's two keys, each over the four threads that hold its queries; `key` is the first"""
        for x in range_constexpr(2):
            for offset in (1, 2):
                sums[x] += arch.shuffle_sync_bfly(sums[x], offset)
        key += 8 * t4
        if t4 < 2 and key < to.shape[0]:
            to[key] = cutlass.select_(t4 == 0, sums[0], sums[1])

    def halves(self, values):
        """a slice's 32 columns as two left sides of a product"""
        P_D = multiply(self.dtype, False, MN, self.width)
        out = []
        for kk in range(2):
            a = P_D.make_fragment_A(P_D.partition_shape_A((ROWS, 16)))
            half = cute.make_tensor(values.iterator + 8 * kk, cute.make_layout(8))
            cute.make_tensor(a.iterator, cute.make_layout(8)).store(half.load().to(self.dtype))
            out.append(a)
        return out
