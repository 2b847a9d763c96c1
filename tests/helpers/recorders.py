"""A recorder of steps that needs no GPU: it traces, and replays the operations that it saw, as a CUDA graph does."""

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree

from evoattn.clients.graphs.recorder import Recording, Shared, modes, scout
from evoattn.core.guards import Onlooker

__all__ = ["Again", "Traced", "seen"]

TENSOR = object()


class Traced:
    """Tensors that the step reads stand in the recording by reference, all other values as they were.

    Attributes:
        recorded: how many recordings it made.
        looked: whether each was asked to look before.
        fails: raised instead of recording.
        takes: the seconds of everything between two looks at the clock, one after the other.
    """

    kind = "cpu"

    def __init__(self) -> None:
        self.recorded = 0
        self.looked: list[bool] = []
        self.fails: Exception | None = None
        self.takes: list[float] = []
        self._time, self._shared = 0.0, Shared()

    def state(self, device: torch.device) -> tuple[Any, ...]:
        return modes("cpu")

    def is_recording(self) -> bool:
        return False

    def seconds(self, device: torch.device) -> float:
        self._time += self.takes.pop(0) if self.takes else 0.0
        return self._time

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def record(
        self,
        run: Callable[[], Any],
        device: torch.device,
        *,
        draws: bool = False,
        once: bool = False,
        looks: bool = True,
        **_: bool,
    ) -> Recording:
        self.looked.append(looks)
        recording = self._recording(run, device, draws, once, looks)
        self.recorded += 1
        if once:
            replay: list[Callable[[], object]] = [recording.replay]
            context = contextvars.copy_context()

            def begin() -> None:
                again = context.run(self._recording, run, device, draws, once)
                replay[:] = [again.replay]
                leaves = (_pytree.tree_leaves(x.result) for x in (recording, again))
                results.extend((x, y) for x, y in zip(*leaves, strict=True) if isinstance(x, torch.Tensor))

            def both() -> None:
                replay[0]()
                for old, new in results:
                    old.copy_(new)

            results: list[tuple[torch.Tensor, torch.Tensor]] = []
            return Recording(both, recording.result, begin=begin)
        return recording

    def shared(self, device: torch.device) -> Shared:
        return self._shared

    def record_both(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device
    ) -> tuple[Recording, Recording]:
        """Replays compute both passes anew, each into the tensors of the first time."""
        before = torch.get_rng_state()
        try:
            scout(functools.partial(seen, lambda: backward(forward())), device, True)
            if self.fails is not None:
                raise self.fails
            first = latest = forward()
            gradients = backward(first)
        finally:
            torch.set_rng_state(before)
        results, modes_of = [x.detach() for x in first.results], contextvars.copy_context()
        low = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def replay_forward() -> None:
            nonlocal latest
            as_a_graph = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)  # which counts no versions
            with torch.enable_grad(), torch.autocast("cpu", low[1], enabled=low[0], cache_enabled=False), as_a_graph:
                latest = modes_of.run(forward)
            for x, y in zip(results, latest.results, strict=True):
                if x.data_ptr() != y.data_ptr():
                    x.copy_(y.detach())

        def replay_backward() -> None:
            for x, y in zip(gradients, backward(latest._replace(cotangents=first.cotangents)), strict=True):
                if x is not None:
                    x.copy_(y)

        self.recorded += 1
        return Recording(replay_forward, first), Recording(replay_backward, gradients)

    def _recording(
        self, run: Callable[[], Any], device: torch.device, draws: bool, once: bool, looks: bool = True
    ) -> Recording:
        before = torch.get_rng_state()
        torch.clear_autocast_cache()
        low = torch.autocast("cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), cache_enabled=once)
        try:
            with low, mock.patch.object(proxy_tensor, "disable_autocast_cache", contextlib.nullcontext):
                return self._record(run, device, draws, looks)
        finally:
            torch.set_rng_state(before)
            torch.clear_autocast_cache()

    def _record(self, run: Callable[[], Any], device: torch.device, draws: bool, looks: bool) -> Recording:
        if looks:
            scout(functools.partial(seen, run), device, draws)  # which leaves casts of weights in autocast's cache, if it is on
        if self.fails is not None:
            raise self.fails
        shape: list[Any] = []

        def tensors() -> list[torch.Tensor]:
            leaves, spec = _pytree.tree_flatten(run())
            shape[:] = [TENSOR if isinstance(x, torch.Tensor) else x for x in leaves], spec
            return [x for x in leaves if isinstance(x, torch.Tensor)]

        traced = proxy_tensor.make_fx(tensors)()
        outputs = traced()
        casts = [x for x in vars(traced).values() if isinstance(x, torch.Tensor) and x.dtype == torch.get_autocast_dtype("cpu")]
        read = _weakly(traced)
        addresses = {name: x().data_ptr() for name, x in read.items()}  # type: ignore[union-attr]

        def replay(_: object = casts) -> None:  # casts that autocast kept are in the recording's own memory
            for name, x in read.items():
                setattr(traced, name, x())
                assert getattr(traced, name).data_ptr() == addresses[name], "a graph would read where the tensor was"
            for x, y in zip(outputs, traced(), strict=True):
                x.copy_(y)
            for name in read:
                setattr(traced, name, None)

        values, (leaves, spec) = iter(outputs), shape
        return Recording(replay, _pytree.tree_unflatten([next(values) if x is TENSOR else x for x in leaves], spec))


def seen(run: Callable[[], Any]) -> Any:
    """Run something under a second mode, so that torch has to see operators, as under the tracer.

    A CPU computes without them what no GPU can repeat.
    """
    with Onlooker():  # type: ignore[no-untyped-call]
        return run()


def _weakly(traced: Any) -> dict[str, weakref.ref[torch.Tensor]]:
    """Have a trace hold the tensors that it reads as a CUDA graph does: not at all.

    Constants of the traced code are no tensors that are read: a GPU gets them as numbers.
    """
    lifted = torch.ops.aten.lift_fresh_copy.default
    read_from = [node for node in traced.graph.nodes if node.op == "get_attr"]
    names = {str(node.target) for node in read_from if not all(user.target is lifted for user in node.users)}
    read = {name: weakref.ref(getattr(traced, name)) for name in names}
    for name in names:
        setattr(traced, name, None)
    return read


class Again(Traced):
    """A recorder that does again what the function does. A layer of evoattn.nn that is traced may round otherwise on a CPU."""

    def record(self, run: Any, device: torch.device, *, draws: bool = False, once: bool = False, **options: bool) -> Any:
        before = torch.get_rng_state()
        result = run()
        torch.set_rng_state(before)

        def replay() -> None:
            for old, new in zip(_pytree.tree_leaves(result), _pytree.tree_leaves(run()), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        return Recording(replay, result)
