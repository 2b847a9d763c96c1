"""The kernels that a plan launches: found without a GPU, and compiled for later processes (see `evoattn.backends.Backend`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evoattn import cache
from evoattn.backends import Needed, Plan
from evoattn.backends.hopper.host import kept
from evoattn.backends.hopper.host.launch import keep_compiled

__all__ = ["keep", "needed"]

Make = Callable[[], tuple[Plan, tuple[Any, ...]]]


def needed(make: Make) -> list[Needed]:
    """The kernels of a plan, each once, in the order in which it plans their launches."""
    names = dict.fromkeys(kernel.name for kernel in make()[0].kernels)
    return [Needed(name, name, kept.file_of(name), kept.is_kept(name)) for name in names]


def keep(make: Make, key: str) -> None:
    """Compile one of the kernels of a plan and write its file.

    Raises:
        KeyError: the plan has no such kernel.
        OSError: the file cannot be written.
        ValueError: there is no place for a file.
    """
    kernel = {kernel.name: kernel for kernel in make()[0].kernels}[key]
    path = kept.file_of(key)
    if path is None:
        raise ValueError(f"{cache.VARIABLE} is empty, which means that nothing is kept; expected a folder")
    keep_compiled(kernel, path)
