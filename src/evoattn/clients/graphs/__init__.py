"""Steps that a client repeats, such as a denoiser's, as CUDA graphs: for small inputs the host sets the pace.

`step` stands for the `forward` of a module. The first two calls of a signature run as they were, and the second is recorded
after it ran. The third runs as it was and is replayed too: only if both returned the same bits, the recording is used from then
on. `trees` tells calls apart by their arguments and `modules` by their weights; `recorder` records; `kept` keeps.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients.graphs.kept import Kind, addresses
from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.recorder import CudaRecorder, Recorder
from evoattn.clients.graphs.trees import NotCaptured, Spec, flat
from evoattn.clients.site import Count, Site
from evoattn.run import guards

__all__ = ["ELSEWHERE", "FIRST", "Steps", "loop", "loops", "release", "sites", "step"]

FIRST = "among the first calls of their kind"
"""Why calls ran as they were that may be replayed the next time."""

ELSEWHERE = "not on a GPU"
"""Why calls ran as they were on a machine without a GPU."""

_RECORDED = 4
"""Recordings kept for one function. Each has a memory pool, with the weights as autocast casts them."""

_LOOKED_AT = 64
"""Kinds of calls that are remembered for one module."""


def sites(*names: str) -> tuple[Site, ...]:
    """The steps "module:Class", whose `forward` is recorded."""
    return tuple(Site(module, f"{name}.forward", step) for module, _, name in (x.partition(":") for x in names))


def step(original: Callable[..., Any], count: Count, recorder: Recorder | None = None) -> Callable[..., Any]:
    """A module's `forward` that is replayed from a recording where that does the same."""
    steps = Steps(original, count, recorder or CudaRecorder())

    @functools.wraps(original)
    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *given, **named)
        return steps.call(self, given, named)

    forward._evoattn_steps = steps  # type: ignore[attr-defined]
    return forward


def loops(*names: str) -> tuple[Site, ...]:
    """The methods "module:Class.method" in which the modules of the class repeat their steps."""
    return tuple(Site(module, name, loop, counted=False) for module, _, name in (x.partition(":") for x in names))


def loop(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A method after which recordings of the modules inside are dropped: what comes next needs the memory."""

    @functools.wraps(original)
    def run(self: nn.Module, *given: Any, **named: Any) -> Any:
        try:
            return original(self, *given, **named)
        finally:
            if not torch.compiler.is_compiling():
                for module in self.children():
                    if (steps := _of(type(module).forward)) is not None:
                        steps.drop(module)

    return run


def release(function: Callable[..., Any]) -> None:
    """Drop the recordings of a function that `step` made; others have none."""
    if (steps := _of(function)) is not None:
        steps.release()


def _of(function: Callable[..., Any]) -> Steps | None:
    steps: Steps | None = getattr(function, "_evoattn_steps", None)
    return steps


class _Known:
    """A module as it was seen, and the kinds of its calls."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = Seen(module)
        self.kinds: collections.OrderedDict[Any, Kind] = collections.OrderedDict()


class Steps:
    """Calls of one function, with what was recorded of them. Threads may call at the same time.

    Args:
        original: `forward` of a class.
        count: of replayed calls, and of those that ran as they were, with the reason.
        recorder: what records.
    """

    def __init__(self, original: Callable[..., Any], count: Count, recorder: Recorder) -> None:
        self._original, self._count, self._recorder = original, count, recorder
        self._lock = threading.RLock()
        self._clock = itertools.count(1)
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()

    def release(self) -> None:
        """Drop all recordings."""
        with self._lock:
            self._known.clear()

    def drop(self, module: nn.Module) -> None:
        """Drop the recordings of a module, but not what is known of its calls."""
        with self._lock:
            if module in self._known:
                for kind in self._known[module].kinds.values():
                    kind.drop()

    def call(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The module's `forward` of these arguments."""
        why = self._obstacle(module)
        if why:
            self._count.other(why)
            return self._original(module, *given, **named)
        # Autocast's cache belongs to all threads: none may find casts there that are being recorded and not computed yet.
        with self._lock:
            tensors: list[Tensor] = []
            why, kind, spec = self._look(module, given, named, tensors)
            stands = kind is not None and not why and kind.stands_for(tensors)
            if kind is not None and stands and kind.checked:
                made = kind.replay(tensors)
                kind.count()
                self._count.one()
                return made
            self._count.other(why or FIRST)
            run = functools.partial(self._original, module)
            if kind is not None and not why:
                learn = self._compare if stands else self._learn
                return learn(kind, run, given, named, spec, tensors)
        return run(*given, **named)

    def _obstacle(self, module: nn.Module) -> str:
        """Why a call runs as it is, if that can be told without a look at its arguments; else ""."""
        first = next(module.parameters(), None)
        if first is None or first.device.type != self._recorder.kind:
            return ELSEWHERE
        if module.training:
            return "the module is in training mode"
        if not guards.only_computes():
            return "torch compiles, traces or transforms them, or a mode is on"
        return "recorded by others" if self._recorder.is_recording() else ""

    def _look(
        self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[str, Kind | None, Spec]:
        """Why a call runs as it is, or the kind that it is of; its tensors are appended."""
        known = self._known.get(module)
        if known is None or not known.seen.holds():  # weights were loaded, or a part was exchanged: recordings are of no use
            known = self._known[module] = _Known(module)
        seen = known.seen
        if seen.obstacle or seen.device is None:
            return seen.obstacle, None, ()
        if seen.is_heard():
            return "a module inside has hooks", None, ()
        try:
            spec = flat((given, named), seen.device, tensors)
        except NotCaptured as error:
            return str(error), None, ()
        if torch.is_grad_enabled() and (seen.wants_gradients() or any(x.requires_grad for x in tensors)):
            return "a gradient may be wanted", None, ()
        if not tensors or not guards.ordinary(tensors):
            return "no argument is an ordinary tensor" if not tensors else "an argument is no ordinary tensor", None, ()
        key = (self._recorder.state(seen.device), spec)
        kind = known.kinds.get(key)
        if kind is None:
            kind = known.kinds[key] = Kind()
            if len(known.kinds) > _LOOKED_AT:
                known.kinds.popitem(last=False)
        known.kinds.move_to_end(key)
        kind.used = next(self._clock)
        return kind.obstacle, kind, spec

    def _learn(
        self,
        kind: Kind,
        run: Callable[..., Any],
        given: tuple[Any, ...],
        named: dict[str, Any],
        spec: Spec,
        tensors: list[Tensor],
    ) -> Any:
        """Run a call as it is, and record it if one like it came before."""
        before = addresses(tensors)
        made = run(*given, **named)
        if self._changed(spec, before, (given, named), tensors[0].device):
            kind.obstacle = "it changes its arguments"
        elif kind.is_ready(tensors):
            kind.record(self._recorder, run, spec, tensors)
            self._drop_oldest()
        return made

    def _compare(
        self,
        kind: Kind,
        run: Callable[..., Any],
        given: tuple[Any, ...],
        named: dict[str, Any],
        spec: Spec,
        tensors: list[Tensor],
    ) -> Any:
        """Run a call as it is, and a replay beside it. Its values are not those that were recorded."""
        device, seconds = tensors[0].device, self._recorder.seconds
        start = seconds(device)
        made = run(*given, **named)
        middle = seconds(device)
        try:
            kind.replay(tensors)  # the first one also loads the graph
            between = seconds(device)
            replayed = kind.replay(tensors)
            kind.check(made, replayed, device, middle - start, seconds(device) - between)
        except Exception as error:  # there may be no memory for another result: the caller has one already
            kind.refuse(error)
        if torch.is_autocast_enabled(device.type):
            torch.clear_autocast_cache()  # of casts that replays do not need
        return made

    @staticmethod
    def _changed(spec: Spec, before: list[tuple[int, int]], arguments: Any, device: torch.device) -> bool:
        """Whether the arguments of a call are not what they were before it."""
        after: list[Tensor] = []
        try:
            return flat(arguments, device, after) != spec or addresses(after) != before
        except NotCaptured:
            return True

    def _drop_oldest(self) -> None:
        recorded = [kind for known in self._known.values() for kind in known.kinds.values() if kind.is_recorded]
        for kind in sorted(recorded, key=lambda x: x.used)[:-_RECORDED]:
            kind.drop()
