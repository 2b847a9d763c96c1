"""The time budget of a run: each problem's share of it, and the reasons not to begin a contender."""

from __future__ import annotations

import math

from evoattn.bench.clock import Clock
from evoattn.bench.contender import Contender

COMPILES_S = {"cpu": 30.0, "cuda": 4.0}
"""Seconds that a peer which compiles is expected to take, until its first problem was measured."""

FIRST_SHARE = 0.2
"""Share of the budget that a peer's first compilation may take, even if its problem's share is smaller."""

LIMIT_SHARE = 0.5
"""Share of the remaining budget after which a peer's first calls are ended."""

LONGEST_CALL_S = 4.0
LONGEST_SHARE = 0.05
"""A call that takes longer than this is not repeated: seconds, and a share of the problem's time."""

_ROUNDS_SHARE = 0.25
"""Share of a problem's time for its rounds, even if compiling used all of it."""


class Budget:
    """The time of a run, shared by its problems one after the other.

    Args:
        seconds: of the run; None means no limit.
        problems: the number of problems.
        clock: its `now()` tells the time.
    """

    def __init__(self, seconds: float | None, problems: int, clock: Clock) -> None:
        self.seconds, self.clock, self.longest_s = seconds, clock, LONGEST_CALL_S
        self._problems, self._rounds_s = problems, 0.0
        self._end = clock.now() + (math.inf if seconds is None else seconds)
        self._until = math.inf  # when the time of the problem that was begun ends
        self.compiled_s: dict[str, float] = {}  # by peer, seconds of its first calls
        self.ended_s: dict[str, float] = {}  # by peer, seconds after which they were ended
        self.over = f"the budget of {seconds:g} s was over" if seconds else ""

    def begin(self) -> bool:
        """Give the next problem its share of the remaining time. Return False if none remains."""
        now = self.clock.now()
        share = (self._end - now) / self._problems
        self._problems -= 1
        self.longest_s = min(LONGEST_CALL_S, share * LONGEST_SHARE)
        self._rounds_s = share * _ROUNDS_SHARE
        self._until = now + share
        return share > 0

    def would_measure(self, seconds: float) -> bool:
        """True if a larger budget would measure a call of so many seconds."""
        return self.seconds is not None and seconds <= LONGEST_CALL_S

    def add(self, seconds: float) -> None:
        """Let the problem take longer, up to the end of the budget."""
        self._until = min(self._until + seconds, self._end)

    def first_calls(self) -> float | None:
        """Seconds that a peer's first calls, or the float64 truth, may take."""
        return None if self.seconds is None else LIMIT_SHARE * max(self._end - self.clock.now(), 0.0)

    def reason_to_skip(self, peer: Contender, device: str) -> str | None:
        """Return the reason not to begin with a peer on a type of device, or None if there is time."""
        if self.seconds is None:
            return None
        now = self.clock.now()
        if now > self._end:
            return self.over
        limit, ended = self.first_calls(), self.ended_s.get(peer.name)
        if ended is not None and limit is not None and limit <= ended:
            return f"its first calls had not ended after {ended:.0f} s on another problem"
        takes = self.compiled_s.get(peer.name, COMPILES_S[device]) if peer.compiles else 0.0
        allowed = max(self._until - now, 0.0)
        if peer.compiles and peer.name not in self.compiled_s:
            allowed = min(self._end - now, max(allowed, FIRST_SHARE * self.seconds))
        if takes > allowed:
            return f"compiles for about {takes:.0f} s, and this problem has {allowed:.0f} s of the budget left"
        return None

    def begin_rounds(self) -> None:
        """Reserve the rounds' share of a problem's time, however long the first calls took."""
        self._until = max(self._until, self.clock.now() + self._rounds_s)

    def enough(self) -> bool:
        """True if the problem's time is over."""
        return self.clock.now() > self._until
