"""The machine: its kernel languages and its GPU. Also run code on a device, or without autocast."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import importlib.util
import platform
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OF_AN_H200 = 132


@dataclasses.dataclass(frozen=True)
class Card:
    """The properties of an NVIDIA GPU that plans depend on, as the driver tells them.

    Args:
        processors, registers: multiprocessors, and the registers of each.
        shared_memory: bytes that one block may use.
        cache_bytes: of second-level cache.
        clusters: how many clusters of 1, 2, 3... blocks run at a time if each block fills a multiprocessor; empty if unknown.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    cache_bytes: int
    registers: int = 2**16
    clusters: tuple[int, ...] = ()

    def clusters_of(self, size: int) -> int:
        """Return how many clusters of `size` blocks run at a time; the most that can, if that is unknown."""
        return self.clusters[size - 1] if size <= len(self.clusters) else self.processors // size


_planned: contextvars.ContextVar[Card | None] = contextvars.ContextVar("planned", default=None)


def planned() -> Card | None:
    """The card for which `planned_for` has plans made, in place of the machine's own."""
    return _planned.get()


@contextlib.contextmanager
def planned_for(card: Card) -> Iterator[None]:
    """Plan for this card, which need not be there; nothing may be launched. Tensors on "meta" stand for tensors on it."""
    token = _planned.set(card)
    try:
        yield
    finally:
        _planned.reset(token)


def card(device: torch.device) -> Card | None:
    """The NVIDIA GPU of a device, or the one that is planned for; None if there is neither."""
    return _planned.get() or (local_card(device) if device.type == "cuda" and torch.version.hip is None else None)


@functools.cache
def local_card(device: torch.device) -> Card:
    """Return the card of this machine."""
    properties = torch.cuda.get_device_properties(device)
    return Card(
        name=properties.name,
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 0),
        cache_bytes=getattr(properties, "L2_cache_size", 0),
        registers=getattr(properties, "regs_per_multiprocessor", 2**16),
    )


def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook that blocks it
        return False
    except ValueError:  # a stand-in in sys.modules that has no spec
        return True


def install_extra(extra: str) -> str:
    """Return the instruction that installs an extra of evoattn, in the words of the README."""
    return f"run pip install '.[{extra}]' in a clone of evoattn"


def installed_version(distribution: str) -> str | None:
    """The version of a distribution that is installed, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def processor() -> str:
    """The name of the CPU."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE):
            return " ".join(found[1].split())
    return platform.machine() or "processor"


def driver_version() -> str | None:
    """NVIDIA's driver, as the kernel module tells it; None where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else None
    return None


def processors(device: torch.device | None = None) -> int:
    """Multiprocessors of a device; None: the current GPU. Without a GPU, those of an H200."""
    if (stands := _planned.get()) is not None:
        return stands.processors
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return _OF_AN_H200
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device_of(
    tensor: Tensor,
    run: Callable[..., Any],
    first: Callable[[Callable[..., Any], tuple[Any, ...]], None] | None = None,
) -> Callable[..., Any]:
    """`run` with the tensor's device as the current one; where it is that already, asking is all it costs.

    On a GPU `first` gets `run` and its arguments before it runs for the first time; other threads wait for that.
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


_constants: dict[tuple[float, tuple[int, ...], torch.dtype, torch.device], Tensor] = {}
"""They stay as long as the process: CUDA graphs read them."""


def constant(value: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor full of a value. Nobody may write to it. It is not kept if a CUDA graph makes it at each replay."""
    key = value, shape, dtype, device
    found = _constants.get(key)
    if found is not None:
        return found
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.full(shape, value, dtype=dtype, device=device)
    with torch.inference_mode(False):
        tensor = torch.full(shape, value, dtype=dtype, device=device)
    if tensor.is_cuda:  # other streams may read it next
        torch.cuda.current_stream(device).synchronize()
    return _constants.setdefault(key, tensor)
