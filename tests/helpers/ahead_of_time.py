"""Compiles kernels for a GPU that is not there, exactly as their launchers would, and reads what came out.

    with target("sm_90") as compiled:
        backend.plan_forward(inputs, ...).run(inputs, outputs)
    report(compiled[0])

Inside the block every kernel launch compiles and is collected instead of run, so the launcher's own choice of constants,
strides and specialisation is what is tested.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import re
import subprocess
import tempfile
import types
import unittest.mock
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from evoattn.kit import cards

__all__ = ["COUNTS", "SHARED_LIMITS", "TARGETS", "TWINS", "Report", "ptxas", "report", "target"]

COUNTS = triton.__version__ == "3.7.1"
"""Whether this is the Triton with whose ptxas the spilled registers in tests were counted."""

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

SHARED_LIMITS = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx90a": 65_536,
    "gfx942": 65_536,
}
"""Bytes of shared memory that one program may use; nothing checks this when compiling."""

TWINS = {"sm_89": "sm_86", "gfx90a": "gfx942"}
"""Cards that are planned for as another one is; few of their kernels are compiled too."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler made of one kernel.

    Args:
        name: the kernel's function.
        registers: a thread's registers (VGPRs on AMD).
        spills: instructions of the main loop that move spilled registers; the number of spilled registers on AMD.
        shared: bytes of shared memory.
        loop: instructions of the main loop: the first innermost one that multiplies, or else the longest.
        mix: how often each instruction stands in that loop.
        threads: threads of a program.
        serialised: what ptxas says when it makes each of Hopper's asynchronous products wait for the one before; else empty.
    """

    name: str
    registers: int
    spills: int
    shared: int
    loop: int
    mix: dict[str, int]
    threads: int
    serialised: str = ""


class _StubDriver:
    """A Triton driver that names a target and can do nothing with it."""

    utils = types.SimpleNamespace(unload_module=lambda module: None)
    """Triton 3.8 unloads a kernel that is forgotten."""

    def __init__(self, number: int, gpu: GPUTarget) -> None:
        self.number, self.gpu = number, gpu

    def get_current_target(self) -> GPUTarget:
        return self.gpu

    def get_current_device(self) -> int:
        # The JIT keeps one cache a device, made for the target it saw first: so one number a target.
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self) -> tuple[int, int]:
        return divmod(self.gpu.arch, 10) if self.gpu.backend == "cuda" else (9, 4)

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("there is no device")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        """Until Triton 3.6 each kernel has a launcher, which a C compiler makes."""

    def get_benchmarker(self) -> Any:
        raise RuntimeError("there is nothing to time")


@contextlib.contextmanager
def target(name: str) -> Iterator[list[Any]]:
    """Compile for `name` instead of launching; the list collects the compiled kernels in launch order."""
    compiled: list[Any] = []
    gpu = TARGETS[name]
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    driver.set_active(_StubDriver(list(TARGETS).index(name), gpu))
    with contextlib.ExitStack() as patches:
        for owner, attribute, value in (
            (JITFunction, "run", compile_only),
            (cards, "shared_memory_limit", lambda device: SHARED_LIMITS[name]),
            (cards, "capability", lambda device: divmod(gpu.arch, 10) if gpu.backend == "cuda" else None),
            (cards, "on_amd", lambda: gpu.backend == "hip"),
        ):
            patches.enter_context(unittest.mock.patch.object(owner, attribute, value))
        yield compiled
    with contextlib.suppress(RuntimeError):  # without a GPU there is no driver to go back to
        driver.reset_active()


def report(kernel: Any) -> Report:
    """Read a compiled kernel's registers, spills, shared memory and main loop."""
    common = {
        "name": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "threads": kernel.metadata.num_warps * kernel.metadata.target.warp_size,
    }
    if "cubin" in kernel.asm:
        return Report(**common, **_read_cubin(kernel.asm["cubin"]), serialised=_serialised(kernel))
    return Report(**common, **_read_amdgcn(kernel.asm["amdgcn"]))


def ptxas() -> tuple[str, str]:
    """The path and the version of the ptxas for sm_90."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(90)
    return tool if isinstance(tool, tuple) else (tool.path, tool.version)  # a pair in Triton 3.3


def _serialised(kernel: Any) -> str:
    """The line in which ptxas says so, or nothing. As Triton calls it, but for options that say nothing about waits.

    A quarter of the samples in dQ with 48 channels stood in such waits.
    """
    ptx = kernel.asm["ptx"]
    if "wgmma" not in ptx:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas()[0], "--verbose", "--gpu-name=sm_90a", path, "--output-file", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return next((line for line in said.splitlines() if "are serialized" in line), "")


def _read_cubin(cubin: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage, sass = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers, usage
    code = [
        (int(address, 16), text) for address, text in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, flags=re.MULTILINE)
    ]
    place = {address: index for index, (address, _) in enumerate(code)}
    jumps = [(index, re.search(r"\bBRA\S*\s.*?0x([0-9a-f]+)", text)) for index, (_, text) in enumerate(code)]
    backward = [
        (place[int(jump[1], 16)], index)
        for index, jump in jumps
        if jump and int(jump[1], 16) in place and place[int(jump[1], 16)] < index
    ]
    names = [re.sub(r"^@!?\S+\s+", "", text).split()[0].split(".")[0] for _, text in code]
    loop = _main_loop(names, backward)
    return {"registers": int(numbers[1]), "spills": sum(loop["mix"].get(name, 0) for name in ("LDL", "STL")), **loop}


def _read_amdgcn(text: str) -> dict[str, Any]:
    def number(key: str) -> int:
        field = re.search(rf"\.{key}:\s+(\d+)", text)
        assert field, key
        return int(field[1])

    names: list[str] = []
    labels: dict[str, int] = {}
    backward: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\t([vs]_\w+|ds_\w+|buffer_\w+|global_\w+|flat_\w+)\b(.*)", line):
            names.append(instruction[1])
            jump = re.search(r"(\.LBB\w+)", instruction[2])
            if "branch" in instruction[1] and jump and jump[1] in labels:
                backward.append((labels[jump[1]], len(names) - 1))
    return {"registers": number("vgpr_count"), "spills": number("vgpr_spill_count"), **_main_loop(names, backward)}


def _main_loop(names: list[str], backward: list[tuple[int, int]]) -> dict[str, Any]:
    """The first loop that holds no other and multiplies, or the longest, from the (first, last) instructions of every loop.

    Loops that come after it are for queries whose pair bias swallows their scores: there speed does not count.
    """
    inner = [
        (first, last)
        for first, last in backward
        if not any((first, last) != other and first <= other[0] and other[1] <= last for other in backward)
    ]
    multiply = [
        (first, last) for first, last in sorted(inner) if any("MMA" in x or "mfma" in x for x in names[first : last + 1])
    ]
    first, last = multiply[0] if multiply else max(inner, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    mix = collections.Counter(names[first : last + 1])
    return {"loop": last - first + 1, "mix": dict(mix.most_common())}
