"""A client's layer as it was: its modules, their settings, and the functions that stand for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evoattn.core.own_code import called, method_names, replaced_function

ATTRIBUTE = "_evoattn_replacement"
"""The attribute of a replaced layer that holds its swap."""


def original_of(kind: type) -> type:
    """The class that a layer had before it was replaced."""
    return getattr(kind, "_evoattn_original", kind)  # type: ignore[no-any-return]


class Snapshot:
    """The modules inside a client's layer, the settings of all of them, and the methods of their classes, as they were.

    It does not hold the layer itself.
    """

    def __init__(self, client: nn.Module) -> None:
        self._layer = _state(client)
        self._inner = tuple((x, *_state(x)) for x in client.modules() if x is not client)
        kinds: Any = dict.fromkeys(original_of(type(x)) for x in client.modules())
        self._methods = tuple((kind, name, getattr(kind, name)) for kind in kinds for name in method_names(kind))
        functions = {(id(names), name): (names, name, x) for kind in kinds for names, name, x in called(kind)}
        self._functions = tuple(functions.values())

    def holds(self, client: nn.Module) -> bool:
        """Return whether the layer still has the same modules with the same settings, and all of them the same methods."""
        for module, children, settings, own_methods in ((client, *self._layer), *self._inner):
            now, own = module._modules, module.__dict__
            if len(now) != len(children):
                return False
            for name, child in children:
                if now.get(name) is not child:
                    return False
            for name, x in settings:
                if name not in own or own[name] != x:
                    return False
            for name, there in own_methods:
                if (name in own) is not there:
                    return False
        for kind, name, method in self._methods:
            if getattr(kind, name, None) is not method:
                return False
        return torch.compiler.is_compiling() or all(names.get(name) is x for names, name, x in self._functions)


def _state(module: nn.Module) -> tuple[Any, ...]:
    """The children of a module, its settings, and which methods of its class it has of its own."""
    own_methods = tuple((name, name in module.__dict__) for name in method_names(original_of(type(module))))
    return tuple(module._modules.items()), _settings(module), own_methods


def own_method(module: nn.Module) -> str:
    """The name of a method that stands on a module itself, in the place of one of its class, or ""."""
    return next((name for name in method_names(original_of(type(module))) if name in module.__dict__), "")


def check_methods(name: str, module: nn.Module) -> None:
    """Raise ValueError if a program has replaced a method of a module's class, or a function that one calls.

    Not while torch.compile traces, which cannot look into files.
    """
    if torch.compiler.is_compiling():
        return
    kind = original_of(type(module))
    if function := replaced_function(kind):
        raise ValueError(
            f"{name or 'the layer'} is a {kind.__name__}, and a program has replaced {function} of {kind.__module__}, which "
            "evoattn.nn would not call"
        )


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The numbers, strings and bools that a client's module was made with. torch's own modules are called as they are."""
    if type(module).__module__.startswith("torch.nn.modules."):
        return ()
    kinds = (bool, int, float, str, type(None))
    return tuple((name, x) for name, x in module.__dict__.items() if type(x) in kinds and name not in ("training", ATTRIBUTE))
