"""Tests for functions that a program has put in the place of a class' own.

A layer of evoattn computes what the forward of another module would compute, without calling it. Programs replace such
functions: by fake quantisation, noise, profiling or adapters. Then the function has to be called. Names do not tell, because
`functools.wraps` copies them. The file that holds the code tells.
"""

from __future__ import annotations

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


def is_from(function: Any, module: str) -> bool:
    """Return whether the package of a module defines a function, and every function that this one wraps.

    A function of evoattn counts too: `evoattn.patch` puts it there, and has looked at what it wraps. So does a decorator such
    as `torch.compiler.disable`, if it wraps one that counts.
    """
    function = getattr(function, "__func__", getattr(function, "fget", function))  # of a static method, of a property
    places = (*_places(module), _OURS)
    while True:
        code = getattr(function, "__code__", None)
        if code is None:
            return False
        inner = vars(function).get("__wrapped__")
        if not code.co_filename.startswith(places) and not (inner and code.co_filename.startswith(_COMPILERS)):
            return False
        if inner is None:
            return True
        function = inner


def methods(kind: type) -> Iterator[tuple[type, str, Any]]:
    """The methods of a module's class that compute: the class that defines each, its name, and what stands there now.

    Of torch's own classes that is `forward`: their other methods print, and make parameters. Layers of evoattn are called.
    """
    for owner in kind.__mro__:
        if owner in (nn.Module, object):
            return
        if owner.__module__.startswith("evoattn."):
            continue
        torchs = owner.__module__.startswith("torch.")
        for name, value in vars(owner).items():
            if name == "forward" if torchs else _computes(name, value):
                yield owner, name, value


def called(kind: type) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The functions that these methods call by a global name: the globals, the name, and what stands there now."""
    for _, _, value in methods(kind):
        function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
        for code in _codes(getattr(function, "__code__", None)):
            for name in code.co_names:
                value = function.__globals__.get(name)
                if isinstance(value, types.FunctionType):
                    yield function.__globals__, name, value


def _codes(code: types.CodeType | None) -> Iterator[types.CodeType]:
    """The code of a function and of the functions and comprehensions inside it."""
    if code is not None:
        yield code
        for x in code.co_consts:
            if isinstance(x, types.CodeType):
                yield from _codes(x)


def replaced_function(kind: type) -> str:
    """The name of a method of a module's class, or of a function that one calls, which a program has replaced; else ""."""
    for owner, name, value in methods(kind):
        if not is_from(value, owner.__module__):
            return name
    for names, name, value in called(kind):
        module, package = value.__module__, names["__name__"].partition(".")[0]
        imported = (module or "").partition(".")[0] != package
        if value.__name__ != name if imported else not is_from(value, module):
            return name
    return ""


def torchs(kind: Any, name: str) -> Any:
    """A function of torch, or None if a program has replaced it."""
    function = getattr(kind, name)
    return function if function.__code__.co_filename.startswith(_TORCHS) else None


def _computes(name: str, value: Any) -> bool:
    if name.startswith(("__init__", "_init", "reset_", "extra_repr")):
        return False
    if isinstance(value, (property, staticmethod)):
        return True
    return callable(value) and not isinstance(value, type)


def _places(module: str) -> tuple[str, ...]:
    """The folders of a module's package, or the file of a module without a package."""
    package = sys.modules.get(module.partition(".")[0])
    folders = tuple(f"{folder}{os.sep}" for folder in getattr(package, "__path__", ()))
    return folders or tuple(x for x in (getattr(sys.modules.get(module), "__file__", None),) if x)
