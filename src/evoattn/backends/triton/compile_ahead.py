"""What the launches of a call need is compiled before the first of them, on several threads at once.

Triton compiles a kernel when it is first launched, and up to 3.6 makes a launcher for it with the C compiler: at `tri384` two
kernels forward and five backward, one after another. So the first call of a plan is walked through before, with launches that
only ask for their kernels; where all of them are there already, that costs what a call costs the host.
"""

from __future__ import annotations

import contextvars
import json
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton import knobs

from evoattn.backends.triton.launch import ahead

__all__ = ["compile_ahead"]


def compile_ahead(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make all kernels that `run(*arguments)` would launch ready, and launch none of them.

    What torch does in `run` it does: memory is allocated, cleared and copied into, and let go. A graph that is captured would
    keep all of that: there nothing happens, and kernels are compiled as they are launched. One plan at a time: a launch that
    another thread has made would not ask but start.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    try:
        _prepare(run, arguments, mode)
    except json.JSONDecodeError as error:  # what Triton keeps beside a kernel is not whole: it would fail in every process
        warnings.warn(f"a kernel in Triton's cache is damaged ({error}): compiled anew", stacklevel=2)
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            _prepare(run, arguments, mode)


def _prepare(run: Callable[..., Any], arguments: tuple[Any, ...], mode: Any) -> None:
    """Compile what a run launches, and load it."""
    with ThreadPoolExecutor() as threads:  # starts none where there is nothing to compile
        # In a context of its own: Triton allows one mode, which the caller may have on, and leaves it on when a kernel fails.
        kernels = contextvars.Context().run(_ask, run, arguments, mode, threads)
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        for _ in threads.map(_load, kernels, [device] * len(kernels)):
            pass  # what a thread raised is raised here


def _ask(run: Callable[..., Any], arguments: tuple[Any, ...], mode: Any, threads: Executor) -> list[Any]:
    """The kernels that had to be compiled."""
    asked: list[tuple[Any, Any]] = []
    ahead.set(asked)
    try:
        with mode(threads):
            run(*arguments)
        return list(dict.fromkeys(kernel.result() for _, kernel in asked if hasattr(kernel, "result")))
    except BaseException:
        for jitted, _ in asked:
            _forget(jitted)
        raise


def _forget(jitted: Any) -> None:
    """Have Triton compile anew what it took for compiled: from 3.7 on it keeps kernels that failed, and fails again."""
    for kept, *_ in list(getattr(jitted, "device_caches", {}).values()):
        for key, kernel in list(kept.items()):  # a copy: other threads may add kernels and forget them
            if hasattr(kernel, "result"):
                kept.pop(key, None)


def _load(kernel: Any, device: int) -> None:
    """Make a kernel's launcher and bring its code to the device, which is a thread's own."""
    with torch.cuda.device(device):
        kernel.run  # noqa: B018 (what it is looked up for is that it is made)
