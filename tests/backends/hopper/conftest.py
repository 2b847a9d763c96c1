"""Fixtures that choose how the Hopper backend runs a call."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.backends.hopper.gpu_calls import WAYS


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a pair bias one kernel finds all gradients, as where a call has many rows, and in this test at least once."""
    from evoattn.backends.hopper import backward_launches, tiles

    kernel, instances = backward_launches.FusedGradients, []

    def make(*args: object, **options: object) -> object:
        instances.append(kernel(*args, **options))
        return instances[-1]

    monkeypatch.setattr(backward_launches, "FusedGradients", make)
    monkeypatch.setattr(tiles, "fused_tiles", lambda problem, _: 16 if problem.d <= 16 else 8)
    yield
    assert instances


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a call has few rows."""
    from evoattn.backends.hopper import tiles

    monkeypatch.setattr(tiles, "fused_tiles", lambda *_: None)


@pytest.fixture
def heads_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time where a pair bias streams, as where one keeps all processors busy."""
    from evoattn.backends.hopper import head_groups

    monkeypatch.setattr(head_groups, "divisor", lambda *_: 1)


@pytest.fixture
def rows_left_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backward leaves out rows that a mask switches off, as where a call has many scores; at least once in a test."""
    from evoattn.backends.hopper import backward_launches, tiles

    kernel, instances = backward_launches.KeyGradients, []

    def make(*args: object, **options: object) -> object:
        instances.append(options["skips"])
        return kernel(*args, **options)

    monkeypatch.setattr(backward_launches, "KeyGradients", make)
    monkeypatch.setattr(tiles, "LEAST_SCORES_TO_SKIP", 0)
    yield
    assert any(instances)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> dict:
    """What a call looks like that goes one of these ways."""
    fixture, changes = WAYS[request.param]
    if fixture is not None:
        request.getfixturevalue(fixture)
    return changes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The name and the arguments of every launch, in their order."""
    from evoattn.backends.hopper import backward_launches, launch

    calls: list[tuple[str, tuple[Any, ...]]] = []

    def compiled(kernel: Any) -> Any:
        return lambda *arguments: calls.append((type(kernel).__name__, arguments))

    monkeypatch.setattr(launch, "load_kernel", compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(backward_launches, "resident_clusters", lambda *arguments: 66)
    return calls


@pytest.fixture
def kernels(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that are launched, in their order."""
    from evoattn.backends.hopper import launch

    created: list[Any] = []
    note = launch.load_kernel
    monkeypatch.setattr(launch, "load_kernel", lambda kernel: created.append(kernel) or note(kernel))
    return created
