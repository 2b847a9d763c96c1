"""Steps that a client repeats, such as a denoiser's, as CUDA graphs: for small inputs the host sets the pace.

`step` stands for the `forward` of a module. For each kind of call, which has one signature of arguments and one state of torch:

| call | what returns the result | what happens besides |
|---|---|---|
| 1 | the original | |
| 2 | the original | the call is recorded after it ran |
| 3 | the original | the recording is replayed; it is dropped unless the bits are the same and the replay is faster |
| from 4 on | a replay | |

Blocks of a trunk share a recording: it is made of a copy of one of them, into which a replay writes the weights of the block
that is called. They are recorded in training too, both passes if autograd sees the call.

`steps` has the calls of one function, `call_kinds` the recording of each kind of call, and `gradients` those of both passes;
`checkpoints` tells of calls that an activation checkpoint computes twice. `recorder` records, and `twins` has the copies of
blocks. `trees` tells calls apart by their arguments and `modules` by their modules.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from evoattn.clients.calls import LONG, residues
from evoattn.clients.graphs.recorder import Recorder
from evoattn.clients.graphs.states import Values
from evoattn.clients.graphs.steps import FIRST, Run, Steps, current
from evoattn.clients.site import Count, Site, named
from evoattn.core import keeping

__all__ = ["FIRST", "Steps", "blocks", "in_loop", "loop", "release", "step", "whole"]


def blocks(*names: str, method: str = ".forward", **options: Any) -> tuple[Site, ...]:
    """The blocks "module:Class", whose `method` is recorded once for all of one structure; options as for `step`."""
    return named(functools.partial(step, shared=True, most=LONG, **options), *names, method=method)


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
        shared: whether modules that differ only in their weights share a recording. It reads copies of all arguments, so it
            stands for calls of other tensors too, in a run of a `loop` and in none. Others are recorded in inference alone.
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


def loop(
    original: Callable[..., Any], count: Count, precision: Callable[[str], str] = lambda asked: asked
) -> Callable[..., Any]:
    """A method that calls steps many times with the same weights.

    It is a sampling in the precision of the patch, or in what `precision` makes of that when a run begins.

    Recordings inside may keep weights as autocast has cast them, or as layers have split them (`core.keeping`). Small ones stay
    for another run, which has them cast and split the weights anew. Large ones are dropped: what comes next needs the memory.

    Modules may not change in a run. They are compared with their earlier state until a replay stands for a call, and once more
    at the end: looking at each step takes as long as a third of a step.
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        this = Run()
        token = current.set(this)
        try:
            with keeping.sampling(precision(count.precision)):
                return original(self, *args, **kwargs)
        finally:
            try:
                for steps, module in this.called.values():
                    steps.end(module)
            finally:
                this.called.clear()  # what stays of a run keeps no module
                current.reset(token)

    return run


def in_loop() -> bool:
    """Return whether a `loop` runs."""
    return current.get() is not None


def release(function: Callable[..., Any]) -> None:
    """Drop the recordings of a function that `step` made; others have none."""
    steps: Steps | None = getattr(function, "_evoattn_steps", None)
    if steps is not None:
        steps.release()


def whole(function: Callable[..., Any], part: str, loops: str) -> Callable[..., Any]:
    """A function that a `loop` calls at each step, recorded as a whole.

    Steps that it calls are not recorded themselves then. Where it cannot be recorded, they are. Recordings are dropped if an
    attribute of the module or of its classes is another one.

    Args:
        function: takes a module first. It draws no random numbers, and nobody writes to what all steps of a run share.
        part: the name of the only module inside that it calls.
        loops: the name of the method that is the loop. Somebody who measures it may have wrapped it.
    """
    owner: contextvars.ContextVar[nn.Module] = contextvars.ContextVar("owner")
    steps = Steps(lambda _, *args: function(owner.get(), *args), Count(), Recorder(), whole=True)
    looks: weakref.WeakKeyDictionary[nn.Module, Values] = weakref.WeakKeyDictionary()

    def run(module: nn.Module, *args: Any) -> Any:
        inner = getattr(module, part)
        if not in_loop() or inner._forward_hooks or inner._forward_pre_hooks:
            return function(module, *args)
        values = [x for kind in type(module).__mro__ for x in vars(kind).values()]
        for name, value in vars(module).items():
            if name != loops:
                values += value.values() if type(value) is dict else (value,)
        seen = looks.get(module)
        if seen is None or not seen.are(values):
            steps.release()
            looks[module] = Values(values)
        token = owner.set(module)
        try:
            return steps.call(inner, args, {})
        finally:
            owner.reset(token)

    run._evoattn_steps = steps  # type: ignore[attr-defined]
    return run
