"""Triangle attention of a pair representation that is split over four processes: what one process finds, and what is sent."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evoattn.nn import MSAColumnAttention, TriangleAttention
from evoattn.testing import relative_error
from tests.helpers import distributed

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo, which these processes talk through", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

PROCESSES = 4
NODES = {"start": True, "end": False}
ROWS, COLUMNS = [Shard(1)], [Shard(2)]
LENGTHS = (8, 9, 3)
"""Of 9 residues the processes have 3, 3, 3 and none; of 3 one each, and the last none."""


def layer_of(node: str, **options: Any) -> TriangleAttention:
    torch.manual_seed(0)
    layer = TriangleAttention(12, 8, 2, starting=NODES[node], **options).double()
    for x in layer.parameters():
        nn.init.normal_(x, std=0.3)
    return layer


def example(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """z, a mask and a cotangent."""
    torch.manual_seed(length)
    z, do = (torch.randn(batch, length, length, 12, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(batch, length, length) > 0.3).double()
    mask[:, 1] = 0
    return z, mask, do


def in_one_process(layer: TriangleAttention, z: Tensor, mask: Tensor | None, do: Tensor) -> list[Tensor]:
    """Output and gradients of one process."""
    z = z.clone().requires_grad_()
    o = layer(z, mask)
    return [o.detach(), *torch.autograd.grad(o, [z, *layer.parameters()], do)]


def in_all_processes(
    layer: TriangleAttention, mesh: Any, placements: Any, z: Tensor, mask: Tensor | None, do: Tensor, whole: bool = False
) -> list[Tensor]:
    """The same of all processes. Of plain parameters each has a part of the gradient, which is summed here."""
    z = distribute_tensor(z, mesh, placements).requires_grad_()
    distributed_mask = None if mask is None else distribute_tensor(mask, mesh, placements)
    parameters = list(layer.parameters())
    o = layer(z, distributed_mask)
    assert o.placements == tuple(placements), o.placements  # type: ignore[attr-defined]
    gradients = torch.autograd.grad(o, [z, *parameters], distribute_tensor(do, mesh, placements))
    assert gradients[0].placements == tuple(placements)  # type: ignore[attr-defined]
    results: list[Any] = [o.detach(), *gradients]
    if not whole:
        for x in gradients[1:]:
            dist.all_reduce(x)
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in results]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative_error(x, y) for x, y in zip(actual, expected, strict=True))


def all_errors(mesh: Any) -> dict[str, float]:
    """How far the processes are from one of them."""
    errors = {}
    for node in NODES:
        layer = layer_of(node)
        for length in LENGTHS:
            z, mask, do = example(length)
            for name, placements in (("rows", ROWS), ("columns", COLUMNS), ("whole", [Replicate()])):
                actual = in_all_processes(layer, mesh, placements, z, mask, do, whole=name == "whole")
                errors[f"{node}, {length}, {name}"] = worst(actual, in_one_process(layer, z, mask, do))
        z, mask, do = example(8)
        errors[f"{node}, no mask"] = worst(in_all_processes(layer, mesh, ROWS, z, None, do), in_one_process(layer, z, None, do))
        residual = layer_of(node, residual=True)
        errors[f"{node}, residual"] = worst(
            in_all_processes(residual, mesh, ROWS, z, mask, do), in_one_process(residual, z, mask, do)
        )
        replicated = distribute_module(copy.deepcopy(layer), mesh)
        actual = in_all_processes(replicated, mesh, ROWS, z, mask, do, whole=True)  # type: ignore[arg-type]
        errors[f"{node}, parameters that are DTensors"] = worst(actual, in_one_process(layer, z, mask, do))
        errors[f"{node}, one mask for all rows"] = one_mask(layer, mesh)
    return errors


def one_mask(layer: TriangleAttention, mesh: Any) -> float:
    z, mask, _ = example(9)
    distributed_mask = distribute_tensor(mask[:, :1].contiguous(), mesh, [Replicate()])
    actual = layer(distribute_tensor(z, mesh, ROWS), distributed_mask).full_tensor()  # type: ignore[attr-defined]
    return relative_error(actual, layer(z, mask[:, :1]))


def on_two_dimensions(mesh: Any) -> dict[str, float]:
    """Batches over one dimension of the mesh and rows over the other."""
    errors = {}
    for node in NODES:
        layer = layer_of(node)
        inputs = example(5, batch=3)
        errors[node] = worst(in_all_processes(layer, mesh, [Shard(0), Shard(1)], *inputs), in_one_process(layer, *inputs))
    return errors


def fsdp(mesh: Any) -> dict[str, float]:
    """Parameters that FSDP splits over the processes of the rows, and averages gradients over."""
    errors = {}
    for node in NODES:
        z, mask, do = example(9)
        expected = in_one_process(layer_of(node), z, mask, do)
        layer = fully_shard(layer_of(node), mesh=mesh)
        z = distribute_tensor(z, mesh, ROWS).requires_grad_()
        o: Any = layer(z, distribute_tensor(mask, mesh, ROWS))
        o.backward(distribute_tensor(do, mesh, ROWS))
        gradients: list[Any] = [x.grad.full_tensor() * PROCESSES for x in layer.parameters()]  # type: ignore[union-attr]
        errors[node] = worst([o.full_tensor(), z.grad.full_tensor(), *gradients], expected)  # type: ignore[union-attr]
    return errors


def dropped(mesh: Any) -> dict[str, Any]:
    """Which entries of each row are dropped: the same of all rows that attend alike."""
    outputs = {}
    for node in NODES:
        layer = layer_of(node, dropout=0.5).train()
        z, _, _ = example(8)
        torch.manual_seed(dist.get_rank())
        outputs[node] = layer(distribute_tensor(z, mesh, ROWS)).full_tensor() == 0  # type: ignore[attr-defined]
    return outputs


def sent(mesh: Any) -> dict[str, dict[str, int]]:
    """What a forward and a backward send."""
    traffic = {}
    z, mask, do = example(8)
    for node in NODES:
        layer = layer_of(node)
        inputs = distribute_tensor(z, mesh, ROWS).requires_grad_()
        distributed_mask, cotangent = distribute_tensor(mask, mesh, ROWS), distribute_tensor(do, mesh, ROWS)
        with CommDebugMode() as forward:
            o = layer(inputs, distributed_mask)
        with CommDebugMode() as backward:
            o.backward(cotangent)
        for name, mode in (("forward", forward), ("backward", backward)):
            traffic[f"{node}, {name}"] = {str(op): count for op, count in mode.get_comm_counts().items()}
    return traffic


def refused(mesh: Any, two: Any) -> dict[str, str]:
    """What is said of what does not fit."""
    z, mask, _ = example(8)
    layer = layer_of("start")
    split = distribute_tensor(z, mesh, ROWS)
    calls: dict[str, Callable[[], Any]] = {
        "channels": lambda: layer(distribute_tensor(z, mesh, [Shard(3)])),
        "rows and columns": lambda: layer(distribute_tensor(z, two, [Shard(1), Shard(2)])),
        "a plain mask": lambda: layer(split, mask),
        "a plain z": lambda: layer(z, distribute_tensor(mask, mesh, ROWS)),
        "a mask elsewhere": lambda: layer(split, distribute_tensor(mask, two, [Shard(1), Replicate()])),
        "parameters elsewhere": lambda: distribute_module(copy.deepcopy(layer), two)(split),
        "another layer": lambda: MSAColumnAttention(12, 8, 2)(split),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def measure() -> dict[str, Any]:
    """Errors and messages, in one of the processes."""
    mesh, two = init_device_mesh("cpu", (PROCESSES,)), init_device_mesh("cpu", (2, 2))
    return {
        "errors": all_errors(mesh),
        "two": on_two_dimensions(two),
        "fsdp": fsdp(mesh),
        "dropped": dropped(mesh),
        "sent": sent(mesh),
        "refused": refused(mesh, two),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return distributed.results(measure, tmp_path_factory.mktemp("processes"), processes=PROCESSES)[0]


def test_outputs_and_all_gradients(results: Any) -> None:
    assert len(results["errors"]) == 26
    for name, error in (*results["errors"].items(), *results["two"].items(), *results["fsdp"].items()):
        assert error < 1e-12, name


def test_rows_drop_the_same_entries(results: Any) -> None:
    start, end = results["dropped"]["start"][0], results["dropped"]["end"][0]
    for x in (start, end.transpose(0, 1)):
        assert 0.2 < x.double().mean() < 0.8
        assert bool((x == x[:1]).all())


def test_sharded_layers_run_the_expected_collectives(results: Any) -> None:
    """The bias once and the gradients of it; around the ending node z, the mask and the update too, once each."""
    gather, exchange = "c10d._allgather_base_", "c10d.alltoall_base_"
    assert results["sent"] == {
        "start, forward": {gather: 1},
        "start, backward": {exchange: 1},
        "end, forward": {gather: 1, exchange: 3},
        "end, backward": {exchange: 3},
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("channels", r"ValueError: z must be split by rows or by columns, .* got \(Shard\(dim=3\),\)"),
        ("rows and columns", r"ValueError: z must be split by rows or by columns, over one dimension"),
        ("a plain mask", "TypeError: mask must be a DTensor, as z is, got a plain tensor"),
        ("a plain z", "TypeError: z must be a DTensor, as mask is, got a plain tensor"),
        ("a mask elsewhere", "ValueError: mask must be on the device mesh of z"),
        ("parameters elsewhere", r"ValueError: layer_norm.weight must be on the device mesh of z"),
        ("another layer", "TypeError: m must be a plain tensor, got a DTensor: gather it first"),
    ],
)
def test_unsplittable_arguments_of_a_layer_are_refused(name: str, words: str, results: Any) -> None:
    assert re.match(words, results["refused"][name])
