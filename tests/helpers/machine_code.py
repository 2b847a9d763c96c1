"""Compiles a Hopper kernel without a GPU and names its machine instructions."""

from __future__ import annotations

import pathlib
import re
import subprocess

import triton

from evoattn.backends.hopper.host import launch

__all__ = ["count", "instructions"]


def instructions(kernel: launch.Kernel, folder: pathlib.Path) -> list[str]:
    """The machine instructions of a kernel, by name; a wait for products, "WARPGROUP.DEPBAR.LE n", says how many may run on.

    `folder` takes what the disassembler reads.
    """
    path = folder / "kernel.o"
    launch.build(kernel).export_to_c(str(path), function_name="kernel")
    data = path.read_bytes()
    cubin = path.with_suffix(".cubin")
    cubin.write_bytes(data[data.index(b"\x7fELF", 16) :])
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([str(tool), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(?: gsb0, 0x(\d))?"
    return [f"{name} {left}".rstrip() for name, left in re.findall(line, text, re.MULTILINE)]


def count(names: list[str], *starts: str) -> int:
    """How many instructions begin with one of these."""
    return sum(name.startswith(starts) for name in names)
