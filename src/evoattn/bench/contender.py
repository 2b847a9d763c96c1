"""Contenders, runners and statuses.

A contender prepares the inputs of a problem. A runner calls its passes. A status says why a contender has no time.
"""

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
        scores: of the problem; they bound the graphs that a compiled backward keeps.
    """

    def __init__(self, contender: Contender, inputs: Any, scores: int = 0) -> None:
        self.contender, self.scores = contender, scores
        self.prepared = contender.prepare(inputs)
        self.do = self.prepared.to_library(inputs.do)
        self.sets: list[tuple[Tensor | None, ...]] = []
        self.outputs: list[Tensor] = []
        self.rotate(1)

    def rotate(self, copies: int | None = None) -> None:
        """Make this many copies of the tensors. The default is more than the cache holds, or one if scores are in memory."""
        if copies is None:  # scores alone are larger than the cache
            tensors = self.prepared.tensors
            copies = 1 if self.contender.score_copies or not tensors else copies_for(tensors, self.do.device)
        for number in range(len(self.sets), copies):
            detached = (None if x is None else x.detach() for x in self.prepared.tensors)
            cloned = (x if x is None or not number else x.clone(memory_format=torch.preserve_format) for x in detached)
            self.sets.append(tuple(None if x is None else x.requires_grad_() for x in cloned))

    def _leaves(self, number: int) -> list[Tensor]:
        return [x for x in (*self.sets[number % len(self.sets)], *self.prepared.parameters) if x is not None]

    def _gradients(self, o: Tensor, number: int, *, retain: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, self._leaves(number), self.do.to(o.dtype), retain_graph=retain)

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
        graph = int(self.contender.score_copies * self.scores * self.do.element_size())
        return max(2, min(32, _MOST_GRAPHS // max(1, graph)))

    def prepare(self, name: str, calls: int) -> None:
        """Make the graphs that `calls` calls of a backward run on, unless they exist."""
        if name == "backward" and (self.contender.compiles or not self.outputs):
            self.outputs.clear()
            self.outputs += [self.forward(number) for number in range(calls if self.contender.compiles else len(self.sets))]

    def errors(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """The output and every gradient against the truth."""
        return self.forward_error(expected) | self.gradient_errors(expected)

    def forward_error(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """The output against the truth."""
        return _errors({"o": self.prepared.from_library(self.forward())}, expected)

    def gradient_errors(self, expected: dict[str, Tensor]) -> dict[str, float]:
        """Every gradient against the truth."""
        parts: dict[str, list[Tensor]] = {}
        for name, gradient in zip(self.prepared.names, self.both(), strict=False):
            parts.setdefault(f"d{name}", []).append(gradient)
        values = {}
        for name, (first, *others) in parts.items():
            if name in ("dq", "dk", "dv"):
                values[name] = self.prepared.from_library(first)
            else:  # one tensor in the shape of the truth, or all of them flattened in a row
                values[name] = torch.cat([x.flatten() for x in (first, *others)]).reshape(expected[name].shape)
        return _errors(values, expected)


def _errors(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: testing.relative_error(x, expected[name]) for name, x in values.items()}


def worst(errors: dict[str, float], dtype: torch.dtype, roundings: int = 1) -> str | None:
    """Name the value with the largest error, if that error is too large for rounding. None if all are right."""
    if not errors:
        return "nothing of it was verified"
    name, limit = max(errors, key=lambda key: errors[key]), roundings * WRONG[dtype]
    if errors[name] <= limit:
        return None
    return f"{name} is wrong: relative error {errors[name]:.1e} against float64, at most {limit:.0e} is rounding"


class RefusesError(Exception):
    """A library does not take this problem, by its own contract."""


def out_of_memory(error: BaseException) -> bool:
    """On a CPU torch raises a plain RuntimeError, with one text on Linux and another elsewhere."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    texts = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def status(error: Exception) -> str:
    """A record's word for a contender that raised: absent, refused or failed."""
    if isinstance(error, ImportError):
        return "absent"
    return "refused" if isinstance(error, RefusesError) else "failed"


def one_line(error: BaseException) -> str:
    """The first line of a message, short enough for a table."""
    if isinstance(error, ModuleNotFoundError):
        return f"{(error.name or 'it').split('.')[0]} is not installed"
    if out_of_memory(error):
        return "out of memory"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {line}" if line and not isinstance(error, RefusesError) else line or repr(error)
    return text if len(text) <= 200 else text[:197] + "..."
