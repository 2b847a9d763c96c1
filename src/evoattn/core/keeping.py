"""Things that are made of tensors once, and used until a sampling ends: split weights, biases in the layout of kernels.

They are dropped with the sampling, in which their tensors may not change. A write that torch counts, or another tensor in the
place of one, makes them anew.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")

_kept: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar("kept", default=None)


@contextlib.contextmanager
def sampling() -> Iterator[None]:
    """Let layers split their weights once, until the block ends.

    The weights may not change inside: a write through `.data`, or to a tensor of inference mode, is seen by nobody. Call the
    layers on one stream. What was made of a weight stays until the end, also of one that the caller has dropped. A sampling
    inside of another one shares what that has. Recordings of CUDA graphs inside read what is kept: drop them with it.
    """
    token = _kept.set({}) if _kept.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _kept.reset(token)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Let nothing be kept, and nothing that is kept be used, until the block ends."""
    token = _kept.set(None)
    try:
        yield
    finally:
        _kept.reset(token)


def keeps() -> bool:
    """Return whether a sampling is running."""
    return _kept.get() is not None


def made_once(
    name: str, owners: Sequence[Any], make: Callable[[], Made], holds: Callable[[Made], bool] = lambda _: True
) -> Made:
    """Return what `make` returns, which a running sampling keeps.

    Args:
        name: of what is made.
        owners: what it is made of. A tensor that was moved or written to counts as another one.
        make: makes it.
        holds: takes the result of an earlier `make`, and returns whether it is still right.
    """
    store = _kept.get()
    if store is None:
        return make()
    key, tensors = (name, *map(id, owners)), [x for x in owners if isinstance(x, Tensor)]
    entry = store.get(key)
    if entry is not None and entry[1] == states(tensors) and holds(entry[2]):
        return entry[2]  # type: ignore[no-any-return]
    made = make()
    # What a recording computes has its values at each replay alone.
    if not is_capturing():
        store[key] = (tuple(owners), states(tensors), made)
    return made


def is_capturing() -> bool:
    """Return whether the current stream is recorded as a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def states(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses of tensors, and their versions where torch counts these: both change if a tensor is moved or written to."""
    return [(x.data_ptr(), -1 if x.is_inference() else x._version) for x in tensors]
