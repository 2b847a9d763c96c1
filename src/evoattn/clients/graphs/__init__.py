"""Steps that a client repeats, such as a denoiser's, as CUDA graphs: for small inputs the host sets the pace.

`step` stands for the `forward` of a module. For each kind of call, which has one signature of arguments and one state of torch:

| call | what returns the result | what happens besides |
|---|---|---|
| 1 | the original | |
| 2 | the original | the call is recorded after it ran |
| 3 | the original | the recording is replayed; it is dropped unless the bits are the same and the replay is faster |
| from 4 on | a replay | |

Blocks of a trunk share a recording: it is made of a copy of one of them, into which a replay writes the weights of the block
that is called. `trees` tells calls apart by their arguments and `modules` by their modules; `recorder` records, and
`call_kinds` has the recording of each kind of call.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients.calls import residues
from evoattn.clients.graphs.call_kinds import Call, CallKind
from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.recorder import Recorder
from evoattn.clients.graphs.states import is_plain
from evoattn.clients.graphs.trees import NotCaptured, Spec, flat, same_bits
from evoattn.clients.site import Count, Site, is_taped, named, repeated
from evoattn.core import guards, keeping

FIRST = "among the first calls of their kind"
"""The reason for calls that were not replayed, but may be the next time."""

ELSEWHERE = "not on a GPU"
"""The reason for calls that were not replayed on a machine without a GPU."""

_RECORDED = 4
"""Recordings kept for one function. Each has a memory pool, with the weights as autocast casts or as layers split them."""

_MOST_BYTES = 4 << 30
"""Bytes of them all. The newest is kept, whatever its size."""

_MOST = 512
"""Residues up to which blocks are recorded: the GPU sets the pace of more. A guess."""

_RESTLESS = 3
"""Calls in a row that change their own module, after which it is not looked at any more."""

_LOOKED_AT = 64
"""Kinds of calls that are remembered for one module."""


def blocks(*names: str, method: str = ".forward", **options: Any) -> tuple[Site, ...]:
    """The blocks "module:Class", whose `method` is recorded once for all of one structure; options as for `step`."""
    return named(functools.partial(step, shared=True, most=_MOST, **options), *names, method=method)


def step(
    original: Callable[..., Any],
    count: Count,
    recorder: Recorder | None = None,
    *,
    shared: bool = False,
    most: int | None = None,
    skip: Callable[..., str] = lambda *_, **__: "",
    instead: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A module's `forward` that is replayed from a recording where that does the same.

    Args:
        recorder: by default of CUDA graphs.
        shared: whether modules that differ only in their weights share a recording.
        most: on a GPU a pair representation of more residues is not recorded: the GPU sets the pace there, and a recording
            would only take memory.
        skip: takes the arguments of a call and returns the reason not to record it, or "".
        instead: values of keyword arguments in place of those that a call passes, if it may be recorded: a block that writes
            into its input cannot be.
    """
    steps = Steps(original, count, recorder or Recorder(), shared, instead)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        why = skip(self, *args, **kwargs)
        if not why and most is not None and (residues((*args, *kwargs.values()), 3) or 0) > most:
            why = f"more than {most} residues, which keep a GPU busy"
        if why:
            count.count_passed_on(why)
            return original(self, *args, **kwargs)
        return steps.call(self, args, kwargs)

    forward._evoattn_steps = steps  # type: ignore[attr-defined]
    return forward


def loop(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A method that calls steps many times with the same weights.

    It is a sampling in the precision of the patch.

    Recordings inside may keep weights as autocast has cast them, or as layers have split them (`core.keeping`). Small ones stay
    for another run, which has them cast and split the weights anew. Large ones are dropped: what comes next needs the memory.

    Modules may not change in a run. They are compared with their earlier state until a replay stands for a call, and once more
    at the end: looking at each step takes as long as a third of a step.
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        this = _Run()
        token = _loop.set(this)
        try:
            with keeping.sampling(count.precision):
                return original(self, *args, **kwargs)
        finally:
            for steps, module in this.called.values():
                steps.end(module)
            _loop.reset(token)

    return run


class _Run:
    """The run of a `loop`, with the steps that it called and their modules."""

    def __init__(self) -> None:
        self.called: dict[tuple[int, int], tuple[Steps, nn.Module]] = {}


_loop: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("loop", default=None)
"""The run that a call is in."""

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)
"""True inside a larger call that is replayed as a whole, or may be."""


def in_loop() -> bool:
    """Return whether a `loop` runs."""
    return _loop.get() is not None


@contextlib.contextmanager
def _within_a_whole() -> Iterator[None]:
    token = _inside.set(True)
    try:
        with repeated():
            yield
    finally:
        _inside.reset(token)


def release(function: Callable[..., Any]) -> None:
    """Drop the recordings of a function that `step` made; others have none."""
    if (steps := _steps_of(function)) is not None:
        steps.release()


def _steps_of(function: Callable[..., Any]) -> Steps | None:
    return getattr(function, "_evoattn_steps", None)


def whole(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    """A function that a `loop` calls at each step, recorded as a whole.

    Steps that it calls are not recorded themselves then. Where it cannot be recorded, they are.

    Args:
        function: takes a module first. It draws no random numbers, and nobody writes to what all steps of a run share.
        part: the name of the only module inside that it calls. Of the module itself it reads plain attributes.
    """
    owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
    steps = Steps(lambda inner, _, *args: function(owners[inner](), *args), Count(), Recorder(), whole=True)

    def run(module: nn.Module, *args: Any) -> Any:
        if _loop.get() is None:
            return function(module, *args)
        inner = getattr(module, part)
        owners[inner] = weakref.ref(module)
        read = {name: value for name, value in vars(module).items() if is_plain(value)}
        return steps.call(inner, ((read, *map(id, vars(type(module)).values())), *args), {})

    run._evoattn_steps = steps  # type: ignore[attr-defined]
    return run


Kinds = collections.OrderedDict[Any, CallKind]
"""The kinds of calls of modules that share recordings: one module, or all of one structure."""


class _Known:
    """A module as it was seen, and the kinds of its calls."""

    def __init__(self, module: nn.Module, changes: int = 0) -> None:
        self.seen, self.kinds = Seen(module), Kinds()
        self.changes = changes  # the last calls, in a row, that changed the module
        self.trusted: object | None = None  # the loop in which it is not looked at any more

    def is_left_alone(self) -> bool:
        """Return whether the call that just ran left the module as it was. A call that fills a cache does not."""
        same = self.seen.holds()
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
            if known.trusted is not None and known.trusted is _loop.get() and not known.seen.holds():
                warnings.warn(
                    f"{type(module).__name__} has changed while it was sampled: replayed steps computed it as it was before. "
                    "Change modules between samplings, or patch with graphs=False",
                    stacklevel=3,
                )
            for kind in known.kinds.values():
                kind.end_loop()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _inside.get():  # a recording counts it as replayed
            self._count.count_replaced() if is_taped() else self._count.count_passed_on(FIRST)
            return self._original(module, *args, **kwargs)
        why = self._obstacle(module)
        if why:
            self._count.count_passed_on(why)
            return self._original(module, *args, **kwargs)
        run = _loop.get()
        if run is not None:
            run.called[id(self), id(module)] = self, module
        recorded = kwargs | {name: value for name, value in self._instead.items() if name in kwargs}
        # Autocast's cache belongs to all threads: none may find casts there that are being recorded and not computed yet.
        with self._lock:
            call = Call(args, recorded, [])
            why, known, kind = self._classify(module, call)
            if known is not None and kind is not None and not why:
                stands = kind.stands_for(call.tensors, run)
                if stands and kind.checked:
                    result = kind.replay(call.tensors, known.seen, run)
                    kind.count()
                    known.trusted = run
                    self._count.count_replaced()
                    return result
                self._count.count_passed_on(FIRST)
                with self._repeated():
                    return self._compare(module, known, kind, call) if stands else self._learn(module, known, kind, call)
            self._count.count_passed_on(why or FIRST)
        with repeated() if kind is not None else contextlib.nullcontext():  # computed as recorded calls of its kind
            return self._original(module, *args, **kwargs)

    def _obstacle(self, module: nn.Module) -> str:
        """The reason not to replay a call that does not depend on its arguments, or ""."""
        first = next(module.parameters(), None)
        if first is None or first.device.type != self._recorder.kind:
            return ELSEWHERE
        if module.training:
            return "the module is in training mode"
        if not guards.only_computes():
            return "torch compiles, traces or transforms them, or a mode is on"
        return "recorded by others" if self._recorder.is_recording() else ""

    def _classify(self, module: nn.Module, call: Call) -> tuple[str, _Known | None, CallKind | None]:
        """Return the reason not to replay a call, the known module and the kind of call. Append the call's tensors."""
        known = self._known.get(module)
        if known is not None and known.changes >= _RESTLESS:
            return "it changes its modules", None, None
        trusted = known is not None and known.trusted is not None and known.trusted is _loop.get()
        if known is None or not (
            trusted or known.seen.holds()
        ):  # weights were loaded, or a part was exchanged: recordings are of no use
            known = self._known[module] = _Known(module, known.changes if known else 0)
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
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*seen.weights, *tensors)):
            return "a gradient may be wanted", None, None
        if not tensors or not guards.ordinary(tensors):
            return "no argument is an ordinary tensor" if not tensors else "an argument is no ordinary tensor", None, None
        key, kinds = (self._recorder.state(seen.device), spec), known.kinds
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = CallKind(spec)
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

    def _learn(self, module: nn.Module, known: _Known, kind: CallKind, call: Call) -> Any:
        """Run a call as it is, and record it if one like it came before."""
        before = keeping.states(call.tensors)
        result = self._original(module, *call.args, **call.kwargs)
        if self._changed(kind.spec, before, call):
            kind.obstacle = "it changes its arguments"
        elif known.is_left_alone() and kind.is_ready(call.tensors):
            kind.record(self._recorder, self._original, module, call, self._shared, _loop.get(), self._is_whole)
            self._drop_oldest()
        return result

    def _drop_oldest(self) -> None:
        kinds = {kind for known in self._known.values() for kind in known.kinds.values() if kind.size is not None}
        size = 0
        for place, kind in enumerate(sorted(kinds, key=lambda x: -x.used)):
            size += kind.size or 0
            if place >= _RECORDED or (place and size > _MOST_BYTES):
                kind.drop()

    def _compare(self, module: nn.Module, known: _Known, kind: CallKind, call: Call) -> Any:
        """Run a call as it is, and a replay beside it.

        Its arguments have other values than those at the recording, so a recording that kept a value is found out.
        """
        device, recorder = call.tensors[0].device, self._recorder
        before = [x.clone() for x in call.tensors]
        undrawn, start = recorder.random_state(device), recorder.seconds(device)
        result = self._original(module, *call.args, **call.kwargs)
        drawn, middle = recorder.random_state(device), recorder.seconds(device)
        if not known.is_left_alone():
            return result
        try:
            if not all(map(same_bits, before, call.tensors)):  # written to where torch counts no versions
                raise NotCaptured("it changes its arguments")
            recorder.set_random_state(device, undrawn)
            kind.replay(call.tensors, known.seen, _loop.get(), begins=True)  # the first one also loads the graph
            if not torch.equal(recorder.random_state(device), drawn):
                raise NotCaptured("it draws other random numbers")
            recorder.set_random_state(device, undrawn)
            between = recorder.seconds(device)
            replayed = kind.replay(call.tensors, known.seen, _loop.get())
            kind.check(result, replayed, device, middle - start, recorder.seconds(device) - between)
        except Exception as error:  # there may be no memory for another result: the caller has one already
            kind.refuse(error)
        finally:
            recorder.set_random_state(device, drawn)
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
