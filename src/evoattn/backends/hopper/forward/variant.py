"""A variant of the forward kernel: what it depends on, its shared memory, and what stands for its arguments."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from cutlass import BFloat16, Float32, Int32

from evoattn.backends.hopper.forward.consumer import ForwardConsumer
from evoattn.backends.hopper.forward.exact import ExactPath
from evoattn.backends.hopper.forward.mma import CHAIN, HALVES
from evoattn.backends.hopper.forward.producer import STREAMS, ForwardProducer
from evoattn.backends.hopper.host.launch import Kernel, Stand, channels, deep, ends, even, free, given_pair, shifts, size, terms
from evoattn.backends.hopper.kernels.key_bias import TERMS
from evoattn.backends.hopper.kernels.primitives import (
    k_major,
    mn_major,
    padded,
)
from evoattn.backends.hopper.kernels.schedule import Schedule
from evoattn.backends.hopper.kernels.tile_sizes import KEYS, ROWS, SLICE

__all__ = ["CONSUMERS", "Arguments", "ForwardVariant"]

CONSUMERS = STREAMS * HALVES
"""Warpgroups that compute."""


class Arguments(namedtuple("Arguments", "row ends deep given pair q k v o lse reference shifts row_b row_n scale interleave")):
    """The arguments of the kernel.

    q, k, v, o: [b,n,h,l,d]. row, ends, deep: the key-wise bias as `Rows` leaves it, [r, keys * TERMS], [r] and [r, keys]; row n
    of batch b has r = b * row_b + n * row_n. given: the pair bias as it is, [b|1,h|1,q,k]. pair, shifts: the same as `Pairs`
    leaves it, and [b|1,h|1,q]; a wide one is in the tiles of `Tiles`, an even number of q. lse, reference: [b,n,h,q].
    """


class ForwardVariant(ForwardProducer, ForwardConsumer, Kernel):
    """One variant of the kernel. Sizes, strides and scale are known when it runs.

    Args:
        dtype: cutlass type of q, k and v, and of the pair bias if it is not wide.
        channels: D = C.
        pair: whether there is a pair bias.
        row: whether there is a key-wise bias; a length that is no multiple of 64 needs one for its end.
        exact: whether 1 / scale is a number of dtype; otherwise it is taken in two terms, so that a pair bias is added exactly.
            With 8 channels it need not be: one term is taken, and q makes up for it.
        resident: whether the pair bias of a panel stays in shared memory.
        wide: whether the pair bias is float32: it streams, over scale, as the accumulators hold it (`pair_bias.Tiles`).
    """

    def __init__(self, dtype: Any, channels: int, *, pair: bool, row: bool, exact: bool, resident: bool, wide: bool = False):
        self.dtype, self.channels, self.pair, self.row, self.wide = dtype, channels, pair, row, wide
        self.resident, self.streamed, self.long = resident, pair and not resident, not resident
        self.D = padded(channels)
        self.twice = channels == 8  # a product's 16 channels meet the 8 of a key twice
        self.key_width = 8 if self.twice else self.D
        self.stage_width = self.key_width + self.D + (TERMS if row else 0)
        self.steps = -(-channels // 16)
        # a kernel of key_bias.py or pair_bias.py comes before; this one starts while it runs
        self.prepared = row or self.streamed
        self.slots = 1 if channels < 64 else 2
        self.odd = row and channels < 48  # whether a row may end in a block of one slice: more channels leave no registers
        self.stages = 3 if resident and pair else {16: 5, 32: 5, 64: 3}[self.D]
        if wide:
            self.stages = {16: 4, 32: 3, 64: 2}[self.D]
        self.offset = 0.0 if dtype is BFloat16 else 8.0
        self.ceiling = 2.0**64 if dtype is BFloat16 else 2.0**15
        self.terms = 1 if exact or self.twice else 2
        options = {"pair": pair, "row": row, "exact": exact, "long": self.long, "wide": wide}
        self.name_after(dtype, channels=channels, **options)
        self.schedule = Schedule(HALVES * ROWS, ROWS)
        self.exact_path = ExactPath(dtype, channels, pair=pair, row=row)

    def arguments(self) -> tuple[Any, ...]:
        b, n, h, lq, lk = size(), size(), size(), size(), size()

        row, end = (terms(self.dtype), ends()) if self.row else (None, None)
        q, k, v, o = (channels(self.dtype, (b, n, h, length), self.channels) for length in (lq, lk, lk, lq))
        pair = given = None
        if self.pair:
            given = given_pair(Float32 if self.wide else self.dtype)
            pair = Stand(self.dtype, (size(), size(), size(), size()), (even(), even(), even(), 1), 16)
        if self.wide:
            tile = (*(size() for _ in range(4)), ROWS * KEYS)
            pair = Stand(Float32, tile, (*(even() for _ in range(4)), 1), 16)
        lse, reference = (Stand(Float32, (b, n, h, lq), (free(), free(), free(), 1), 4) for _ in range(2))
        numbers = (Int32(0), Int32(0), Float32(0.0), Int32(0), Int32(0))
        whole = deep() if self.row and self.pair else None
        return q, k, v, row, end, whole, given, pair, o, lse, reference, shifts() if self.pair else None, *numbers

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; what the compiler does not check."""
        tiles = 2 * CONSUMERS * ROWS * self.D + STREAMS * self.stages * KEYS * (self.key_width + self.D)
        terms = self.terms * SLICE * SLICE + STREAMS * self.stages * KEYS * TERMS
        pair = self.tiles_of_pair * ROWS * KEYS * (2 if self.wide else 1)
        return 2 * (tiles + terms + pair) + 2048

    @property
    def tiles_of_pair(self) -> int:
        """Tiles of the pair bias that lie in shared memory."""
        return HALVES * (CHAIN if self.resident else self.stages) if self.pair else 1

    def layouts(self):
        return (
            k_major(self.dtype, ROWS, self.D, self.slots * CONSUMERS),  # q
            k_major(self.dtype, KEYS, self.key_width, STREAMS * self.stages),  # k
            mn_major(self.dtype, self.D, KEYS, STREAMS * self.stages),  # v
            k_major(self.dtype, ROWS, KEYS, self.tiles_of_pair),  # pair bias
            k_major(self.dtype, SLICE, SLICE, self.terms),  # identity / scale
            k_major(self.dtype, 16, self.D, self.slots * CONSUMERS * 4),  # o, a warp's rows
        )
