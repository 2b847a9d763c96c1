"""The ceilings of a device, measured in the same run: exponentials, copied bytes and matrix products per second."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from evoattn.bench.clock import Clock
from evoattn.bench.record import Ceilings

COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Bytes of the tensor that is copied: many times any cache."""

CACHED_NUMBERS = 1 << 18
"""A mebibyte of float32: exponentials on the CPU are taken within the second-level cache, as a tiled kernel takes them."""

_PROGRAMS_A_PROCESSOR = 16
_ROUNDS_OF_EXP2 = 4096
SIDE = {"cpu": 1024, "cuda": 8192}
"""Side of the matrices that are multiplied."""

_BEST_OF = 3


def measure(device: torch.device, clock: Clock, dtypes: tuple[str, ...]) -> Ceilings:
    """Measure all ceilings of a device. A number that cannot be measured is replaced by the reason.

    Args:
        device: is measured.
        clock: measures it.
        dtypes: of the matrix products, by torch's names.
    """
    on_cpu, side = device.type == "cpu", SIDE[device.type]
    copied, exp2 = _copy(device, clock), None
    products = {}
    for dtype in dtypes:
        with contextlib.suppress(torch.OutOfMemoryError):  # a ceiling is a service: the benchmark goes on without
            products[dtype] = _product(device, clock, getattr(torch, dtype))
    how = "torch.exp2 within the second-level cache" if on_cpu else "exp2 in registers, in a kernel that does nothing else"
    try:
        exp2 = _cpu_exp2(clock) if on_cpu else _gpu_exp2(device, clock)
    except Exception as error:  # likewise
        how = f"exp2 not measured: {type(error).__name__}: {error}"[:200]
    tf32 = ", TF32 for float32" if not on_cpu and "float32" in dtypes else ""
    how += f"; a copy of {COPIED[device.type] >> 20} MiB; products of {side} x {side} matrices by torch{tf32}"
    return Ceilings(exp2, copied, how, products)


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
    from evoattn.bench.exp2_kernel import BLOCK, exp2_kernel

    programs = _PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs * BLOCK, dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        seconds = _best(clock, lambda _: exp2_kernel[(programs,)](out, _ROUNDS_OF_EXP2, SIZE=BLOCK, num_warps=4), 3)
    return programs * BLOCK * _ROUNDS_OF_EXP2 / seconds
