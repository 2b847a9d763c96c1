"""Compiled kernels: made once, kept in memory and on disk, called with torch tensors.

The compiler takes 2 to 4 s a kernel. What it makes is an object file of about 150 KB, which later processes load in 25 ms.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import tempfile
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor

from evoattn import cache

__all__ = ["Kernel", "build", "channels", "compiled", "ends", "even", "free", "size", "tensor", "terms", "types"]

types = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.bool: cutlass.Uint8,
}

_OPTIONS = "--enable-tvm-ffi --gpu-arch=sm_90a"
_FUNCTION = "kernel"


def size() -> Any:
    """A size known only when the kernel runs."""
    return cute.sym_int()


def free() -> Any:
    """A stride known only when the kernel runs."""
    return cute.sym_int64()


def even() -> Any:
    """A stride that is a multiple of 8 elements: 16 bytes of a 16-bit type."""
    return cute.sym_int64(divisibility=8)


def tensor(dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], align: int) -> Any:
    """What stands for a tensor when a kernel is compiled."""
    return make_fake_tensor(dtype, shape, stride, assumed_align=align)


def channels(dtype: Any, sizes: tuple[Any, ...], d: int) -> Any:
    """What stands for a tensor [b,n,h,l,d] in either layout: rows of channels start on 16 bytes."""
    return tensor(dtype, (*sizes, d), (even(), even(), even(), even(), 1), 16)


def terms(dtype: Any) -> Any:
    """What stands for the terms of a key-wise bias, [r, keys * TERMS]."""
    return tensor(dtype, (size(), size()), (even(), 1), 16)


def ends() -> Any:
    """What stands for the rows' numbers of keys up to the last that counts, int32 [r]."""
    return tensor(cutlass.Int32, (size(),), (1,), 4)


@functools.cache
def _source() -> bytes:
    """What a kept kernel depends on besides its own name: the kernels' text and the compiler's version."""
    digest = hashlib.sha256(importlib.metadata.version("nvidia-cutlass-dsl").encode())
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


class Kernel:
    """A variant of a kernel: what it is depends on its name alone.

    Subclasses give `__call__` and the kernel itself.
    """

    name: str

    def name_after(self, dtype: Any, **options: Any) -> None:
        """Name this variant after its class and everything that it depends on."""
        words = [type(self).__name__, dtype.__name__]
        for option, value in options.items():
            if value is True:
                words.append(option)
            elif value is not False and value is not None:
                words.append(option + str(getattr(value, "__name__", value)))
        self.name = "-".join(words)

    def arguments(self) -> tuple[Any, ...]:
        """What stands for the arguments of `__call__` when it is compiled, without the stream; sizes and strides open."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def build(kernel: Kernel) -> Any:
    """Compile a kernel for compute capability 9.0, on any machine."""
    return cute.compile(kernel, *kernel.arguments(), make_fake_stream(use_tvm_ffi_env_stream=True), options=_OPTIONS)


@functools.cache
def compiled(kernel: Kernel) -> Any:
    """A kernel as a function of torch tensors and numbers; from disk if an earlier process made it."""
    kept = cache.folder()
    if kept is None:
        return build(kernel)
    key = hashlib.sha256(_source() + kernel.name.encode()).hexdigest()[:24]
    path = kept / "hopper" / f"{kernel.name}-{key}.o"
    function = f"evoattn_{key}"  # no two in one process may share a symbol
    if not path.exists():
        made = build(kernel)
        try:
            _keep(made, path, function)
        except OSError:  # no room or no right to write: this process has the kernel all the same
            return made
    return getattr(_module(path), function)


@functools.cache
def _module(path: pathlib.Path) -> Any:
    """What an object file holds. It is kept: a function of it does not outlive it, and fails by hanging."""
    return load_module(str(path), enable_tvm_ffi=True)


def _keep(made: Any, path: pathlib.Path, function: str) -> None:
    """Write the object file whole or not at all: another process may do the same at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".o")
    os.close(handle)
    try:
        made.export_to_c(temporary, function_name=function)
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
