"""What several backends ask of the machine: whether a kernel language is installed, to run on a device, or without autocast."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["installed", "on_device_of", "without_autocast"]


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook that blocks it
        return False


def on_device_of(
    tensor: Tensor,
    run: Callable[..., Any],
    first: Callable[[Callable[..., Any], tuple[Any, ...]], None] | None = None,
) -> Callable[..., Any]:
    """`run` with the tensor's device as the current one; where it is that already, asking is all it costs.

    first: what is done with `run` and its arguments before it runs for the first time, on a GPU; other threads wait for that.
    """
    if not tensor.is_cuda:
        return run
    index, preparing = tensor.device.index, threading.Lock()

    def on_device(*arguments: Any) -> Any:
        nonlocal first
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return on_device(*arguments)
        if first is not None:
            with preparing:
                if first is not None:
                    try:
                        first(run, arguments)
                    finally:
                        first = None
        return run(*arguments)

    return on_device


def without_autocast(tensor: Tensor, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, made of torch's operations on the tensor's device, with autocast off there: sums stay in the dtype of sums."""
    device = tensor.device.type
    if device not in ("cpu", "cuda"):
        return run

    def uncast(*arguments: Any) -> Any:
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return run(*arguments)
        return run(*arguments)

    return uncast
