"""Contenders and runners. A contender prepares the inputs of a problem. A runner calls its passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn import testing
from evoattn.bench.clock import MOST_CALLS

_MOST_COPIES = 24
_MOST_GRAPHS = 4 << 30
"""Bytes that the scores of all kept graphs may take."""

WRONG = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3, torch.float32: 2e-3, torch.float64: 1e-10}
"""Relative errors above these are wrong results, not rounding. The limit of float32 lets TF32 pass."""

_CACHES = {"cpu": 32 << 20, "cuda": 64 << 20}
"""Bytes of the device's second-level cache (of a CPU core's share of the third level), if torch does not know them."""


class Prepared(NamedTuple):
    """A problem as a contender computes it, ready to run.

    Args:
        compute: `tensors` -> the output, in the contender's layout.
        tensors: inputs of a call that get gradients, such as q, k, v and pair_bias (or None), in that layout.
        to_library: brings a tensor of the output's layout into the contender's.
        from_library: the inverse.
        parameters: further tensors that every call reads, and that get gradients.
        names: of `tensors`, then of `parameters`; those of one name are compared with the truth together.
    """

    compute: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]
    to_library: Callable[[Tensor], Tensor] = lambda x: x
    from_library: Callable[[Tensor], Tensor] = lambda x: x
    parameters: tuple[Tensor, ...] = ()
    names: tuple[str, ...] = ("q", "k", "v", "pair_bias")


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to compute a problem: a backend of evoattn, a layer, a library, or plain torch.

    Args:
        name: what command lines and records call it.
        title: what tables and pictures call it.
        prepare: makes it ready for the inputs of a problem. It raises ImportError if a library is absent, RefusesError if it
            does not take the problem.
        score_copies: how many tensors of all scores forward and backward hold, in the problem's dtype; 0 if it holds none.
        compiles: whether the first call of every problem compiles for seconds.
    """

    name: str
    title: str
    prepare: Callable[[Any], Prepared]
    score_copies: float = 0
    compiles: bool = False


class UntimedError(Exception):
    """A contender has no time. `status` is the record's word for it; the message is the reason."""

    status: str


class RefusesError(UntimedError):
    """A library does not take this problem, by its own contract."""

    status = "refused"


class WrongError(UntimedError):
    """A result is further from float64 than rounding explains."""

    status = "wrong"


class LeftOutError(UntimedError):
    """There is not enough memory."""

    status = "left out"


def copies_for(tensors: tuple[Tensor | None, ...], device: torch.device) -> int:
    """Number of copies of these tensors that fill the cache twice, so that no call finds its inputs in the cache."""
    cache = _CACHES[device.type]
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or cache
    size = max(1, sum(x.nbytes for x in tensors if x is not None))
    return max(1, min(_MOST_COPIES, -(-2 * cache // size)))


class Runner:
    """The passes of a contender, each as a function of the number of the call, which picks the copy of the inputs.

    Raises whatever the library raises when it does not take the problem.

    Args:
        contender: computes the passes.
        inputs: of the problem, with a cotangent `do`.
        graph_bytes: of the scores in one graph; they bound the graphs that a compiled backward keeps.
    """

    def __init__(self, contender: Contender, inputs: Any, graph_bytes: int = 0) -> None:
        self.contender, self.graph_bytes = contender, graph_bytes
        self.prepared = contender.prepare(inputs)
        self.do = self.prepared.to_library(inputs.do)
        self.sets: list[tuple[Tensor | None, ...]] = []
        self.outputs: list[Tensor] = []
        self._copy(1)

    def _copy(self, copies: int) -> None:
        """Make this many copies of the tensors. The first are the tensors themselves."""
        for number in range(len(self.sets), copies):
            detached = (None if x is None else x.detach() for x in self.prepared.tensors)
            cloned = (x if x is None or not number else x.clone(memory_format=torch.preserve_format) for x in detached)
            self.sets.append(tuple(None if x is None else x.requires_grad_() for x in cloned))

    def rotate(self) -> None:
        """Make more copies of the tensors than the cache holds. One is enough if scores, which are larger, are in memory."""
        if self.prepared.tensors and not self.contender.score_copies:
            self._copy(copies_for(self.prepared.tensors, self.do.device))

    def _gradients(self, o: Tensor, number: int, *, retain: bool = False) -> tuple[Tensor, ...]:
        leaves = [x for x in (*self.sets[number % len(self.sets)], *self.prepared.parameters) if x is not None]
        return torch.autograd.grad(o, leaves, self.do.to(o.dtype), retain_graph=retain)

    def forward(self, number: int = 0) -> Tensor:
        """The forward of training: it keeps what the backward needs."""
        return self.prepared.compute(*self.sets[number % len(self.sets)])

    def backward(self, number: int = 0) -> tuple[Tensor, ...]:
        """Gradients of outputs that `prepare` made. A compiled graph serves once, any other again and again."""
        if not self.contender.compiles:
            return self._gradients(self.outputs[number % len(self.outputs)], number, retain=True)
        o, self.outputs[number] = self.outputs[number], self.do
        return self._gradients(o, number)

    def both(self, number: int = 0) -> tuple[Tensor, ...]:
        """A training step's share: forward and backward."""
        return self._gradients(self.forward(number), number)

    def most_calls(self, name: str) -> int:
        """The most calls of a pass in a round. A compiled graph frees its memory in its backward, so each call needs one."""
        if name != "backward" or not self.contender.compiles:
            return MOST_CALLS
        return max(2, min(32, _MOST_GRAPHS // max(1, self.graph_bytes)))

    def prepare(self, name: str, calls: int) -> None:
        """Make the graphs that `calls` calls of a backward run on, unless they exist."""
        if name == "backward" and (self.contender.compiles or not self.outputs):
            self.outputs.clear()
            self.outputs += [self.forward(number) for number in range(calls if self.contender.compiles else len(self.sets))]

    def errors(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """The relative errors of the output and of every gradient against the truth."""
        return self.output_error(expected) | self.gradient_errors(expected)

    def output_error(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """The relative error of the output against the truth."""
        return {"o": testing.relative_error(self.prepared.from_library(self.forward()), expected["o"])}

    def gradient_errors(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """The relative error of every gradient against the truth."""
        parts: dict[str, list[Tensor]] = {}
        for name, gradient in zip(self.prepared.names, self.both(), strict=False):
            parts.setdefault(f"d{name}", []).append(gradient)
        errors = {}
        for name, gradients in parts.items():
            if name in ("dq", "dk", "dv"):
                value = self.prepared.from_library(gradients[0])
            else:  # one tensor in the shape of the truth, or all of them flattened in a row
                value = torch.cat([x.flatten() for x in gradients]).reshape(expected[name].shape)
            errors[name] = testing.relative_error(value, expected[name])
        return errors


def check(errors: dict[str, float], dtype: torch.dtype, roundings: int = 1) -> None:
    """Raise WrongError with the value of the largest error if that error is too large for so many roundings to a dtype."""
    name, limit = max(errors, key=lambda key: errors[key]), roundings * WRONG[dtype]
    if errors[name] > limit:
        raise WrongError(f"{name} is wrong: relative error {errors[name]:.1e} against float64, at most {limit:.0e} is rounding")
