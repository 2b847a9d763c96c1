"""Modes of torch that a call may run in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["MODES"]


class _Function(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "with torch.device": lambda: torch.device("cpu"),
    "set_default_device": _default_device,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "function mode": _Function,
    "dispatch mode": _Dispatch,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
}
