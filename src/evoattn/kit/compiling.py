"""Triton's compiler: where a kernel is kept, and the kernel of one launch compiled by a worker process.

A launch tells a worker all that its kernel depends on: the function, the dtype and alignment of each tensor, numbers, constants
and the GPU. The worker asks Triton for the kernel as the launch would, with a driver that only names the GPU. So Triton keeps
the kernel under the key for which the launch looks.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import pathlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from evoattn.compile import beside, cache
from evoattn.compile.workers import Task
from evoattn.core.attempts import Compilation

COMPILES_AHEAD = hasattr(triton, "AsyncCompileMode")
"""True if this Triton compiles kernels before they are launched; 3.3, which goes with torch 2.7, does not."""

LAUNCHERS_ARE_COMPILED = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
"""True if Triton makes a launcher for each signature with the C compiler, as it does up to 3.6."""


class NamedDriver:
    """A Triton driver that names a GPU and can do nothing with it. It is a device of its own, with no kernel in memory."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> Any:
        return self  # the key of Triton's kernels in memory

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def named_driver(capability: tuple[int, int]) -> Any:
    """Let Triton take the driver of a GPU that is only named."""
    stand_in = NamedDriver(capability)
    driver.set_active(stand_in)
    try:
        yield stand_in
    finally:
        with contextlib.suppress(RuntimeError):  # without a GPU there is no driver to go back to
            driver.reset_active()


@functools.cache
def digest_of_triton() -> Future[Any]:
    """Begin to read all of Triton on a thread: its digest is a part of each key, and 300 MB take a second.

    Triton keeps the digest. The thread leaves the interpreter to others while it reads and digests.
    """
    digest: Future[Any] = Future()

    def read() -> None:
        try:
            digest.set_result(triton.runtime.cache.triton_key())
        except Exception:  # Triton itself reads it then, or says what is wrong
            digest.set_result(None)

    threading.Thread(target=read, name="evoattn-digest", daemon=True).start()
    return digest


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=digest_of_triton.cache_clear)  # its thread is not there


def key_of(text: str) -> str:
    """The key under which Triton keeps a kernel, from what it depends on."""
    return hashlib.sha256(text.encode()).hexdigest()


def folder_of(key: str) -> pathlib.Path:
    """The folder in which Triton keeps a kernel."""
    return pathlib.Path(triton.knobs.cache.dir) / base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def kept_bytes(folder: pathlib.Path) -> int:
    """The size of a folder; 0 if Triton would not find the kernel there: it keeps absolute paths, so none in a moved folder."""
    for group in folder.glob("__grp__*"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            if all(map(os.path.exists, json.loads(group.read_text())["child_paths"].values())):
                return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def forget(jitted: Any) -> None:
    """Have Triton ask for kernels again that failed, or that were not compiled: it keeps what stands for them."""
    for kernels, *_ in list(getattr(jitted, "device_caches", {}).values()):
        for key, kernel in list(kernels.items()):  # a copy: other threads may add kernels and forget them
            if hasattr(kernel, "result"):
                kernels.pop(key, None)


def mended(ask: Callable[[], Any]) -> None:
    """Ask Triton for kernels, once more if a file that it keeps beside a kernel is damaged: it would fail in every process."""
    try:
        ask()
    except json.JSONDecodeError as error:
        warnings.warn(f"a kernel in Triton's cache is damaged ({error}): compiled anew", stacklevel=3)
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            ask()


@dataclasses.dataclass(frozen=True)
class Stub:
    """Stands for a tensor: what Triton asks of it. No tuple, of which Triton would make a tuple of arguments."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)


class Wanted(NamedTuple):
    """The kernel of a launch: a `FlatKernel` by module and name, the launch's arguments, and Triton's options."""

    module: str
    name: str
    stubs: tuple[Stub, ...]
    numbers: tuple[float, ...]
    options: dict[str, Any]
    through_map: Any
    capability: tuple[int, int] | None

    def task(self) -> Task:
        """Compile it in a worker."""
        return Task(f"{__name__}:compile_kernel", tuple(self))


def compilation(wanted: Wanted, jitted: Any, ask: Callable[[], Any]) -> Compilation | None:
    """The compilation of a kernel that is not kept, by a worker. It begins now, if it has not.

    Args:
        wanted: the kernel.
        jitted: its `triton.jit` function.
        ask: asks Triton for it.

    Returns:
        None: Triton has the kernel. It was kept, or no worker could compile it and this process did.
    """
    if not COMPILES_AHEAD:
        beside.tell(f"Triton {triton.__version__} compiles no kernel ahead of its launch")
        return None
    if not _takes_files(triton.knobs.cache.dir):
        beside.tell(f"{triton.knobs.cache.dir} cannot be written")
        return None
    digest = digest_of_triton()
    if not digest.done() and _was_empty(triton.knobs.cache.dir):
        return digest  # before it is there no kernel has a key, and none is kept
    digest.result()
    mode, found = triton.AsyncCompileMode(None), list[Compilation]()

    def submit(text: str, compile_one: Callable[[], Any], finish: Callable[[Any], Any], *_: Any) -> Any:
        folder = folder_of(key_of(text))
        compiling = beside.compilation(str(folder), wanted.task(), lambda: kept_bytes(folder) > 0)
        if compiling is not None:
            found.append(compiling)
            return compiling
        kernel = compile_one()
        finish(kernel)
        return kernel

    def look() -> None:
        with mode:
            ask()

    mode.submit = submit
    mended(lambda: contextvars.Context().run(look))  # Triton allows one mode, which the caller may have on
    if not found:
        return None
    forget(jitted)
    return found[0]


@functools.cache
def _was_empty(folder: str) -> bool:
    """Return whether Triton kept nothing in a folder when a process first asked."""
    return not any(pathlib.Path(folder).glob("*"))


@functools.cache
def _takes_files(folder: str) -> bool:
    return cache.takes_files(pathlib.Path(folder))


def compile_kernel(*wanted: Any) -> int:
    """Compile a kernel into Triton's cache, and its launcher. Return the bytes of the kernel's folder."""
    from evoattn.kit.launch import OPTIONS, settle_key

    module, name, stubs, numbers, options, through_map, capability = wanted
    jitted = getattr(importlib.import_module(module), name).jitted
    settle_key(jitted)
    with named_driver(capability) as stand_in:
        try:
            arguments = with_descriptor(through_map, list(stubs), stubs)
            kernel = jitted.warmup(*arguments, *numbers, grid=(1,), **OPTIONS, **options)
        finally:
            jitted.device_caches.pop(stand_in, None)
    if LAUNCHERS_ARE_COMPILED:
        with contextlib.suppress(Exception):  # the process that launches the kernel makes it then, or says why it cannot
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(kernel.src, kernel.metadata)
    return kept_bytes(folder_of(kernel.hash))


def with_descriptor(through_map: Any, arguments: list[Any], tensors: tuple[Any, ...]) -> list[Any]:
    """The arguments of a launch, with a descriptor in the place of the tensor that goes through a map.

    The descriptor's constructor only repeats checks of the plan, and takes 3 us of the host.
    """
    if through_map is not None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        place, fields = through_map
        arguments[place] = descriptor = TensorDescriptor.__new__(TensorDescriptor)
        descriptor.__dict__.update(fields, base=tensors[place])
    return arguments
