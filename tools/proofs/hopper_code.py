"""The Hopper kernels that launches ask for: found, traced to MLIR without names, compiled to machine code without names."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import struct
from collections.abc import Iterator
from typing import Any

import torch

from proofs.text import digest, unnamed

__all__ = ["AVAILABLE", "Source", "code_of", "driven", "traced"]

AVAILABLE = importlib.util.find_spec("cutlass") is not None

_STREAM = "_cuda_getCurrentRawStream"
_NOBITS = 8


def _launches() -> Any:
    """The module with `load_kernel(kernel)`, which gives a launch its function, and `build(kernel)`, which compiles."""
    return importlib.import_module("evoattn.backends.hopper.launch")


@contextlib.contextmanager
def driven(launched: Any) -> Iterator[None]:
    """Hand each launch of a Hopper kernel to `launched(kernel, extents, arguments)`."""
    if not AVAILABLE:
        yield
        return

    def compiled(kernel: Any) -> Any:
        return lambda extents, stream, *arguments: launched(kernel, tuple(extents), list(arguments))

    launches = _launches()
    kept, stream = launches.load_kernel, getattr(torch._C, _STREAM, None)
    launches.load_kernel = compiled
    setattr(torch._C, _STREAM, lambda index: 0)
    try:
        yield
    finally:
        launches.load_kernel = kept
        if stream is None:
            delattr(torch._C, _STREAM)
        else:
            setattr(torch._C, _STREAM, stream)


class _TracedError(Exception):
    """Ends a compilation of which the MLIR is all that is wanted."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A kernel as it is compiled.

    Args:
        name: of the kernel; not compared.
        text: its MLIR, without names, with that of the function that launches it.
        pipeline, options: what it is compiled with.
    """

    name: str
    text: str
    pipeline: str
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for the same code of the GPU."""
        return digest(importlib.metadata.version("nvidia-cutlass-dsl"), _parts(self.text)[0], self.pipeline)

    @property
    def host(self) -> str:
        """The same for the same function that launches it."""
        return digest(_parts(self.text)[1])


def traced(kernel: Any) -> Source:
    """The MLIR of a kernel, as the package plans it."""
    from cutlass.cutlass_dsl import CuTeDSL

    compiler = type(CuTeDSL._get_dsl().compiler_provider)
    compile_module = compiler.compile
    found: list[Source] = []

    def keep(self: Any, module: Any, pipeline: str, **options: Any) -> Any:
        found.append(Source(kernel.name, unnamed(str(module)), pipeline, options))
        raise _TracedError

    compiler.compile = keep
    try:
        _launches().build(kernel)
    except _TracedError:
        return found[0]
    finally:
        compiler.compile = compile_module
    raise ValueError(f"{kernel.name} is not compiled as others are")


def _parts(text: str) -> tuple[str, str]:
    """The kernels of an MLIR module, and all else of it. Aliases of types belong to both."""
    start = text.index("  gpu.module ")
    end = text.index("\n  }\n", start)
    return text[: text.index("module attributes")] + text[start:end], text[:start] + text[end:]


def code_of(source: Source) -> str:
    """The digest of a kernel's machine code."""
    from cutlass._mlir import ir
    from cutlass.cutlass_dsl import CuTeDSL

    provider = CuTeDSL._get_dsl().compiler_provider
    with ir.Context() as context, ir.Location.unknown():
        context.enable_multithreading(False)
        module = ir.Module.parse(source.text)
        made = provider.compile(module, source.pipeline, **source.options)
        text = str(made if isinstance(made, ir.Module) else module)
    return digest(*sorted(_sections(_binary(text))))


def _binary(text: str) -> bytes:
    """The machine code in a compiled module, in which bytes that are no letters stand as \\XX."""
    found = re.search(r'internal constant @\w+_binary\("((?:[^"\\]|\\.)*)"', text)
    if found is None:
        raise ValueError("a compiled module without machine code")
    escaped = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)
    data = escaped.sub(lambda one: bytes.fromhex(one[1].decode()) if len(one[1]) == 2 else one[1], found[1].encode())
    return data[data.index(b"\x7fELF") :]


def _sections(elf: bytes) -> Iterator[str]:
    """The sections of an ELF file that the GPU runs or reads: kind, size, contents."""
    table, size, count, names = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = heads[names][4]
    for name, kind, _, _, offset, length in heads:
        start = strings + name
        text = elf[start : elf.index(b"\0", start)].decode()
        part = re.match(r"\.(text|nv\.info|nv\.constant\d|nv\.shared)\.", text)
        if part:
            contents = b"" if kind == _NOBITS else elf[offset : offset + length]
            yield f"{part[1]} {length} {hashlib.sha256(contents).hexdigest()}"
