"""Calls inside an activation checkpoint, of whose forward it keeps no more than the inputs.

A reentrant one computes them again in the backward, and their backward follows.

One that is not reentrant counts what autograd saves in its first pass, and keeps none of it. In the backward it runs its
function again, up to the last tensor that it counted: its second pass has to save what the first saved. A replay is hidden from
it, keeps its own inputs, and computes its forward again before its backward. If other operators in the checkpoint need a second
pass, each call there does what it did in the first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

_AUTOGRAD: Any = torch._C._autograd
_innermost_hooks: Any = getattr(_AUTOGRAD, "_top_saved_tensors_default_hooks", None)
"""The innermost hooks on what autograd saves. None: this torch does not tell, as before 2.8."""

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
    found = _innermost()
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
    hooks = []
    while _innermost() is not None:
        hooks.append(_innermost_hooks(True))
        _AUTOGRAD._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            _AUTOGRAD._push_saved_tensors_default_hooks(*pair)


def is_recomputed() -> bool:
    """Return whether a reentrant checkpoint computes a call again in a backward, and no hook sees what autograd saves.

    The backward of the call follows then, when the checkpoint is done.
    """
    if _innermost_hooks is None or torch._C._current_graph_task_id() == -1:
        return False
    return _innermost_hooks(True) is None


def _innermost() -> tuple[Any, Any] | None:
    """The innermost checkpoint that is not reentrant, if its hooks are those that see what autograd saves.

    torch shows it by the variables of its hooks alone.

    Returns:
        What stands in torch for this checkpointed call, and None in its first pass, or what tells the backward in which it is
        computed again. None: there is none, or torch has other variables, as before 2.8.
    """
    hooks = None if _innermost_hooks is None else _innermost_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint" or not shows_checkpoints():
        return None
    pack: Any = inspect.unwrap(hooks[0])  # torch.compile looks into none
    variables = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "frame" in variables:
        return variables["frame"].cell_contents, None
    frame = variables["target_frame_ref"].cell_contents()
    return None if frame is None else (frame, variables["gid"].cell_contents)


@functools.cache
def shows_checkpoints() -> bool:
    """Return whether the hooks of both passes have the variables that tell of a checkpoint, and can be taken off."""
    if not all(hasattr(_AUTOGRAD, f"_{x}_saved_tensors_default_hooks") for x in ("top", "pop", "push")):
        return False
    for name, variables in (("_checkpoint_hook", {"frame"}), ("_recomputation_hook", {"target_frame_ref", "gid"})):
        init: Any = getattr(getattr(sys.modules["torch.utils.checkpoint"], name, None), "__init__", None)
        codes = [x for x in getattr(getattr(init, "__code__", None), "co_consts", ()) if isinstance(x, types.CodeType)]
        if not any(x.co_name == "pack_hook" and variables <= set(x.co_freevars) for x in codes):
            return False
    return True
