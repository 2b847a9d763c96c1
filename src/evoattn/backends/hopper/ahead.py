"""The kernels that a plan launches: found without a GPU, and compiled for later processes (see `evoattn.backends.Backend`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evoattn.backends import Needed, Plan
from evoattn.backends.hopper.host import kept
from evoattn.backends.hopper.host.launch import Kernel, keep_compiled, noted

__all__ = ["keep", "needed"]

Make = Callable[[], tuple[Plan, tuple[Any, ...]]]


def needed(make: Make) -> list[Needed]:
    """The kernels of a plan, each once, in the order in which it plans their launches."""
    return [Needed(name, name, kept.file_of(name), kept.is_kept(name)) for name in _kernels(make)]


def keep(make: Make, key: str) -> None:
    """Compile one of the kernels of a plan and write its file.

    Raises:
        KeyError: the plan has no such kernel.
        OSError, ValueError: it cannot be kept.
    """
    keep_compiled(_kernels(make)[key])


def _kernels(make: Make) -> dict[str, Kernel]:
    """By name: all launches are planned before the first."""
    found: list[Kernel] = []
    token = noted.set(found)
    try:
        make()
    finally:
        noted.reset(token)
    return {kernel.name: kernel for kernel in found}
