"""Compile the kernels of a plan before it launches any: those of a call on several threads, or one for later processes.

Triton compiles a kernel when it is first launched, and up to 3.6 it makes a launcher for it with the C compiler. At `tri384`
these are two kernels forward and five backward, one after another. So the first call of a plan runs twice. In the first run
launches only ask Triton for their kernels, which are then compiled on several threads. If all of them are compiled already,
this run costs the host as much as a call.

`evoattn warm` runs plans in the same way, with tensors on "meta" and a driver that only names the GPU. So Triton names kernels
by the keys under which a launch looks for them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime import driver

from evoattn.backends import Needed, Plan
from evoattn.core import attempts, devices
from evoattn.kit import compiling, launch

Make = Callable[[], tuple[Plan, tuple[Any, ...]]]

_loading = threading.Lock()


def compile_ahead(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Compile and load all kernels that `run(*arguments)` would launch. Launch none of them.

    This calls `run`, so torch operations in it do run: they allocate, clear and copy memory, which is then freed. A CUDA graph
    would record them, so during a capture this function returns at once, and each kernel is compiled at its launch.

    No other thread may run the same plan meanwhile: a launch that it made would start its kernel here instead of collecting it.
    An attempt does not wait: its launches themselves ask workers for what is not there.
    """
    if not compiling.COMPILES_AHEAD or attempts.current() is not None:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    compiling.mended(lambda: _try_again(run, arguments))


def _try_again(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Prepare a run, once more if threads were in each other's way, and in the end with one thread.

    Python up to 3.11 counts for all threads together how deep they are in a syntax tree. It raises SystemError if the number is
    not what it was.
    """
    for last in (False, False, True):
        try:
            with ThreadPoolExecutor(1 if last else None) as threads:  # starts none if there is nothing to compile
                # In a context of its own: Triton allows one mode, which the caller may have on.
                load(contextvars.Context().run(_compile, run, arguments, threads), threads)
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


def _compile(run: Callable[..., Any], arguments: tuple[Any, ...], threads: ThreadPoolExecutor) -> list[Any]:
    """The kernels of a run that are not on the device, also those that another thread has compiled and not loaded."""
    launched: list[launch.Collected] = []
    try:
        _collect(launched, triton.AsyncCompileMode(threads), run, arguments)
        kernels = [one.kernel.result() if hasattr(one.kernel, "result") else one.kernel for one in launched]
        return [kernel for kernel in dict.fromkeys(kernels) if kernel.module is None]
    except BaseException:
        for one in launched:
            compiling.forget(one.jitted)
        raise


def _collect(launched: list[launch.Collected], mode: Any, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Add each launch of a run, with what Triton returns for its kernel in a mode; start none."""
    launch.collecting.set(launched)
    with mode:
        run(*arguments)


def load(kernels: list[Any], threads: ThreadPoolExecutor) -> None:
    """Make the launchers of kernels, and bring their code to the current device.

    A launcher that the C compiler made is a Python module. All launchers have the same module name, and Python keeps one module
    object for a name: of two threads that load launchers at once, one can get the other's. So other threads only fill Triton's
    cache of compiled launchers, and kernels are loaded one at a time in the whole process.
    """
    with _loading:
        if compiling.LAUNCHERS_ARE_COMPILED:
            for _ in threads.map(compile_launcher, kernels):
                pass  # what a thread raised is raised here
        for kernel in kernels:
            kernel.run  # noqa: B018 (the look-up loads it)


def compile_launcher(kernel: Any) -> None:
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def needed(make: Make) -> list[Needed]:
    """List the kernels of a plan, each once, in the order in which it launches them (see `evoattn.backends.Backend`)."""
    card = devices.planned()
    if card is None:
        raise RuntimeError("kernels are found for a card that plans are made for; none is")
    launched: list[launch.Collected] = []
    mode = triton.AsyncCompileMode(None)
    mode.submit = lambda text, *_: compiling.key_of(text)  # a kernel's key stands for it

    def walk() -> None:
        plan, arguments = make()
        _collect(launched, mode, plan.run, arguments)

    with compiling.named_driver(card.capability) as stand_in:
        try:
            contextvars.copy_context().run(walk)
        finally:
            for one in launched:
                one.jitted.device_caches.pop(stand_in, None)
    kernels = {one.kernel: one for one in launched}
    folders = {key: compiling.folder_of(key) for key in kernels}
    return [
        Needed(one.jitted.__name__, key, folders[key], compiling.kept_bytes(folders[key]), one.wanted.task())
        for key, one in kernels.items()
    ]
