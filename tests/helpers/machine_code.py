"""Compiles a Hopper kernel without a GPU, and tells what ptxas said, what its launch asks for, and its instructions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile
import unittest.mock
from collections.abc import Iterator
from typing import Any

import triton
from cutlass.base_dsl import diagnostics

from evoattn.backends.hopper import launch
from evoattn.backends.hopper.tiles import CHAIN

__all__ = ["Made", "count", "instructions_a_score", "make"]

_CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
"""CUDA's `CUlaunchConfig`, as the compiler writes it: its third field is the launch's shared memory."""


@dataclasses.dataclass(frozen=True)
class Made:
    """What the compiler made of a kernel.

    Args:
        log: what ptxas said, with `--verbose`.
        shared: bytes of shared memory that the launch asks for.
        cubin: the machine code.
    """

    log: str
    shared: int
    cubin: bytes

    @property
    def serialised(self) -> str:
        """The line in which ptxas says that each asynchronous product waits for the one before; else empty."""
        return next((line for line in self.log.splitlines() if "serialized" in line), "")

    @property
    def spilled(self) -> int:
        """Bytes of the spilled registers that instructions store, and of those that they load, wherever they stand."""
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", self.log)
        assert spills, self.log
        return int(spills[1]) + int(spills[2])

    @functools.cached_property
    def instructions(self) -> list[str]:
        """The instructions by name; a wait for products, "WARPGROUP.DEPBAR.LE n", says how many may run on."""
        tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "kernel.cubin"
            path.write_bytes(self.cubin)
            text = subprocess.run([str(tool), "-sass", str(path)], capture_output=True, text=True, check=True).stdout
        line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(?: gsb0, 0x(\d))?"
        return [f"{name} {left}".rstrip() for name, left in re.findall(line, text, re.MULTILINE)]


@functools.cache
def make(kernel: launch.KernelVariant) -> Made:
    """Compile a kernel as its first call would, once a process."""
    with _asking_ptxas() as said:
        built = launch.build(kernel)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.o"
        built.export_to_c(str(path), function_name="kernel")
        data = path.read_bytes()
    return Made("\n".join(said), _shared(str(built.ir_module)), data[data.index(b"\x7fELF", 16) :])


def count(names: list[str], *starts: str) -> int:
    """How many instructions begin with one of these."""
    return sum(name.startswith(starts) for name in names)


def instructions_a_score(names: list[str]) -> float:
    """Instructions between the first and the last exponential of the row's steps, to a score of a thread.

    The rare choice of a reference is among them; what runs at every step is about two thirds.
    """
    exponentials = [i for i, name in enumerate(names) if name == "MUFU.EX2"]
    exponentials = exponentials[: 16 * (2 * CHAIN - 1)]
    return (exponentials[-1] - exponentials[0]) / (len(exponentials) - 1)


@contextlib.contextmanager
def _asking_ptxas() -> Iterator[list[str]]:
    """Kernels that are compiled meanwhile leave what ptxas says in the list, and print nothing."""
    said: list[str] = []
    collect = diagnostics.collect_compiler_diagnostics

    def record(*arguments: Any, **options: Any) -> list[Any]:
        remarks = collect(*arguments, **options)
        said.extend(text for each in remarks for text in (each.message, each.reason) if "ptxas info" in text)
        return []

    with (
        unittest.mock.patch.object(launch, "OPTIONS", launch.OPTIONS + " --remark-filter=ptxas"),
        unittest.mock.patch.object(diagnostics, "collect_compiler_diagnostics", record),
    ):
        yield said


def _shared(module: str) -> int:
    """The shared memory of a module's one launch."""
    field = re.search(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*{re.escape(_CONFIG)}", module)
    assert field, "no launch"
    function = module[module.rindex("llvm.func", 0, field.start()) : module.index("llvm.func", field.end())]
    value = re.search(rf"llvm\.store (%\w+), {field[1]} : i64", function)
    assert value, "nothing is stored"
    constant = re.search(rf"{value[1]} = llvm\.mlir\.constant\((\d+) : i64\)", function)
    assert constant, "the size is no constant"
    return int(constant[1])
