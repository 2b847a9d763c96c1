"""What a call launches is compiled before its first launch, on other threads. Nothing here runs on a GPU."""

import functools
import gc
import pathlib
import threading
import time
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton.runtime._async_compile", reason="no Triton, or one that compiles no kernel ahead")

import triton
from triton.compiler.compiler import CompiledKernel
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from evoattn.backends import triton as backend
from evoattn.backends.triton import ahead as ahead_module
from evoattn.backends.triton import pair_in_order
from evoattn.backends.triton.ahead import compile_ahead
from evoattn.core import devices
from evoattn.core.config import Config
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.kit import compiling
from tests.helpers.ahead_of_time import target
from tests.helpers.triton_kernels import KERNELS


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that were brought to the device."""
    names: list[str] = []

    def load(kernel: CompiledKernel) -> None:
        names.append(kernel.metadata.name)
        kernel.module = "there"

    monkeypatch.setattr(CompiledKernel, "run", property(load))
    return names


N = 1200
"""Rows n: so many that a deterministic sum has three turns, of which two are one kernel."""


def planned(backward: bool, deterministic: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """A plan of a small call, and what it is called with."""
    q, o = (torch.empty(1, N, 2, 64, 16, dtype=torch.bfloat16) for _ in range(2))
    mask, pair = torch.ones(1, N, 64, dtype=torch.bool), torch.empty(1, 2, 64, 64, dtype=torch.bfloat16)
    lse = torch.empty(1, N, 2, 64)
    options: dict[str, Any] = {"scale": 0.25, "layout": "bnhld", "config": Config()}
    inputs, outputs = Inputs(q, q, q, mask, None, pair), Outputs(o, lse, torch.zeros_like(lse))
    if not backward:
        return backend.plan_forward(inputs, **options).run, (inputs, outputs)
    values = Cotangents(o), inputs, outputs
    options |= {"needs": (True, True, True, False, True, False), "deterministic": deterministic}
    return backend.plan_backward(*values, **options).run, (*values, (*(torch.empty_like(q) for _ in range(3)), None))


@pytest.mark.parametrize(("backward", "deterministic"), [(False, False), (True, False), (True, True)])
def test_all_kernels_of_a_call_are_ready_before_the_first(
    backward: bool, deterministic: bool, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_in_order, "cache_bytes", lambda device: 1 << 16)
    asked: list[tuple[str, bool]] = []
    with target("sm_90") as compiled, monkeypatch.context() as patch:
        compile_only = JITFunction.run

        def noted(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
            asked.append((self.__name__, warmup))
            return compile_only(self, *arguments, warmup=warmup, **options)

        patch.setattr(JITFunction, "run", noted)
        for kernel in KERNELS:  # no set of jitted functions: its hash is the key, which would be settled too early
            kernel.jitted.device_caches.clear()
        plan, tensors = planned(backward, deterministic)
        compile_ahead(plan, tensors)
        names = [name for name, _ in asked]
        assert len(names) > 1
        assert asked == [(name, True) for name in names]
        ahead = [kernel.result() for kernel in compiled]
        assert sorted(loaded) == sorted(kernel.metadata.name for kernel in set(ahead))
        plan(*tensors)
        assert asked[len(names) :] == [(name, False) for name in names]
        assert compiled[len(names) :] == ahead
        before = len(loaded)
        compile_ahead(*planned(backward, deterministic))
        assert len(loaded) == before  # they are there: nothing was compiled or loaded again


def test_what_does_not_compile_is_tried_again(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with target("sm_90"):
        for kernel in KERNELS:
            kernel.jitted.device_caches.clear()
        plan, tensors = planned(backward=False)
        with monkeypatch.context() as patch:

            def fail(*arguments: Any, **options: Any) -> None:
                raise RuntimeError("no room left")

            patch.setattr("triton.compiler.compile", fail)
            for kernel in KERNELS:
                kernel.jitted.device_caches.clear()
            with pytest.raises(RuntimeError, match="no room left"):
                compile_ahead(plan, tensors)
        for kernel in KERNELS:  # what failed was the compiler that it found then, and kept
            kernel.jitted.compile = triton.compiler.compile
        compile_ahead(plan, tensors)
    assert _async_compile.active_mode.get() is None
    assert len(loaded) > 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "ctrl_c"])
def test_a_walk_that_ends_early_leaves_nothing_half_made(
    error: BaseException, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has no memory, or the user presses Ctrl-C, when a kernel has been asked for: later calls have all of theirs."""
    with target("sm_90"):
        for kernel in KERNELS:
            kernel.jitted.device_caches.clear()
        plan, tensors = planned(backward=True)
        with monkeypatch.context() as patch:
            warmup, asked = JITFunction.warmup, []

            def fail(self: Any, *arguments: Any, **options: Any) -> Any:
                if asked:
                    raise error
                asked.append(self)
                return warmup(self, *arguments, **options)

            patch.setattr(JITFunction, "warmup", fail)
            with pytest.raises(type(error)):
                compile_ahead(plan, tensors)
        assert _async_compile.active_mode.get() is None
        assert not loaded
        compile_ahead(plan, tensors)
        plan(*tensors)
    assert len(loaded) > 1


@pytest.mark.slow
def test_a_damaged_kernel_in_the_cache_of_triton_is_compiled_anew(
    loaded: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, and the next process finds it whole. Triton itself raises what its parser does, in every process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def in_a_new_process() -> int:
        with target("sm_90") as compiled:
            for kernel in KERNELS:
                kernel.jitted.device_caches.clear()
            compile_ahead(*planned(backward=False))
        return len(compiled)

    count = in_a_new_process()
    for file in tmp_path.glob("*/*.json"):
        if "__grp__" not in file.name:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.warns(UserWarning, match="in Triton's cache is damaged") as seen:
        assert in_a_new_process() >= count
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_a_new_process() == count


def test_kernels_are_loaded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Triton 3.6 two threads that load launchers mix them up. Only compiling them is for several threads."""
    loading, most, compiled, launched = [0], [0], set(), []

    class Fake:
        module = None

        @property
        def run(self) -> None:
            assert self in compiled
            loading[0] += 1
            most[0] = max(most[0], loading[0])
            time.sleep(0.002)
            loading[0] -= 1
            launched.append(self)

    def compile_launcher(kernel: Any) -> None:
        assert not loading[0]
        compiled.add(kernel)

    monkeypatch.setattr(compiling, "LAUNCHERS_ARE_COMPILED", True)
    monkeypatch.setattr(ahead_module, "compile_launcher", compile_launcher)

    def prepare(kernels: list[Fake]) -> None:
        with ThreadPoolExecutor(2) as threads:
            ahead_module.load(kernels, threads)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(prepare, [[Fake() for _ in range(5)] for _ in range(4)]))
    assert most == [1]
    assert len(launched) == len(compiled) == 20


def test_a_kernel_that_another_thread_compiled_is_loaded_before_it_is_launched(loaded: list[str]) -> None:
    with target("sm_90"):
        for kernel in KERNELS:
            kernel.jitted.device_caches.clear()
        plan, tensors = planned(backward=False)
        compile_ahead(plan, tensors)
        names = loaded.copy()
        for kernel in KERNELS:
            for kept, *_ in kernel.jitted.device_caches.values():
                for known in kept.values():
                    getattr(known, "result", lambda known=known: known)().module = None  # as before the other has loaded it
        compile_ahead(*planned(backward=False))
    assert loaded == names * 2


@pytest.mark.parametrize("failures", [1, 2, 100])
def test_threads_that_parse_python_at_once_try_again(
    failures: int, loaded: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once in a run of all tests with Python 3.11. After three failures it is another fault."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with target("sm_90"):
        for kernel in KERNELS:
            kernel.jitted.device_caches.clear()
        plan, tensors = planned(backward=False)
        parse, failed = JITFunction.parse, []

        def fail(self: Any) -> Any:
            if len(failed) < failures:
                failed.append(self)
                raise SystemError("AST constructor recursion depth mismatch (before=111, after=107)")
            return parse(self)

        monkeypatch.setattr(JITFunction, "parse", fail)
        if failures == 100:
            with pytest.raises(Exception, match="recursion depth"):
                compile_ahead(plan, tensors)
            assert not loaded
            return
        compile_ahead(plan, tensors)
    assert len(failed) == failures
    assert loaded


def test_the_last_try_has_one_thread(loaded: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    parse, threads = JITFunction.parse, []

    def pool(number: int | None) -> ThreadPoolExecutor:
        threads.append(number)
        return ThreadPoolExecutor(number)

    def fail_beside_others(self: Any) -> Any:
        if threads[-1] != 1:
            raise SystemError("AST constructor recursion depth mismatch (before=111, after=107)")
        return parse(self)

    monkeypatch.setattr(ahead_module, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(JITFunction, "parse", fail_beside_others)
    with target("sm_90"):
        for kernel in KERNELS:
            kernel.jitted.device_caches.clear()
        compile_ahead(*planned(backward=False))
    assert threads == [None, None, 1] and loaded


def test_threads_forget_what_failed_at_the_same_time() -> None:
    """While one looks at a kernel, another forgets all of them and a third adds one."""
    kept: dict[str, Any] = {}

    class Failed:
        @property
        def result(self) -> None:
            for name in ("first", "second"):
                kept.pop(name, None)
            kept["third"] = object()

    kept.update(first=Failed(), second=Failed())
    compiling.forget(types.SimpleNamespace(device_caches={0: (kept,)}))
    assert list(kept) == ["third"]


def test_a_caller_may_compile_ahead_too(loaded: list[str]) -> None:
    with target("sm_90"), ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads) as mode:
        compile_ahead(*planned(backward=False))
        assert _async_compile.active_mode.get() is mode


def test_a_captured_call_is_not_walked_through_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    compile_ahead(pytest.fail, ("called while a graph was captured",))


def test_other_threads_wait_while_a_plan_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ran the plan meanwhile would have its launches made, and the walk through it would start them."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tensor: Any = types.SimpleNamespace(is_cuda=True, device=types.SimpleNamespace(index=1))
    done: list[str] = []
    preparing, other_is_there = threading.Event(), threading.Event()

    def prepare(run: Any, arguments: tuple[Any, ...]) -> None:
        preparing.set()
        other_is_there.wait(10)
        time.sleep(0.05)
        done.append("prepared")

    start = devices.on_device_of(tensor, lambda: done.append("run"), first=prepare)
    first = threading.Thread(target=start)
    first.start()
    assert preparing.wait(10)
    second = threading.Thread(target=lambda: (other_is_there.set(), start()))
    second.start()
    first.join(10)
    second.join(10)
    assert done == ["prepared", "run", "run"]


@pytest.mark.parametrize("current", [0, 1])
def test_a_plan_is_prepared_once(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(Device, "current", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: Device.current)
    done: list[tuple[str, int, tuple[Any, ...]]] = []
    tensor: Any = types.SimpleNamespace(is_cuda=True, device=types.SimpleNamespace(index=1))

    def run(*arguments: Any) -> None:
        done.append(("run", Device.current, arguments))

    start = devices.on_device_of(tensor, run, first=lambda run, args: done.append(("first", Device.current, args)))
    start(1, 2)
    start(3)
    assert done == [("first", 1, (1, 2)), ("run", 1, (1, 2)), ("run", 1, (3,))]
    assert Device.current == current


@pytest.mark.parametrize("first", [None, lambda run, arguments: None], ids=["at once", "prepared"])
def test_what_a_start_holds_is_freed_with_it(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a circle of references its tensors would keep gigabytes of a GPU until Python looks for garbage."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tensor: Any = types.SimpleNamespace(is_cuda=True, device=types.SimpleNamespace(index=1))
    workspace = torch.empty(1)
    kept = weakref.ref(workspace)
    start = devices.on_device_of(tensor, functools.partial(lambda workspace: None, workspace), first=first)
    gc.disable()
    try:
        start()
        del start, workspace
        assert kept() is None
    finally:
        gc.enable()


class Device:
    """Stands for torch.cuda.device."""

    current = 0

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.index

    def __exit__(self, *raised: object) -> None:
        Device.current = self.before
