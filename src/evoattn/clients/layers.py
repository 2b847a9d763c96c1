"""Whole layers of a client, from norm to output, computed by `evoattn.nn`: what `patch(name, layers=True)` replaces besides."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from evoattn.clients.calls import is_float32_on_gpu, residues
from evoattn.clients.site import Count, Site, is_repeated, named
from evoattn.nn import AttentionPairBias, Transition, TriangleMultiplication
from evoattn.nn.known import LAYERS
from evoattn.nn.known_blocks import BLOCKS
from evoattn.nn.known_calls import ClientsOwn, UnknownArgument
from evoattn.nn.replace import Replacement, by_name, overridden, positions
from evoattn.nn.snapshots import Snapshot

FEW = 288
"""Residues below which blocks are left to clients: launching kernels takes longer there than running them.

A guess. At 256 residues those of `evoattn.nn` are slower in some cases, at 1,024 in none (docs/clients/speed.md). Nothing
between was measured.
"""

_FEW_IN_SINGLE_TRACK = 1024
"""Residues below which a float32 attention with pair bias is left to the client in inference.

With 16 heads these are the 2^24 scores of `calls.host_sets_pace`.

200 steps of OpenFold-3's denoiser took, on an H100, 12.1 s as installed and 16.4 s patched at 152 residues, 11.9 and 15.8 s
at 304. The trunk at 152 residues took 1.5 and 2.4 s.
"""


class _Counterpart(NamedTuple):
    """The layer of `evoattn.nn` for a client's layer, or why there is none; "" if the client's own is as fast."""

    layer: Replacement | None
    reason: str
    snapshot: Snapshot


_counterparts: weakref.WeakKeyDictionary[nn.Module, _Counterpart] = weakref.WeakKeyDictionary()
"""For each layer of a client the counterpart that its last call had."""

_FEW_RESIDUES = "float32 with few residues, where the client's own layer takes less of the host"

WIDE = "float32 on a GPU, where the client's own products are faster"
"""The reason why blocks, transitions and triangle multiplications are left to the client.

The kernels multiply float32 without tensor cores, as torch does by default, and reach less of the card than cuBLAS: ESMFold of
380 residues took 4.4 s with them and 3.9 s as installed, on an H100.
"""


_BASES = {"MSARowAttentionWithPairBias": "MSAAttention", "SwiGLUTransition": "Transition", "ReLUTransition": "Transition"}
"""Known classes without a `forward` of their own, and the classes that they inherit it from."""


def known_sites(package: str, *, but: str = "", **options: Any) -> tuple[Site, ...]:
    """All layers and blocks of a package that `evoattn.nn` knows, but for a class. Options as for `sites`."""
    pairs = (name.rpartition(".")[::2] for name in (*LAYERS, *BLOCKS) if name.startswith(f"{package}."))
    names = (f"{module}:{_BASES.get(kind, kind)}" for module, kind in pairs if kind != but)
    return sites(*dict.fromkeys(names), **options)


def sites(*names: str, least: int = 0, least_trained: int | None = None, method: str = ".forward") -> tuple[Site, ...]:
    """The layers "module:Class", whose `method` is replaced. least, least_trained: as `layer` takes them."""
    replaced = named(functools.partial(layer, least=least, least_trained=least_trained), *names, method=method)
    return tuple(dataclasses.replace(site, kind=_kind(name)) for site, name in zip(replaced, names, strict=True))


def _kind(name: str) -> str:
    """The kind of a layer or block "module:Class", of `KINDS`."""
    if name.replace(":", ".") in BLOCKS:
        return "pair block"
    parts = {"Multiplicati": "triangle multiplication", "Transition": "transition", "MLP": "transition"}
    return next((kind for part, kind in parts.items() if part in name.partition(":")[2]), "attention call")


def layer(original: Callable[..., Any], count: Count, least: int = 0, least_trained: int | None = None) -> Callable[..., Any]:
    """A layer's `forward` by `evoattn.nn`.

    The original computes what `evoattn.nn` does not know, with its attention replaced: methods that a subclass overrides, other
    parameters, a precision or arguments of its own. torch.compile compiles the original too.

    Args:
        original, count: as all replacements take them.
        least: on a GPU a pair representation of fewer residues is left to the original: the host sets the pace there, and the
            original asks less of it. Not if the call is recorded as a CUDA graph.
        least_trained: the same while gradients are recorded. None: `least`.
    """

    names = positions(original)
    least_trained = least if least_trained is None else least_trained

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        values = (*args, *kwargs.values())
        counterpart, reason = None, _too_small(values, least_trained if torch.is_grad_enabled() else least)
        if not reason:
            counterpart, reason = _counterpart(self, values)
        if counterpart is not None:
            reason = counterpart.obstacle()
            if not reason:
                try:
                    result = counterpart(by_name(names, args, kwargs), self)
                except UnknownArgument as error:
                    reason = "" if isinstance(error, ClientsOwn) else str(error)
                else:
                    count.count_replaced()
                    return result
        if reason:
            count.count_passed_on(reason)
        return original(self, *args, **kwargs)

    return forward


def _too_small(arguments: tuple[Any, ...], least: int) -> str:
    """The reason why a call of fewer residues than `least` is left to the client, or ""."""
    if not least or is_repeated() or (residues(arguments) or least) >= least:
        return ""
    return f"fewer than {least} residues, where the client's own layers take less of the host"


def slower_in_float32(counterpart: Replacement | None, arguments: tuple[Any, ...]) -> str:
    """The reason why a float32 call on a GPU is left to the client, or ""."""
    if counterpart is None or not is_float32_on_gpu(arguments):
        return ""
    if counterpart.is_block or isinstance(counterpart.layer, (Transition, TriangleMultiplication)):
        return WIDE
    if is_repeated() or not isinstance(counterpart.layer, AttentionPairBias):
        return ""
    least = FEW if torch.is_grad_enabled() else _FEW_IN_SINGLE_TRACK
    return _FEW_RESIDUES if (residues(arguments, 3) or least) < least else ""


def _counterpart(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Replacement | None, str]:
    """The layer of `evoattn.nn` that computes a call of a client's layer, or None and the reason.

    It is made anew when a module or a setting in the layer changed. A look at all of them takes the host as long as several
    kernels, so a layer that is left to the client anyway gets none.
    """
    known = _counterparts.get(module)
    if known is not None:
        if known.layer is None and not known.reason:
            return None, ""
        if reason := slower_in_float32(known.layer, arguments):
            return None, reason
    method = overridden(module, entries=False)
    if method:
        return None, f"a {type(module).__name__} overrides {method}"
    if known is None or not known.snapshot.holds(module):
        layer, reason = None, ""
        try:
            layer = Replacement.of(module, entries=False)
        except ValueError as error:
            reason = str(error)
        snapshot = Snapshot(module) if layer is None else layer.snapshot
        known = _counterparts[module] = _Counterpart(layer, reason, snapshot)
        if reason := slower_in_float32(layer, arguments):
            return None, reason
    return known.layer, known.reason
