"""Calls of one signature, their recording, and whether it stands for a call."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evoattn.clients import site
from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.recorder import Recorder, Recording
from evoattn.clients.graphs.trees import NotCaptured, Spec, copied, copies, flat, nested, room_bytes, room_for, same_bits
from evoattn.clients.graphs.twins import Twin, Twins
from evoattn.clients.site import Count, taped
from evoattn.core import keeping

WORTH = 8
"""Replays that pay for a recording, which takes as long as two to four calls."""

MOVES = "its arguments move too often for a recording to pay"
"""The reason for calls that are not recorded because recordings before were replayed too rarely."""

_FREE = 3
"""Recordings that need not have paid: the second and the third may copy more than the first."""

MOST_COPIED = 512 << 20
"""Bytes of arguments up to which a recording has copies of all, and stands for calls of other tensors and in other loops."""

_UNLIKE = 3
"""So many calls in a row that share fewer tensors than others before them are recorded none the less, with more copies."""

GAIN = 0.9
"""A recording is used if a replay takes at most this share of the time of the call itself. Else it is memory for nothing."""


class Call(NamedTuple):
    """The arguments of a call, and the tensors in them in the order of `flat`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]


class _Place:
    """A tensor that was an argument, which may be gone."""

    def __init__(self, tensor: Tensor, gone: Callable[[Any], None] | None = None) -> None:
        self._tensor = weakref.ref(tensor, gone)
        self._at = keeping.states([tensor])

    def holds(self, tensor: Tensor) -> bool:
        """Return whether it is this very tensor, neither moved nor written to."""
        return self._tensor() is tensor and self._at == keeping.states([tensor])

    def exists(self) -> bool:
        return self._tensor() is not None


class CallKind:
    """Calls whose arguments have one `Spec`.

    A recording reads tensors that were the same in two calls where they are. It reads the others from room of its own, into
    which they are copied.

    A recording that is made in the run of a loop, and that is small, has room for all. It is kept for other runs: each copies
    what its steps share once, and has the recording begin again.

    Args:
        spec: of the arguments.
        copies: whether a recording has room for all tensors, whatever is the same in two calls.

    Attributes:
        obstacle: why such calls are never recorded, or "".
        used: when the recording was last used, by a count of calls.
        checked: whether the recording did what a call did.
        failed: whether a recording without a look failed, so that other sizes of such calls need one too.
        proof: what such calls of other sizes have in common.
        needs: whether each weight and each tensor needs a gradient. Empty: autograd sees no such call.
    """

    needs: tuple[bool, ...] = ()

    def __init__(self, spec: Spec, copies: bool = False) -> None:
        self.spec, self._copies = spec, copies
        self.obstacle = ""
        self.failed = False
        self.proof: Hashable = None
        self.used = 0
        self._came = False  # whether a call ran as it was
        self._last: list[_Place] = []
        self._unlike = self._shared = 0
        self._still: set[int] = set()
        self._moving: set[int] = set()
        self._recordings = self._replays = 0
        self._may_keep = True
        self.drop()

    def drop(self, *_: Any) -> None:
        """Forget the recording, which frees its memory."""
        self._recording: Recording | None = None
        self.checked = False
        self._rooms: list[Tensor | None] = []  # of each tensor; None: it is read where it is
        self._places: list[_Place | None] = []  # of the tensors that all calls share
        self._facts: list[tuple[int, Callable[[Tensor], Any], Any]] = []  # of tensors: how each is read, and its value
        self._loop: object | None = None  # the run in which the recording began
        self._is_kept = False  # for other runs
        self._twin: Twin | None = None
        self._results: list[Tensor] = []
        self._result_spec: Spec = ()
        self._calls: list[tuple[Count, str]] = []

    @property
    def size(self) -> int | None:
        """Bytes of the recording. None: there is none."""
        if self._recording is None:
            return None
        return self._recording.size + sum(room_bytes(x) for x in self._rooms if x is not None)

    @property
    def begins(self) -> bool:
        """True if there is a recording that makes something at its beginning, as each of a loop does."""
        return self._recording is not None and self._loop is not None

    def end_loop(self) -> None:
        """Drop a recording of a loop that is not kept for other runs."""
        if self.begins and not self._is_kept:
            self.drop()

    def stands_for(self, tensors: list[Tensor], loop: object | None) -> bool:
        """Return whether the recording computes a call of these tensors, in a run of a loop or in none."""
        if self._recording is None or not self._recording.is_valid():
            return False
        if self._loop not in (None, loop):
            return loop is not None and self._is_kept and all(read(tensors[i]) == value for i, read, value in self._facts)
        return all(x is None or x.holds(y) for x, y in zip(self._places, tensors, strict=True))

    def is_ready(self, tensors: list[Tensor], loop: object | None) -> bool:
        """Note the tensors of a call that ran as it was, in a run of a loop or in none. Return whether to record it now."""
        if self._copies:
            came, self._came = self._came, True
            return came
        same = {i for i, (x, y) in enumerate(zip(self._last, tensors, strict=False)) if x.holds(y)}
        # If another tensor came while the recorded one is in use, two computations take turns. Runs may differ.
        for i, x in enumerate(self._places if self._loop in (None, loop) else ()):
            if x is not None and x.exists() and not x.holds(tensors[i]):
                self._moving.add(i)
        self._last = [_Place(x) for x in tensors]
        self._still = same - self._moving
        # The first call of another prediction shares less with the call before it than the second will.
        self._unlike = 0 if same and len(same) >= self._shared else self._unlike + 1
        self._shared = max(self._shared, len(same))
        if 0 < self._unlike < _UNLIKE:
            return False
        if self._recordings >= _FREE and self._replays < WORTH * self._recordings:
            self.obstacle = MOVES
            self.drop()
        return not self.obstacle

    def record(
        self,
        recorder: Recorder,
        run: Callable[..., Any],
        module: nn.Module,
        seen: Seen,
        call: Call,
        twins: Twins | None,
        loop: object | None,
        *,
        only_reads: bool,
        looks: bool,
    ) -> None:
        """Record a call that has run.

        twins: of the modules of one structure, if the recording is to read the weights of any of them.

        In the run of a `loop` it makes casts of weights once, and stands for calls in such a run alone. Without one it casts
        weights at each replay.

        only_reads: whether nobody writes to what all calls share. Else a recording is not kept whose tensors do not tell that
        they were written to. looks: as `Recorder.record` takes it. A recording without a look that fails is tried with one.
        """
        self.drop()
        declined = site.declined()
        # Only a recording of a loop may read what the loop keeps. And replays write the weights of other modules
        # into a shared one, which must read nothing that is made of weights.
        kept = keeping.nothing_kept() if twins is not None or loop is None else contextlib.nullcontext()
        try:
            with kept:
                if twins is not None:
                    needs = self.needs[: len(seen.weights)] or None
                    device = call.tensors[0].device
                    once = lambda twin: run(twin, *call.args, **call.kwargs)  # noqa: E731
                    self._twin = twins.of(module, seen, recorder, device, once, needs)
                    module, loop = self._twin.module, None
                self._record(recorder, functools.partial(run, module), call.tensors, loop, only_reads, looks)
        except Exception as error:  # whatever the client, a kernel or CUDA raises: the caller has its result already
            self.refuse(error)
        if site.declined() != declined:  # a kernel of the recording alone is being compiled: the next call is recorded
            self.obstacle = ""
            self.drop()

    def refuse(self, error: Exception) -> None:
        """Never record such calls again, because of an error."""
        first = (str(error).strip() or "no message").splitlines()[0][:160]
        known = isinstance(error, NotCaptured)
        self.obstacle = first if known else f"it cannot be recorded: {type(error).__name__}: {first}"
        self.drop()

    def _record(
        self,
        recorder: Recorder,
        run: Callable[..., Any],
        tensors: list[Tensor],
        loop: object | None,
        only_reads: bool,
        looks: bool,
    ) -> None:
        me = weakref.ref(self)

        def gone(_: Any) -> None:  # the caller has dropped the tensor, so no call will be one that was recorded
            if (kind := me()) is not None:
                kind.drop()

        kept = loop is not None and self._may_keep and self._fits([tensors[i] for i in self._still], only_reads)
        rooms = [None if i in self._still and not kept else room_for(x) for i, x in enumerate(tensors)]
        read = [x if room is None else room for x, room in zip(tensors, rooms, strict=True)]
        calls: list[tuple[Count, str]] = []

        def again() -> Any:
            calls.clear()
            args, kwargs = nested(self.spec, iter(read))
            with taped(calls):
                return run(*args, **kwargs)

        _copy(rooms, tensors)
        facts = [(i, x.read, x.value) for i in sorted(self._still) if kept for x in keeping.facts_of(tensors[i], read[i])]
        try:
            options = {"draws": self._copies, "once": loop is not None, "anew": kept}
            recording = None if looks else self._without_a_look(recorder, again, tensors[0].device, options)
            recording = recording or recorder.record(again, tensors[0].device, **options)
        except NotCaptured:
            if not kept:
                raise
            self._may_keep = False  # what the steps share is made by something that a graph cannot repeat
            self._record(recorder, run, tensors, loop, only_reads, True)
            return
        results: list[Tensor] = []
        self._result_spec = flat(recording.result, tensors[0].device, results)
        check_result(self._result_spec)
        self._recording, self._rooms, self._results, self._calls = recording, rooms, results, calls
        self._places = [_Place(x, None if kept else gone) if i in self._still else None for i, x in enumerate(tensors)]
        self._facts, self._loop, self._is_kept = facts, loop, kept
        self._recordings += 1

    def _without_a_look(
        self, recorder: Recorder, run: Callable[[], Any], device: torch.device, options: dict[str, bool]
    ) -> Recording | None:
        try:
            return recorder.record(run, device, looks=False, **options)
        except Exception:  # a look tells why, and leaves nothing behind
            self.failed = True
            return None

    @staticmethod
    def _fits(still: list[Tensor], only_reads: bool) -> bool:
        """Return whether a recording may have copies of what all calls of a loop share."""
        small = sum(map(room_bytes, still)) <= MOST_COPIED
        return small and (only_reads or not any(x.is_inference() for x in still))

    def replay(self, tensors: list[Tensor], seen: Seen, loop: object | None, begins: bool = False) -> Any:
        """Replay the call, and return its result in new tensors.

        Args:
            seen: the module that is called.
            loop: in whose run it is called.
            begins: whether to begin again, as in another run.
        """
        assert self._recording is not None
        if begins or self._loop not in (None, loop):
            _copy(self._rooms, tensors)
            self._recording.begin()
            if self._is_kept:
                self._places = [x and _Place(y) for x, y in zip(self._places, tensors, strict=True)]
                self._loop = loop
        else:
            _copy([room if place is None else None for room, place in zip(self._rooms, self._places, strict=True)], tensors)
        if self._twin is not None:
            self._twin.write(seen.weights)
        self._recording.replay()
        return nested(self._result_spec, iter(copies(self._results)))

    def count(self) -> None:
        """Count the calls that were taped while the recording was made: a replay stands for all of them."""
        self._replays += 1
        for count, reason in self._calls:
            count.add(reason)

    def try_out(
        self,
        recorder: Recorder,
        run: Callable[..., Any],
        seen: Seen,
        call: Call,
        result: Any,
        undrawn: Tensor,
        call_s: float,
        loop: object | None,
    ) -> None:
        """Compare what a call returned with what replays return, and their seconds.

        Args:
            run: what the call ran.
            result: of the call.
            undrawn: the state of the random numbers before the call. Now it is that after it.
            call_s: seconds of the call.
        """
        device = call.tensors[0].device
        drawn = recorder.random_state(device)
        recorder.set_random_state(device, undrawn)
        self.replay(call.tensors, seen, loop)  # the first one also loads the graph
        if not torch.equal(recorder.random_state(device), drawn):
            raise NotCaptured("it draws other random numbers")
        recorder.set_random_state(device, undrawn)
        start = recorder.seconds(device)
        replayed = self.replay(call.tensors, seen, loop)
        self.judge(_is_same(result, replayed, device), call_s, recorder.seconds(device) - start)
        if self.begins:  # as in another run
            recorder.set_random_state(device, undrawn)
            begun = self.replay(call.tensors, seen, loop, begins=True)
            self.judge(_is_same(result, begun, device), math.inf, 0)

    def judge(self, same: bool, call_s: float, replay_s: float) -> None:
        """Use the recording from now on, or never, by what a comparison found."""
        if not same:
            self.obstacle = "a replay of its recording returned something else"
        elif replay_s > GAIN * call_s:
            self.obstacle = "a replay of its recording is not faster"
        self.checked = True
        if self.obstacle:
            self.drop()


def _is_same(result: Any, replayed: Any, device: torch.device) -> bool:
    """Return whether two results have the same bits."""
    tensors: list[Tensor] = []
    others: list[Tensor] = []
    return flat(result, device, tensors) == flat(replayed, device, others) and all(map(same_bits, tensors, others))


def _copy(rooms: list[Tensor | None], tensors: list[Tensor]) -> None:
    moved = [(x, y) for x, y in zip(rooms, tensors, strict=True) if x is not None]
    copied([x for x, _ in moved], [y for _, y in moved])


def check_result(spec: Spec) -> None:
    """Raise NotCaptured if something in a result is neither a tensor of its device nor a plain value."""
    if spec[0] == "unread":
        raise NotCaptured(f"a replay cannot return {spec[1]}")
    for part in spec[2:] if spec[0] in ("dict", "items", "partial") else ():
        check_result(part)
