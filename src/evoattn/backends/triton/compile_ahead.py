"""What the launches of a call need is compiled before the first of them, on several threads at once.

Triton compiles a kernel when it is first launched, and up to 3.6 makes a launcher for it with the C compiler: at `tri384` two
kernels forward and five backward, one after another. So the first call of a plan is walked through before, with launches that
only ask for their kernels; where all of them are there already, that costs what a call costs the host.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch

from evoattn.backends.triton.launch import ahead

__all__ = ["compile_ahead"]


def compile_ahead(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make all that `run(*arguments)` would launch ready, and launch nothing.

    Memory that `run` allocates is allocated, cleared and copied into, and let go. A graph that is captured would keep all of
    that: there nothing happens, and kernels are compiled as they are launched.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    with ThreadPoolExecutor() as threads:  # starts none where there is nothing to compile
        # In a context of its own: Triton leaves its mode on when a kernel does not compile.
        kernels = contextvars.copy_context().run(_ask, run, arguments, threads)
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        for _ in threads.map(_load, kernels, [device] * len(kernels)):
            pass  # what a thread raised is raised here


def _ask(run: Callable[..., Any], arguments: tuple[Any, ...], threads: Executor) -> list[Any]:
    """The kernels that had to be compiled."""
    from triton import AsyncCompileMode

    kernels: list[Any] = []
    ahead.set(kernels)
    with AsyncCompileMode(threads):
        run(*arguments)
    return [kernel.result() for kernel in kernels if hasattr(kernel, "result")]


def _load(kernel: Any, device: int) -> None:
    """Make a kernel's launcher and bring its code to the device, which is a thread's own."""
    with torch.cuda.device(device):
        kernel.run  # noqa: B018 (what it is looked up for is that it is made)
