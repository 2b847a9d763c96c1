"""Compile all kernels of a call on several threads, before the first of them is launched.

Triton compiles a kernel when it is first launched, and up to 3.6 it makes a launcher for it with the C compiler. At `tri384`
these are two kernels forward and five backward, one after another. So the first call of a plan runs twice. In the first run
launches only collect their kernels, which are then compiled together. If all of them are compiled already, this run costs the
host as much as a call.
"""

from __future__ import annotations

import contextvars
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime import driver

from evoattn.backends.triton.launch import ahead
from evoattn.backends.triton.release import COMPILES_AHEAD

__all__ = ["compile_ahead"]

_LAUNCHERS_ARE_COMPILED = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
"""Whether Triton makes a launcher for each signature with the C compiler, as it does up to 3.6."""

_loading = threading.Lock()


def compile_ahead(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Compile and load all kernels that `run(*arguments)` would launch. Launch none of them.

    This calls `run`, so torch operations in it do run: they allocate, clear and copy memory, which is then freed. A CUDA graph
    would record them, so during a capture this function returns at once, and each kernel is compiled at its launch.

    No other thread may run the same plan meanwhile: a launch that it made would start its kernel here instead of collecting it.
    """
    if not COMPILES_AHEAD or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    mode = triton.AsyncCompileMode
    try:
        _try_again(run, arguments, mode)
    except json.JSONDecodeError as error:  # what Triton keeps beside a kernel is not whole: it would fail in every process
        warnings.warn(f"a kernel in Triton's cache is damaged ({error}): compiled anew", stacklevel=2)
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            _try_again(run, arguments, mode)


def _try_again(run: Callable[..., Any], arguments: tuple[Any, ...], mode: Any) -> None:
    """Prepare a run, once more if threads were in each other's way: Python up to 3.11 counts for all of them together how deep
    they are in a syntax tree, and raises SystemError if the number is not what it was."""
    for last in (False, False, True):
        try:
            _prepare(run, arguments, mode)
        except Exception as error:
            if last or not any(isinstance(cause, SystemError) for cause in _causes(error)):
                raise
        else:
            return


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _prepare(run: Callable[..., Any], arguments: tuple[Any, ...], mode: Any) -> None:
    """Compile what a run launches, and load it."""
    with ThreadPoolExecutor() as threads:  # starts none where there is nothing to compile
        # In a context of its own: Triton allows one mode, which the caller may have on, and leaves it on when a kernel fails.
        _load(contextvars.Context().run(_ask, run, arguments, mode, threads), threads)


def _ask(run: Callable[..., Any], arguments: tuple[Any, ...], mode: Any, threads: Executor) -> list[Any]:
    """The kernels that are not on the device yet, also those that another thread has compiled and not loaded."""
    asked: list[tuple[Any, Any]] = []
    ahead.set(asked)
    try:
        with mode(threads):
            run(*arguments)
        kernels = [kernel.result() if hasattr(kernel, "result") else kernel for _, kernel in asked]
        return [kernel for kernel in dict.fromkeys(kernels) if kernel.module is None]
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


def _load(kernels: list[Any], threads: Executor) -> None:
    """Make the launchers of kernels, and bring their code to the current device.

    A launcher that the C compiler made is a Python module. All launchers have the same module name, and Python keeps one module
    object for a name: of two threads that load launchers at once, one can get the other's. So other threads only fill Triton's
    cache of compiled launchers, and kernels are loaded one at a time in the whole process.
    """
    with _loading:
        if _LAUNCHERS_ARE_COMPILED:
            for _ in threads.map(_compile_launcher, kernels):
                pass  # what a thread raised is raised here
        for kernel in kernels:
            kernel.run  # noqa: B018 (what it is looked up for is that it is made)


def _compile_launcher(kernel: Any) -> None:
    driver.active.launcher_cls(kernel.src, kernel.metadata)
