"""The parts of a layer add up to the layer, and parts that make something else get no time."""

import dataclasses
from types import ModuleType

import pytest
import torch
from layer_ways import inputs_of
from layer_workloads import workload

from tests.helpers.scripts import load

from .conftest import CPU


@pytest.fixture(scope="module")
def layer_parts() -> ModuleType:
    """benchmarks/layer_parts.py, which is a script."""
    return load("benchmarks/layer_parts.py")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_part_has_its_times(layer_parts: ModuleType, dtype: str) -> None:
    by_part = layer_parts.measure("layer12", dtype, CPU, 2)
    assert list(by_part["ways"]) == ["written", "evoattn"]
    for times in by_part["ways"].values():
        assert list(times) == [*layer_parts.PARTS, "whole"]
        assert all(forward > 0 for forward, _ in times.values())


@pytest.mark.parametrize("of", ["as_written", "as_ours"])
def test_the_parts_have_the_gradients_of_the_layer(layer_parts: ModuleType, of: str) -> None:
    """Backwards through the parts, each given the gradient that the part after it made."""
    layer = inputs_of(workload("layer12"), torch.float32, CPU)
    make = getattr(layer_parts, of)
    steps = make(layer) if of == "as_written" else make(layer, torch.float32)
    parts = layer_parts.parts_of(layer, steps, torch.float32)
    cotangents, of_parameters = (layer.do,), {}
    for part in reversed(parts.values()):
        part.cotangents = cotangents
        gradients = part.both()
        cotangents = gradients[: len(part.inputs)]
        of_parameters |= dict(zip(map(id, part.leaves[len(part.inputs) :]), gradients[len(part.inputs) :], strict=True))
    expected = torch.autograd.grad(layer.module(layer.inputs["z"], layer.mask), layer.leaves, layer.do)
    torch.testing.assert_close(cotangents[0], expected[0], rtol=1e-4, atol=1e-5)
    for parameter, wanted in zip(layer.module.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(of_parameters[id(parameter)], wanted, rtol=1e-4, atol=1e-4)


def test_other_parts_get_no_time(layer_parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer_parts.as_written
    monkeypatch.setattr(
        layer_parts,
        "as_written",
        lambda layer: dataclasses.replace(right(layer), output=lambda o, g: layer.module.mha.linear_o(o)),
    )
    with pytest.raises(ValueError, match="layer12, written: the parts differ from the layer"):
        layer_parts.measure("layer12", "float32", CPU, 2)
    with pytest.raises(ValueError, match="layer_single12 is no triangle layer"):
        layer_parts.measure("layer_single12", "float32", CPU, 2)
