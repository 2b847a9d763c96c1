"""A machine whose driver is there and whose GPU is hidden, for processes that compile."""

from __future__ import annotations

import importlib
from typing import Any


def asked_of_the_driver() -> int:
    """How often CuTe DSL starts the driver while it compiles its first kernel in this process."""
    driver = importlib.import_module("cuda.bindings.driver")
    statistics = importlib.import_module("evoattn.backends.hopper.kernels.statistics")
    launch = importlib.import_module("evoattn.backends.hopper.launch")
    asked = []

    class Hidden:
        def cuInit(self, flags: int) -> tuple[Any]:
            asked.append(flags)
            return (driver.CUresult.CUDA_ERROR_NO_DEVICE,)

        def cuGetErrorName(self, error: Any) -> tuple[Any, bytes]:
            return driver.CUresult.CUDA_SUCCESS, error.name.encode()

        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

    importlib.import_module("cutlass.base_dsl.runtime.cuda").cuda = Hidden()
    kernel = statistics.Statistics(importlib.import_module("cutlass").BFloat16, 32, dlse=False)
    launch.build(kernel)
    return len(asked)
