"""Calls inside a checkpoint that is not reentrant, whose second pass has to save what its first pass saved.

The checkpoint counts what autograd saves in the first pass, and keeps none of it. In the backward it runs its function again up
to the last tensor that it counted. A replay is hidden from it, keeps its own inputs, and computes its forward again before its
backward. If other operators in the checkpoint need a second pass, each call there does what it did in the first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from evoattn.core import guards

PLAIN, REPEATED, REPLAYED = "as it is", "as calls that are recorded", "by a replay"
"""The ways in which a call inside a checkpoint is computed."""


class _Calls:
    """The ways of the calls inside one checkpoint in its first pass, in turn."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self.backward: Any = None  # that the second pass is for
        self.next = 0


_calls: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()


class Note:
    """The way of one call, which its first pass notes and its second pass reads.

    Attributes:
        is_second: whether the call is one of the second pass.
    """

    def __init__(self, calls: _Calls, place: int, is_second: bool) -> None:
        self._calls, self._place, self.is_second = calls, place, is_second

    @property
    def way(self) -> str:
        return self._calls.ways[self._place]

    @way.setter
    def way(self, way: str) -> None:
        self._calls.ways[self._place] = way


def note() -> Note | None:
    """The note of a call, if the innermost hooks on what autograd saves are those of a checkpoint. Ask once for each call."""
    found = guards.checkpoint()
    if found is None:
        return None
    frame, backward = found
    calls = _calls.setdefault(frame, _Calls())
    if backward is None:
        calls.ways.append(PLAIN)
        return Note(calls, len(calls.ways) - 1, is_second=False)
    if calls.backward != backward:
        calls.backward, calls.next = backward, 0
    calls.next += 1
    if calls.next > len(calls.ways):  # the first pass called something else
        return None
    return Note(calls, calls.next - 1, is_second=True)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide what autograd saves from the innermost checkpoint and from those right around it. Other hooks around them see it.

    An outer checkpoint has a second pass, in which the inner one has a new first pass, which may do something else.
    """
    internals = torch._C._autograd
    hooks = []
    while guards.checkpoint() is not None:
        hooks.append(internals._top_saved_tensors_default_hooks(True))
        internals._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            internals._push_saved_tensors_default_hooks(*pair)
