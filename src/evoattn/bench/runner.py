"""One contender on one problem: its passes, over as many copies of the inputs as do not fit the cache together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evoattn import testing
from evoattn.bench.peers import Peer
from evoattn.testing import Inputs

__all__ = ["Runner", "copies_for"]

_MOST_COPIES = 24
_MOST_GRAPHS = 4 << 30
"""Bytes that the scores of kept graphs may take together."""

_CACHES = {"cpu": 32 << 20, "cuda": 64 << 20}
"""Second-level cache of the device (third-level of a CPU core's share), where torch does not tell."""


def copies_for(inputs: Inputs) -> int:
    """Copies of the inputs that together are twice the cache, so that none finds its own in there."""
    device = inputs.q.device
    cache = _CACHES[device.type]
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or cache
    given = (inputs.q, inputs.k, inputs.v, inputs.pair_bias)
    size = max(1, sum(x.nbytes for x in given if x is not None))
    return max(1, min(_MOST_COPIES, -(-2 * cache // size)))


class Runner:
    """The passes of a contender, each as a function of the number of the call, which picks the copy of the inputs.

    Raises whatever the library raises when it does not take the problem.
    """

    def __init__(self, peer: Peer, inputs: Inputs) -> None:
        self.peer = peer
        self.prepared = peer.prepare(inputs)
        self.scores = inputs.case.h * inputs.k.shape[2] * inputs.do[..., 0, 0].numel()
        self.do = self.prepared.to_library(inputs.do)
        self.sets: list[tuple[Tensor | None, ...]] = []
        self.outputs: list[Tensor] = []
        self._add_set(clone=False)

    def _add_set(self, *, clone: bool) -> None:
        tensors = self.prepared.tensors
        if clone:
            tensors = tuple(None if x is None else x.detach().clone(memory_format=torch.preserve_format) for x in tensors)
        self.sets.append(tuple(None if x is None else x.detach().requires_grad_() for x in tensors))

    def rotate(self, copies: int) -> None:
        """Have this many copies of the inputs."""
        while len(self.sets) < copies:
            self._add_set(clone=True)

    def _leaves(self, number: int) -> list[Tensor]:
        return [x for x in self.sets[number % len(self.sets)] if x is not None]

    def forward(self, number: int) -> Tensor:
        """As in training: what the backward needs is kept."""
        return self.prepared.attend(*self.sets[number % len(self.sets)])

    @property
    def most_calls(self) -> int:
        """Of one pass in a row: a compiled graph gives its memory away in its backward, so every call needs one of its own."""
        if not self.peer.compiles:
            return 200
        graph = int(self.peer.score_copies * self.scores * self.do.element_size())
        return max(2, min(32, _MOST_GRAPHS // max(1, graph)))

    def prepare(self, name: str, calls: int) -> None:
        """Before `calls` calls of a pass: the graphs that the backward runs on, where they are not there yet."""
        if name == "backward" and (self.peer.compiles or not self.outputs):
            self.outputs.clear()
            self.outputs += [self.forward(number) for number in range(calls if self.peer.compiles else len(self.sets))]

    def backward(self, number: int) -> tuple[Tensor, ...]:
        """Of outputs that `prepare` made: of each once where that is compiled, else again and again."""
        if not self.peer.compiles:
            o = self.outputs[number % len(self.outputs)]
            return torch.autograd.grad(o, self._leaves(number), self.do, retain_graph=True)
        o, self.outputs[number] = self.outputs[number], self.do
        return torch.autograd.grad(o, self._leaves(number), self.do)

    def both(self, number: int) -> tuple[Tensor, ...]:
        """A training step's share: forward and backward."""
        return torch.autograd.grad(self.forward(number), self._leaves(number), self.do)

    def passes(self) -> dict[str, Callable[[int], object]]:
        """By name."""
        return {"forward": self.forward, "backward": self.backward, "both": self.both}

    def forward_error(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """The output against the truth."""
        return _errors({"o": self.prepared.from_library(self.forward(0))}, expected)

    def gradient_errors(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """Every gradient against the truth."""
        gradients = self.both(0)
        values = {
            name: self.prepared.from_library(gradient) for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=False)
        }
        if len(gradients) == 4:
            values["dpair_bias"] = gradients[3].reshape(expected["dpair_bias"].shape)
        return _errors(values, expected)


def _errors(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Over the rows n that the truth has: of a bound it has only the first."""
    return {name: testing.relative_error(value[:, : expected[name].shape[1]], expected[name]) for name, value in values.items()}
