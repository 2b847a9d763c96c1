"""Run a block of a client with and without the patch, and compare outputs and gradients."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import evoattn
from clients.blocks import Block, Call, Options, Problem
from evoattn.clients import patching
from evoattn.clients.site import repeated

__all__ = ["DTYPES", "LIMITS", "RESIDUES", "Outcome", "Result", "Watch", "compare", "errors", "outcome"]

RESIDUES = (16, 33, 64, 97)
DTYPES = (torch.float64, torch.float32)

LIMITS = {torch.float64: (1e-8, 1e-8), torch.float32: (1e-5, 1e-4)}
"""Of outputs, by the largest element, and of all gradients together, in the L2 norm."""


@dataclasses.dataclass
class Result:
    """The results of the comparisons of a block in one dtype.

    Attributes:
        outputs: the largest error of an output, as a fraction of its largest element.
        gradients: the largest error of all gradients together, as a fraction of their L2 norm.
        calls: how often ours ran.
        sites: how often ours ran at each site.
        faults: what is beyond a bound, or was not computed by ours.
    """

    outputs: float = 0.0
    gradients: float = 0.0
    calls: int = 0
    sites: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)


def compare(
    client: str,
    block: Block,
    dtype: torch.dtype,
    residues: Iterable[int] = RESIDUES,
    tell: Callable[[str], None] | None = None,
) -> Result:
    """Compare ours with the original at each length, chunked and not, with the kernel switches on and off.

    float64 compares residues alone, because -1e9 leaves a score only seven digits; float32 compares padding too.

    Args:
        client: a name that `evoattn.patch` takes.
        block: the block.
        dtype: of parameters, inputs, and whatever the client computes in between.
        residues: the lengths.
        tell: is told what runs next.

    Returns:
        The largest errors, and the faults in words.
    """
    result = Result()
    for length in residues:
        for way in block.ways:
            originals: dict[str, Outcome] = {}
            for switch in ({}, *block.switches):
                what = _words(block.name, dtype, length, {**way, **switch})
                if tell:
                    tell(what)
                like = block.like(length, switch)
                if str(like) not in originals:
                    originals[str(like)], _ = _run(block, dtype, length, {**way, **like})
                for layers in (False, True) if _has_layers(client) else (False,):
                    # repeated: else a CPU leaves small calls to the client
                    with evoattn.patch(client, layers=layers, graphs=False, wait=True) as patched, repeated():
                        found, theirs = _run(block, dtype, length, {**way, **switch})
                    result.calls += patched.calls
                    result.sites.update(patched.calls_by_site)
                    how = f"{what}, whole layers" if layers else what
                    result.faults += [f"{how}: {fault}" for fault in _not_ours(patched, theirs)]
                    _judge(result, how, errors(originals[str(like)], found), LIMITS[dtype])
    return result


def _has_layers(client: str) -> bool:
    """True if the patch of a client takes whole layers too."""
    return bool(patching.client(client).layers)


def _judge(result: Result, what: str, errors: tuple[float, float], limits: tuple[float, float]) -> None:
    """Take the errors of outputs and gradients into the result."""
    for name, error, limit in zip(("outputs", "gradients"), errors, limits, strict=True):
        if error > limit:
            result.faults.append(f"{what}: {name} are off by {error:.1e}, the bound is {limit:.0e}")
    result.outputs, result.gradients = max(result.outputs, errors[0]), max(result.gradients, errors[1])


def _words(name: str, dtype: torch.dtype, length: int, options: Options) -> str:
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"{name} in {str(dtype).removeprefix('torch.')} at {length} residues{given}"


def _not_ours(patched: evoattn.Patch, theirs: collections.Counter[str]) -> Iterator[str]:
    """The client's own results."""
    if not patched.calls:
        yield "no call was ours"
    for reason, calls in patched.passed_on.items():
        yield f"{calls} calls went to the original: {reason}"
    for place, calls in theirs.items():
        yield f"the client took {calls} softmaxes itself, in {place}"


Outcome = tuple[list[Tensor], list[Tensor]]
"""Outputs and gradients, without the positions that do not count."""


def outcome(block: Block, dtype: torch.dtype, length: int, options: Options) -> Outcome:
    """Outputs and gradients of a block, as it is."""
    return _run(block, dtype, length, options)[0]


def _run(block: Block, dtype: torch.dtype, length: int, options: Options) -> tuple[Outcome, collections.Counter[str]]:
    """Build the block, call it, and differentiate it; also count the softmaxes of the client's own code."""
    problem = Problem(length, dtype)
    call = block.call(problem)
    with Watch(dtype) as watch:
        outputs = call.run(**call.leaves, **options)
        kept = [_residues(x, call, name, dtype) for x, name in zip(outputs, call.outputs, strict=True)]
        cotangents = [problem.normal(*x.shape).detach() for x in kept]
        wanted = [*call.leaves.values(), *call.module.parameters()]
        gradients = torch.autograd.grad(kept, wanted, cotangents, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True)]
    of_leaves = [_residues(g, call, name, dtype) for name, g in zip(call.leaves, found, strict=False)]
    return ([x.detach() for x in kept], of_leaves + found[len(of_leaves) :]), watch.theirs


def _residues(x: Tensor, call: Call, name: str, dtype: torch.dtype) -> Tensor:
    """The positions of a leaf or output that are compared: in float64 without padding."""
    if name not in call.masks or dtype == torch.float32:
        return x
    mask = call.masks[name].bool()
    return x[mask.expand(x.shape[: mask.ndim])]


def errors(expected: Outcome, found: Outcome) -> tuple[float, float]:
    """Of the outputs, by the largest element of each, and of all gradients in one vector. What is NaN is off by infinity."""
    outputs = [float((b - a).abs().max() / a.abs().max()) for a, b in zip(expected[0], found[0], strict=True)]
    theirs, ours = (torch.cat([g.flatten().double() for g in gradients]) for _, gradients in (expected, found))
    gradients = float((ours - theirs).norm() / theirs.norm())
    return max(_or_infinite(x) for x in outputs), _or_infinite(gradients)


def _or_infinite(x: float) -> float:
    return math.inf if math.isnan(x) else x


_AVERAGING = "PairWeightedAveraging"
"""Modules of this name take a softmax that is no attention, because it has no q and no k."""


class Watch(TorchFunctionMode):
    """Keep a float64 client in float64, and count the softmaxes that its own code takes.

    Clients cast to float32 before an attention, which bfloat16 needs. A cast of a float64 tensor in their code stays float64;
    what evoattn casts is left alone.
    """

    _ATTENTION = frozenset(
        {
            torch.softmax,
            torch.nn.functional.softmax,
            Tensor.softmax,
            torch.nn.functional.scaled_dot_product_attention,
        }
    )

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._double = dtype == torch.float64
        self.theirs: collections.Counter[str] = collections.Counter()

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in self._ATTENTION:
            frames = _of_client()
            if frames and not any(type(x.f_locals.get("self")).__name__.endswith(_AVERAGING) for x in frames):
                self.theirs[frames[0].f_code.co_filename] += 1
        elif self._double and func in (Tensor.float, Tensor.to) and _of_client():
            if func is Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            given = {key: torch.float64 if x is torch.float32 else x for key, x in given.items()}
        return func(*args, **given)


def _of_client() -> list[types.FrameType]:
    """The frames of the client's code that call torch, innermost first, or none if it is evoattn that calls."""
    found: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(2)
    while frame:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in ("clients", "evoattn"):
            break
        if package not in ("contextlib", "torch"):
            found.append(frame)
        frame = frame.f_back
    return found
