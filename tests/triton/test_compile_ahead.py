"""What a call launches is compiled before its first launch, on other threads. Nothing here runs on a GPU."""

import pathlib
import sys
import threading
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from ahead_of_time import target
from triton.compiler.compiler import CompiledKernel
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from evoattn import devices
from evoattn.backends import triton as backend
from evoattn.backends.triton.compile_ahead import compile_ahead
from evoattn.backends.triton.launch import Kernel
from evoattn.tuning import Config


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, threading.Thread]]:
    """Kernels that were brought to the device, and the threads that did."""
    found: list[tuple[str, threading.Thread]] = []
    monkeypatch.setattr(
        CompiledKernel, "run", property(lambda self: found.append((self.metadata.name, threading.current_thread())))
    )
    return found


def test_all_kernels_of_a_call_are_ready_before_the_first(
    loaded: list[tuple[str, threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(1, 8, 2, 64, 16, dtype=torch.bfloat16)
    mask = torch.ones(1, 8, 64, dtype=torch.bool)
    o, lse = torch.full_like(q, 7), torch.full((1, 8, 2, 64), 7.0)
    asked: list[tuple[str, bool]] = []
    with target("sm_90") as compiled:
        compile_only = JITFunction.run

        def noted(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
            asked.append((self.__name__, warmup))
            return compile_only(self, *arguments, warmup=warmup, **options)

        monkeypatch.setattr(JITFunction, "run", noted)
        plan = backend.plan_forward(q, q, q, mask, None, None, scale=0.25, layout="bnhld", config=Config())
        tensors = (q, q, q, mask, None, None, o, lse)
        compile_ahead(plan, tensors)
        names = [name for name, _ in asked]
        assert len(names) > 1
        assert asked == [(name, True) for name in names]
        assert sorted(name for name, _ in loaded) == sorted(names)
        assert threading.main_thread() not in {thread for _, thread in loaded}
        assert (o == 7).all()
        assert (lse == 7).all()
        ahead = [kernel.result() for kernel in compiled]
        plan(*tensors)
        assert asked[len(names) :] == [(name, False) for name in names]
        assert compiled[len(names) :] == ahead
        compile_ahead(plan, tensors)
        assert len(loaded) == len(names)  # they are there: nothing was compiled or loaded again


class Broken:
    """A kernel that does not compile."""

    params = ()

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        def fail() -> None:
            raise RuntimeError("does not fit")

        return _async_compile.active_mode.get().submit(id(self), fail, lambda kernel: None)


def test_what_does_not_compile_says_so_each_time() -> None:
    start = Kernel(Broken()).plan(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not fit"):
            compile_ahead(start, (torch.zeros(4),))
    assert _async_compile.active_mode.get() is None


def test_a_captured_call_is_not_walked_through_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    compile_ahead(pytest.fail, ("called while a graph was captured",))


@pytest.mark.parametrize("current", [0, 1])
def test_a_plan_is_prepared_once(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(Device, "current", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: Device.current)
    done: list[tuple[str, int, tuple[Any, ...]]] = []
    tensor: Any = types.SimpleNamespace(is_cuda=True, device=types.SimpleNamespace(index=1))

    def run(*arguments: Any) -> None:
        done.append(("run", Device.current, arguments))

    start = devices.on_device_of(tensor, run, first=lambda run, given: done.append(("first", Device.current, given)))
    start(1, 2)
    start(3)
    assert done == [("first", 1, (1, 2)), ("run", 1, (1, 2)), ("run", 1, (3,))]
    assert Device.current == current


class Device:
    """Stands for torch.cuda.device."""

    current = 0

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.index

    def __exit__(self, *raised: object) -> None:
        Device.current = self.before
