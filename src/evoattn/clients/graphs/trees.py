"""The tensors of a call's arguments, however they are nested, and what the call depends on besides their values."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from evoattn.dispatch.axes import narrow_expanded

Spec = tuple[Any, ...]
"""The result of `flat`: containers with their keys, layouts of tensors, and plain values. It is hashable."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format)
_FUNCTIONS = (types.BuiltinFunctionType, type)


class NotCaptured(RuntimeError):  # noqa: N818
    """A call cannot be replayed as a graph, for the reason in the message. The original computes it."""


def flat(value: Any, device: torch.device, tensors: list[Tensor]) -> Spec:
    """Append the tensors of a value that lie on a device to a list, and return what the value is besides.

    Tensors elsewhere and objects of unknown classes are told by their class alone: what `nested` puts in their place cannot be
    read, so a call that reads one is not captured.

    Raises:
        NotCaptured: a tensor is of a subclass, or has no strides.
    """
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        if value.device != device:
            return ("unread", "a tensor on another device")
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise NotCaptured("an argument is a tensor without ordinary strides")
        tensors.append(value)
        return ("tensor", value.dtype, *value.shape, *value.stride())
    if kind is dict:
        return ("dict", tuple(value), *(flat(x, device, tensors) for x in value.values()))
    if kind is list or isinstance(value, tuple):
        return ("items", kind, *(flat(x, device, tensors) for x in value))
    if isinstance(value, _PLAIN):
        return ("plain", kind, value, repr(value) if kind is float else "")  # 0.0 == -0.0
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        return ("partial", None, *(flat(x, device, tensors) for x in parts))
    if isinstance(value, _FUNCTIONS) or (isinstance(value, types.FunctionType) and value.__closure__ is None):
        return ("plain", kind, value)
    if isinstance(value, Tensor):
        raise NotCaptured(f"an argument is a {kind.__name__}")
    return ("unread", f"a {kind.__name__}")


def outline(spec: Spec) -> Spec:
    """A spec without the sizes and strides of its tensors."""
    if spec[0] == "tensor":
        return "tensor", spec[1], len(spec)
    return spec if spec[0] in ("plain", "unread") else (*spec[:2], *map(outline, spec[2:]))


def nested(spec: Spec, tensors: Iterator[Tensor]) -> Any:
    """The value of a spec with other tensors, in the order of `flat`. Unread objects raise NotCaptured if they are read."""
    what, kind, *parts = spec
    if what == "tensor":
        return next(tensors)
    if what == "plain":
        return parts[0]
    if what == "unread":
        return _Unread(kind)
    items = [nested(x, tensors) for x in parts]
    if what == "dict":
        return dict(zip(kind, items, strict=True))
    if what == "partial":
        return functools.partial(items[0], *items[1], **items[2])
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


class _Unread:
    """Stands for an argument that a graph cannot follow. Whatever is asked of it raises NotCaptured."""

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def _read(self, *_: Any, **__: Any) -> Any:
        raise NotCaptured(f"it reads an argument that is {object.__getattribute__(self, '_what')}")

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_read")()

    __bool__ = __call__ = __contains__ = __eq__ = __float__ = __getitem__ = __hash__ = __index__ = __int__ = _read
    __iter__ = __len__ = __str__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __array__ = _read


def room_for(tensor: Tensor) -> Tensor:
    """An uninitialised tensor that looks like another one: an expanded axis stays expanded, and only then it is a view."""
    small = narrow_expanded(tensor)
    room = torch.empty_strided(small.shape, small.stride(), dtype=small.dtype, device=small.device)
    return room if room.shape == tensor.shape else room.as_strided(tensor.shape, tensor.stride())


def room_bytes(tensor: Tensor) -> int:
    """The bytes of `room_for(tensor)`, gaps between its rows included."""
    small = narrow_expanded(tensor)
    if not small.numel():
        return 0
    return small.element_size() * (1 + sum((n - 1) * s for n, s in zip(small.shape, small.stride(), strict=True)))


def copied(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others that `room_for` made."""
    if targets:
        torch._foreach_copy_([narrow_expanded(x) for x in targets], [narrow_expanded(x) for x in sources])


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """New tensors with the values of others, and with their strides, on which later kernels may depend."""
    rooms = [room_for(x) for x in tensors]
    copied(rooms, tensors)
    return rooms


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same bits: a NaN is itself, and -0 is not 0."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (x, y)))
