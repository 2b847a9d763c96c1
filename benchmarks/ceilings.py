#!/usr/bin/env python3
"""The ceilings of a device, written into a record of `evoattn bench --json`: `python3 dev.py bench ceilings RECORD.json`.

They are exponentials, copied bytes and matrix products per second. Run it on the device that the record was measured on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evoattn.bench import machine
from evoattn.bench.clock import Clock, clock_for
from evoattn.bench.record import Problem, Record, read, write

COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Bytes of the tensor that is copied: many times any cache."""

CACHED_NUMBERS = 1 << 18
"""A mebibyte of float32: exponentials on the CPU are taken within the second-level cache, as a tiled kernel takes them."""

_PROGRAMS_A_PROCESSOR = 16
_ROUNDS_OF_EXP2 = 4096
SIDE = {"cpu": 1024, "cuda": 8192}
"""Side of the matrices that are multiplied."""

_BEST_OF = 3


def measure(device: torch.device, clock: Clock, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Measure all ceilings of a device, for `Record.ceilings`. A number that cannot be measured is replaced by the reason.

    Args:
        device: is measured.
        clock: measures it.
        dtypes: of the matrix products, by torch's names.
    """
    on_cpu, side = device.type == "cpu", SIDE[device.type]
    found: dict[str, Any] = {"copy_bytes_per_s": _copy(device, clock), "product_flops_per_s": {}}
    for dtype in dtypes:
        with contextlib.suppress(torch.OutOfMemoryError):
            found["product_flops_per_s"][dtype] = _product(device, clock, getattr(torch, dtype))
    how = "torch.exp2 within the second-level cache" if on_cpu else "exp2 in registers, in a kernel that does nothing else"
    try:
        found["exp2_per_s"] = _cpu_exp2(clock) if on_cpu else _gpu_exp2(device, clock)
    except Exception as error:  # such as a machine without Triton
        how = f"exp2 not measured: {type(error).__name__}: {error}"[:200]
    tf32 = ", TF32 for float32" if not on_cpu and "float32" in dtypes else ""
    how += f"; a copy of {COPIED[device.type] >> 20} MiB; products of {side} x {side} matrices by torch{tf32}"
    return found | {"how": how}


def _best(clock: Clock, call: Callable[[int], object], count: int = 1) -> float:
    """Seconds of the fastest of a few runs, after one to warm up: a ceiling is a maximum."""
    clock.calls(call, 1)
    return min(clock.calls(call, count) / count for _ in range(_BEST_OF))


def _copy(device: torch.device, clock: Clock) -> float:
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(clock, lambda _: target.copy_(source), 3)


def _product(device: torch.device, clock: Clock, dtype: torch.dtype) -> float:
    side = SIDE[device.type]
    x, y = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(x)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else precision)
    try:
        return 2 * side**3 / _best(clock, lambda _: torch.mm(x, y, out=out), 3)
    finally:
        torch.set_float32_matmul_precision(precision)


def _cpu_exp2(clock: Clock) -> float:
    x = torch.linspace(-4, 0, CACHED_NUMBERS, dtype=torch.float32)
    out = torch.empty_like(x)
    return x.numel() / _best(clock, lambda _: torch.exp2(x, out=out), 200)


def _gpu_exp2(device: torch.device, clock: Clock) -> float:
    from exp2_kernel import BLOCK, exp2_kernel

    programs = _PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs * BLOCK, dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        seconds = _best(clock, lambda _: exp2_kernel[(programs,)](out, _ROUNDS_OF_EXP2, SIZE=BLOCK, num_warps=4), 3)
    return programs * BLOCK * _ROUNDS_OF_EXP2 / seconds


def roofs(record: Record, problem: Problem, name: str) -> dict[str, float]:
    """The bounds of a pass, in billions of scores a second, by the ceiling; those that were measured.

    A score takes one exponential, and four operations a channel in the forward's two products, ten in the backward's five. A
    backward moves the inputs and the output again, and as many gradients.
    """
    if name == "both":
        return {}
    w, measured = problem.workload, record.ceilings
    product, copied = measured.get("product_flops_per_s", {}).get(problem.dtype), measured.get("copy_bytes_per_s")
    bounds = {
        "exp2": measured.get("exp2_per_s"),
        "products": product and product / ((4 if name == "forward" else 10) * w.d),
        "memory": copied and problem.bytes and copied * w.scores / (problem.bytes * (1 if name == "forward" else 2)),
    }
    return {what: bound / 1e9 for what, bound in bounds.items() if bound}


def as_text(record: Record) -> str:
    """The ceilings in words, or an empty text."""
    measured = record.ceilings
    exp2, copied = measured.get("exp2_per_s"), measured.get("copy_bytes_per_s")
    products = measured.get("product_flops_per_s", {})
    words = [
        *([f"{exp2 / 1e9:,.1f} x 10⁹ exp2/s"] if exp2 else []),
        *([f"{copied / 1e9:,.1f} GB/s copied"] if copied else []),
        *(f"{flops / 1e12:,.3g} Tflop/s of {dtype} products" for dtype, flops in products.items()),
    ]
    return f"{', '.join(words)} ({measured.get('how', '')})" if words else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, metavar="RECORD")
    path: Path = parser.parse_args(arguments).record
    record = read(path)
    device = torch.device("cuda" if record.machine.get("kind") == "gpu" else "cpu")
    if (here := machine.name(device)) != record.machine["device"]:
        parser.error(f"{path} was measured on {record.machine['device']}; this is {here}")
    dtypes = tuple(dict.fromkeys(problem.dtype for problem in record.problems))
    record.ceilings = measure(device, clock_for(device), dtypes)
    write(record, path)
    print(as_text(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
