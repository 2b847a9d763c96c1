"""The steps of `dkdv`: what a warpgroup does with 64 keys and 32 queries at a time."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode

from evoattn.backends.hopper.backward.common import TILE, delta_units, exp2, narrow, step_of, unseen
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.primitives import LOG2E, finite, keep, multiply, of_quad, three_terms
from evoattn.backends.hopper.kernels.tile_sizes import ROWS, SLICE

K, MN = OperandMajorMode.K, OperandMajorMode.MN


class KeyMma:
    """The part of `KeyGradients` and `FusedGradients` that knows nothing of the queries' barriers."""

    dtype: Any
    D: int
    steps: int
    width: int
    pair: bool
    mask_gradient: bool

    def right_sides(self, sQ, sG, sQt, sGt, pS, buffers, wt):
        """What a thread of a warpgroup multiplies by: q and do, both as right sides of dS^T q and P^T do, and the statistics"""
        S_K, P_D = multiply(self.dtype, False, K, SLICE), multiply(self.dtype, False, MN, self.width)
        fQ, fG = (
            S_K.make_fragment_B(S_K.get_slice(wt).partition_B(cute.local_tile(x, (SLICE, self.D), (None, 0, None))))
            for x in (sQ, sG)
        )
        fQt, fGt = (P_D.make_fragment_B(P_D.get_slice(wt).partition_B(narrow(x, self.width))) for x in (sQt, sGt))
        # the words of a query fill 8 of 16 channels; the other 8 are the same again, see take_rows
        words = cute.make_tensor(
            cute.recast_ptr(pS, dtype=self.dtype),
            cute.make_layout(((8, 4), (8, 2), (2, buffers)), stride=((8, 64), (1, 0), (8 * SLICE, 2 * TILE))),
        )
        return fQ, fG, fQt, fGt, S_K.make_fragment_B(S_K.get_slice(wt).partition_B(words))

    def accumulators(self):
        """S and T, the scores and dP of a slice, and X and Y, dk and dv of a row"""
        S_K, P_D = multiply(self.dtype, False, K, SLICE), multiply(self.dtype, False, MN, self.width)
        S, T = (S_K.make_fragment_C(S_K.partition_shape_C((ROWS, SLICE))) for _ in range(2))
        X, Y = (P_D.make_fragment_C(P_D.partition_shape_C((ROWS, self.width))) for _ in range(2))
        return S, T, X, Y

    def left_sides(self, t4, lane):
        """k and v of 64 keys, what meets the statistics in the scores, and in dP"""
        S_K = multiply(self.dtype, False, K, SLICE)
        rK, rV = (S_K.make_fragment_A(S_K.partition_shape_A((ROWS, self.D))) for _ in range(2))
        rR, rD = (S_K.make_fragment_A(S_K.partition_shape_A((ROWS, 16))) for _ in range(2))
        self.take_deltas(rD, t4, lane)
        return rK, rV, rR, rD

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

    def take_rows(self, ldm, rows, tiles, own, rR, t4, inverse, kfull, kp):
        """k and v of 64 keys into registers, and what meets a query's channels: 1 1 1 t0 veto t2 0 0, 0 0 0 t1 veto 0 0 0

        t are terms of the key's bias / scale. float16 counts both in STEP, which stands for 1 too.
        """
        arch.mbarrier_wait(kfull, kp)
        for tile, to in tiles:
            cute.copy(ldm, rows[None, None, None, tile], ldm.retile(to))
        step, zero = step_of(self.dtype), self.dtype(0.0)
        # The compiler would take apart what was loaded a row ahead as soon as it is asked for, and so wait for memory there.
        words = cute.make_rmem_tensor(6, Int32)
        for x in range(6):
            words[x] = unseen(own[x])
        one, parts = self.dtype(step), cute.recast_tensor(words, self.dtype)
        for x in range(2):
            hi, mid, lo, veto = (parts[6 * x + y] for y in (0, 1, 2, 4))
            bias = (hi.to(Float32) + mid.to(Float32) + lo.to(Float32)) * (inverse * Float32(1.0 / step))
            if self.dtype is not BFloat16:
                bias = Float32(cutlass.select_(bias < -65504.0, Float32(-65504.0), bias))
            t0, t1, t2 = three_terms(bias, self.dtype)
            first, second = (
                ((one, one), (one, t0), (veto, t2), (zero, zero)),
                ((zero, zero), (zero, t1), (veto, zero), (zero, zero)),
            )
            for y, two in enumerate((first, second)):
                for z in range(2):
                    rR[2 * x + 4 * y + z] = of_quad(t4, *(pair[z] for pair in two))

    def take_deltas(self, rD, t4, lane):
        """What meets a query's channels in V dO^T, which then has delta subtracted: 0 0 0 0 u2 0 u0 u1, and zeros."""
        u0, u1, u2 = (self.dtype(x) for x in delta_units(self.dtype))
        zero = self.dtype(0.0)
        rD.fill(zero)
        rD[0] = rD[2] = cutlass.select_(t4 == 2, u2, cutlass.select_(t4 == 3, u0, zero))
        rD[1] = rD[3] = cutlass.select_(t4 == 3, u1, zero)
        keep(rD, lane)

    def load_panel(self, mine, pair, u, b, h, k0, t4, LQ, LK, inverse):
        """this thread's part of slice u of the pair bias, as the accumulators of the scores hold it"""
        for x in range(4):
            values = cute.make_rmem_tensor(4, Float32)
            for y in range(4):
                key, q = k0 + y // 2 * 8, u * SLICE + 8 * x + 2 * t4 + y % 2
                bias = pair[b, h, cutlass.min(q, LQ - 1), cutlass.min(key, LK - 1)].to(Float32)
                values[y] = finite(bias) * inverse
            cute.autovec_copy(values, mine[None, 4 * u + x])

    def preload(self, S, bias, u, inverse):
        """start the accumulators of a slice from the pair bias: slice u of what stays, or of a tile of what streams"""
        if self.pair:
            for x in range(4):
                four = cute.make_rmem_tensor(4, bias.element_type)
                cute.autovec_copy(bias[None, 4 * u + x], four)
                for y in range(4):
                    S[4 * x + y] = four[y] if bias.element_type is Float32 else four[y].to(Float32) * inverse

    def scores(self, S, T, rK, rV, rR, rD, fQ, fG, f1, sl, i):
        """S = K Q^T + biases - LSE and T = V dO^T - delta of slice sl of stage i"""
        for kk in range(self.steps):
            op = multiply(self.dtype, False, K, SLICE, kk > 0 or self.pair)
            cute.gemm(op, S, rK[None, None, kk], fQ[None, None, kk, sl, i], S)
        cute.gemm(multiply(self.dtype, False, K, SLICE), S, rR[None, None, 0], f1[None, None, 0, (sl, i)], S)
        cute.gemm(multiply(self.dtype, False, K, SLICE, False), T, rD[None, None, 0], f1[None, None, 0, (sl, i)], T)
        for kk in range(self.steps):
            cute.gemm(multiply(self.dtype, False, K, SLICE), T, rV[None, None, kk], fG[None, None, kk, sl, i], T)

    def products(self, P, dS, X, Y, fQt, fGt, u, i, started):
        """dv += P dO and dk += dS Q of slice u of stage i"""
        for to, left, right in ((Y, P, fGt), (X, dS, fQt)):
            for kk in range(2):
                op = multiply(self.dtype, False, MN, self.width, True if u > 0 or kk > 0 else started)
                cute.gemm(op, to, left[kk][None, None, 0], right[None, None, u * 2 + kk, i], to)

    def gradient(self, S, T, scale, sums):
        """P and dS of a slice [k,q], in the dtype of a product's left side.

        `sums` grow by dS of this thread's two keys, unrounded, where the mask bias has a gradient."""
        p, d = cute.make_rmem_tensor(16, Float32), cute.make_rmem_tensor(16, Float32)
        for y in range(16):
            p[y] = exp2(S[y] * (scale * LOG2E))
        for y in range(16):
            d[y] = p[y] * T[y]
            if self.mask_gradient:
                sums[y // 2 % 2] += d[y]
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
