"""The steps of a row in the forward kernel: scores by the tensor cores, softmax, output, block of keys after block of keys."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from evoattn.backends.hopper.kernels.primitives import fma, multiply, release
from evoattn.backends.hopper.kernels.tile_sizes import ROWS, SLICE

__all__ = ["CHAIN", "HALVES", "SLICE", "ForwardMma"]

K, MN = OperandMajorMode.K, OperandMajorMode.MN
HALVES = 2  # warpgroups of a row
LOW = -256.0  # a reference below, in units of log2, may be one of keys that a finite bias masks
CHAIN = 8  # blocks of keys whose steps are laid out one after another


class ForwardMma:
    """What a consumer warpgroup does; `Forward` says what the attributes are."""

    dtype: Any
    D: int
    steps: int
    stages: int
    slots: int
    twice: bool
    terms: int
    offset: float
    pair: bool
    row: bool
    resident: bool
    streamed: bool
    wide: bool
    long: bool

    def slot(self, s, turn, phase):
        """Where the queries of the row that is `turn` in a stream lie, and the phase in which they arrive.

        With one slot they go on into registers, and `phase` is what the caller counts. With two, for want of registers,
        the tensor cores read them there at every step, and o leaves from there.
        """
        return (s, phase) if self.slots == 1 else (s * 2 + turn % 2, turn // 2 % 2)

    def free(self, turn, phase):
        """The phase in which that slot is free: with two slots the row before gives it back at its first step."""
        return phase ^ 1 if self.slots == 1 else (turn + 3) // 2 % 2

    def queries(self, held, shared, s, half, turn):
        """A row's queries as an operand."""
        return held if self.slots == 1 else shared[None, None, None, self.slot(s, turn, 0)[0] * HALVES + half]

    @cute.jit
    def take(self, arriving, s: Int32, half: Int32, turn: Int32, phase: Int32):
        """Wait for a row's queries. With 8 channels the other 8 are what the scale leaves over, times q."""
        qfull, ldm, source, target, held, excess = arriving
        slot, phase = self.slot(s, turn, phase)
        arch.mbarrier_wait(qfull + slot, phase)
        if const_expr(self.slots == 1):
            cute.copy(ldm, source[None, None, None, s * HALVES + half], target)
            if const_expr(self.twice):
                for x in range_constexpr(4):
                    held[4 + x] = (held[x].to(Float32) * excess).to(self.dtype)

    @cute.jit
    def taken(self, qempty: cute.Pointer, lane: Int32):
        """Let new queries come to where those in registers were, once a product has used these.

        Earlier, loads might still be on their way: an arrival may overtake them.
        """
        if const_expr(self.slots == 1):
            release(qempty, lane)

    @cute.jit
    def give_back(self, qempty: cute.Pointer, lane: Int32):
        """Let new queries come to where the o of the row before has left from."""
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        release(qempty, lane)

    def arrived(self, full: cute.Pointer, pfull: cute.Pointer, so: Int32, st: Int32, ph: Int32):
        """Wait for a block of keys in stage `st` of a stream whose stages begin at `so`, and for the pair bias of it."""
        arch.mbarrier_wait(full + so + st, ph)
        if self.streamed:
            arch.mbarrier_wait(pfull + st, ph)

    @cute.jit
    def give_back_keys(self, empty: cute.Pointer, pempty: cute.Pointer, so: Int32, st: Int32, lane: Int32):
        """Give a block of keys, and the pair bias of it, back for this warp."""
        if lane == 0:
            arch.mbarrier_arrive(empty + so + st)
            if const_expr(self.streamed):
                arch.mbarrier_arrive(pempty + st)

    def tile(self, j, stage, half):
        """Where the pair bias of block j lies."""
        return (j if self.resident else stage) * HALVES + half

    @cute.jit
    def chain(
        self,
        j: cutlass.Constexpr,
        left: Int32,
        blocks: Int32,
        queries: cute.Tensor,
        frags,
        S0: cute.Tensor,
        S1: cute.Tensor,
        O: cute.Tensor,
        fV: cute.Tensor,
        m: cute.Tensor,
        l: cute.Tensor,
        c: Float32,
        half: Int32,
        so: Int32,
        st: Int32,
        ph: Int32,
        prev: Int32,
        bars,
        lane: Int32,
    ):
        """Blocks j, j+1, ... up to the last of a row; what is left to do is the softmax of S1, block `prev`."""
        full, empty, pfull, pempty, qempty = bars
        warpgroup.fence()
        self.scores(queries, frags, S1, 1, self.tile(j, st, half), so + st)
        if const_expr(j > 0):
            warpgroup.wait_group(1)
            self.give_back_keys(empty, pempty, so, prev, lane)
        adds = left != blocks if const_expr(j == 0 and self.long) else j > 0
        self.soften(O, fV, m, l, c, S0, 0, so + st, adds)
        if const_expr(self.slots == 2 and j == 0):
            if left == blocks:
                self.give_back(qempty, lane)
        prev = st
        st += 1
        if st == self.stages:
            st = Int32(0)
            ph ^= 1
        if const_expr(j + 1 < CHAIN):
            if j + 1 < left:
                self.arrived(full, pfull, so, st, ph)
                warpgroup.fence()
                self.scores(queries, frags, S0, 0, self.tile(j + 1, st, half), so + st)
                warpgroup.wait_group(1)
                self.soften(O, fV, m, l, c, S1, 1, so + prev)
                st, ph, prev = self.chain(
                    j + 1, left, blocks, queries, frags, S0, S1, O, fV, m, l, c, half, so, st, ph, prev, bars, lane
                )
            else:
                warpgroup.wait_group(0)
        else:
            warpgroup.wait_group(0)
        return st, ph, prev

    def scores(self, queries, frags, S, part, tile, stage):
        """Issue S = Q K^T + key-wise bias + pair bias for slice `part` of a stage: one wgmma group.

        A wide pair bias is where the accumulators start.
        """
        rA, fK, fR, fP, fI = frags
        if self.wide:
            for x in range(4):
                cute.autovec_copy(fP[None, 4 * part + x, tile], cute.make_tensor(S.iterator + 4 * x, cute.make_layout(4)))
            warpgroup.fence()
        for step in range(self.steps):
            tiled = multiply(self.dtype, self.slots == 2, K, SLICE, self.wide or step > 0)
            cute.gemm(tiled, S, queries[None, None, step], fK[None, None, step, part, stage], S)
        if self.row:
            cute.gemm(multiply(self.dtype, False, K, SLICE), S, rA[None, None, 0], fR[None, None, 0, part, stage], S)
        if self.pair and not self.wide:
            for term in range(self.terms):
                for x in range(2):
                    cute.gemm(
                        multiply(self.dtype, True, K, SLICE), S, fP[None, None, part * 2 + x, tile], fI[None, None, x, term], S
                    )
        warpgroup.commit_group()

    def soften(self, O, fV, m, l, c, S, part, stage, adds: Any = True):
        """P = exp2(S c - m), its sums, and issue O += P V, or O = P V where a row begins: one wgmma group.

        `adds` must be the same for all warps: where one adds to O and its neighbours do not, all get garbage.
        """
        self.reference(S, O, m, l, c)
        P = []
        for step in range(2):
            e = cute.make_rmem_tensor(8, Float32)
            for y in range(8):
                value = cute.math.exp2(fma(S[8 * step + y], c, -m[y // 2 % 2]), fastmath=True)
                e[y] = value
                l[y % 4] = l[y % 4] + value
            tiled = multiply(self.dtype, False, MN, 16 * self.steps)
            p = tiled.make_fragment_A(tiled.partition_shape_A((ROWS, 16)))
            cute.make_tensor(p.iterator, cute.make_layout(8)).store(e.load().to(self.dtype))
            P.append(p)
        warpgroup.fence()
        for step in range(2):
            tiled = multiply(self.dtype, False, MN, 16 * self.steps, True if step > 0 else adds)
            cute.gemm(tiled, O, P[step][None, None, 0], fV[None, None, part * 2 + step, stage], O)
        warpgroup.commit_group()

    @cute.jit
    def reference(self, S: cute.Tensor, O: cute.Tensor, m: cute.Tensor, l: cute.Tensor, c: Float32):
        """What the scores of a row are measured from, chosen when nothing but masked keys came before.

        What O and l hold so far is nothing then, or too small to count.
        """
        if arch.vote_all_sync(arch.fmax(m[0], m[1]) < LOW):
            top = cute.make_rmem_tensor(2, Float32)
            for r in range_constexpr(2):
                a = S[2 * r]
                for i in range_constexpr(SLICE // 8):
                    a = arch.fmax(a, arch.fmax(S[4 * i + 2 * r], S[4 * i + 2 * r + 1]))
                top[r] = arch.warp_reduction_max(a, threads_in_group=4) * c + self.offset
            # A sum that has met NaN stays as it is, so that `exact` finds it.
            whole = l[0] + l[1] + l[2] + l[3] < Float32.inf
            if arch.vote_all_sync(whole and arch.fmin(top[0] - m[0], top[1] - m[1]) > 100.0):
                for r in range_constexpr(2):
                    m[r] = top[r]
                for x in range_constexpr(4):
                    l[x] = Float32(0.0)
                for x in range_constexpr(8 * self.steps):
                    O[x] = Float32(0.0)
