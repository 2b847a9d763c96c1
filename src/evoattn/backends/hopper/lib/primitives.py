"""Constants of biases, shared-memory layouts, tensor-core operations and single instructions."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute, select_
from cutlass import min as smaller
from cutlass.cute import arch, make_tiled_mma, tile_to_shape
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from evoattn.core.numerics import LOG2E

MASKED = -(2.0**100)
"""The value of -inf in a bias: finite, because the tensor cores would turn 0 * -inf into NaN, and out of reach of any score."""

SHALLOW = -(2.0**99)
"""The lowest finite bias: still lower ones are raised to it, so that MASKED stays lower than every finite bias."""

LOWEST = -(2.0**14)
"""The lowest pair bias: if all keys that a query attends to lie below it, they are raised to it. Divided by the scale it leaves
a float32 score its digits."""

LOWEST_KEY = 2 * LOWEST
"""The same for key biases, where a pair bias of -inf leaves a query only keys that such a bias masks."""

DEAD = -(2.0**100)
"""In units of log2, for bfloat16: a query whose largest score lies below it attends to nothing. MASKED log2(e) does."""

VETO = 2.0**15
"""float16 cannot hold MASKED: two more terms of a masked key, -VETO, meet VETO in the queries' operand."""

_SWIZZLED = {
    16: (warpgroup.SmemLayoutAtomKind.K_SW32, warpgroup.SmemLayoutAtomKind.MN_SW32),
    32: (warpgroup.SmemLayoutAtomKind.K_SW64, warpgroup.SmemLayoutAtomKind.MN_SW64),
    64: (warpgroup.SmemLayoutAtomKind.K_SW128, warpgroup.SmemLayoutAtomKind.MN_SW128),
}


def k_major(dtype: Any, rows: int, columns: int, buffers: int) -> Any:
    """Layout of `buffers` tiles [rows, columns] whose columns are contiguous: swizzled, but for 8 columns."""
    kind = warpgroup.SmemLayoutAtomKind.K_INTER if columns == 8 else _SWIZZLED[min(columns, 64)][0]
    return tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, columns, buffers), (0, 1, 2))


def mn_major(dtype: Any, rows: int, columns: int, buffers: int) -> Any:
    """Swizzled layout of `buffers` tiles [rows, columns] whose rows' index is contiguous."""
    kind = _SWIZZLED[min(rows, 64)][1]
    return tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, columns, buffers), (0, 1, 2))


def make_wgmma(dtype: Any, a_in_shared: bool, b_major: OperandMajorMode, n: int, accumulate: Any = True) -> Any:
    """Make a wgmma of 64 x n x 16 with a float32 accumulator, which it adds to or overwrites."""
    source = warpgroup.OperandSource.SMEM if a_in_shared else warpgroup.OperandSource.RMEM
    operation = warpgroup.MmaF16BF16Op(dtype, Float32, (64, n, 16), source, OperandMajorMode.K, b_major)
    tiled = make_tiled_mma(operation)
    tiled.set(warpgroup.Field.ACCUMULATE, accumulate)
    return tiled


def three_terms(x: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """A float32 number as a sum of three of dtype, to about 2^-24 of it."""
    high = x.to(dtype)
    middle = (x - high.to(Float32)).to(dtype)
    return high, middle, (x - high.to(Float32) - middle.to(Float32)).to(dtype)


def block_and_thread() -> tuple[Any, Any, Any, Any, Any]:
    """The number of this block, how many there are, and the thread, warp and lane in the block."""
    tid, _, _ = arch.thread_idx()
    bid, _, _ = arch.block_idx()
    blocks, _, _ = arch.grid_dim()
    return bid, blocks, tid, arch.make_warp_uniform(arch.warp_idx()), arch.lane_idx()


def broadcast_index(x: Any, b: Any, h: Any) -> tuple[Any, Any]:
    """The index into the first two axes of a tensor, which may have size 1 for all b, or all h."""
    return smaller(b, x.shape[0] - 1), smaller(h, x.shape[1] - 1)


def broadcast_load(x: Any, b: Any, h: Any, *others: Any) -> Any:
    """x[b, h, *others], whose first two axes may have size 1 for all b, or all h."""
    index = (*broadcast_index(x, b, h), *others)
    return x[index]


def pack_words(fragment: Any) -> Any:
    """A register fragment of 16-bit numbers as 32-bit words."""
    return cute.recast_tensor(cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment))), Int32)


def fill_coefficients(to: Any, alpha: Any, t4: Any, dtype: Any) -> None:
    """Fill 8 of an A fragment's 16 channels with the coefficients of a key bias: alpha's own terms, see key_bias.py."""
    a0, a1, a2 = three_terms(alpha, dtype)
    veto = dtype(0.0 if dtype is BFloat16 else VETO)
    to[0] = to[2] = select_(t4 == 2, a1, select_(t4 == 3, veto, a0))
    to[1] = to[3] = select_quad(t4, a0, a1, a2, veto)


def select_quad(t4: Any, *four: Any) -> Any:
    """The one of four values that is meant for this thread of a quad."""
    return select_(t4 == 0, four[0], select_(t4 == 1, four[1], select_(t4 == 2, four[2], four[3])))


def pin_registers(fragment: Any, lane: Any) -> None:
    """Let constants of a product stay in registers: a shuffle hides that the compiler could make them anew before each."""
    words = pack_words(fragment)
    for x in range(cute.size(words)):
        words[x] = arch.shuffle_sync(words[x], lane)


def mma_m16n8k16(dtype: Any, c: Any, a: Any, b: Any) -> Any:
    """c + a b of one warp, on packed words; c is a list of four float32."""
    kind = "bf16" if dtype is BFloat16 else "f16"
    return arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return arch.inline_ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of a float32 number, to about 3 units in the last place; 0 for -inf, and 1 for +inf."""
    return arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2E), fastmath=True))


def make_finite(x: Any) -> Any:
    """Return -inf as MASKED, any other number below SHALLOW as SHALLOW; NaN stays."""
    shallow = Float32(select_(x < SHALLOW, Float32(SHALLOW), x))
    return Float32(select_(x == -Float32.inf, Float32(MASKED), shallow))


def make_finite_two(x: Any) -> Any:
    """`make_finite` of two bfloat16 numbers in 32 bits."""
    return arch.inline_ptx(
        "{ .reg .b32 shallow, lowest, deep;\n"
        "mov.b32 shallow, 0xf100f100;\n"
        "mov.b32 lowest, 0xff80ff80;\n"
        "set.eq.bf16x2.bf16x2 deep, {$r0}, lowest;\n"  # 1 is 0x3f80, and MASKED is SHALLOW | 0x80
        "and.b32 deep, deep, 0x00800080;\n"
        "max.NaN.bf16x2 shallow, {$r0}, shallow;\n"
        "or.b32 {$w0}, shallow, deep; }",
        write_only_types=[Int32],
        read_only_args=[x],
    )


def hide(word: Any) -> Any:
    """Return the same 32 bits, whose source the compiler cannot see."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


def narrow(tile: Any, width: int) -> Any:
    """A tile [D, rows] as a right side without the channels that only fill it up."""
    if cute.size(tile, mode=[0]) == width:
        return tile
    return cute.local_tile(tile, (width, tile.shape[1], tile.shape[2]), (0, 0, 0))


def add_four(pointer: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Four float32 reductions in one instruction, to a 16-byte boundary of global memory."""
    arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer.toint(), a, b, c, d]
    )


def store_remote(address: Any, four: Any, barrier: Any) -> None:
    """Four float32 to another block's shared memory; a barrier there counts their bytes."""
    arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *four, barrier],
    )


def exp2(x: Any) -> Any:
    """2^x to about 2 units in the last place; one instruction."""
    return arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
