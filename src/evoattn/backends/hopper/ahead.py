"""Compile kernels once, and keep what was compiled in memory and in the cache folder.

The compiler takes 1 to 5 s a kernel. What it makes is an object file of about 150 KB, which later processes load in 25 ms.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from cutlass.cute.runtime import load_module

from evoattn.backends import Needed, Plan, hopper
from evoattn.compile import beside, cache
from evoattn.compile.workers import Task
from evoattn.core import attempts, numerics
from evoattn.core.config import Config
from evoattn.core.devices import Card, planned_for
from evoattn.core.inputs import Inputs

if TYPE_CHECKING:
    from evoattn.backends.hopper.launch import KernelVariant

Make = Callable[[], tuple[Plan, tuple[Any, ...]]]

HOPPER = pathlib.Path(__file__).parent

functions: dict[str, Any] = {}
"""Compiled kernels by name."""

modules: list[Any] = []
"""The modules that functions were loaded from: a function that outlives its module hangs when it is called."""

_compiler = threading.Lock()
"""The compiler is one thread's at a time: two at once bring the process down."""


@functools.cache
def digest_source() -> bytes:
    """Digest what a kept kernel depends on besides its name: the kernels' text, the compiler's version, the kind of host.

    The compilers for CUDA 12 and 13 have the same version.
    """
    parts = [importlib.metadata.version("nvidia-cutlass-dsl"), platform.machine()]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        parts.append("cu13 " + importlib.metadata.version("nvidia-cutlass-dsl-libs-cu13"))
    digest = hashlib.sha256(" ".join(parts).encode())
    for pattern in ("kernels/*.py", "lib/*.py", "launch.py", "tiles.py"):
        for path in sorted(HOPPER.glob(pattern)):
            digest.update(path.read_bytes())
    digest.update(repr(numerics.NEAR).encode())
    return digest.digest()


def _symbol(name: str) -> str:
    """The name of the function of a kernel of this name: no two in one process may share a symbol."""
    return "evoattn_" + hashlib.sha256(digest_source() + name.encode()).hexdigest()[:24]


def _file(name: str) -> pathlib.Path | None:
    """The file of a compiled kernel; None if nothing is to be kept."""
    folder = hopper.folder()
    return None if folder is None else folder / f"{name}-{_symbol(name).removeprefix('evoattn_')}.o"


def _compilation(kernel: KernelVariant) -> attempts.Compilation | None:
    """The compilation of a kernel by a worker. None: it is kept, or no worker can hand it on."""
    path = _file(kernel.name)
    if path is None or not cache.takes_files(path.parent):
        beside.tell(f"{cache.VARIABLE} is empty" if path is None else f"{path.parent} cannot be written")
        return None
    return beside.compilation(str(path), Task(f"{__name__}:keep", (kernel, path)), lambda: cache.code_bytes(path) > 0)


def keep_forward(inputs: list[Any], scale: float, layout: str, card: Card) -> None:
    """Compile the kernels of a forward that are not kept. Its inputs are on "meta"."""
    with planned_for(card):
        plan = hopper.plan_forward(Inputs(*inputs), scale=scale, layout=layout, config=Config())
    for kernel in plan.kernels:
        keep(kernel, _file(kernel.name))


def load_kernel(kernel: KernelVariant) -> Any:
    """Return a kernel as a function; from its file if an earlier process made it.

    None: it is not there, and the attempt that would launch it was given up.

    It is made in a thread of its own. Ctrl-C, or a signal handler that raises, reaches the caller: inside the compiler it would
    abort the process. What was begun goes on meanwhile, and the next call finds it. Threads that want one kernel share it.
    """
    function, attempt = functions.get(kernel.name), attempts.current()
    if function is None and attempt is not None and (compilation := _compilation(kernel)) is not None:
        attempt.give_up(compilation)
        return None
    if function is None:
        result: Future[Any] = Future()
        threading.Thread(target=contextvars.copy_context().run, args=(_make, kernel, result)).start()
        function = result.result()
    return function


def _make(kernel: KernelVariant, result: Future[Any]) -> None:
    """Load or compile a kernel unless another thread has done so meanwhile."""
    name = kernel.name
    with _compiler:
        try:
            if name not in functions:
                load = functools.partial(_load, symbol=_symbol(name))
                functions[name] = cache.code(_file(name), load, lambda: _object_file(kernel))
            result.set_result(functions[name])
        except BaseException as error:  # raised to the caller, whatever it is
            result.set_exception(error)


def _object_file(kernel: KernelVariant) -> bytes:
    from evoattn.backends.hopper.launch import build

    symbol = _symbol(kernel.name)
    handle = os.memfd_create(symbol)  # needs no disk
    with open(handle, "rb") as file:
        build(kernel).export_to_c(f"/proc/self/fd/{handle}", function_name=symbol)
        return file.read()


def _load(data: bytes, symbol: str) -> Any:
    """The function of an object file."""
    handle = os.memfd_create(symbol)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        module = load_module(f"/proc/self/fd/{handle}", enable_tvm_ffi=True)
    function = getattr(module, symbol)
    modules.append(module)
    return function


def begin(kernels: Iterable[KernelVariant]) -> None:
    """Have kernels that are not kept compiled in other processes, while this one comes to them in this order."""
    missing = {kernel: _file(kernel.name) for kernel in kernels if kernel.name not in functions}
    tasks = [Task(f"{__name__}:keep", (kernel, path, False)) for kernel, path in missing.items() if not cache.code_bytes(path)]
    beside.help_with(tasks, hopper.folder())


def needed(make: Make) -> list[Needed]:
    """List the kernels of a plan, each once, in the order in which it plans their launches (see `evoattn.backends.Backend`)."""
    return [_needed(kernel) for kernel in dict.fromkeys(make()[0].kernels)]


def _needed(kernel: KernelVariant) -> Needed:
    path = _file(kernel.name)
    return Needed(kernel.name, kernel.name, path, cache.code_bytes(path), Task(f"{__name__}:keep", (kernel, path)))


def keep(kernel: KernelVariant, path: pathlib.Path | None, wait: bool = True) -> int:
    """Compile a kernel into its file, unless another process has, and return the bytes of that file. This one loads nothing.

    Raises OSError if the file cannot be written, and ValueError if there is no place for one. Without `wait` it leaves a kernel
    that another process compiles.
    """
    if path is None:
        raise ValueError(f"{cache.VARIABLE} is empty, which means that nothing is kept; expected a folder")
    with _compiler, cache.locked(path, wait=wait) as held:
        if held and not cache.code_bytes(path):
            cache.keep_code(path, _object_file(kernel))
    return cache.code_bytes(path)
