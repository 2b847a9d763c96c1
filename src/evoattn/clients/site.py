"""Clients: their functions that compute attention, the replacements of these, and counts of calls."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from evoattn.clients.kinds import KINDS, TRANSFORMER
from evoattn.core import attempts, keeping
from evoattn.core.devices import installed_version
from evoattn.dispatch.distributed import is_distributed
from evoattn.nn.submodules import has_global_hooks, has_hooks_inside

if TYPE_CHECKING:
    from evoattn.clients.blocks import KnownBlock, SplitBlock
    from evoattn.clients.known import KnownLayer


class Count:
    """Counts of a site's calls that the replacement computed, and of those passed on to the original, by reason.

    Calls inside code that torch.compile made are not counted: a number that changes would have it compiled anew. `tell` is told
    of each call: "" if the replacement computes it, else the reason. `precision` is what the patch asks of a replacement that
    opens a sampling, and `waits` whether calls wait for their kernels to be compiled.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, precision: str = "exact", waits: bool = True) -> None:
        self.precision, self.waits = precision, waits
        self.replaced = 0
        self.passed_on: collections.Counter[str] = collections.Counter()
        self._tell = tell
        self._asked: dict[Hashable, list[attempts.Compilation]] = {}  # by kind of call: what is not compiled yet

    def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns that computes a call by kernels. `PassedOn` if they are being compiled meanwhile.

        Then the call has left no trace: no count, no random number drawn, nothing that a sampling keeps. Calls wait that
        `_must_wait`. What another thread draws from the same generators meanwhile is drawn again.
        """
        if self.waits or not _has_kernels() or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return function(*args, **kwargs)
        if keeping.is_capturing():
            with attempts.waiting():
                return function(*args, **kwargs)
        if self.is_compiling(*args, **kwargs):
            return PassedOn(COMPILING)
        values = list(_values((args, kwargs)))
        if _must_wait(values):
            return function(*args, **kwargs)
        states, notes = _random_states(values), list[tuple[Count, str]]()
        try:
            with attempts.attempt() as attempt, _noted(notes):
                result = function(*args, **kwargs)
        except attempts.NotCompiled:
            _set_random_states(states)
            self._asked[_kind_of_call(args, kwargs)] = attempt.waits_for
            return PassedOn(COMPILING)
        if self._asked:
            self._asked.pop(_kind_of_call(args, kwargs), None)
        for count, reason in notes:
            count._note(reason)
        return result

    def is_compiling(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether kernels of such a call, as `compute` takes it, were not there at its last try and still are not."""
        if not self._asked or torch.is_grad_enabled():
            return False
        return not all(x.done() for x in self._asked.get(_kind_of_call(args, kwargs), ()))

    def count_replaced(self) -> None:
        """Count a call that the replacement computes."""
        self._note("")

    def count_passed_on(self, reason: str) -> None:
        """Count a call that the original computes, and why."""
        self._note(reason)

    def _note(self, reason: str) -> None:
        """Count a call now, or put it on the tape of a recording."""
        global _declined
        if torch.compiler.is_compiling():
            return
        if reason == COMPILING:
            _declined += 1
        notes = _tape.get()
        if notes is None:
            notes = _notes.get()
        if notes is None:
            self.add(reason)
        else:
            notes.append((self, reason))

    def add(self, reason: str) -> None:
        """Count a call that the replacement computes, if the reason is "", or that the original computes."""
        if reason:
            self.passed_on[reason] += 1
        else:
            self.replaced += 1
        if self._tell is not None:
            self._tell(reason)


class PassedOn(NamedTuple):
    """The result of a call that the client's own function has to compute. The reason is counted unless it is ""."""

    reason: str = ""


COMPILING = "its kernels were being compiled meanwhile"
"""The reason for calls that did not wait for their kernels."""

_declined = 0
"""Calls of this process that did not wait for their kernels."""


def declined() -> int:
    """Return how many calls of this process did not wait for their kernels."""
    return _declined


def _kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """A key of the kernels of a call by one function: dtypes and shapes of tensors, and classes of modules."""

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape
        if isinstance(value, dict):
            return tuple((name, kind(x)) for name, x in value.items())
        return tuple(map(kind, value)) if isinstance(value, list | tuple) else type(value)

    return kind(args), kind(kwargs)


def _values(value: Any) -> Iterator[Any]:
    """The values in lists, tuples and dicts."""
    if isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _values(inner)
    else:
        yield value


def _must_wait(values: list[Any]) -> bool:
    """Return whether a call of these arguments must not be given up.

    Its backward would wait if a module is training: a checkpoint calls it without gradients. Hooks would see tensors that have
    no values. And of several processes all have to do the same.
    """
    modules = [x for x in values if isinstance(x, torch.nn.Module)]
    if any(x.training for x in modules) or any(map(is_distributed, values)):
        return True
    return has_global_hooks() or any(map(has_hooks_inside, modules))


def _has_kernels() -> bool:
    """Return whether a call may launch kernels, which may have to be compiled: a GPU is in use."""
    return bool(torch.cuda.is_initialized())


def _random_states(values: list[Any]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """torch's generators and their states, on the CPU and on the GPUs of some values. No operation of torch's is called."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        devices = {x.device.index for x in values if isinstance(x, torch.Tensor) and x.is_cuda} | {torch.cuda.current_device()}
        generators += [torch.cuda.default_generators[x] for x in sorted(devices)]
    return [(generator, generator.get_state()) for generator in generators]


def _set_random_states(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


_notes: contextvars.ContextVar[list[tuple[Count, str]] | None] = contextvars.ContextVar("notes", default=None)


@contextlib.contextmanager
def _noted(calls: list[tuple[Count, str]]) -> Iterator[None]:
    """Note calls in a list: whether they count is not known yet."""
    token = _notes.set(calls)
    try:
        yield
    finally:
        _notes.reset(token)


_tape: contextvars.ContextVar[list[tuple[Count, str]] | None] = contextvars.ContextVar("tape", default=None)


@contextlib.contextmanager
def taped(calls: list[tuple[Count, str]]) -> Iterator[None]:
    """Do not count calls, but note them in a list: they are of a recording, which counts them each time it is replayed."""
    token = _tape.set(calls)
    try:
        yield
    finally:
        _tape.reset(token)


def is_taped() -> bool:
    """Return whether calls are noted for a recording."""
    return _tape.get() is not None


_repeated: contextvars.ContextVar[bool] = contextvars.ContextVar("repeated", default=False)


@contextlib.contextmanager
def repeated() -> Iterator[None]:
    """Calls inside are recorded as CUDA graphs, or will be. So layers that are slow to launch are used all the same."""
    token = _repeated.set(True)
    try:
        yield
    finally:
        _repeated.reset(token)


def is_repeated() -> bool:
    """Return whether the call is one inside `repeated`."""
    return _repeated.get()


Replace = Callable[[Callable[..., Any], Count], Callable[..., Any]]
"""Makes a replacement of a function from it and from what counts its calls."""


def replacement(function: Callable[..., Any]) -> Replace:
    """Make a replacement of a function with the client's arguments that returns the result of a call, or `PassedOn`."""

    def replace(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = count.compute(function, *args, **kwargs)
            if not isinstance(result, PassedOn):
                count.count_replaced()
                return result
            if result.reason:
                count.count_passed_on(result.reason)
            return original(*args, **kwargs)

        return run

    return replace


@dataclasses.dataclass(frozen=True)
class Site:
    """A function that computes attention or a layer, or that decides which one does.

    Args:
        module: its module, by its full name.
        name: the function in the module, or "Class.function"; or "Class", to check all of its source.
        replace: makes what stands there instead. None: it is only checked, because the replacements rely on it.
        missing: the site is replaced only if this module is not installed.
        counted: whether its calls are counted. Not if it calls another site, which counts them, or computes nothing of `KINDS`.
        kind: what a call of it computes, of `KINDS`.
    """

    module: str
    name: str
    replace: Replace | None = None
    missing: str | None = None
    counted: bool = True
    kind: str = KINDS[0]

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def find(self) -> tuple[Any, str, Callable[..., Any] | None]:
        """Import the module. Return the owner of the function (module or class), its name there, and it or None."""
        *classes, name = self.name.split(".")
        owner: Any = importlib.import_module(self.module)
        for part in classes:
            owner = getattr(owner, part, None)
        return owner, name, None if owner is None else vars(owner).get(name)


def named(replace: Replace, *names: str, method: str = ".forward", counted: bool = True) -> tuple[Site, ...]:
    """Sites of one replacement, by names "module:Class", with their `method`."""
    pairs = (name.partition(":") for name in names)
    return tuple(Site(module, f"{name}{method}", replace, counted=counted) for module, _, name in pairs)


@dataclasses.dataclass(frozen=True)
class Client:
    """A program whose attention can be replaced.

    Args:
        name: what `patch` takes.
        distribution: its name in the package registry.
        sites: the functions to replace, and those that are only checked.
        values: module, name and value of what says that a kernel is there, or is one; set where nothing is there.
        layers: whole layers that `evoattn.nn` can compute, replaced besides if that is asked for.
        steps: what a prediction repeats, recorded as CUDA graphs if that is asked for.
        command: functions of the client's command around its predictions, replaced by `evoattn run` with graphs alone.
        known: layers and blocks that `evoattn.nn` can compute, by the full name of the class.
        split: blocks whose pair representation can be split over processes, by the full name of the class.
        linears, norms: full names of classes that compute the same as torch's, if they set no precision.
    """

    name: str
    distribution: str
    sites: tuple[Site, ...]
    values: tuple[tuple[str, str, Any], ...] = ()
    layers: tuple[Site, ...] = ()
    steps: tuple[Site, ...] = ()
    command: tuple[Site, ...] = ()
    known: Mapping[str, KnownLayer | KnownBlock] = dataclasses.field(default_factory=dict)
    split: Mapping[str, SplitBlock] = dataclasses.field(default_factory=dict)
    linears: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    @property
    def installed(self) -> str | None:
        """The version that is installed, or None."""
        return installed_version(self.distribution)

    @property
    def has_transformers(self) -> bool:
        """True if its diffusion transformers can be replaced. They alone have the precision of a patch."""
        return any(site.kind == TRANSFORMER and site.replace for site in self.layers)

    def parts(self, layers: bool = True, graphs: bool = True, command: bool = False) -> dict[str, tuple[Site, ...]]:
        """The sites by part, in the order of replacement. Each stands over those before, and passes on what it cannot do."""
        parts = {"attention": self.sites, "layers": self.layers, "steps": self.steps, "command": self.command}
        wanted = ("attention", *["layers"] * layers, *["steps"] * graphs, *["command"] * command)
        return {part: parts[part] for part in wanted}
