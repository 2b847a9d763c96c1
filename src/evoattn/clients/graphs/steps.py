"""Calls of functions with their recordings: which call is recorded, compared with its recording, or replayed."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients import site
from evoattn.clients.graphs import checkpoints
from evoattn.clients.graphs.call_kinds import MOST_COPIED, MOVES, WORTH, Call, CallKind
from evoattn.clients.graphs.gradients import GradientKind, is_recorded_elsewhere
from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.recorder import Recorder
from evoattn.clients.graphs.trees import NotCaptured, Spec, flat, outline, room_bytes, same_bits
from evoattn.clients.graphs.twins import Twins
from evoattn.clients.kinds import ELSEWHERE
from evoattn.clients.site import Count, is_taped, repeated
from evoattn.core import guards, keeping

FIRST = "among the first calls of their kind"
"""The reason for calls that were not replayed, but may be the next time."""

AGAIN = "computed again by a checkpoint, as its first pass was"
"""The reason for calls in the second pass of a checkpoint that is not reentrant."""

_RECORDED = 8
"""Recordings kept for one function. Each has a memory pool, with the weights as autocast casts or as layers split them."""

_TRIED = 8
"""Recordings of one structure that need not have paid."""

_MOST_BYTES = 4 << 30
"""Bytes of them all. The newest is kept, whatever its size."""

_RESTLESS = 3
"""Calls in a row that change their own module, after which it is not looked at any more."""

_LOOKED_AT = 64
"""Kinds of calls that are remembered for one module."""


class Run:
    """The run of a `loop`, with the steps that it called and their modules."""

    def __init__(self) -> None:
        self.called: dict[tuple[int, int], tuple[Steps, nn.Module]] = {}


current: contextvars.ContextVar[Run | None] = contextvars.ContextVar("run", default=None)
"""The run that a call is in."""

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)
"""True inside a larger call that is replayed as a whole, or may be."""


@contextlib.contextmanager
def _within_a_whole() -> Iterator[None]:
    token = _inside.set(True)
    try:
        with repeated():
            yield
    finally:
        _inside.reset(token)


class Kinds(collections.OrderedDict[Any, CallKind]):
    """The kinds of calls of modules that share recordings: one module, or all of one structure.

    Attributes:
        proven: what is recorded and checked, by the `proof` of its kinds. Other sizes of it are recorded without a look.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins()
        self.recorded = self.replayed = 0
        self.proven: set[Hashable] = set()

    def pay(self) -> bool:
        """Return whether another recording may pay, as those before did."""
        return self.recorded < _TRIED or self.replayed >= WORTH * self.recorded


class _Known:
    """A module as it was seen, and the kinds of its calls."""

    def __init__(self, module: nn.Module, changes: int = 0, trains: bool = False) -> None:
        self.seen, self.kinds = Seen(module, trains), Kinds()
        self.changes = changes  # the last calls, in a row, that changed the module
        self.trusted: Run | None = None  # the run in which it is not looked at any more

    def is_trusted(self) -> bool:
        """Return whether a replay has stood for a call in the run that goes on."""
        return self.trusted is not None and self.trusted is current.get()

    def holds(self, shared: bool) -> bool:
        """Return whether the module is as it was seen. In a run it is not looked at once it is trusted.

        shared: whether its weights may have other values, because replays copy them.
        """
        return self.is_trusted() or (self.seen.is_alike() if shared else self.seen.holds())

    def is_left_alone(self, at: list[int]) -> bool:
        """Return whether the call that just ran left the module as it was. A call that fills a cache does not.

        at: the addresses and versions of its weights before the call.
        """
        same = self.seen.holds(at)
        self.changes = 0 if same else self.changes + 1
        return same


class Steps:
    """Calls of one function with their recordings, for several threads.

    Arguments are as for `step`. whole: whether steps inside are not recorded themselves.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        count: Count,
        recorder: Recorder,
        shared: bool = False,
        instead: Mapping[str, Any] | None = None,
        whole: bool = False,
    ) -> None:
        self._original, self._count, self._recorder, self._shared = original, count, recorder, shared
        self._repeated, self._is_whole = _within_a_whole if whole else repeated, whole
        self._instead = instead or {}
        self._lock = threading.RLock()
        self._clock = itertools.count(1)
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._kinds: weakref.WeakValueDictionary[Hashable, Kinds] = weakref.WeakValueDictionary()

    def release(self) -> None:
        with self._lock:
            self._known.clear()
            self._kinds.clear()

    def end(self, module: nn.Module) -> None:
        """Drop the large recordings of a module at the end of a loop, but not what is known of its calls."""
        with self._lock:
            known = self._known.get(module)
            if known is None:
                return
            if known.is_trusted() and not known.seen.holds():
                warnings.warn(
                    f"{type(module).__name__} has changed while it was sampled: replayed steps computed it as it was before. "
                    "Change modules between samplings, or patch with graphs=False",
                    stacklevel=3,
                )
            for kind in known.kinds.values():
                kind.end_loop()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        note = checkpoints.note()
        if note is not None and note.is_second:
            return self._again(note, module, args, kwargs)
        if _inside.get() or is_taped():  # a recording counts it as replayed
            self._count.count_replaced() if is_taped() else self._count.count_passed_on(FIRST)
            return self._original(module, *args, **kwargs)
        why = self._obstacle(module)
        if why:
            self._count.count_passed_on(why)
            return self._original(module, *args, **kwargs)
        run = None if self._shared else current.get()
        if run is not None:
            run.called[id(self), id(module)] = self, module
        recorded = kwargs | {name: value for name, value in self._instead.items() if name in kwargs}
        # Autocast's cache belongs to all threads: none may find casts there that are being recorded and not computed yet.
        with self._lock:
            call = Call(args, recorded, [])
            why, known, kind = self._classify(module, call, note)
            if note is not None and kind is not None:
                note.way = checkpoints.REPEATED
            if known is not None and kind is not None and not why:
                stands = kind.stands_for(call.tensors, run)
                if stands and kind.checked:
                    if note is not None:
                        note.way = checkpoints.REPLAYED
                    with contextlib.nullcontext() if note is None else checkpoints.hidden():
                        result = kind.replay(call.tensors, known.seen, run)
                    kind.count()
                    known.kinds.replayed += 1
                    known.trusted = run
                    self._count.count_replaced()
                    return result
                self._count.count_passed_on(FIRST)
                with self._repeated():
                    return (self._compare if stands else self._learn)(module, known, kind, call, run)
            self._count.count_passed_on(why or FIRST)
        with repeated() if kind is not None else contextlib.nullcontext():  # computed as recorded calls of its kind
            return self._original(module, *args, **kwargs)

    def _again(self, note: checkpoints.Note, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call in the second pass of a checkpoint as in its first, by the original."""
        self._count.count_passed_on(self._obstacle(module) or AGAIN)
        hidden = checkpoints.hidden() if note.way == checkpoints.REPLAYED else contextlib.nullcontext()
        with hidden, contextlib.nullcontext() if note.way == checkpoints.PLAIN else self._repeated():
            return self._original(module, *args, **kwargs)

    def _obstacle(self, module: nn.Module) -> str:
        """The reason not to replay a call that does not depend on its arguments, or ""."""
        first = next(module.parameters(), None)
        if first is None or first.device.type != self._recorder.kind:
            return ELSEWHERE
        if module.training and not self._shared:
            return "the module is in training mode"
        if is_recorded_elsewhere():
            return "recorded by others"
        if not guards.only_computes():
            return "torch compiles, traces or transforms them, or a mode is on"
        return "recorded by others" if self._recorder.is_recording() else ""

    def _classify(
        self, module: nn.Module, call: Call, note: checkpoints.Note | None
    ) -> tuple[str, _Known | None, CallKind | None]:
        """Return the reason not to replay a call, the known module and the kind of call. Append the call's tensors."""
        known = self._known.get(module)
        if known is not None and known.changes >= _RESTLESS:
            return "it changes its modules", None, None
        if known is None or not known.holds(self._shared):  # a part was exchanged, say: recordings are of no use
            known = self._known[module] = _Known(module, known.changes if known else 0, trains=self._shared)
            if self._shared:
                self._join(known)
        seen, tensors = known.seen, call.tensors
        if seen.obstacle or seen.device is None:
            return seen.obstacle, None, None
        if seen.has_hooks():
            return "a module inside has hooks", None, None
        try:
            spec = flat((call.args, call.kwargs), seen.device, tensors)
        except NotCaptured as error:
            return str(error), None, None
        needs = _needs(seen.weights, tensors)
        if needs and not (self._shared and (note is not None or checkpoints.is_recomputed())):
            return "a gradient may be wanted", None, None
        if not tensors or not guards.ordinary(tensors):
            return "no argument is an ordinary tensor" if not tensors else "an argument is no ordinary tensor", None, None
        state, kinds = self._recorder.state(seen.device), known.kinds
        key = state, spec, needs
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = GradientKind(spec, needs) if needs else CallKind(spec, self._shared)
            kind.proof = state, outline(spec), needs
            if self._shared and sum(map(room_bytes, tensors)) > MOST_COPIED:
                kind.obstacle = "many arguments, which keep a GPU busy"
            if len(kinds) > _LOOKED_AT:
                kinds.popitem(last=False)
        kinds.move_to_end(key)
        kind.used = next(self._clock)
        return kind.obstacle, known, kind

    def _join(self, known: _Known) -> None:
        """Let a module share the recordings of those of its structure. They live as long as one of its modules."""
        try:
            known.kinds = self._kinds.setdefault(known.seen.structure(), known.kinds)
        except NotCaptured as error:
            known.seen.obstacle = known.seen.obstacle or str(error)

    def _learn(self, module: nn.Module, known: _Known, kind: CallKind, call: Call, run: Run | None) -> Any:
        """Run a call as it is, and record it if one like it came before."""
        before, at, declined = keeping.states(call.tensors), known.seen.addresses(), site.declined()
        result = self._original(module, *call.args, **call.kwargs)
        if site.declined() != declined:  # the client computed a part, while its kernels are compiled
            return result
        if self._changed(kind.spec, before, call):
            kind.obstacle = "it changes its arguments"
        elif known.is_left_alone(at) and kind.is_ready(call.tensors, run):
            if self._shared and not known.kinds.pay():
                kind.obstacle = MOVES
                return result
            known.kinds.recorded += 1
            twins = known.kinds.twins if self._shared else None
            options = {"only_reads": self._is_whole, "looks": kind.proof not in known.kinds.proven}
            with checkpoints.hidden():
                kind.record(self._recorder, self._original, module, known.seen, call, twins, run, **options)
            if kind.failed:
                known.kinds.proven.discard(kind.proof)
            self._drop_oldest()
        return result

    def _drop_oldest(self) -> None:
        kinds = {kind for known in self._known.values() for kind in known.kinds.values() if kind.size is not None}
        size = 0
        for place, kind in enumerate(sorted(kinds, key=lambda x: -x.used)):
            size += kind.size or 0
            if place >= _RECORDED or (place and size > _MOST_BYTES):
                kind.drop()

    def _compare(self, module: nn.Module, known: _Known, kind: CallKind, call: Call, run: Run | None) -> Any:
        """Run a call as it is, and a replay beside it.

        Its arguments have other values than those at the recording, so a recording that kept a value is found out.
        """
        device, recorder = call.tensors[0].device, self._recorder
        before, at = [x.detach().clone() for x in call.tensors], known.seen.addresses()
        undrawn, start, declined = recorder.random_state(device), recorder.seconds(device), site.declined()
        result = self._original(module, *call.args, **call.kwargs)
        drawn, seconds = recorder.random_state(device), recorder.seconds(device) - start
        if site.declined() != declined or not known.is_left_alone(at):
            return result
        try:
            if not all(map(same_bits, before, call.tensors)):  # written to where torch counts no versions
                raise NotCaptured("it changes its arguments")
            with checkpoints.hidden():
                kind.try_out(recorder, self._original, known.seen, call, result, undrawn, seconds, run)
        except Exception as error:  # there may be no memory for another result: the caller has one already
            kind.refuse(error)
        finally:
            recorder.set_random_state(device, drawn)
        if kind.checked and not kind.obstacle:
            known.kinds.proven.add(kind.proof)
        if torch.is_autocast_enabled(device.type):
            torch.clear_autocast_cache()  # of casts that replays do not need
        return result

    @staticmethod
    def _changed(spec: Spec, before: list[tuple[int, int]], call: Call) -> bool:
        """Return whether the arguments of a call are not what they were before it."""
        after: list[Tensor] = []
        try:
            return flat((call.args, call.kwargs), call.tensors[0].device, after) != spec or keeping.states(after) != before
        except NotCaptured:
            return True


def _needs(weights: list[Tensor], tensors: list[Tensor]) -> tuple[bool, ...]:
    """The needs of gradients of each weight and of each tensor of the arguments. Empty: there is none.

    A weight that is there twice has one gradient, at its first place.
    """
    if not torch.is_grad_enabled():
        return ()
    first = {id(x): place for place, x in reversed(tuple(enumerate(weights)))}
    needs = [x.requires_grad and first[id(x)] == place for place, x in enumerate(weights)]
    needs += [x.requires_grad for x in tensors]
    return tuple(needs) if any(needs) else ()
