"""The Triton kernels that launches ask for, as text without names: found, put into one form, compiled.

Triton's front end makes TTIR of a kernel. It is written without locations and names, and with parameters in the order in which
the kernel first reads them; those that it never reads are left out. So a kernel that is renamed, moved or called with its
arguments in another order gives the same text, and the code that Triton makes of this text is what is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import compiler
from triton.runtime import driver

from proofs.text import digest, unnamed

__all__ = ["Source", "code_of", "driven"]

_CODE = ("ptx", "amdgcn")
"""The stages after which the text is compared: ptxas makes the same of the same."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A kernel as it is compiled.

    Args:
        name: of its function, and its constants; not compared.
        text: its TTIR.
        target: the GPU, as `GPUTarget` takes it.
        options: what it is compiled with.
        order: for each parameter of `text`, the place among those that the kernel was written with.
    """

    name: str
    text: str
    target: tuple[str, Any, int]
    options: dict[str, Any]
    order: tuple[int, ...]

    @property
    def key(self) -> str:
        """The same for the same code."""
        told = sorted((name, str(value)) for name, value in self.options.items() if name != "extern_libs")  # a path
        return digest(triton.__version__, self.text, self.target, told)


class _Driver:
    """A Triton driver that names a GPU and can do nothing with it. The JIT keeps kernels by the device, so each is one."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> Any:
        return f"{self.target.backend} {self.target.arch}"

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextlib.contextmanager
def driven(target: GPUTarget, launched: Any) -> Iterator[None]:
    """Have Triton compile for a GPU, and hand each launch to `launched(source, grid, arguments)`."""
    saved = triton.compiler.compile
    triton.compiler.compile = lambda src, target=None, options=None, **_: _Stand(_source(src, target, options), src, launched)
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        triton.compiler.compile = saved
        with contextlib.suppress(RuntimeError):  # without a GPU there is no driver to go back to
            driver.reset_active()


class _Stand:
    """A stand-in for a compiled kernel."""

    module, function, packed_metadata = types.SimpleNamespace(), 0, ()

    def __init__(self, source: Source, written: Any, launched: Any) -> None:
        self.source, self.signature, self.launched = source, written.signature, launched

    def launch_metadata(self, *_: Any) -> None:
        """Nothing is told of a launch."""

    def run(self, x: int, y: int, z: int, stream: Any, function: Any, packed: Any, *rest: Any) -> None:
        """A launch: its arguments come after the metadata and two hooks."""
        given = list(_flat(tuple(self.signature.values()), rest[3:]))
        self.launched(self.source, (x, y, z), [given[i] for i in self.source.order if i < len(given)])

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.run(*grid, None, None, None, None, None, None, *arguments)


def _flat(signature: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[Any]:
    """The values that a kernel takes as parameters, tuples opened and constants left out."""
    for kind, value in zip(signature, values, strict=True):
        if isinstance(kind, tuple | list):
            yield from _flat(tuple(kind), tuple(value))
        elif kind == "constexpr":
            continue
        elif str(kind).startswith("tensordesc"):
            sizes = (*value.shape, *value.strides)
            yield value
            yield from sizes
        else:
            yield value


def _source(src: Any, target: GPUTarget, options: Any) -> Source:
    """A kernel's TTIR, in one form."""
    backend = compiler.make_backend(target)
    options = backend.parse_options(dict(options or {}, **src.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = src.make_ir(target, options, implementation, modules, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, src.language)
    text = stages["ttir"](module, {}).str_nodebug()
    text, order = _in_form(text)
    names = src.fn.arg_names
    constants = " ".join(f"{names[path[0]]}={value}" for path, value in src.constants.items() if len(path) == 1)
    made_for = (target.backend, target.arch, target.warp_size)
    return Source(f"{src.name} {constants}", text, made_for, dict(options.__dict__), order)


def _in_form(text: str) -> tuple[str, tuple[int, ...]]:
    """TTIR without names, its parameters in the order of their first use; and the order that they had."""
    text = unnamed(text)
    start = text.index("(", text.index("tt.func public"))
    end = _closing(text, start)
    parts = (one.partition(":") for one in _split(text[start + 1 : end]))
    parameters = {name.removeprefix("%arg"): kind.strip() for name, _, kind in parts}
    body = text[end:]
    names: dict[str, str] = {}
    order: list[int] = []
    for name in re.findall(r"%arg(\d+)\b", body):
        if name not in names:
            names[name] = f"%p{len(order)}" if name in parameters else f"%r{len(names) - len(order)}"
            order += [int(name)] if name in parameters else []
    body = re.sub(r"%arg(\d+)\b", lambda found: names[found[1]], body)
    head = ", ".join(f"%p{i}: {parameters[str(name)]}" for i, name in enumerate(order))
    return f"{text[: start + 1]}{head}{body}", tuple(order)


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{<") - (text[i] in ")]}" or (text[i] == ">" and text[i - 1] != "-"))
        if not depth:
            return i
    raise ValueError("a bracket is not closed")


def _split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket."""
    parts, depth, last = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and not depth:
            parts.append(text[last:i].strip())
            last = i + 1
    return [part for part in (*parts, text[last:].strip()) if part]


def code_of(source: Source) -> str:
    """The digest of a kernel's PTX or, on AMD, its assembler."""
    target = GPUTarget(*source.target)
    backend = compiler.make_backend(target)
    options = backend.parse_options(dict(source.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(source.text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata = {"target": target, **options.__dict__}
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        for stage, make in list(stages.items())[1:]:
            module = make(module, metadata)
            if stage in _CODE:
                break
    return digest(module)
