"""Rings of buffers in shared memory, which one side of a block fills and the other side reads."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from cutlass import Int32, Int64, cute
from cutlass.cute import arch


class Slot(NamedTuple):
    """A stage of a ring, and the parity of the round in which the ring comes to it."""

    stage: Any
    phase: Any


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages with two barriers each; the verbs are those of CUTLASS' `PipelineTmaAsync`.

    It is frozen, so that CuTe DSL does not carry it through loops. Only a `Slot` changes.

    Args:
        full: barriers of the first stage of all: a stage is filled.
        empty: the same: a stage has been read.
        stages: stages of the ring.
        part: number of this ring, if several lie side by side.
        offset: number of its first stage there, if `part` does not tell it.
        sleeps: whether a producer sleeps while it waits. Spinning took 23% of the issue slots of a backward kernel.
    """

    full: Any
    empty: Any
    stages: int
    part: Any = None
    offset: Any = None
    sleeps: bool = False

    @classmethod
    def allocate(cls, smem: Any, stages: int, *, sleeps: bool = False) -> Ring:
        """Allocate a ring in shared memory; `initialize` comes before its use."""
        full, empty = (smem.allocate_array(Int64, max(stages, 1)) for _ in range(2))
        return cls(full, empty, stages, sleeps=sleeps)

    def initialize(self, *, producers: int = 1, consumers: int) -> None:
        """Set how many arrivals fill a stage, and how many empty it, by one thread."""
        for stage in range(self.stages):
            arch.mbarrier_init(self.full + stage, producers)
            arch.mbarrier_init(self.empty + stage, consumers)

    def of(self, part: Any, stages: int) -> Ring:
        """Return ring number `part` of several that lie side by side, each of so many stages."""
        return dataclasses.replace(self, part=part, stages=stages)

    def at(self, offset: Any, stages: int) -> Ring:
        """Return the ring whose first stage is stage `offset` of all."""
        return dataclasses.replace(self, offset=offset, stages=stages)

    def start(self) -> Slot:
        """The slot with which both sides begin."""
        return Slot(Int32(0), Int32(0))

    def index(self, stage: Any) -> Any:
        """The number of a stage among all rings that lie side by side."""
        if self.offset is not None:
            return self.offset + stage
        return stage if self.part is None else self.part * self.stages + stage

    def _consumer_barrier(self, barriers: Any, stage: Any) -> Any:
        """The barrier of a consumer's stage. The order of the additions is the one that the kernels were timed with."""
        if self.offset is not None:
            return barriers + self.offset + stage
        return barriers + stage if self.part is None else barriers + self.part * self.stages + stage

    @cute.jit
    def advance(self, slot: Slot) -> Slot:
        """The next slot."""
        stage, phase = slot
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return Slot(stage, phase)

    def full_barrier(self, stage: Any) -> Any:
        """The barrier that the copies into a stage arrive at."""
        return self.full + self.index(stage)

    def producer_acquire(self, slot: Slot, transferred: int | None = None) -> None:
        """Wait until a stage is empty. Then expect so many bytes of copies there, by one thread of the warp."""
        wait = sleep_until if self.sleeps else arch.mbarrier_wait
        wait(self.empty + self.index(slot.stage), slot.phase ^ 1)
        if transferred is not None:
            with arch.elect_one():
                self.expect(slot.stage, transferred)

    def expect(self, stage: Any, transferred: int) -> None:
        """Expect so many bytes of copies in a stage."""
        arch.mbarrier_arrive_and_expect_tx(self.full_barrier(stage), transferred)

    def consumer_wait(self, slot: Slot) -> None:
        """Wait until a stage is full."""
        arch.mbarrier_wait(self._consumer_barrier(self.full, slot.stage), slot.phase)

    def empty_barrier(self, stage: Any) -> Any:
        """The barrier that warps arrive at that have read a stage."""
        return self._consumer_barrier(self.empty, stage)

    def consumer_release(self, stage: Any, lane: Any) -> None:
        """Say that this warp has read a stage."""
        release(self.empty_barrier(stage), lane)


@cute.jit
def release(barrier: Any, lane: Any) -> None:
    """Arrive at a barrier, once for this warp."""
    if lane == 0:
        arch.mbarrier_arrive(barrier)


def sleep_until(barrier: Any, phase: Any) -> None:
    """Wait for a barrier without spinning."""
    arch.inline_ptx(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1};\n@p bra DONE;\n"
        "nanosleep.u32 100;\nbra AGAIN;\nDONE:\n}",
        read_only_args=[barrier.toint(), phase],
    )
