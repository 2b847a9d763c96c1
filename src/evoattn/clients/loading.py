"""Imports of what calls on a GPU need, on a thread, while the client reads its checkpoint."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading

from evoattn.compile import cache
from evoattn.core.devices import driver_version

MODULES = (
    *("evoattn.backends.triton.forward_plan", "evoattn.kit.norm", "evoattn.kit.compiling"),
    *("evoattn.pair.multiplication.steps", "evoattn.pair.transitions.steps", "evoattn.pair.products.steps"),
    "triton.experimental.gluon.nvidia.hopper",  # Triton imports it at its first launch
)
"""Those of calls in inference. They import Triton."""

_LONGEST_S = 20.0
"""Seconds that a fork waits for the imports. They may be waiting for an import of the thread that forks."""

COMPILER = "evoattn.backends.hopper.forward_plan"
"""Imports CuTe DSL, which takes 2 s. Where no kernel is kept it is left to the first call whose kernels are there."""


@functools.cache
def load_ahead() -> threading.Thread | None:
    """Begin to import, once in a process, if it has a GPU of NVIDIA's. CUDA is not started: a program may fork."""
    if driver_version() is None:
        return None
    thread = threading.Thread(target=_load, name="evoattn-imports", daemon=True)

    def wait() -> None:
        if threading.current_thread() is not thread:
            thread.join(_LONGEST_S)

    thread.start()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=wait)  # a child would wait for ever for what the thread was importing
    return thread


def _load() -> None:
    folder = cache.folder()
    kept = folder is not None and any((folder / "hopper").glob("*.o"))
    for module in (*MODULES, *[COMPILER] * kept):
        with contextlib.suppress(Exception):  # the call that needs it says what is wrong
            found = importlib.import_module(module)
            if module == "evoattn.kit.compiling":
                found.digest_of_triton()
                _compile_driver()


def _compile_driver() -> None:
    """Have Triton compile the C code by which it calls CUDA, if that is not kept. It takes .5 s, and starts no CUDA."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()
