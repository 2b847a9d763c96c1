"""What backends and layers ask of the machine: kernel languages, processors, to run on a device, or without autocast."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["installed", "on_device_of", "processors", "uncast", "without_autocast"]

_OF_AN_H200 = 132


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook that blocks it
        return False


def processors(device: torch.device | None = None) -> int:
    """Multiprocessors of a GPU, of the current one for None; of an H200 where there is none, or for another device."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return _OF_AN_H200
    return torch.cuda.get_device_properties(device).multi_processor_count


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

    def prepared(*arguments: Any) -> Any:
        nonlocal first
        if first is not None:
            with preparing:
                if first is not None:
                    try:
                        first(run, arguments)
                    finally:
                        first = None
        return run(*arguments)

    start = run if first is None else prepared

    def on_device(*arguments: Any) -> Any:  # does not name itself: a cycle would keep what `run` holds until a collection
        if torch.cuda.current_device() == index:
            return start(*arguments)
        with torch.cuda.device(index):
            return start(*arguments)

    return on_device


def uncast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """No autocast on a device: what runs there computes in the dtypes that it is given."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def without_autocast(tensor: Tensor, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, made of torch's operations on the tensor's device, with autocast off there: sums stay in the dtype of sums."""
    device, kind = tensor.device, tensor.device.type
    if kind not in ("cpu", "cuda"):
        return run

    def run_uncast(*arguments: Any) -> Any:
        if torch.is_autocast_enabled(kind):
            with uncast(device):
                return run(*arguments)
        return run(*arguments)

    return run_uncast
