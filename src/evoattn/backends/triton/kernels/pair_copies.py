"""Copies of the pair bias that kernels load faster than the tensor of the caller."""

from __future__ import annotations

import triton.language as tl

from evoattn.backends.triton.kernels.backward import PADDED
from evoattn.kit.arguments import Constant, Number, PairView, Pointer, kernel
from evoattn.kit.overlap import wait_to_load, wait_to_store
from evoattn.kit.primitives import decode


@kernel
def pack_kernel(
    pair: PairView, packed: Pointer, heads: Number, lq: Number, lk: Number, units_q: Number, units_k: Number,
    blocks_q: Number, blocks_k: Number, BLOCK: Constant, GRAIN: Constant, EVEN: Constant, TRANSPOSE: Constant,
    WAIT: Constant,
) -> None:  # fmt: skip
    """One program owns a BLOCK x BLOCK tile of one (b, h) of the pair bias.

    It loops over nothing.
    It writes the tile once, transposed or not, with zeros past the ends.
    """
    wait_to_load(WAIT)
    block_q, block_k, h, b = decode(tl.program_id(0), blocks_q, blocks_k, heads)
    o_q = (block_q * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    o_k = (block_k * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    padded_q = units_q.to(tl.int64) * PADDED
    padded_k = units_k.to(tl.int64) * PADDED
    p_tile = pair.p + (b.to(tl.int64) * pair.b + h.to(tl.int64) * pair.h) * GRAIN
    p_tile += o_q[:, None] * pair.q * GRAIN + o_k[None, :] * pair.k
    p_packed = packed + (b * heads + h).to(tl.int64) * padded_q * padded_k
    if TRANSPOSE:
        p_packed += o_k[None, :] * padded_q + o_q[:, None]
    else:
        p_packed += o_q[:, None] * padded_k + o_k[None, :]
    if EVEN:
        b_pair = tl.load(p_tile)  # [q,k]
        wait_to_store(WAIT)
        tl.store(p_packed, b_pair)
    else:
        b_pair = tl.load(p_tile, mask=(o_q[:, None] < lq) & (o_k[None, :] < lk), other=0.0)  # [q,k]
        wait_to_store(WAIT)
        tl.store(p_packed, b_pair, mask=(o_q[:, None] < padded_q) & (o_k[None, :] < padded_k))
