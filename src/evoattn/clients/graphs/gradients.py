"""Recordings of calls that autograd differentiates: a graph of the forward, and one of the backward.

The backward reads what the forward left in memory that all such recordings share. Only calls inside a checkpoint are recorded:
it keeps nothing of their forward but the inputs. A reentrant one computes the call again, and its backward follows at once. In
others the backward of most calls comes after the forward of the next one, and begins with a replay of their own.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evoattn.clients.graphs.call_kinds import Call, CallKind, check_result
from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.recorder import Recorder, Recording
from evoattn.clients.graphs.trees import NotCaptured, Spec, copied, copies, flat, nested, same_bits
from evoattn.clients.graphs.twins import Twin
from evoattn.clients.site import Count, taped
from evoattn.core import keeping
from evoattn.dispatch.autograd import once_differentiable

_NEAR = 1e-2
"""The largest relative difference, by the L2 norm, of a gradient of a replay. Kernels that add in no fixed order differ by
less; one that read a value of an earlier call differs by more."""

_LITTLE = 2.0**-8
"""The relative size of a change of the cotangents that shows how much of a gradient is rounding."""

_NOISE = 10.0
"""Differences that this change makes, so many of which may be added."""

_recorders: list[int] = []
"""Threads that record a backward, or compare one. Another thread may compute it, and waits for nobody then."""


def is_recorded_elsewhere() -> bool:
    """Return whether another thread records a backward, which this thread may be computing."""
    here = threading.get_ident()
    return any(x != here for x in tuple(_recorders))


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Record or compare a backward in this thread. Whatever autograd saves inside is of no interest to the caller's hooks.

    A result that its own function saves is detached: else they would keep each other, and with them nodes of autograd that
    belong to another stream, which a recording cannot wait for.
    """
    here = threading.get_ident()
    _recorders.append(here)
    try:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
            yield
    finally:
        _recorders.remove(here)


class _Made(NamedTuple):
    """The result of a forward, and room for the cotangents, which each replay of the backward reads."""

    spec: Spec
    results: list[Tensor]
    cotangents: list[Tensor]


class Passes:
    """A recorded forward and its backward.

    Args:
        spec: of the arguments.
        needs: whether each weight and each tensor of the arguments needs a gradient.
        run: a call of the twin.
        twin: whose weights the graphs read.
        tensors: of a call.

    Attributes:
        result_spec: of its result.
        differentiable: whether each tensor of the result has a gradient.
        rooms: where replays read the arguments.
        calls: that were taped in the forward.
    """

    def __init__(
        self,
        recorder: Recorder,
        run: Callable[..., Any],
        spec: Spec,
        needs: tuple[bool, ...],
        twin: Twin,
        tensors: list[Tensor],
    ) -> None:
        self.needs, self._twin = needs, twin
        self._recorder, self._device = recorder, tensors[0].device
        self._shared = recorder.shared(self._device)
        self.calls: list[tuple[Count, str]] = []
        self.rooms = _leaves(tensors, needs[len(twin.weights) :])
        sources = [x for x, need in zip((*twin.weights, *self.rooms), needs, strict=True) if need]

        def forward() -> _Made:
            self.calls.clear()
            args, kwargs = nested(spec, iter(self.rooms))
            results: list[Tensor] = []
            with taped(self.calls):
                result_spec = flat(run(*args, **kwargs), self._device, results)
            return _Made(result_spec, results, [torch.empty_like(x) for x in results if x.requires_grad])

        def backward(made: _Made) -> tuple[Tensor | None, ...]:
            outputs = [x for x in made.results if x.requires_grad]
            return torch.autograd.grad(outputs, sources, made.cotangents, allow_unused=True)

        with torch.enable_grad():
            self._forward, self._backward = recorder.record_both(forward, backward, self._device)
        made: _Made = self._forward.result
        check_result(made.spec)
        self.result_spec, self._cotangents = made.spec, made.cotangents
        self.differentiable = [x.requires_grad for x in made.results]
        self._results = [x.detach() for x in made.results]
        self._gradients = _placed(self._backward.result, needs)
        self._forward.result = None  # with the graph of autograd

    @property
    def recording(self) -> Recording:
        """That of the forward, with the bytes of both."""
        return self._forward

    def random_state(self) -> Tensor:
        return self._recorder.random_state(self._device)

    @torch.no_grad()
    def forward(self, weights: list[Tensor], tensors: list[Tensor]) -> tuple[list[Tensor], int]:
        """Replay the forward of a call. Return its results, and the turn that its backward names."""
        with self._shared.lock:
            return self._replay(weights, tensors)

    def _replay(self, weights: list[Tensor], tensors: list[Tensor]) -> tuple[list[Tensor], int]:
        self._shared.turn = 0  # also if something raises
        self._twin.write(weights)
        copied(self.rooms, tensors)
        self._forward.replay()
        self._shared.turns += 1
        turn = self._shared.turn = self._shared.turns
        return copies(self._results), turn

    @torch.no_grad()
    def backward(
        self,
        turn: int,
        state: Tensor,
        weights: list[Tensor],
        tensors: list[Tensor],
        cotangents: list[Tensor],
        same: bool = True,
    ) -> list[Tensor | None]:
        """Replay the backward of a call. The forward is replayed before it, with its random numbers, unless it was the last.

        Args:
            turn: of the forward.
            state: that the random numbers had before it.
            weights, tensors: its inputs.
            cotangents: gradients of the results that have one.
            same: whether nobody has written to its inputs since.

        Raises:
            RuntimeError: the forward would have to be replayed, and cannot be any more.
        """
        with self._shared.lock:
            if self._shared.turn != turn:
                if not same or not self._forward.is_valid():
                    why = "a recording failed" if same else "an input without a gradient was written to"
                    raise RuntimeError(
                        f"{why} between the forward and the backward of a call, so it has no backward any more; "
                        "run the step again"
                    )
                now = self.random_state()
                try:
                    self._recorder.set_random_state(self._device, state)
                    self._replay(weights, tensors)
                finally:
                    self._recorder.set_random_state(self._device, now)
            copied(self._cotangents, cotangents)
            self._shared.turn = 0  # the backward overwrites what the forward left
            self._backward.replay()
            there = [x is not None for x in self._gradients]
            return _placed(copies([x for x in self._gradients if x is not None]), there)


class _Replayed(torch.autograd.Function):
    """The results of a replay, as functions of all weights and of the tensors of the arguments."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.passes, ctx.count, ctx.state = passes, count, passes.random_state()
        results, ctx.turn = passes.forward(list(inputs[:count]), list(inputs[count:]))
        ctx.save_for_backward(*(x for x, need in zip(inputs, passes.needs, strict=True) if need))
        ctx.others = [None if need else x for x, need in zip(inputs, passes.needs, strict=True)]
        ctx.at = keeping.states(x for x in ctx.others if x is not None)
        ctx.mark_non_differentiable(*(x for x, has in zip(results, passes.differentiable, strict=True) if not has))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        passes: Passes = ctx.passes
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if x is None else x for x in ctx.others]
        wanted = [x for x, has in zip(cotangents, passes.differentiable, strict=True) if has]
        same = keeping.states(x for x in ctx.others if x is not None) == ctx.at
        found = passes.backward(ctx.turn, ctx.state, inputs[: ctx.count], inputs[ctx.count :], wanted, same)
        return None, None, *found


class GradientKind(CallKind):
    """Calls with one `Spec` that autograd differentiates by the same weights and arguments.

    Args:
        spec: of the arguments.
        needs: whether each weight, in the order of `Seen.weights`, and each tensor of the arguments needs a gradient.
    """

    def __init__(self, spec: Spec, needs: tuple[bool, ...]) -> None:
        self._passes: Passes | None = None
        super().__init__(spec, copies=True)
        self.needs = needs

    def drop(self, *_: Any) -> None:
        super().drop()
        self._passes = None  # a backward that is still to come keeps it

    def record(
        self, recorder: Recorder, run: Callable[..., Any], module: nn.Module, seen: Seen, call: Call, *args: Any, **options: Any
    ) -> None:
        recorder.shared(call.tensors[0].device).forget()  # the twin gets other weights
        with _recording():
            super().record(recorder, run, module, seen, call, *args, **options)

    def _record(
        self,
        recorder: Recorder,
        run: Callable[..., Any],
        tensors: list[Tensor],
        *_: object,
    ) -> None:
        assert self._twin is not None
        passes = Passes(recorder, run, self.spec, self.needs, self._twin, tensors)
        self._passes, self._recording, self._calls = passes, passes.recording, passes.calls
        self._rooms = list(passes.rooms)
        self._places = [None] * len(tensors)
        self._recordings += 1

    def replay(self, tensors: list[Tensor], seen: Seen, loop: object | None, begins: bool = False) -> Any:
        """Replay the call, and return its result, which autograd differentiates."""
        assert self._passes is not None
        weights = seen.weights
        results = _Replayed.apply(self._passes, len(weights), *weights, *tensors)  # type: ignore[no-untyped-call]
        return nested(self._passes.result_spec, iter(results))

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
        """Compare results, and gradients by random cotangents, with those of the twin; and the seconds of both passes."""
        assert self._passes is not None and self._twin is not None
        passes, weights, device = self._passes, seen.weights, call.tensors[0].device
        drawn = recorder.random_state(device)
        with _recording():
            recorder.set_random_state(device, undrawn)
            passes.forward(weights, call.tensors)  # loads the graph; the twin has the weights of the module now
            if not torch.equal(recorder.random_state(device), drawn):
                raise NotCaptured("it draws other random numbers")
            start = recorder.seconds(device)
            recorder.set_random_state(device, undrawn)
            expected, cotangents = self._by_twin(run, call, device)
            middle = recorder.seconds(device)
            recorder.set_random_state(device, undrawn)
            again, _ = self._by_twin(run, call, device, [x * (1 + _LITTLE * torch.randn_like(x)) for x in cotangents])
            between = recorder.seconds(device)
            recorder.set_random_state(device, undrawn)
            state = recorder.random_state(device)
            replayed, turn = passes.forward(weights, call.tensors)
            gradients = passes.backward(turn, state, weights, call.tensors, cotangents)
            end = recorder.seconds(device)
        tensors: list[Tensor] = []
        same = flat(result, device, tensors) == passes.result_spec and all(map(same_bits, tensors, replayed))
        self.judge(same and all(map(_is_near, gradients, expected, again)), middle - start, end - between)

    def _by_twin(
        self, run: Callable[..., Any], call: Call, device: torch.device, cotangents: list[Tensor] | None = None
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """The gradients of the twin, None for those that are not needed; and the cotangents, random ones if none are given."""
        assert self._twin is not None
        weights = self._twin.weights
        tensors = _leaves(call.tensors, self.needs[len(weights) :])
        args, kwargs = nested(self.spec, iter(tensors))
        results: list[Tensor] = []
        with taped([]), torch.enable_grad():
            flat(run(self._twin.module, *args, **kwargs), device, results)
        outputs = [x for x in results if x.requires_grad]
        cotangents = [torch.randn_like(x) for x in outputs] if cotangents is None else cotangents
        sources = [x for x, need in zip((*weights, *tensors), self.needs, strict=True) if need]
        with torch.autocast(device.type, enabled=False):  # as outside of it, where a backward runs
            found = torch.autograd.grad(outputs, sources, cotangents, allow_unused=True)
        return _placed(found, self.needs), cotangents


@torch.no_grad()
def _leaves(tensors: list[Tensor], needs: tuple[bool, ...]) -> list[Tensor]:
    """Copies of tensors, leaves of a graph of autograd, of which some need a gradient."""
    return [x.requires_grad_(need) for x, need in zip(copies(tensors), needs, strict=True)]


def _placed(gradients: Sequence[Tensor | None], there: Sequence[bool]) -> list[Tensor | None]:
    """The gradients at the places where there is one, None at the others."""
    each = iter(gradients)
    return [next(each) if is_there else None for is_there in there]


def _is_near(x: Tensor | None, y: Tensor | None, again: Tensor | None) -> bool:
    """Return whether a gradient x is y but for rounding. again: the gradient by cotangents that are a little different.

    Some gradients are nothing but rounding, such as that of a number that is added to all scores of a softmax. These are other
    ones by the little difference, and by another order of sums.
    """
    if x is None or y is None or again is None:
        return x is y
    limit = _NEAR * _norm(y) + _NOISE * _norm(y, again)
    return (math.isfinite(limit) and _norm(x, y) <= limit) or same_bits(x, y)


def _norm(x: Tensor, minus: Tensor | None = None) -> float:
    """The L2 norm of a gradient, or of a difference, which float16 could not hold."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return float((x.to(dtype) if minus is None else x.to(dtype) - minus.to(dtype)).norm())
