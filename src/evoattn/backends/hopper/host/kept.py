"""Compiled kernels as files: under which name they are kept, whether a file is whole, and how it is loaded."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import warnings
from typing import Any

from cutlass.cute.runtime import load_module

from evoattn import cache, numerics

__all__ = ["cannot_keep", "checked", "file_of", "is_kept", "loaded", "source", "symbol_of", "write"]

_HOPPER, _KERNELS = pathlib.Path(__file__).parents[1], ("kernels", "forward", "backward")
"""Where the kernels' text lies, beside plans, which only say what is launched."""

_DIGEST = hashlib.sha256().digest_size
"""Bytes at the end of a kept file."""

_modules: list[Any] = []
"""What functions were loaded from."""


@functools.cache
def source() -> bytes:
    """What a kept kernel depends on besides its own name: the kernels' text, the compiler's version, the kind of host.

    The compilers for CUDA 12 and 13 have the same version.
    """
    parts = [importlib.metadata.version("nvidia-cutlass-dsl"), platform.machine()]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        parts.append("cu13 " + importlib.metadata.version("nvidia-cutlass-dsl-libs-cu13"))
    digest = hashlib.sha256(" ".join(parts).encode())
    for path in sorted(path for folder in _KERNELS for path in (_HOPPER / folder).rglob("*.py")):
        if path.name != "plan.py":
            digest.update(path.read_bytes())
    digest.update((_HOPPER / "host/launch.py").read_bytes() + repr(numerics.NEAR).encode())
    return digest.digest()


def symbol_of(name: str) -> str:
    """The name of the function of a kernel of this name: no two in one process may share a symbol."""
    return "evoattn_" + hashlib.sha256(source() + name.encode()).hexdigest()[:24]


def file_of(name: str) -> pathlib.Path | None:
    """Where a compiled kernel is kept; None where nothing is to be kept."""
    kept = cache.folder()
    return None if kept is None else kept / "hopper" / f"{name}-{symbol_of(name).removeprefix('evoattn_')}.o"


def is_kept(name: str) -> bool:
    """Whether a launch would read the kernel and not compile it."""
    path = file_of(name)
    try:
        return path is not None and os.path.exists(path) and bool(checked(path.read_bytes()))
    except (OSError, ValueError):
        return False


def write(path: pathlib.Path, made: bytes) -> None:
    """Keep an object file, with its digest behind it."""
    cache.write(path, made + hashlib.sha256(made).digest())


def checked(data: bytes) -> bytes:
    """An object file without the digest that follows it.

    The loader takes an object file with a hole of zeros, as a machine that lost power may leave it, and the kernel then fails.
    """
    made, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(made).digest() != digest:
        raise ValueError(f"its {len(data)} bytes are not what was written")
    return made


def loaded(made: bytes, symbol: str) -> Any:
    """The function of an object file. The module is kept: a function that outlives its module hangs when it is called."""
    handle = os.memfd_create(symbol)
    with open(handle, "wb") as file:
        file.write(made)
        file.flush()
        module = load_module(f"/proc/self/fd/{handle}", enable_tvm_ffi=True)
    function = getattr(module, symbol)
    _modules.append(module)
    return function


@functools.cache
def cannot_keep(folder: str, why: str) -> None:
    """Say once that kernels are not kept."""
    warnings.warn(
        f"{folder} cannot be written ({why}): each process compiles its kernels. {cache.VARIABLE} names another folder; "
        "empty, nothing is kept and nothing is said.",
        stacklevel=2,
    )
