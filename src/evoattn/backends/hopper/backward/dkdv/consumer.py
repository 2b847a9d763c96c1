"""A row in the kernel of the keys: a warpgroup goes through its tiles of queries, and on to the next row."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, range_constexpr
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from evoattn.backends.hopper.backward.dkdv.mma import KeyMma
from evoattn.backends.hopper.kernels.ring import Ring, Slot

__all__ = ["KeyConsumer", "Rings"]


@dataclasses.dataclass(frozen=True)
class Rings:
    """The rings of q, dO and statistics of each stream of rows, of k and v, one row a stream, and of tiles of the pair bias."""

    queries: Ring
    keys: Ring
    bias: Ring

    def at(self, first: Any, stages: int) -> Rings:
        """The rings of the stream whose first stage has this number."""
        return dataclasses.replace(self, queries=self.queries.at(first, stages))


class KeyConsumer(KeyMma):
    """A consumer warpgroup's way through a row; `KeyGradients` explains the attributes."""

    stages: int
    ring: int
    streamed: bool
    run_on: int

    @cute.jit
    def queries_of_row(
        self, operands, row, bias: Any, sums: cute.Tensor, rings, scale: Float32, inverse: Float32, more: Boolean, s: Int32,
        turn: Int32, slot, bias_slot, NT: Int32, t4: Int32, lane: Int32,
    ):  # fmt: skip
        """Do all tiles of a row's queries, of which the first scores are there; then start those of the next row, if `more`.

        `bias` is this thread's part of a pair bias that stays, or the tiles of one that streams and the thread's place there.
        Returns the next slots of queries, and of a pair bias that streams.
        """
        sums.fill(0.0)
        held = slot.stage
        for j in cutlass.range(NT, unroll=1):
            here = rings.at(arch.make_warp_uniform(s * self.stages), self.stages)
            slot = Slot(arch.make_warp_uniform(slot.stage), slot.phase)
            old = slot.stage
            for u in range_constexpr(2):
                P, dS = self.gradient(operands, scale, sums)
                nu = 2 * j + u + 1
                if const_expr(u == 1):
                    slot = here.queries.advance(slot)
                    last = j + 1 == NT
                    if last:
                        nu = Int32(0)
                        if more:
                            rings.keys.consumer_wait(Slot(s, (turn + 1) & 1))
                            self.load_keys(operands, row, (2 * s, 2 * s + 1), t4, inverse)
                    if const_expr(self.streamed):
                        rings.bias.consumer_release(bias_slot.stage, lane)
                        bias_slot = rings.bias.advance(bias_slot)
                    if not last or more:
                        here.queries.consumer_wait(slot)
                        if const_expr(self.streamed):
                            rings.bias.consumer_wait(bias_slot)
                if const_expr(u == 1 and self.run_on > 0):
                    warpgroup.wait_group(0)
                elif const_expr(u == 0 and self.run_on == 2):
                    if j > 0:
                        warpgroup.wait_group(0)
                        here.queries.consumer_release(held, lane)
                # After the last row both start from what is there, perhaps in the middle of a copy, and nobody reads the
                # outcome: a branch around this would make each product wait for the one before.
                if const_expr(self.streamed):
                    tiles, wt = bias
                    self.preload(operands.acc_S, tiles[None, wt, None, bias_slot.stage], 1 - u, inverse)
                else:
                    self.preload(operands.acc_S, bias, nu, inverse)
                warpgroup.fence()
                self.scores(operands, 1 - u, here.queries.index(slot.stage))
                warpgroup.commit_group()
                self.products(operands, P, dS, u, here.queries.index(old), j > 0)
                warpgroup.commit_group()
                warpgroup.wait_group(1 if u < self.run_on else 0)
            if const_expr(self.run_on == 2):
                held = old
            else:
                here.queries.consumer_release(old, lane)
        if const_expr(self.run_on == 2):
            warpgroup.wait_group(0)
            rings.at(s * self.stages, self.stages).queries.consumer_release(held, lane)
        return slot, bias_slot
