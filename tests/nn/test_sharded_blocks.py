"""Blocks and layers of a pair representation that is split over four processes: what one process finds, and what is sent."""

from __future__ import annotations

import collections
import copy
import functools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evoattn.nn import AttentionPairBias, PairBlock, PairformerBlock, Transition, TriangleMultiplication
from evoattn.nn.multiplication import JoinedTriangleMultiplication
from evoattn.pair.multiplication import products
from tests.helpers import distributed

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch was built without gloo, which these processes talk through", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

PROCESSES = 4
C_S, C_Z, HIDDEN = 12, 8, 10
LENGTHS = (8, 9, 3)
"""Of 9 residues the processes have 3, 3, 3 and none; of 3 one each, and the last none."""

SPLITS: dict[str, Any] = {"rows": [Shard(1)], "columns": [Shard(2)], "whole": [Replicate()]}

MULTIPLICATIONS: dict[str, Callable[..., nn.Module]] = {
    "outgoing": functools.partial(TriangleMultiplication, C_Z, HIDDEN, True),
    "incoming": functools.partial(TriangleMultiplication, C_Z, HIDDEN, False, residual=True),
    "joined": functools.partial(JoinedTriangleMultiplication, C_Z, HIDDEN, False, bias=False),
    "few channels": functools.partial(TriangleMultiplication, C_Z, 3, True),
}
LAYERS: dict[str, Callable[..., nn.Module]] = {
    **MULTIPLICATIONS,
    "transition": functools.partial(Transition, C_Z, 2, residual=True),
    "pair bias": functools.partial(AttentionPairBias, C_S, C_Z, 6, 2, residual=True),
    "pair bias under a condition": functools.partial(AttentionPairBias, C_S, C_Z, 6, 2, C_S),
    "pair block": functools.partial(PairBlock, C_Z, HIDDEN, 4, 2, 2, bias=True, dropout=0.25),
    "pairformer block": functools.partial(PairformerBlock, C_S, C_Z, 6, 2, HIDDEN, 4, 2, 2, dropout=0.25),
}

Given = dict[str, "Tensor | None"]


def layer_of(name: str) -> Any:
    torch.manual_seed(0)
    layer = LAYERS[name]().double().eval()
    for x in layer.parameters():
        nn.init.normal_(x, std=0.4)
    return layer


def example(length: int, batch: int = 1, masked: bool = True) -> Given:
    """s and z, masks, and cotangents of s and z."""
    torch.manual_seed(length)
    s, ds = (torch.randn(batch, length, C_S, dtype=torch.float64) for _ in range(2))
    z, dz = (torch.randn(batch, length, length, C_Z, dtype=torch.float64) for _ in range(2))
    pairs = (torch.rand(batch, length, length) > 0.3).double()
    mask = (torch.rand(batch, length) > 0.2).double()
    return {"s": s, "z": z, "mask": mask if masked else None, "pairs": pairs if masked else None, "ds": ds, "dz": dz}


def call(layer: Any, s: Any, z: Any, mask: Any, pairs: Any) -> list[Any]:
    """The outputs of a layer or a block: of s, of z, or of both."""
    if isinstance(layer, PairformerBlock):
        return list(layer(s, z, mask, pairs))
    if isinstance(layer, AttentionPairBias):
        return [layer(s, z, None if layer.c_s is None else s + 1, mask)]
    return [layer(z, pairs)]


def differentiate(layer: Any, problem: dict[str, Any], run: Callable[..., list[Any]] = call) -> list[Any]:
    """Outputs, the gradients of s and z, and those of the parameters."""
    s, z = (problem[name].detach().requires_grad_() for name in ("s", "z"))
    output = run(layer, s, z, problem["mask"], problem["pairs"])
    cotangents = [_as(problem["ds"] if x.ndim == 3 else problem["dz"], x) for x in output]
    actual = torch.autograd.grad(output, [s, z, *layer.parameters()], cotangents, allow_unused=True)
    return [*(x.detach() for x in output), *(x for x in actual if x is not None)]


def _as(do: Any, x: Any) -> Any:
    """A cotangent that lies as the output x."""
    return do.redistribute(placements=x.placements) if hasattr(x, "placements") else do


def spread(problem: Given, mesh: Any, placements: Any) -> dict[str, Any]:
    """DTensors. s and its mask have no columns, and are split by rows in their place."""

    def lies(x: Tensor) -> list[Any]:
        return [Shard(1) if p == Shard(2) and x.ndim < 4 and x.shape[-1] != x.shape[-2] else p for p in placements]

    return {name: x if x is None else distribute_tensor(x, mesh, lies(x)) for name, x in problem.items()}


def in_all_processes(
    layer: Any, problem: Given, mesh: Any, placements: Any, run: Any = call, whole: bool = False
) -> list[Tensor]:
    """The same of all processes. Of plain parameters each has a part of the gradient, which is summed here."""
    actual = differentiate(layer, spread(problem, mesh, placements), run)
    for x in actual:
        if not hasattr(x, "full_tensor") and not whole:
            dist.all_reduce(x)
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in actual]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error. Some gradients are 0 but for rounding: a constant in the pair bias does not change the softmax."""
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1)).item() for x, y in zip(actual, expected, strict=True))


def of_layers(mesh: Any) -> dict[str, float]:
    """How far the processes are from one of them."""
    errors = {}
    for name in LAYERS:
        layer = layer_of(name)
        for length in LENGTHS:
            problem = example(length)
            expected = differentiate(layer, problem)
            for split, placements in SPLITS.items():
                actual = in_all_processes(layer, problem, mesh, placements, whole=split == "whole")
                errors[f"{name}, {length}, {split}"] = worst(actual, expected)
        problem = example(9, masked=False)
        errors[f"{name}, no mask"] = worst(
            in_all_processes(layer, problem, mesh, SPLITS["rows"]), differentiate(layer, problem)
        )
    return errors


def of_blocks(mesh: Any, two: Any) -> dict[str, float]:
    """The ways in which a block is trained."""
    layer, problem, rows = layer_of("pairformer block"), example(9), SPLITS["rows"]
    expected = differentiate(layer, problem)
    errors = {}
    replicated = distribute_module(copy.deepcopy(layer), mesh)
    errors["parameters that are DTensors"] = worst(in_all_processes(replicated, problem, mesh, rows, whole=True), expected)

    def checkpointed(layer: Any, *tensors: Any) -> list[Any]:
        return list(checkpoint(layer, *tensors, use_reentrant=False))

    errors["checkpoint"] = worst(in_all_processes(layer, problem, mesh, rows, checkpointed), expected)
    batches = example(5, batch=3)
    actual = in_all_processes(layer, batches, two, [Shard(0), Shard(1)])
    errors["batches and rows"] = worst(actual, differentiate(layer, batches))
    hooked = layer_of("pairformer block")
    for module in (hooked.pair_stack.tri_mul_out.linear_a_p, hooked.pair_stack.tri_mul_in.linear_z):
        module.register_forward_hook(lambda *_: None)
    errors["hooks"] = worst(in_all_processes(hooked, problem, mesh, rows), expected)
    products._SLICES = 1
    errors["one slice"] = worst(in_all_processes(layer, problem, mesh, rows), expected)
    products._SLICES = 4
    errors["fsdp"] = fsdp(mesh, problem, expected)
    errors["dropout"] = dropout(mesh, problem)
    return errors


def fsdp(mesh: Any, problem: Given, expected: list[Tensor]) -> float:
    """Parameters that FSDP splits over the processes of the rows, and averages gradients over."""
    layer: Any = fully_shard(layer_of("pairformer block"), mesh=mesh)
    tensors = spread(problem, mesh, SPLITS["rows"])
    s, z = (tensors[name].requires_grad_() for name in ("s", "z"))
    output = call(layer, s, z, tensors["mask"], tensors["pairs"])
    torch.autograd.backward(output, [tensors["ds"], tensors["dz"]])
    gradients = [x.grad.full_tensor() * PROCESSES for x in layer.parameters()]
    return worst([*(x.full_tensor() for x in (*output, s.grad, z.grad)), *gradients], expected)


def dropout(mesh: Any, problem: Given) -> float:
    """The first process draws for all: they drop what it alone would."""
    layer, outputs = layer_of("pairformer block").train(), []
    for split in ("rows", "columns"):
        torch.manual_seed(5)
        expected = differentiate(layer, problem)
        torch.manual_seed(5 + dist.get_rank())
        outputs.append(worst(in_all_processes(layer, problem, mesh, SPLITS[split]), expected))
    return max(outputs)


class Collectives(TorchDispatchMode):
    """Counts collectives by name. CommDebugMode hooks modules too, and loses count of them in some blocks of torch 2.13."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and name.split("_")[0] not in ("wait", "wrap"):
            self.counts[name] += 1
        return func(*args, **kwargs or {})


def sent(mesh: Any) -> dict[str, dict[str, int]]:
    """What a forward and a backward send."""
    counts = {}
    for name in ("outgoing", "incoming", "transition", "pair bias", "pairformer block"):
        layer, problem = layer_of(name), spread(example(8), mesh, SPLITS["rows"])
        s, z = (problem[name].requires_grad_() for name in ("s", "z"))
        with Collectives() as forward:
            output = call(layer, s, z, problem["mask"], problem["pairs"])
        with Collectives() as backward:
            torch.autograd.backward(output, [problem["ds"] if x.ndim == 3 else problem["dz"] for x in output])
        for way, mode in (("forward", forward), ("backward", backward)):
            counts[f"{name}, {way}"] = dict(mode.counts)
    return counts


def refused(mesh: Any, two: Any) -> dict[str, str]:
    """What is said of what does not fit."""
    problem = spread(example(8), mesh, SPLITS["rows"])
    plain = example(8)
    s, z, mask, pairs = (problem[name] for name in ("s", "z", "mask", "pairs"))
    block, multiply, bias, transition = (layer_of(x) for x in ("pair block", "outgoing", "pair bias", "transition"))
    calls: dict[str, Callable[[], Any]] = {
        "channels": lambda: multiply(distribute_tensor(plain["z"], mesh, [Shard(3)])),
        "channels of a transition": lambda: transition(distribute_tensor(plain["z"], mesh, [Shard(3)])),
        "a plain mask": lambda: multiply(z, plain["pairs"]),
        "a plain z": lambda: multiply(plain["z"], pairs),
        "a plain mask of a transition": lambda: transition(z, plain["pairs"]),
        "a mask elsewhere": lambda: multiply(z, distribute_tensor(plain["pairs"], two, [Shard(1), Replicate()])),
        "parameters elsewhere": lambda: distribute_module(copy.deepcopy(multiply), two)(z),
        "a plain a": lambda: bias(plain["s"], z),
        "a plain z of a": lambda: bias(s, plain["z"]),
        "a plain mask of a": lambda: bias(s, z, mask=plain["mask"]),
        "keys": lambda: bias(s, z, mask=mask, keys=s),
        "in place": lambda: block(z, pairs, in_place=True),
    }
    said = {}
    for name, run in calls.items():
        try:
            with torch.no_grad():
                run()
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def compiled(mesh: Any) -> float:
    """How far compiled code is from code that is not."""
    layer, problem = layer_of("incoming"), example(9)

    def run(layer: Any, s: Any, z: Any, mask: Any, pairs: Any) -> list[Any]:
        return [torch.compile(layer, fullgraph=True, backend="aot_eager")(z, pairs)]

    return worst(in_all_processes(layer, problem, mesh, SPLITS["rows"], run), differentiate(layer, problem))


def few(mesh: Any, two: Any) -> dict[str, Any]:
    layer, problem = layer_of("pairformer block"), example(9)
    expected = differentiate(layer, problem)
    errors = {name: worst(in_all_processes(layer, problem, mesh, SPLITS[name]), expected) for name in ("rows", "columns")}
    return {"errors": errors, "sent": sent(mesh), "refused": refused(mesh, two)}


def many(mesh: Any, two: Any) -> dict[str, Any]:
    return {"layers": of_layers(mesh), "blocks": of_blocks(mesh, two), "compiled": compiled(mesh)}


def measure(which: str) -> dict[str, Any]:
    """Errors and messages, in one of the processes."""
    products._SLICE_BYTES = 1
    return {"few": few, "many": many}[which](init_device_mesh("cpu", (PROCESSES,)), init_device_mesh("cpu", (2, 2)))


def run_processes(folder: pathlib.Path, which: str) -> Any:
    return distributed.results(measure, folder, which, processes=PROCESSES)[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_processes(tmp_path_factory.mktemp("few"), "few")


def test_sharded_block_agrees_with_one_process(results: Any) -> None:
    """Outputs and all gradients."""
    for name, error in results["errors"].items():
        assert error < 1e-10, name


@pytest.mark.slow
def test_all_layers(tmp_path: pathlib.Path) -> None:
    """Outputs and all gradients of each layer, and the ways in which a block is trained."""
    actual = run_processes(tmp_path, "many")
    assert len(actual["layers"]) == 10 * len(LAYERS)
    for name, error in (*actual["layers"].items(), *actual["blocks"].items(), ("compiled", actual["compiled"])):
        assert error < 1e-10, name


def test_sharded_block_runs_the_expected_collectives(results: Any) -> None:
    """Of a multiplication three all-to-alls for each of two slices of channels. Of the block these twice, the bias and its
    gradient, what one attention exchanges, keys and mask of the single track.
    """
    gather, exchange = "allgather_base", "alltoall_base"
    assert results["sent"] == {
        **{f"{name}, {way}": {exchange: 6} for name in ("outgoing", "incoming") for way in ("forward", "backward")},
        **{f"transition, {way}": {} for way in ("forward", "backward")},
        "pair bias, forward": {gather: 1, "all_gather_into_tensor": 1},
        "pair bias, backward": {exchange: 1},
        "pairformer block, forward": {gather: 3, "all_gather_into_tensor": 1, exchange: 15},
        "pairformer block, backward": {exchange: 17},
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("channels", r"ValueError: z must be split by rows or by columns, .* got \(Shard\(dim=3\),\)"),
        ("channels of a transition", r"ValueError: x must be split along other axes than the last, got \(Shard\(dim=3\),\)"),
        ("a plain mask", "TypeError: mask must be a DTensor, as z is, got a plain tensor"),
        ("a plain z", "TypeError: z must be a DTensor, as mask is, got a plain tensor"),
        ("a plain mask of a transition", "TypeError: mask must be a DTensor, as x is, got a plain tensor"),
        ("a mask elsewhere", "ValueError: mask must be on the device mesh of z"),
        ("parameters elsewhere", "ValueError: linear_a_p.weight must be on the device mesh of z"),
        ("a plain a", "TypeError: a must be a DTensor, as z is, got a plain tensor"),
        ("a plain z of a", "TypeError: z must be a DTensor, as a is, got a plain tensor"),
        ("a plain mask of a", "TypeError: mask must be a DTensor, as z is, got a plain tensor"),
        ("keys", "TypeError: keys must be a plain tensor, got a DTensor: gather it first"),
        ("in place", "ValueError: in_place=True takes no DTensors"),
    ],
)
def test_unsplittable_arguments_of_a_block_are_refused(name: str, words: str, results: Any) -> None:
    assert re.match(words, results["refused"][name])


def one_dies(folder: str) -> None:
    """The last process ends without a word. The others wait for it in a collective, and write down what they are told."""
    layer, mesh, rank = layer_of("outgoing"), init_device_mesh("cpu", (PROCESSES,)), dist.get_rank()
    z = distribute_tensor(example(8)["z"], mesh, SPLITS["rows"])
    layer(z)
    if rank == PROCESSES - 1:
        os._exit(3)
    try:
        for _ in range(3):
            layer(z)
    except RuntimeError as error:
        (pathlib.Path(folder) / f"said-{rank}").write_text(str(error))
    os._exit(0)


def test_a_process_that_dies_ends_the_others(tmp_path: pathlib.Path) -> None:
    started = distributed.start(one_dies, tmp_path, str(tmp_path), processes=PROCESSES)
    for each in started.processes:
        each.join(120)
    assert [each.exitcode for each in started.processes] == [0, 0, 0, 3]
    for rank in range(PROCESSES - 1):
        assert re.search("(Connection closed|reset) by peer", (tmp_path / f"said-{rank}").read_text())
