"""Layers that are sharded over processes: output and all gradients are those of the layer alone."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from evoattn.nn.attention import Attention
from evoattn.nn.pair_bias import AdaLN
from tests.nn.wrapped import LAYERS, TOLERANCE, example, layer_of, step, worst

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(deprecated|quantiz|observer|jit).*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


PROCESSES = 2

Gradients = list[Any]
Sharded = Callable[[nn.Module], tuple[nn.Module, Callable[[], Gradients]]]
"""Takes a layer. Returns the module to call, and what finds the gradients of all parameters after a backward."""


def gathered(tensors: Any) -> Gradients:
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]


def gradients_of(module: nn.Module) -> Callable[[], Gradients]:
    return lambda: gathered(x.grad for x in module.parameters())


def by_ddp(layer: nn.Module) -> tuple[nn.Module, Callable[[], Gradients]]:
    return nn.parallel.DistributedDataParallel(layer), gradients_of(layer)


def by_fsdp1(
    layer: nn.Module, strategy: str, policy: Any = None, original: bool = True
) -> tuple[nn.Module, Callable[[], Gradients]]:
    """original: whether the module keeps its parameters, or has one flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    before = {name: x.detach().clone() for name, x in layer.named_parameters()}
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": original}
    model = FullyShardedDataParallel(layer, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy], **options)

    def find() -> Gradients:
        """The gradients as an optimizer sees them."""
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        with FullyShardedDataParallel.summon_full_params(model):
            after = {name.replace("_fsdp_wrapped_module.", ""): x for name, x in model.named_parameters()}
            return [before[name] - after[name].detach() for name in before]

    return model, find


def by_fsdp2(layer: nn.Module, each: tuple[type, ...] = ()) -> tuple[nn.Module, Callable[[], Gradients]]:
    from torch.distributed.fsdp import fully_shard

    for module in [x for x in layer.modules() if isinstance(x, each)]:
        fully_shard(module)
    fully_shard(layer)
    return layer, gradients_of(layer)


def sharded() -> dict[str, Sharded]:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    policies = {
        "whole": None,
        "projections": ModuleWrapPolicy({nn.Linear}),
        "projections and norms": ModuleWrapPolicy({nn.Linear, nn.LayerNorm}),
        "adaptive norm": ModuleWrapPolicy({AdaLN}),
        "container": ModuleWrapPolicy({Attention}),
        "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    }
    makers: dict[str, Sharded] = {
        "DDP": by_ddp,
        "FSDP2, whole": by_fsdp2,
        "FSDP2, each sub-module": functools.partial(by_fsdp2, each=(nn.Linear, nn.LayerNorm)),
        "FSDP2, container": functools.partial(by_fsdp2, each=(Attention,)),
        "FSDP1, flat": functools.partial(by_fsdp1, strategy="FULL_SHARD", policy=policies["projections"], original=False),
    }
    for name, policy in policies.items():
        makers[f"FSDP1, FULL_SHARD, {name}"] = functools.partial(by_fsdp1, strategy="FULL_SHARD", policy=policy)
    for name in ("whole", "projections and norms"):
        makers[f"FSDP1, NO_SHARD, {name}"] = functools.partial(by_fsdp1, strategy="NO_SHARD", policy=policies[name])
    return makers


def means(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What this process should find: every process has an input of its own, and gradients of parameters are means."""
    plain = layer_of(name).to(dtype)
    parameters = list(plain.parameters())
    each = [step(plain, parameters, *example(name, seed, dtype)) for seed in range(PROCESSES)]
    inputs = len(each[0]) - len(parameters)
    return [*each[dist.get_rank()][:inputs], *(torch.stack(x).mean(0) for x in zip(*(x[inputs:] for x in each), strict=True))]


def trained(model: nn.Module, find: Callable[[], Gradients], name: str) -> list[Tensor]:
    inputs, cotangent = example(name, dist.get_rank())
    o = model(*inputs)
    o.backward(cotangent)
    return [o.detach(), *(x.grad for x in inputs[:-1]), *find()]


def all_errors(mesh: Any) -> dict[str, float]:
    """How far each is from the layer alone."""
    errors = {}
    for name in LAYERS:
        expected = means(name)
        for wrapper, shard in sharded().items():
            errors[f"{name}, {wrapper}"] = worst(trained(*shard(layer_of(name)), name), expected)
    for name in ("starting node", "ending node"):
        errors[f"{name}, heads"] = heads_over_processes(name, mesh)
    return errors


def heads_over_processes(name: str, mesh: Any) -> float:
    """Tensor parallelism: all processes have the same input, and each has one head."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layer: Any = layer_of(name)
    inputs, cotangent = example(name)
    expected = step(layer, list(layer.parameters()), inputs, cotangent)
    columns = {f"mha.linear_{x}": ColwiseParallel() for x in "qkvg"}
    parallelize_module(layer, mesh, {**columns, "linear": ColwiseParallel(), "mha.linear_o": RowwiseParallel()})
    layer.no_heads //= PROCESSES
    return worst(gathered(step(layer, list(layer.parameters()), inputs, cotangent)), expected)


def measure() -> dict[str, float]:
    """Errors, in one of the processes."""
    errors = all_errors(dist.device_mesh.init_device_mesh("cpu", (PROCESSES,)))
    largest = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(errors, largest.tolist(), strict=True))


def in_processes(work: Callable[[], object], folder: pathlib.Path) -> Any:
    """Return what `work` returns in the first of the processes."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo, which these processes talk through")
    from tests.helpers import distributed

    return distributed.results(work, folder, processes=PROCESSES)[0]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return in_processes(measure, tmp_path_factory.mktemp("processes"))


def test_over_processes(measured: Any) -> None:
    assert len(measured) == len(LAYERS) * 13 + 2
    assert {name: error for name, error in measured.items() if not error < TOLERANCE} == {}


def measure_zero3() -> dict[str, Any]:
    """DeepSpeed has no float64. It puts hooks on every module, except within a leaf."""
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    import deepspeed

    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage, "zero_allow_untested_optimizer": True}
    errors: dict[str, Any] = {}
    for name in LAYERS:
        expected = means(name, torch.float32)
        for leaf in (False, True):
            layer, (inputs, cotangent) = layer_of(name).float(), example(name, rank, torch.float32)
            if leaf:
                deepspeed.utils.set_z3_leaf_modules(layer, [type(layer)])
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            model, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=settings)
            assert all(not x.numel() for x in layer.parameters())
            o = model(*inputs)
            model.backward((o * cotangent).sum())
            gradients: Gradients = [x.grad for x in inputs[:-1]]
            gradients += [deepspeed.utils.safe_get_full_grad(x) for x in layer.parameters()]
            errors[f"{name}, leaf={leaf}"] = worst([o.detach(), *gradients], expected)
    return errors


def test_zero3(tmp_path: pathlib.Path) -> None:
    """A layer is right as a leaf, and with hooks on every module."""
    pytest.importorskip("deepspeed")
    errors = in_processes(measure_zero3, tmp_path)
    assert len(errors) == 2 * len(LAYERS)
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
