"""Comparisons of modules over time, besides their weights: attributes, values inside these, and classes.

A look at modules is a list of values that stand for everything they contain. Plain values, such as numbers, are compared as
such. Functions, classes, tensors and modules are compared by identity. Containers and objects are spread into their parts.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import logging
import operator
import re
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients.graphs.trees import NotCaptured

_MOST = 1024
"""Lists, dicts and objects inside one attribute. To compare more would take longer than a call."""

_MOST_BYTES = 1 << 16
"""Bytes of an array that is compared."""

_PLAIN: frozenset[type] = frozenset(
    {type(None), type(...), bool, int, float, complex, str, bytes, range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Classes of plain values: two of them with one `repr` are equal."""

_EXACT: frozenset[type] = frozenset({type(None), bool, int, str, bytes})
"""Classes of plain values that differ if they are not equal."""

_BY_IDENTITY = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.GenericAlias, types.UnionType, functools._lru_cache_wrapper),
    *(enum.Enum, re.Pattern, logging.Logger, type(threading.Lock()), type(threading.RLock())),
    *(Tensor, nn.Module, torch.Generator, torch.Stream, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
"""Classes of values that do not change, or do not decide what is computed. Tensors and modules are looked at elsewhere."""

_FIXED = ("torch._C", "typing", "einops.")
"""Modules whose objects do not change. 24 patterns of einops in Boltz-2's denoiser would take 2.5 ms to compare."""


def spread(value: Any, parts: list[Any], seen: dict[int, int] | None = None) -> None:
    """Append a value to a list, or the classes, lengths and parts of a container or an object. NotCaptured: it could change
    unseen.
    """
    kind = type(value)
    if kind in _PLAIN:
        parts.append(value)
        return
    seen = {} if seen is None else seen
    if id(value) in seen:
        parts += (_Again, seen[id(value)])
        return
    seen[id(value)] = len(seen)
    if len(seen) > _MOST:
        raise NotCaptured(f"a module inside has more than {_MOST:,} lists, dicts and objects in its attributes")
    if kind is list or kind is tuple:
        inner = value
        parts += (kind, len(value))
    elif kind is dict:
        inner = (*value, *value.values())
        parts += (kind, len(value))
    else:
        inner = _inner(value, kind, parts)
        parts.append(len(inner))
    for part in inner:
        if type(part) in _PLAIN:
            parts.append(part)
        else:
            spread(part, parts, seen)


class _Again:
    """Stands before the number of a value that was spread before."""


def _inner(value: Any, kind: type, parts: list[Any]) -> list[Any]:
    """Append the identity or the class of a value, and return the values inside."""
    if kind.__module__.startswith(_FIXED):
        parts.append(value)
        return []
    if isinstance(value, types.FunctionType):
        parts.append(value)
        return [] if _root(value.__globals__.get("__name__")) in ("torch", "evoattn") else _bound(value)
    if isinstance(value, types.BuiltinFunctionType):
        parts.append(value)
        return [] if isinstance(value.__self__, (types.ModuleType, type, type(None))) else [value.__self__]
    if isinstance(value, _BY_IDENTITY):
        parts.append(value)
        return []
    parts.append(kind)
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords, vars(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, (bytearray, memoryview)):
        return [_bytes(value, len(value))]
    if _root(kind.__module__) == "numpy" and hasattr(value, "tobytes"):
        if value.dtype.hasobject:
            raise NotCaptured("a module inside has an array of objects, whose changes cannot be seen")
        return [str(value.dtype), *value.shape, _bytes(value, value.nbytes)]
    return _items(value, kind)


def _items(value: Any, kind: type) -> list[Any]:
    """The values inside a container or an object."""
    inner: list[Any] = []
    known = isinstance(value, (list, tuple, dict, set, frozenset, collections.deque, types.MappingProxyType))
    if isinstance(value, (dict, types.MappingProxyType)):
        inner += [*value.keys(), *value.values()]
    elif known:
        inner += value
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        inner += [*own, *own.values()]
        known = True
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    inner += [getattr(value, name, None) for name in slots]
    if not known and not slots:
        raise NotCaptured(f"a module inside has a {kind.__name__}, whose changes cannot be seen")
    return inner


def _bound(function: types.FunctionType) -> list[Any]:
    """The values that belong to a function: variables of the function around it, and defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [*cells, function.__defaults__, function.__kwdefaults__]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _bytes(value: Any, size: int) -> bytes:
    if size > _MOST_BYTES:
        raise NotCaptured(f"a module inside has an array of more than {_MOST_BYTES >> 10} KB, whose changes cannot be seen")
    return value.tobytes() if hasattr(value, "tobytes") else bytes(value)


def _root(name: object) -> str:
    return str(name).partition(".")[0]


def _is_heap(kind: type) -> bool:
    """Return whether attributes of a class may be set."""
    return bool(kind.__flags__ & 1 << 9)


def is_plain(value: Any) -> bool:
    """Return whether a value is plain, or a tuple of plain values."""
    kind = type(value)
    return kind in _PLAIN or (kind in (tuple, torch.Size) and all(map(is_plain, value)))


def is_leaf(value: Any) -> bool:
    """Return whether a value stands for itself."""
    return is_plain(value) or (isinstance(value, _BY_IDENTITY) and not isinstance(value, types.BuiltinFunctionType))


class _Same(weakref.ref[Any]):
    """Equal to another one of the same object while that exists. It does not keep the object."""

    __slots__ = ("_id",)

    def __init__(self, value: Any, gone: Callable[[Any], None] | None = None) -> None:
        super().__init__(value, gone)  # type: ignore[call-arg]
        self._id = id(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self() is not None and self() is other()

    def __hash__(self) -> int:
        return self._id


def key(value: Any, gone: Callable[[Any], None] | None = None) -> Hashable:
    """A part that `spread` appended, as something that two looks may have in common. It keeps nothing that may hold a module.

    gone: is called when a value that is no plain one does not exist any more.
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if is_plain(value):
        return kind, repr(value)  # 0.0 == -0.0
    try:
        return _Same(value, gone)
    except TypeError:  # a descriptor that knows its class
        return "address", id(value)


class Values:
    """Values at a look, to compare with those of another one."""

    def __init__(self, values: list[Any]) -> None:
        self._gone: list[Any] = []  # so the address of a value may be that of another one now
        self._held = list(filter(is_plain, values))  # so no other value gets their addresses
        self._keys = [key(x, self._gone.append) for x in values]
        self._ids = list(map(id, values))

    def are(self, values: list[Any]) -> bool:
        return (list(map(id, values)) == self._ids and not self._gone) or list(map(key, values)) == self._keys


_LAZY = frozenset(("__slotnames__", "__annotations__", "__annotate_func__", "__annotations_cache__"))
"""Attributes that Python itself adds to a class, for copies and for annotations."""


class ClassLook:
    """The attributes of a class that may differ at two looks. It does not keep the class alive."""

    def __init__(self, kind: type) -> None:
        self._kind = weakref.ref(kind)
        own = vars(kind)
        own_names = () if _root(kind.__module__) == "torch" else (x for x in own if not x.startswith(("__", "_abc_")))
        self._containers = [name for name in own_names if _is_spread(own[name])]
        self._properties = [name for name, value in own.items() if type(value) is property]
        others = _LAZY.union(self._containers, self._properties)
        plain = [x for x in own if x not in others]
        self._get = operator.itemgetter("__module__", "__module__", *plain)  # two, to get a tuple
        self._size = self._count(own)

    @staticmethod
    def _count(own: Mapping[str, Any]) -> int:
        return len(own) - sum(map(own.__contains__, _LAZY))

    def append(self, values: list[Any]) -> None:
        """Append everything in the class that may differ to a list. TypeError: the class is gone. KeyError: an attribute is."""
        own = vars(self._kind())
        values.append(self._count(own) == self._size)
        values += self._get(own)
        for name in self._properties:  # cannot be told from another one at its address, but its functions can
            value = own[name]
            values += (value.fget, value.fset, value.fdel)
        for name in self._containers:
            spread(own[name], values)


def _is_spread(value: Any) -> bool:
    """Return whether an attribute of a class is a container or an object, and no function or other descriptor."""
    return not is_leaf(value) and not hasattr(type(value), "__get__")


def classes_of(values: Iterable[Any]) -> list[type]:
    """All classes among some values, and those that they inherit from, whose attributes may be set."""
    kinds = dict.fromkeys(base for kind in dict.fromkeys(x for x in values if isinstance(x, type)) for base in kind.__mro__)
    return [x for x in kinds if _is_heap(x) and x.__module__ not in ("typing", "abc", "enum")]


def brought(values: Iterable[Any]) -> list[Any]:
    """The parts of the values that belong to functions among some values."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, types.FunctionType):
            spread(_bound(value), parts)
    return parts
