"""Attempts: calls that are given up, rather than wait for a compiler, if a kernel of theirs is not compiled.

A launch whose kernel is not there gives up the attempt that it is in, and has the kernel compiled by a worker. The call goes on
to its end, so that all its kernels are asked for at once, but no kernel is launched any more. Its tensors then have no values,
and nobody may keep or return what is made of them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Protocol

import torch


class Compilation(Protocol):
    """A kernel that is being compiled, such as a future."""

    def done(self) -> bool: ...


class NotCompiled(Exception):  # noqa: N818 (nobody outside sees it)
    """An attempt is given up. Whoever began it has the call computed in another way."""


class Attempt:
    """A call that does not wait.

    Attributes:
        waits_for: the kernels that it lacks.
    """

    def __init__(self, outer: Attempt | None) -> None:
        self._outer = outer
        self.waits_for: list[Compilation] = []

    @property
    def is_given_up(self) -> bool:
        """Return whether it lacks a kernel, or the attempt around it does."""
        return bool(self.waits_for) or (self._outer is not None and self._outer.is_given_up)

    def give_up(self, compilation: Compilation) -> None:
        """Note a kernel that is not there."""
        self.waits_for.append(compilation)


_running: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("attempt", default=None)


def current() -> Attempt | None:
    """The attempt that a call is in. None: it waits for its kernels."""
    return _running.get()


def given_up() -> bool:
    """Return whether the call is one that was given up: nothing is launched, and tensors have no values."""
    attempt = _running.get()
    return attempt is not None and attempt.is_given_up


def may_be_given_up() -> bool:
    """Return whether the call is an attempt. torch.compile traces none."""
    return not torch.compiler.is_compiling() and _running.get() is not None


def check() -> None:
    """Raise NotCompiled if the call was given up. Call this before you write into a caller's tensor, or call its modules."""
    if may_be_given_up() and given_up():
        raise NotCompiled


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Let the calls inside wait for their kernels, also in an attempt."""
    token = _running.set(None)
    try:
        yield
    finally:
        _running.reset(token)


@contextlib.contextmanager
def attempt() -> Iterator[Attempt]:
    """Let the calls inside not wait for kernels.

    Raises:
        NotCompiled: at the end, if they were given up. Errors of a call that was given up mean nothing, and become this one.
    """
    this = Attempt(_running.get())
    token = _running.set(this)
    try:
        yield this
    except Exception:
        if not this.is_given_up:
            raise
    finally:
        _running.reset(token)
    if this.is_given_up:
        raise NotCompiled
