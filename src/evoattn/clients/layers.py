"""Whole layers of a client, from norm to output, computed by `evoattn.nn`: what `patch(name, layers=True)` replaces besides."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evoattn.clients.calls import is_float32_on_gpu, residues
from evoattn.clients.site import Count, Site, is_repeated, named
from evoattn.nn import AttentionPairBias, Transition, TriangleMultiplication
from evoattn.nn.known_calls import ClientsOwn, UnknownArgument
from evoattn.nn.replace import Ours, Settings, by_name, has_settings, overridden, positions, settings

__all__ = ["FEW", "layer", "sites"]

FEW = 288
"""Residues below which blocks are left to clients: launching kernels takes longer there than running them.

A guess. At 256 residues ours are slower in some cases, at 1,024 in none, and nothing between was measured.

Blocks of 256 residues on hosts with an H100, in ms, the client's own and ours:

| client | inference | training step |
|---|---|---|
| Boltz-2 | 5.7, 7.0 | 14.2, 15.5 |
| OpenFold-3 | 6.9, 4.8 | 18.1, 15.9 |
| Protenix | 5.2, 4.6 | 13.1, 16.9 |
| ESMFold, four blocks | 17.2, 17.7 | 54.0, 63.0 |
"""

_FEW_IN_SINGLE_TRACK = 1024
"""Residues below which a float32 attention with pair bias is left to the client in inference.

With 16 heads these are the 2^24 scores of `calls.host_sets_pace`.

200 steps of OpenFold-3's denoiser took, on an H100, 12.1 s as installed and 16.4 s with ours at 152 residues, 11.9 and 15.8 s
at 304. The trunk at 152 residues took 1.5 and 2.4 s.
"""

_kept: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[nn.Module, ...], tuple[Settings, ...], Ours | str | None]]
_kept = weakref.WeakKeyDictionary()
"""For each layer of a client the modules in it when it was looked at, their settings, and ours of it, or why there is none."""

_FEW_RESIDUES = "float32 with few residues, where the client's own layer takes less of the host"

_WIDE = "float32 on a GPU, where the client's own products are faster"
"""The reason why blocks, transitions and triangle multiplications are left to the client.

The kernels multiply float32 without tensor cores, as torch does by default, and reach less of the card than cuBLAS: ESMFold of
380 residues took 4.4 s with them and 3.9 s as installed, on an H100.
"""


def sites(*names: str, least: int = 0, least_trained: int | None = None) -> tuple[Site, ...]:
    """The layers "module:Class", whose `forward` is replaced. least, least_trained: as `layer` takes them."""
    return named(functools.partial(layer, least=least, least_trained=least_trained), *names)


def layer(original: Callable[..., Any], count: Count, least: int = 0, least_trained: int | None = None) -> Callable[..., Any]:
    """A layer's `forward` by `evoattn.nn`.

    The original computes, with its attention by ours, what ours does not know: methods that a subclass overrides, other
    parameters, a precision or arguments of its own. It also is what torch.compile compiles.

    Args:
        original, count: as all replacements take them.
        least: on a GPU a pair representation of fewer residues is left to the original: the host sets the pace there, and the
            original asks less of it. Not if the call is recorded as a CUDA graph.
        least_trained: the same while gradients are recorded. None: `least`.
    """

    names = positions(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        at_least = least_trained if least_trained is not None and torch.is_grad_enabled() else least
        if at_least and not is_repeated() and (residues((*args, *kwargs.values())) or at_least) < at_least:
            count.other(f"fewer than {at_least} residues, where the client's own layers take less of the host")
            return original(self, *args, **kwargs)
        ours = _of(self)
        if ours is None:
            return original(self, *args, **kwargs)
        reason = ours if isinstance(ours, str) else ours.observed()
        if reason or isinstance(ours, str):
            count.other(reason)
            return original(self, *args, **kwargs)
        if _is_product_bound(ours) and is_float32_on_gpu((*args, *kwargs.values())):
            count.other(_WIDE)
            return original(self, *args, **kwargs)
        if _has_few_residues(ours, (*args, *kwargs.values())):
            count.other(_FEW_RESIDUES)
            return original(self, *args, **kwargs)
        try:
            result = ours(by_name(names, args, kwargs), self)
        except UnknownArgument as error:
            if not isinstance(error, ClientsOwn):
                count.other(str(error))
            return original(self, *args, **kwargs)
        count.one()
        return result

    return forward


def _has_few_residues(ours: Ours, arguments: tuple[Any, ...]) -> bool:
    """Return whether a float32 attention with pair bias has so few residues that the client's own takes less time."""
    if is_repeated() or not isinstance(ours.layer, AttentionPairBias) or not is_float32_on_gpu(arguments):
        return False
    most = FEW if torch.is_grad_enabled() else _FEW_IN_SINGLE_TRACK
    return (residues(arguments, 3) or most) < most


def _is_product_bound(ours: Ours) -> bool:
    """Return whether a layer spends its time in products, not in attention."""
    return ours.is_block or isinstance(ours.layer, (Transition, TriangleMultiplication))


def _of(theirs: nn.Module) -> Ours | str | None:
    """Ours of a client's layer, why there is none, or None for a layer that is as fast as it is, which is no news to anybody.

    It is made anew when a module or a setting in the layer changed.
    """
    method = overridden(theirs, entries=False)
    if method:
        return f"a {type(theirs).__name__} overrides {method}"
    modules = tuple(theirs.modules())[1:]  # not the layer itself, which must not keep itself alive
    entry = _kept.get(theirs)
    if entry is None or not _holds(theirs, modules, *entry[:2]):
        try:
            ours: Ours | str | None = Ours.of(theirs, entries=False)
        except ValueError as error:
            ours = str(error)
        entry = _kept[theirs] = modules, tuple(map(settings, (theirs, *modules))), ours
    return entry[2]


def _holds(
    theirs: nn.Module, now: tuple[nn.Module, ...], before: tuple[nn.Module, ...], made_with: tuple[Settings, ...]
) -> bool:
    """Return whether a layer has the modules and the settings that it had before."""
    if len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True)):
        return False
    return all(map(has_settings, (theirs, *now), made_with))
