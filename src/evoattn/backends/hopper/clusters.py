"""The number of clusters of blocks that a card runs at a time: each stays within a part of it, so processors may be idle.

`cutlass.utils.HardwareInfo` asks the driver the same. But it compiles a kernel for that in each process, and needs a current
context.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from cuda.bindings import driver

from evoattn.core import devices

_EMPTY_KERNEL = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"


def resident_clusters(size: int, shared: int, device: torch.device) -> int:
    """Clusters of `size` blocks, each of which fills a processor with `shared` bytes of shared memory.

    Raises:
        RuntimeError: a part of a card that has been divided may be too small for any.
    """
    card = devices.planned()
    return count_on_this_machine(size, shared, device) if card is None else card.clusters_of(size)


@functools.cache
def count_on_this_machine(size: int, shared: int, device: torch.device) -> int:
    number = torch.cuda.current_device() if device.index is None else device.index
    context = check_status(driver.cuDevicePrimaryCtxRetain(number))  # torch's; a thread of autograd may have none current
    check_status(driver.cuCtxPushCurrent(context))
    try:
        clusters = _count(size, shared)
    finally:
        check_status(driver.cuCtxPopCurrent())
        check_status(driver.cuDevicePrimaryCtxRelease(number))
    if clusters == 0:
        raise RuntimeError(f"this device has no room for {size} blocks that work together: name backend='triton'")
    return clusters


def _count(size: int, shared: int) -> int:
    module = check_status(driver.cuModuleLoadData(_EMPTY_KERNEL))
    try:
        kernel = check_status(driver.cuModuleGetFunction(module, b"nothing"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check_status(driver.cuFuncSetAttribute(kernel, limit, shared))
        shape = driver.CUlaunchAttribute()
        shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1
        shape.value = value
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = size, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = 128, 1, 1
        launch.sharedMemBytes, launch.attrs, launch.numAttrs = shared, [shape], 1
        return int(check_status(driver.cuOccupancyMaxActiveClusters(kernel, launch)))
    finally:
        driver.cuModuleUnload(module)


def check_status(answer: tuple[Any, ...]) -> Any:
    """The values that the driver returns besides its status."""
    status, *values = answer
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA driver: {status.name}")  # what callers catch
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None
