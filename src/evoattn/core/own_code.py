"""Tests for functions that a program has put in the place of a class' or a module's own.

A layer of evoattn computes what the forward of another module would compute, without calling it. Programs replace such
functions: by fake quantisation, noise, profiling or adapters. Then the function has to be called. Names do not tell, because
`functools.wraps` copies them. The file that holds the code tells, and the import statements of the client's module.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_OURS = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
_TORCHS = f"{pathlib.Path(nn.__file__).parents[1]}{os.sep}"
_COMPILERS = f"{_TORCHS}_dynamo{os.sep}"

_FUNCTIONS = (types.FunctionType, functools._lru_cache_wrapper)

_DECORATORS = {"foundry.training.checkpoint": "activation_checkpointing"}
"""Decorators whose functions do not say what they wrap, by their modules. It is in a variable called `function`."""

CALLS = ("forward", "__call__", "_call_impl")
"""Methods that run when a module is called, by whatever class they are defined."""


def is_from(function: Any, module: str) -> bool:
    """Return whether the package of a module defines a function, and every function that this one wraps.

    A function of evoattn counts too: `evoattn.patch` puts it there, and has looked at what it wraps. So does a decorator such
    as `torch.compiler.disable`, `functools.lru_cache` or foundry's, if it wraps one that counts. Proxies and other callable
    objects do not count.
    """
    if isinstance(function, functools.partial):
        return is_ours(function.func)
    function = getattr(function, "__func__", getattr(function, "fget", function))  # of a static method, of a property
    places = (*_places(module), _OURS)
    while type(function) in _FUNCTIONS:
        inner = _wrapped(function)
        code = getattr(function, "__code__", None)  # a cache has none
        around = (_COMPILERS, *_places(function.__module__)) if _decorator(function) else _COMPILERS
        if code and not code.co_filename.startswith(places) and not (inner and code.co_filename.startswith(around)):
            return False
        if inner is None:
            return True
        function = inner
    return False


def _decorator(function: Any) -> str:
    """The name of the decorator in `_DECORATORS` that made a function, or ""."""
    name = _DECORATORS.get(getattr(function, "__module__", None) or "", "")
    return name if name and getattr(function, "__qualname__", "").startswith(f"{name}.<locals>.") else ""


def _wrapped(function: Any) -> Any:
    """The function that a function says it wraps, or that a decorator in `_DECORATORS` has given it. None: there is none."""
    if _decorator(function):
        return inspect.getclosurevars(function).nonlocals.get("function")
    return vars(function).get("__wrapped__")


def unwrapped(function: Any) -> Any:
    """The innermost function that a function wraps."""
    while type(function) in _FUNCTIONS and (inner := _wrapped(function)) is not None:
        function = inner
    return function


def is_ours(function: Any) -> bool:
    """Return whether evoattn defines a function."""
    return type(function) is types.FunctionType and function.__code__.co_filename.startswith(_OURS)


def methods(kind: type) -> Iterator[tuple[type, str, Any]]:
    """The methods of a module's class that compute: the class that defines each, its name, and what stands there now.

    Of torch's own classes those are `CALLS`: their other methods print, and make parameters. Layers of evoattn are called.
    """
    for owner in kind.__mro__:
        if owner in (nn.Module, object):
            return
        if owner.__module__.startswith("evoattn."):
            continue
        torchs = owner.__module__.startswith("torch.")
        for name, value in vars(owner).items():
            if name in CALLS or (not torchs and _computes(name, value)):
                yield owner, name, value


def method_names(kind: type) -> tuple[str, ...]:
    """The names of all methods that a call of a module may run, each once: `CALLS`, and those of its class that compute."""
    return tuple(dict.fromkeys((*CALLS, *(name for _, name, _ in methods(kind)))))


def called(kind: type) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The functions that these methods call by a global name, and those that these call in turn in the same package: the
    globals, the name, and what stands there now.
    """
    seen: set[tuple[int, str]] = set()
    waiting = [getattr(value, "__func__", getattr(value, "fget", value)) for _, _, value in methods(kind)]
    while waiting:
        function = waiting.pop()
        function = unwrapped(function) if type(function) in _FUNCTIONS else None
        if function is None or is_ours(function):
            continue
        names = function.__globals__
        for name in dict.fromkeys(name for code in _codes(function.__code__) for name in code.co_names):
            value = names.get(name)
            if not callable(value) or isinstance(value, type) or (id(names), name) in seen:
                continue
            seen.add((id(names), name))
            yield names, name, value
            if is_from(value, names["__name__"]):
                waiting.append(value)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of the functions and comprehensions inside it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


def replaced_function(kind: type) -> str:
    """The name of a method of a module's class, or of a function that one calls, which a program has replaced; else ""."""
    for owner, name, value in methods(kind):
        if not is_from(value, owner.__module__) or not _is_at_home(value, owner, name):
            return name
    return next((name for names, name, value in called(kind) if not _is_own(names, name, value)), "")


def _is_at_home(function: Any, owner: type, name: str) -> bool:
    """Return whether a method is the one of its own class, and not another one of the package. A decorator may hide it."""
    function = getattr(function, "__func__", getattr(function, "fget", function))
    function = function if is_ours(function) else unwrapped(function)
    where = function.__qualname__
    return is_ours(function) or "<locals>" in where or where == f"{owner.__qualname__}.{name}"


def _is_own(names: dict[str, Any], name: str, value: Any) -> bool:
    """Return whether a module's global function is the one that its file defines or imports."""
    if is_ours(value):
        return True
    source = _sources(names.get("__file__") or "", names.get("__package__") or "").get(name)
    if source is None:  # a value that the file computes, such as a partial function
        return is_from(getattr(value, "func", value), names["__name__"])
    module, original = source
    return getattr(sys.modules.get(module), original, None) is value if module else is_from(value, names["__name__"])


@functools.cache
def _sources(path: str, package: str) -> dict[str, tuple[str, str]]:
    """For each name that a module defines or imports: the module and the name that it is imported from, or "" and the name."""
    try:
        tree = ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            where = "." * node.level + (node.module or "")
            where = importlib.util.resolve_name(where, package) if node.level else where
            found |= {alias.asname or alias.name: (where, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.col_offset <= 8:
            found.setdefault(node.name, ("", node.name))
    return found


def torchs(kind: Any, name: str) -> Any:
    """A function of torch, or None if a program has replaced it."""
    function = getattr(kind, name)
    is_torchs = type(function) is types.FunctionType and function.__code__.co_filename.startswith(_TORCHS)
    return function if is_torchs else None


def _computes(name: str, value: Any) -> bool:
    if name.startswith(("__init__", "_init", "reset_", "extra_repr", "__annotate", "__class")):
        return False
    if isinstance(value, (property, staticmethod)):
        return True
    return callable(value) and not isinstance(value, type)


def _places(module: str) -> tuple[str, ...]:
    """The folders of a module's package, or the file of a module without a package."""
    package = sys.modules.get(module.partition(".")[0])
    folders = tuple(f"{folder}{os.sep}" for folder in getattr(package, "__path__", ()))
    return folders or tuple(x for x in (getattr(sys.modules.get(module), "__file__", None),) if x)
