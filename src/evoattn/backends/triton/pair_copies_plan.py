"""Copies of the pair bias: when they pay, how they lie in memory, and the launch that fills one."""

from __future__ import annotations

from typing import NamedTuple

from evoattn.backends.triton.kernels.backward import PAD
from evoattn.backends.triton.kernels.pair_copies import pack_kernel
from evoattn.kit.arguments import pair_view
from evoattn.kit.launch import Launch
from evoattn.kit.strides import Strided, grain, loads_vectors

_ALIGNMENT = 16
"""The keys of each query of a copy start on multiples of so many elements."""

_PACK_TILE = 64

ROWS_WORTH_A_COPY = 4
"""A copy moves each bias element twice; a kernel that cannot load 16 bytes at a time pays more than that on every row n."""

COPIED = "pair_bias: its rows are not 16-byte aligned with stride 1, so it is laid out anew once a call"
"""Why a pair bias is copied, as `explain` says it."""


def needs_copy(pair_bias: Strided, n: int) -> bool:
    """Return whether copying a pair bias first is cheaper than loading it with the strides that it has.

    An odd length or a permuted bias would be loaded element by element, on every row n.
    """
    return n >= ROWS_WORTH_A_COPY and pair_bias.shape[-1] > 1 and not loads_vectors(pair_bias)


def aligned_copy(pair_bias: Strided) -> Strided:
    """The same shape, with stride 1 along keys, and queries that start on multiples of 16 elements."""
    _, h, lq, lk = pair_bias.shape
    padded = -(-lk // _ALIGNMENT) * _ALIGNMENT
    return Strided(pair_bias.shape, (h * lq * padded, lq * padded, padded, 1), pair_bias.dtype)


class PairCopy(NamedTuple):
    """A copy of the pair bias, and the launch of (pair bias, copy) that fills it."""

    tensor: Strided
    launch: Launch


def plan_pack(pair_bias: Strided, padded_q: int, padded_k: int, *, transpose: bool) -> PairCopy:
    """Plan a copy of a full pair bias [b,h,q,k] in full tiles, which load unmasked: zeros up to padded_q and padded_k.

    These are multiples of PAD. `transpose` lays it out in memory as [b,h,k,q]; the axes of the result stay [b,h,q,k].
    """
    b, h, lq, lk = pair_bias.shape
    area = padded_q * padded_k
    stride = (h * area, area, 1, padded_q) if transpose else (h * area, area, padded_k, 1)
    blocks_q, blocks_k = -(-padded_q // _PACK_TILE), -(-padded_k // _PACK_TILE)
    units = grain(pair_bias)
    fill = pack_kernel.plan(
        blocks_q * blocks_k * h * b,
        pair=pair_view(pair_bias, units),
        heads=h,
        lq=lq,
        lk=lk,
        units_q=padded_q // PAD,
        units_k=padded_k // PAD,
        blocks_q=blocks_q,
        blocks_k=blocks_k,
        BLOCK=_PACK_TILE,
        GRAIN=units,
        EVEN=(padded_q, padded_k) == (lq, lk) and lq % _PACK_TILE == 0 and lk % _PACK_TILE == 0,
        TRANSPOSE=transpose,
        num_warps=4,
    )
    return PairCopy(Strided((b, h, padded_q, padded_k), stride, pair_bias.dtype), fill)
