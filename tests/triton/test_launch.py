"""Launches that are planned once and repeated, and how many kernels a new length compiles. Nothing here runs on a GPU."""

import contextlib
import dataclasses
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from evoattn.backends.triton import launch
from evoattn.backends.triton.launch import Kernel, strided


class Compiled:
    """What Triton hands back for a compiled kernel; remembers how it is launched."""

    function = 17
    packed_metadata = ("packed",)

    def __init__(self) -> None:
        self.run_with: list[tuple[Any, ...]] = []
        self.hooked_with: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.run_with.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.hooked_with.append((grid, *arguments))


class Jitted:
    """A kernel with two compile-time constants."""

    def __init__(self) -> None:
        names = (("p_x", False), ("p_y", False), ("length", False), ("SECOND", True), ("FIRST", True))
        self.params = [types.SimpleNamespace(name=name, is_constexpr=constant) for name, constant in names]
        self.compiled = Compiled()
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> Compiled:
            self.launched.append((grid, arguments, constants))
            return self.compiled

        return start


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "keeps_compiled", lambda tensor: True)
    driver.set_active(types.SimpleNamespace(get_current_stream=lambda device: 99))
    yield
    with contextlib.suppress(RuntimeError):  # without a GPU there is no driver to go back to
        driver.reset_active()


X, Y = torch.zeros(4), torch.ones(4)


def test_the_second_launch_skips_the_jit(stub: None) -> None:
    """Addresses for tensors, and the constants in the kernel's own order, whatever the order in which they were planned."""
    jitted = Jitted()
    start = Kernel(jitted).plan(3, 12, FIRST=1, num_warps=4, SECOND=2)
    start(X, Y)
    assert jitted.launched == [((3,), (X, Y, 12), {"FIRST": 1, "num_warps": 4, "SECOND": 2})]
    start(Y, X)
    assert len(jitted.launched) == 1
    expected = (3, 1, 1, 99, 17, ("packed",), None, None, None, Y.data_ptr(), X.data_ptr(), 12, 2, 1)
    assert jitted.compiled.run_with == [expected]


def test_hooks_of_profilers_are_called(stub: None) -> None:
    jitted = Jitted()
    start = Kernel(jitted).plan(3, 12, FIRST=1, SECOND=2)
    start(X, Y)

    def hook(metadata: Any) -> None: ...

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        start(X, Y)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert jitted.compiled.run_with == []
    assert jitted.compiled.hooked_with == [((3, 1, 1), X.data_ptr(), Y.data_ptr(), 12, 2, 1)]


def test_elsewhere_every_launch_goes_through_the_jit() -> None:
    jitted = Jitted()
    start = Kernel(jitted).plan(3, 12, FIRST=1, SECOND=2)
    start(X, Y)
    start(X, Y)
    assert len(jitted.launched) == 2


def test_a_tensor_map_is_what_its_constructor_would_make(stub: None) -> None:
    pair = torch.zeros(1, 2, 32, 48)
    planned = launch.tensor_map(strided(pair), (1, 1, 16, 32))
    jitted = Jitted()
    start = Kernel(jitted).plan(3, 12, FIRST=1, SECOND=2, through_map=(1, planned))
    start(X, pair)
    start(X, pair)
    checked = TensorDescriptor(pair, planned["shape"], planned["strides"], planned["block_shape"])
    for given in (jitted.launched[0][1][1], jitted.compiled.run_with[0][10]):
        assert isinstance(given, TensorDescriptor)
        assert given.base is pair
        for field in dataclasses.fields(checked):
            assert field.name == "base" or getattr(given, field.name) == getattr(checked, field.name)
