"""Launches of kernels that belong to no plan, as those of `nn` and `compat`: kept for calls that look alike."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.triton.launch import Kernel, Launch

__all__ = ["start"]


def start(kernel: Kernel, programs: int, tensors: tuple[Tensor, ...], *numbers: float, **constants: Any) -> None:
    """Launch so many programs on the device of the first tensor.

    Args:
        kernel: takes the tensors, then the numbers, then the constants.
        programs: how many.
        tensors: on one device. Their strides, where the kernel wants them, are among the numbers.
        numbers, constants: as `Kernel.plan` takes them.
    """
    first = tensors[0]
    looks = tuple([(x.dtype, x.data_ptr() & 15) for x in tensors])
    launch = _kept(kernel, first.device, looks, programs, numbers, tuple(constants.items()))
    if not first.is_cuda or torch.cuda.current_device() == first.device.index:
        launch(*tensors)
        return
    with torch.cuda.device(first.device):
        launch(*tensors)


@functools.lru_cache(maxsize=4096)
def _kept(
    kernel: Kernel, device: torch.device, looks: Any, programs: int, numbers: tuple[float, ...], constants: tuple[Any, ...]
) -> Launch:
    return kernel.plan(programs, *numbers, **dict(constants))
