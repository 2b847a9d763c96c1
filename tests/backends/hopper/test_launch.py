"""How a launch of a Hopper kernel is planned: what it packs once, what it takes from each call, and what it refuses."""

import concurrent.futures
import os
import threading
import time
from typing import Any

import pytest
import torch

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
cutlass = pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

from evoattn.backends.hopper import (  # noqa: E402
    ahead,
    clusters,
    launch,
)
from evoattn.backends.hopper.planner import Workspace  # noqa: E402

CPU = torch.device("cpu", 0)


class Copy(launch.KernelVariant):
    """Two tensors of one size, a third that may be missing, and a number."""

    def __init__(self, third: bool = True):
        self.third = third
        self.name = "Copy"

    def arguments(self) -> dict[str, Any]:
        tensors = launch.Tensors(cutlass.BFloat16)
        x = tensors.lines("r", 8)
        y = launch.TensorSpec(cutlass.BFloat16, x.shape, (launch.sym_stride(), 1), 16)
        return {"x": x, "y": y, "z": tensors.floats("?") if self.third else None, "number": cutlass.Int32(0)}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every launch; nothing is compiled."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "load_kernel", lambda kernel: lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return calls


def test_a_launch_takes_addresses(launched: list[tuple[Any, ...]]) -> None:
    x, y, z = torch.empty(5, 16)[:, :8], torch.empty(5, 8), torch.empty(3)
    run = launch.plan_launch(Copy(), CPU, {"x": x, "y": y, "z": z}, number=9)
    others = [torch.empty_like(t) for t in (x, y, z)]
    run(*(t.data_ptr() for t in others))
    extents, stream, *rest = launched[0]
    assert tuple(extents) == (5, 16, 8, 3)
    assert stream == 77
    assert rest == [*(t.data_ptr() for t in others), 9]


def test_a_launch_finds_its_tensors_by_name(launched: list[tuple[Any, ...]]) -> None:
    x, z = torch.empty(5, 8), torch.empty(3)
    launch.plan_launch(Copy(), CPU, {"z": z, "other": z, "y": x, "x": x}, number=9)(1, 2, 3, 4)
    assert launched[0][2:] == (4, 3, 1, 9)


def test_what_a_kernel_does_not_take_takes_no_place(launched: list[tuple[Any, ...]]) -> None:
    x = torch.empty(5, 8)
    run = launch.plan_launch(Copy(third=False), CPU, {"x": x, "y": x, "z": None}, number=4)
    run(1, 2, None)
    run(1, 2, 3)
    assert [arguments[2:] for arguments in launched] == [(1, 2, 4)] * 2


def test_the_stride_of_an_axis_of_size_1_does_not_matter(launched: list[tuple[Any, ...]]) -> None:
    x = torch.empty(1, 8).as_strided((1, 8), (3, 1))
    launch.plan_launch(Copy(), CPU, {"x": x, "y": x, "z": torch.empty(1).as_strided((1,), (5,))}, number=0)(1, 2, 3)
    assert tuple(launched[0][0]) == (1, 8, 1, 1)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.empty(5, 8), torch.empty(6, 8)),  # one symbol, two sizes
        (torch.empty(5, 4), torch.empty(5, 8)),  # another number than the fixed one
        (torch.empty(5, 12)[:, :8], torch.empty(5, 8)),  # a stride that 8 does not divide
        (torch.empty(8, 5).T, torch.empty(5, 8)),  # another stride than the fixed one
    ],
    ids=["sizes", "fixed", "divisible", "stride"],
)
def test_a_tensor_that_the_kernel_does_not_take_is_refused(x: torch.Tensor, y: torch.Tensor, launched: list[Any]) -> None:
    with pytest.raises(ValueError, match="Copy takes no tensor of shape"):
        launch.plan_launch(Copy(), CPU, {"x": x, "y": y, "z": torch.empty(3)}, number=0)


def test_a_workspace_has_room_for_all_that_is_added() -> None:
    workspace = Workspace(torch.device("cpu"))
    few, more = torch.empty(7, dtype=torch.int32, device="meta"), torch.empty(3, 50, device="meta")
    starts = [workspace.add(x) for x in (few, more, few)]
    assert starts == [0, 256, 1024]
    assert workspace.make().nbytes >= 1024 + few.nbytes


def test_one_thread_at_a_time_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads whose first calls meet: a second compilation in the process would end it."""
    at_once = []
    inside = threading.Semaphore(1)

    names = {}

    class Made:
        def __init__(self, name: str):
            self.name = name

        def export_to_c(self, path: str, function_name: str) -> None:
            names[function_name] = self.name

    class Module:
        def __getattr__(self, function: str) -> str:
            return names[function]

    def build(kernel: launch.KernelVariant) -> Made:
        at_once.append(inside.acquire(blocking=False))
        time.sleep(0.05)
        inside.release()
        return Made(kernel.name)

    monkeypatch.setattr(launch, "build", build)
    monkeypatch.setattr(ahead, "load_module", lambda path, enable_tvm_ffi: Module())
    monkeypatch.setattr(ahead, "modules", [])
    monkeypatch.setattr(ahead, "functions", {})
    monkeypatch.setenv("EVOATTN_CACHE_DIR", "")
    kernels = [Copy() for _ in range(3)]
    for number, kernel in enumerate(kernels):
        kernel.name = f"thread {number}"
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ahead.load_kernel, 2 * kernels)) == 2 * [kernel.name for kernel in kernels]
    assert at_once == [True] * 3, "one at a time, and each kernel once"


def test_a_driver_without_memory_raises_what_callers_catch() -> None:
    result = clusters.driver.CUresult
    with pytest.raises(torch.OutOfMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        clusters.check_status((result.CUDA_ERROR_OUT_OF_MEMORY,))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        clusters.check_status((result.CUDA_ERROR_INVALID_VALUE,))
    assert clusters.check_status((result.CUDA_SUCCESS, 3)) == 3
