"""The card that a plan is for, and the precision of products on it."""

from __future__ import annotations

import functools
import math

import torch

from evoattn.core import devices
from evoattn.core.numerics import float32_products

_FOLDABLE_SCALE = 1e-3
"""Below this, bias / scale could leave float32's range for a bias that is itself in range."""

_MAX_SPLIT_CHANNELS = 128
_NO_DEVICE_LIMIT = 1 << 30
_UNKNOWN_CACHE = 32 << 20
_UNKNOWN_PROGRAMS = 396  # three on each processor of an H200


def on_amd() -> bool:
    """Return whether torch was built for AMD's GPUs, whose Triton backend knows no TF32 in general."""
    return torch.version.hip is not None


def split_precision(dtype: torch.dtype, channels: int) -> str:
    """Triton's input_precision for matmuls: "ieee", but for float32 "tf32" if torch is told that TF32 will do, else "tf32x3".

    The latter is three TF32 products on the tensor cores, since a float32 number is the sum of two TF32 numbers to 22 bits.
    Measured on H200 against float64: 2.6e-7, where IEEE products on the ALUs lose 5.3e-7 (their sums round more often) and take
    two to twenty times as long. Above 128 channels the parts are far from fitting in registers: the kernel of the pair bias'
    gradient spills kilobytes.
    """
    if dtype != torch.float32 or on_amd():
        return "ieee"
    if float32_products() == "tf32":
        return "tf32"
    return "tf32x3" if channels <= _MAX_SPLIT_CHANNELS else "ieee"


def folds(scale: float) -> bool:
    """Return whether biases may be divided by the scale, so that the matmul's accumulator starts from them."""
    return scale >= _FOLDABLE_SCALE and math.isfinite(scale)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None elsewhere."""
    card = devices.card(device)
    return None if card is None else card.capability


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on `device`."""
    card = devices.planned()
    return _shared_memory(device) if card is None else card.shared_memory


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return _NO_DEVICE_LIMIT
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def _card(device: torch.device) -> devices.Card | None:
    """The card that is planned for, or the NVIDIA or AMD GPU of a device; None if there is neither."""
    return devices.planned() or (devices.local_card(device) if device.type == "cuda" else None)


def cache_bytes(device: torch.device) -> int:
    """Bytes of second-level cache of `device`."""
    card = _card(device)
    return (0 if card is None else card.cache_bytes) or _UNKNOWN_CACHE


def programs_at_once(device: torch.device, num_warps: int, max_registers: int) -> int:
    """Programs of so many warps that run on `device` at a time, if registers are what limits them; 0: 255 a thread."""
    card = _card(device)
    if card is None:
        return _UNKNOWN_PROGRAMS
    threads = getattr(torch.cuda.get_device_properties(device), "warp_size", 32) if on_amd() else 32
    return card.processors * max(card.registers // (num_warps * threads * (max_registers or 255)), 1)
