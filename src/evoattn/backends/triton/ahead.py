"""The kernels that a plan launches: found without a GPU, and compiled for later processes (see `evoattn.backends.Backend`).

A plan's first run is walked through with tensors on "meta", as `compile_ahead` does it with those of a call. Triton then asks
for kernels just as at a launch, by the keys under which it keeps them. The driver that stands for the GPU only names it.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, driver

from evoattn import devices
from evoattn.backends import Needed, Plan
from evoattn.backends.triton.launch import ahead

__all__ = ["keep", "needed"]

Make = Callable[[], tuple[Plan, tuple[Any, ...]]]

_WARP = 32


def needed(make: Make) -> list[Needed]:
    """The kernels of a plan, each once, in the order in which it launches them."""
    return [_needed(key, name) for key, name in _walk(make, None).items()]


def keep(make: Make, key: str) -> None:
    """Compile one of the kernels of a plan, into Triton's cache.

    Raises:
        KeyError: the plan has no such kernel.
    """
    if key not in _walk(make, key):
        raise KeyError(key)


def _needed(key: str, name: str) -> Needed:
    folder = pathlib.Path(knobs.cache.dir) / base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")
    return Needed(name, key, folder, any(folder.glob("__grp__*")))


class _Named(NamedTuple):
    """What stands for a kernel that Triton asked for."""

    key: str


class _Asked:
    """What Triton hands its compilations to, in place of threads: names them all, and compiles the one of a key, if any.

    Args:
        wanted: that key.
    """

    def __init__(self, wanted: str | None) -> None:
        self.wanted = wanted

    def submit(self, text: str, compile_one: Callable[[], Any], *after: Any) -> _Named:
        """What stands for the kernel, which is not loaded.

        Args:
            text: from which the kernel's key follows.
            compile_one: compiles it.
            after: what Triton would do with it, and from 3.9 on what it would do after an error.
        """
        key = hashlib.sha256(text.encode()).hexdigest()
        if key == self.wanted:
            compile_one()
        return _Named(key)


def _walk(make: Make, wanted: str | None) -> dict[str, str]:
    """The keys of all kernels and their names. A context of its own, as for `compile_ahead`."""
    card = devices.planned()
    if card is None:
        raise RuntimeError("kernels are found for a card that plans are made for; none is")
    stand_in = _Driver(card.capability)
    driver.set_active(stand_in)
    try:
        launches = contextvars.copy_context().run(_walked, make, wanted)
    finally:
        with contextlib.suppress(RuntimeError):  # without a GPU there is no driver to go back to
            driver.reset_active()
    for jitted, _ in launches:
        jitted.device_caches.pop(stand_in, None)
    return {named.key: jitted.__name__ for jitted, named in launches}


def _walked(make: Make, wanted: str | None) -> list[tuple[Any, _Named]]:
    """Each launch, by its `triton.jit` function and what stands for the kernel."""
    launches: list[tuple[Any, _Named]] = []
    plan, arguments = make()
    ahead.set(launches)
    _async_compile.active_mode.set(_Asked(wanted))
    plan.run(*arguments)
    return launches


class _Driver:
    """A Triton driver that names a GPU and can do nothing with it. Each is a device of its own, with no kernel in memory."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, _WARP)

    def get_current_device(self) -> Any:
        """What Triton keeps kernels in memory by."""
        return self

    def get_current_stream(self, device: Any) -> int:
        """The default one."""
        return 0
