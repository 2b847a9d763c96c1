"""The kernel that writes the key bias for a main kernel, and lists the rows that a mask leaves.

A block owns a row of mask and mask bias and loops over its keys. It writes the terms of the key bias, and the end of the row.
If rows are listed, one more block a batch loops over all rows and writes the lists (`live_rows`).

**A key's terms.** mask and mask_bias become one bias, measured from the row's largest (`core.numerics`), and each number
x of it eight 16-bit terms, hi mid lo hi mid hi veto veto, with x = hi + mid + lo. The forward multiplies them by 1 / scale =
a0 + a1 + a2 in the order a0 a0 a0 a1 a1 a2 VETO VETO, so that the tensor cores add x / scale to about 2^-24.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Uint8, Uint32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.memory import SmemAllocator

from evoattn.backends.hopper.launch import KernelVariant, Tensors
from evoattn.backends.hopper.lib.primitives import LOWEST_KEY, VETO, broadcast_load, make_finite, three_terms
from evoattn.backends.hopper.tiles import KEYS, MOST_PANELS

TERMS = 8
_THREADS = 128
_THREADS_OF_LIST = 512
CLEARED_VECTORS = 8 * _THREADS  # vectors of four words that a block clears
_READ_TOGETHER = 8  # keys, or words of 16 keys, that a thread looks at together, from the last to the first
_WORD_KEYS = 16  # keys of a word
_LARGEST_FLOAT32 = 2.0**127 * (2 - 2.0**-23)


@dataclasses.dataclass(frozen=True)
class KeyBias(KernelVariant):
    """mask [b|1,n|1,k] and mask_bias [b|1,n|1,k] -> terms [r, keys * TERMS], keys past the end masked, and ends [r].

    The end of a row is the number of keys up to the last that is not masked. key_bias [r, keys] holds the key bias in float32,
    measured from the largest of the row. The terms cannot hold it if it is too low.
    """

    dtype: Any  # cutlass type of the terms
    _: dataclasses.KW_ONLY
    mask: bool  # whether there is a mask
    bias: Any  # cutlass type of the mask bias, or None
    clears: bool = False  # whether it clears what a later kernel adds to, float32 [words, 4]
    # whether it also lists the rows that `mask` leaves to each panel of 64 keys, as `live_rows` reads them.
    lists: bool = False
    unrounded: bool = False  # whether it writes key_bias
    # whether a finite bias below LOWEST_KEY is raised to it, as `repair` does in the forward, for the backward.
    bounded: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: many if one lists rows, so that each reads few."""
        return _THREADS_OF_LIST if self.lists else _THREADS

    def arguments(self) -> dict[str, Any]:
        t = Tensors(self.dtype)
        return {
            "mMask": t.strided("???", Uint8) if self.mask else None,
            "mBias": t.strided("???", self.bias) if self.bias is not None else None,
            "mTerms": t.lines("??"),
            "mEnds": t.ends(),
            "mKeyBias": t.floats("??") if self.unrounded else None,
            "mCleared": t.fours("?", Float32) if self.clears else None,
            **(t.live_rows() if self.lists else {"mOrder": None, "mStarts": None}),
            "keys": Int32(0),
            "n": Int32(0),  # rows of a batch
        }

    @cute.jit
    def __call__(self, args, stream: cuda.CUstream):
        blocks = args.mTerms.shape[0]
        if const_expr(self.clears):
            blocks = cutlass.max(blocks, (args.mCleared.shape[0] + CLEARED_VECTORS - 1) // CLEARED_VECTORS)
        if const_expr(self.lists):
            blocks = blocks + args.mOrder.shape[0]
        self.kernel(args).launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, args):
        # In this order: most warps of the next kernel wait for nothing, and all before this one has to be complete by then.
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        tid, _, _ = arch.thread_idx()
        r, _, _ = arch.block_idx()
        smem = SmemAllocator()
        sTop, sLast = (smem.allocate_tensor(dtype, cute.make_layout(self.threads // 32)) for dtype in (Float32, Int32))
        if const_expr(self.lists):
            sCounts = smem.allocate_tensor(Int32, cute.make_layout(MOST_PANELS + 1))
            r = r - args.mOrder.shape[0]
            if r < 0:
                self.list_rows(args, sCounts, r + args.mOrder.shape[0], tid)
        if const_expr(self.clears):
            zeros = cute.make_rmem_tensor(4, Float32)
            zeros.fill(0.0)
            if r >= 0:
                mCleared = args.mCleared
                for x in cutlass.range(
                    r * CLEARED_VECTORS + tid, cutlass.min((r + 1) * CLEARED_VECTORS, mCleared.shape[0]), self.threads
                ):
                    cute.autovec_copy(zeros, mCleared[x, None])
        if r >= 0 and r < args.mTerms.shape[0]:
            self.fill(args, r, tid, sTop, sLast)

    @cute.jit
    def list_rows(self, args, sCounts: cute.Tensor, b: Int32, tid: Int32):
        """order and starts of batch b, by all threads of a block: a counting sort of the rows by their panels."""
        mMask, mOrder, mStarts, keys = args.mMask, args.mOrder, args.mStarts, args.keys
        rows, panels = mOrder.shape[2], mStarts.shape[1] - 2
        for x in cutlass.range(tid, panels + 1, self.threads):
            sCounts[x] = Int32(0)
        arch.sync_threads()
        for n in cutlass.range(tid, rows, self.threads):
            live = self.live_panels(mMask, b, n, keys)
            mOrder[b, 1, n] = live
            arch.atomic_add(sCounts.iterator + live, Int32(1), sem="relaxed", scope="cta")
        arch.sync_threads()
        if tid == 0:
            longer, units, used_panels = Int32(0), Int32(0), Int32(0)
            for y in cutlass.range(panels + 1):
                x = panels - y
                longer, sCounts[x] = longer + sCounts[x], longer
            for x in cutlass.range(panels):  # as many rows have more than x panels
                mStarts[b, x] = units
                units += sCounts[x]
                used_panels += Int32(cutlass.select_(sCounts[x] > 0, 1, 0))
            mStarts[b, panels], mStarts[b, panels + 1] = units, used_panels
        arch.sync_threads()
        for n in cutlass.range(tid, rows, self.threads):
            rank = arch.atomic_add(sCounts.iterator + mOrder[b, 1, n], Int32(1), sem="relaxed", scope="cta")
            mOrder[b, 0, rank] = n

    @cute.jit
    def live_panels(self, mMask: cute.Tensor, b: Int32, n: Int32, keys: Int32) -> Int32:
        """Panels of 64 keys of a row up to the last key that is not masked."""
        row = broadcast_load(mMask, b, n, None)
        live = Int32(0)
        if mMask.stride[2] == 1:
            live = self.last_of_words(row, keys)
        else:
            chunks = (keys + _READ_TOGETHER - 1) // _READ_TOGETHER
            while chunks > 0 and live == 0:
                for x in range_constexpr(_READ_TOGETHER):
                    j = cutlass.min((chunks - 1) * _READ_TOGETHER + x, keys - 1)
                    live = cutlass.max(live, Int32(cutlass.select_(row[j] != Uint8(0), j + 1, 0)))
                chunks -= 1
        return (live + KEYS - 1) // KEYS

    @cute.jit
    def last_of_words(self, row: cute.Tensor, keys: Int32) -> Int32:
        """Keys of a row up to the last that is not masked, where they lie side by side.

        It reads the words of 16 bytes that hold them, from the last to the first.
        """
        start = row.iterator.toint()
        skipped = Int32(start) & (_WORD_KEYS - 1)  # bytes of the first word that are not this row's
        pointer = cute.make_ptr(Int32, start & ~(_WORD_KEYS - 1), cute.AddressSpace.gmem, assumed_align=_WORD_KEYS)
        words, live = (skipped + keys + _WORD_KEYS - 1) // _WORD_KEYS, Int32(0)
        while words > 0 and live <= 0:
            rWords = [cute.make_rmem_tensor(4, Int32) for _ in range(_READ_TOGETHER)]
            for x in range_constexpr(_READ_TOGETHER):
                word = cutlass.max(words - 1 - x, 0)
                cute.autovec_copy(cute.make_tensor((pointer + word * 4).align(_WORD_KEYS), cute.make_layout(4)), rWords[x])
            for x in range_constexpr(_READ_TOGETHER):
                first = cutlass.max(words - 1 - x, 0) * _WORD_KEYS - skipped
                for y in range_constexpr(4):
                    first_key = first + 4 * y
                    bits = cutlass.min(cutlass.max(keys - first_key, 0), 4) * 8  # of this row
                    last = Int32(arch.bfind(Uint32(rWords[x][y] & arch.shf(Int32(-1), Int32(0), bits, "clamp_left"))))
                    live = cutlass.max(live, Int32(cutlass.select_(last >= 0, first_key + 1 + last // 8, 0)))
            words -= _READ_TOGETHER
        return live

    @cute.jit
    def fill(self, args, r: Int32, tid: Int32, sTop: cute.Tensor, sLast: cute.Tensor):
        """Write the terms, the end and the key bias of row r, by all threads of a block."""
        mMask, mBias, mTerms, keys = args.mMask, args.mBias, args.mTerms, args.keys
        rb, rn = r // args.n, r % args.n
        warp, lane = tid // 32, tid % 32
        top = -Float32.inf
        if const_expr(self.bias is not None):
            for j in cutlass.range(tid, keys, self.threads):
                top = arch.fmax(top, self.read(mMask, mBias, rb, rn, j))
            top = arch.warp_reduction_max(top)
            if lane == 0:
                sTop[warp] = top
            arch.sync_threads()
            for x in range_constexpr(self.threads // 32):
                top = arch.fmax(top, sTop[x])
        shift = Float32(cutlass.select_(cute.math.absf(top) < Float32.inf, top, Float32(0.0)))
        last = Int32(0)
        for j in cutlass.range(tid, mTerms.shape[1] // TERMS, self.threads):
            x = -Float32.inf
            if j < keys:
                x = self.read(mMask, mBias, rb, rn, j)
            if x != -Float32.inf:
                last = j + 1
                x = arch.fmax(x - shift, Float32(-_LARGEST_FLOAT32))
            if const_expr(self.unrounded):
                if j < keys:
                    args.mKeyBias[r, j] = x
            self.write(mTerms, r, j, x)
        last = arch.warp_redux_sync(last, "max")
        if lane == 0:
            sLast[warp] = last
        arch.sync_threads()
        if tid == 0:
            for x in range_constexpr(self.threads // 32):
                last = cutlass.max(last, sLast[x])
            args.mEnds[r] = last

    @cute.jit
    def read(self, mMask: Any, mBias: Any, b: Int32, n: Int32, j: Int32) -> Float32:
        x = Float32(0.0)
        if const_expr(self.bias is not None):
            x = broadcast_load(mBias, b, n, j).to(Float32)
        if const_expr(self.mask):
            if broadcast_load(mMask, b, n, j) == Uint8(0):
                x = -Float32.inf
        return x

    @cute.jit
    def write(self, mTerms: cute.Tensor, r: Int32, j: Int32, x: Float32):
        veto = Float32(0.0)
        if const_expr(self.bounded):
            x = Float32(cutlass.select_((x < LOWEST_KEY) & (x != -Float32.inf), Float32(LOWEST_KEY), x))
        if const_expr(self.dtype is BFloat16):
            x = make_finite(x)
        else:
            if x == -Float32.inf:
                veto = Float32(-VETO)
                x = Float32(0.0)
            if x < -65504.0:
                x = Float32(-65504.0)
        hi, mid, lo = three_terms(x, self.dtype)
        terms = cute.make_rmem_tensor(TERMS, self.dtype)
        for y, term in enumerate((hi, mid, lo, hi, mid, hi, veto.to(self.dtype), veto.to(self.dtype))):
            terms[y] = term
        target = cute.local_tile(mTerms, (1, TERMS), (r, j))
        cute.autovec_copy(terms, target[0, None])
