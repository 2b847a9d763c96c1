"""Layers that are sharded, copied, offloaded, adapted or transformed: output and all gradients are those of the layer alone."""

from __future__ import annotations

import copy
import functools
import io
import os
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim.swa_utils import AveragedModel

from evoattn.nn import AttentionPairBias, MSAColumnGlobalAttention, TriangleAttention
from evoattn.nn.attention import Attention
from evoattn.nn.pair_bias import AdaLN
from evoattn.testing import relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(deprecated|quantiz|observer|jit).*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

M, Z, MASK = (1, 5, 6, 16), (1, 6, 6, 16), (1, 6, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "starting node": (lambda: TriangleAttention(16, 8, 2), (Z, MASK)),
    "ending node": (lambda: TriangleAttention(16, 8, 2, starting=False), (Z, MASK)),
    "global columns": (lambda: MSAColumnGlobalAttention(16, 8, 2), (M, (1, 5, 6))),
    "condition": (lambda: AttentionPairBias(16, 8, 8, 2, 12), ((1, 5, 6, 16), (1, 1, 6, 6, 8), (1, 5, 6, 12), (1, 5, 6))),
}
"""How each layer is made, and the shapes of what it takes; the last is its mask."""

EACH = pytest.mark.parametrize("name", LAYERS)
TOLERANCE = 1e-12

Leaves = Sequence[Tensor]
Call = Callable[..., Any]


def layer_of(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layer = LAYERS[name][0]().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def example(name: str, seed: int = 1, dtype: torch.dtype = torch.float64, length: int = 6) -> tuple[list[Tensor], Tensor]:
    """What a layer takes, and a cotangent. One row of the mask has no key."""
    torch.manual_seed(seed)
    *shapes, of_mask = (tuple(length if size == 6 else size for size in shape) for shape in LAYERS[name][1])
    given = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    mask = (torch.rand(of_mask) > 0.3).to(dtype)
    mask[..., -1, :] = 0
    return [*given, mask], torch.randn(shapes[0], dtype=dtype)


def step(call: Call, leaves: Leaves, given: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Output, and gradients of the inputs and the leaves."""
    o = call(*given)
    return [o.detach(), *torch.autograd.grad(o, [*given[:-1], *leaves], cotangent)]


def worst(found: Leaves, expected: Leaves) -> float:
    return max(relative_error(x, y) for x, y in zip(found, expected, strict=True))


def forget(layer: nn.Module) -> None:
    """Make a layer useless, so that whoever still reads its parameters is found out."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)


def copied(how: Callable[[nn.Module], nn.Module], layer: nn.Module) -> tuple[Call, Leaves]:
    other = how(layer)
    forget(layer)
    return other, list(other.parameters())


def saved(layer: nn.Module) -> nn.Module:
    memory = io.BytesIO()
    torch.save(layer, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)  # type: ignore[no-any-return]


def by_functional_call(layer: nn.Module) -> tuple[Call, Leaves]:
    parameters = {name: x.detach().clone().requires_grad_() for name, x in layer.named_parameters()}
    forget(layer)
    return lambda *given: functional_call(layer, parameters, given), list(parameters.values())


def with_copies_of_saved_tensors(layer: nn.Module) -> tuple[Call, Leaves]:
    """On a CPU `save_on_cpu` copies nothing. Here its hooks do."""

    def call(*given: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.device, x.clone()), lambda packed: packed[1]):
            return layer(*given)

    return call, list(layer.parameters())


def replica(layer: nn.Module) -> tuple[Call, Leaves]:
    """A replica of DataParallel, less its copy to a GPU: weights are tensors, and there are no parameters."""
    from torch.nn.parallel import replicate

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[x.clone() for x in tensors] for _ in devices]

    module = sys.modules["torch.nn.parallel.replicate"]  # the function has the name of its module
    with mock.patch.object(module, "_broadcast_coalesced_reshape", broadcast):
        (made,) = replicate(layer, [0])
    assert not list(made.parameters())
    return made, list(layer.parameters())


def averaged(layer: nn.Module) -> tuple[Call, Leaves]:
    """The mean of two states, which is the layer's own."""
    states = [copy.deepcopy(layer) for _ in range(2)]
    with torch.no_grad():
        for one, other in zip(*(state.parameters() for state in states), strict=True):
            change = torch.randn_like(one)
            one += change
            other -= change
    model = AveragedModel(layer)
    for state in states:
        model.update_parameters(state)
    forget(layer)
    return model, list(model.module.parameters())


def observed(layer: nn.Module) -> tuple[Call, Leaves]:
    """Observers of torch.ao, which hooks call: they see the input of a projection, and change nothing."""
    layer.qconfig = torch.ao.quantization.default_qconfig  # type: ignore[assignment]
    model = torch.ao.quantization.prepare(layer)
    seen = [x for x in model.modules() if isinstance(x, torch.ao.quantization.MinMaxObserver)]

    def call(*given: Tensor) -> Any:
        made = model(*given)
        assert seen and all(x.min_val.isfinite() for x in seen)  # type: ignore[union-attr]
        return made

    return call, list(model.parameters())


ALONE: dict[str, Callable[[nn.Module], tuple[Call, Leaves]]] = {
    "deepcopy": functools.partial(copied, copy.deepcopy),
    "pickle": functools.partial(copied, lambda layer: pickle.loads(pickle.dumps(layer))),
    "torch.save": functools.partial(copied, saved),
    "functional_call": by_functional_call,
    "save_on_cpu": with_copies_of_saved_tensors,
    "DataParallel": replica,
    "AveragedModel": averaged,
    "torch.ao observers": observed,
}


@EACH
@pytest.mark.parametrize("wrapper", ALONE)
def test_in_one_process(wrapper: str, name: str) -> None:
    layer, (given, cotangent) = layer_of(name), example(name)
    expected = step(layer, list(layer.parameters()), given, cotangent)
    call, leaves = ALONE[wrapper](layer)
    assert worst(step(call, leaves, given, cotangent), expected) < TOLERANCE


@EACH
def test_an_ensemble(name: str) -> None:
    """`vmap` over stacked parameters. All models share the first input; the other inputs are mapped too."""
    models = [layer_of(name, seed) for seed in range(3)]
    cases = [example(name, seed) for seed in range(3)]
    shared = cases[0][0][0]
    each = [
        step(model, list(model.parameters()), [shared, *given[1:]], cotangent)
        for model, (given, cotangent) in zip(models, cases, strict=True)
    ]
    expected = [torch.stack(x) for x in zip(*each, strict=True)]
    expected[1] = expected[1].sum(0)
    found = step(*ensemble(models, [given[1:] for given, _ in cases], shared), torch.stack([do for _, do in cases]))
    assert worst(found, expected) < TOLERANCE


def ensemble(models: list[nn.Module], others: list[list[Tensor]], shared: Tensor) -> tuple[Call, Leaves, list[Tensor]]:
    """All models as one call of the stacked inputs, its leaves, and these inputs."""
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")
    mapped = [torch.stack(x).detach() for x in zip(*others, strict=True)]
    given = [shared, *(x.requires_grad_() for x in mapped[:-1]), mapped[-1]]

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *given: Tensor) -> Any:
        return functional_call(base, (parameters, buffers), given)

    every = vmap(one, (0, 0, None, *[0 for _ in mapped]))
    return functools.partial(every, parameters, buffers), list(parameters.values()), given


def test_a_compiled_ensemble() -> None:
    models = [layer_of("ending node", seed) for seed in range(2)]
    (z, mask), cotangent = example("ending node")
    call, leaves, given = ensemble(models, [[mask], [mask]], z)
    cotangent = torch.stack([cotangent, -cotangent])
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert worst(step(compiled, leaves, given, cotangent), step(call, leaves, given, cotangent)) < TOLERANCE


@EACH
def test_torch_func_grad_is_refused_by_torch(name: str) -> None:
    """torch's own refusal of any operator of `torch.library`: see docs/errors.md."""
    layer, (given, _) = layer_of(name), example(name)
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        torch.func.grad(lambda x: layer(x, *given[1:]).sum())(given[0])


def traced(layer: nn.Module, given: list[Tensor]) -> Any:
    """Traced, saved and loaded."""
    memory = io.BytesIO()
    torch.jit.save(torch.jit.trace(layer, tuple(given), check_trace=False), memory)
    memory.seek(0)
    return torch.jit.load(memory)


@EACH
def test_a_trace(name: str) -> None:
    """It is of other values, and is right for other lengths too."""
    layer = layer_of(name)
    loaded = traced(layer, example(name, seed=9)[0])
    by_name = dict(loaded.named_parameters())
    parameters = [by_name[name] for name, _ in layer.named_parameters()]
    for length in (6, 9):
        given, cotangent = example(name, length=length)
        expected = step(layer, list(layer.parameters()), given, cotangent)
        assert worst(step(loaded, parameters, given, cotangent), expected) < TOLERANCE


@EACH
def test_a_trace_in_float32(name: str) -> None:
    """The means of rows without a key are a call of Python, which no saved graph holds."""
    layer: Any = layer_of(name).float().requires_grad_(False)
    given, _ = example(name, dtype=torch.float32)
    with pytest.raises(RuntimeError, match='takes no mask with empty_rows="mean": make the layer with empty_rows="native"'):
        traced(layer, given)
    layer.empty_rows = "native"
    torch.testing.assert_close(traced(layer, given)(*given), layer(*given))


PROJECTIONS = ("linear_q", "linear_v", "linear_o", "linear_z", "linear")
"""What gets an adapter: projections of each layer, and the pair bias."""


def projections(layer: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in layer.named_modules() if name.rpartition(".")[2] in PROJECTIONS and isinstance(x, nn.Linear)}


def by_peft(layer: nn.Module) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=list(PROJECTIONS), init_lora_weights=False)
    model = peft.get_peft_model(layer, config)
    modules = {name: x for name, x in layer.named_modules() if isinstance(x, peft.tuners.lora.Linear)}
    return model, lambda: {f"{name}.weight": x.weight + x.get_delta_weight("default") for name, x in modules.items()}


def by_loralib(layer: nn.Module) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    loralib = pytest.importorskip("loralib")
    modules = {}
    for name, old in projections(layer).items():
        made = loralib.Linear(old.in_features, old.out_features, r=2, bias=old.bias is not None).double()
        made.load_state_dict(old.state_dict(), strict=False)
        nn.init.normal_(made.lora_B)
        layer.set_submodule(name, made)
        modules[name] = made
    return layer, lambda: {f"{name}.weight": x.weight + x.scaling * x.lora_B @ x.lora_A for name, x in modules.items()}


@EACH
@pytest.mark.parametrize("adapt", [by_peft, by_loralib])
def test_adapters(adapt: Callable[[nn.Module], tuple[nn.Module, Callable[[], dict[str, Tensor]]]], name: str) -> None:
    """The same as the products of the adapters added to the weights; the gradients are those of the adapters."""
    plain, (given, cotangent) = layer_of(name), example(name)
    model, weights = adapt(copy.deepcopy(plain))
    leaves = [x for n, x in model.named_parameters() if "lora_" in n]
    assert len(leaves) == 2 * len(projections(plain)) >= 6
    expected = step(lambda *given: functional_call(plain, weights(), given), leaves, given, cotangent)
    assert worst(step(model, leaves, given, cotangent), expected) < TOLERANCE


@EACH
def test_cpu_offload(name: str) -> None:
    """accelerate keeps the weights elsewhere, and the modules have none outside their forward. Weights get no gradient then."""
    accelerate = pytest.importorskip("accelerate")
    layer, (given, cotangent) = layer_of(name), example(name)
    expected = step(layer, [], given, cotangent)
    accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))
    assert all(x.is_meta for x in layer.parameters())
    assert worst(step(layer, [], given, cotangent), expected) < TOLERANCE


@EACH
def test_quantised(name: str) -> None:
    """torch.ao quantises only float32. Dynamic quantisation has no gradient; training with simulated 8 bits has all."""
    layer, (given, cotangent) = layer_of(name).float(), example(name, dtype=torch.float32)
    expected = step(layer, list(layer.parameters()), given, cotangent)
    with torch.no_grad():
        found = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)(*given)
    assert 1e-4 < relative_error(found, expected[0]) < 0.1
    layer.qconfig = torch.ao.quantization.get_default_qat_qconfig("onednn")
    model = torch.ao.quantization.prepare_qat(layer.train())
    by_name = dict(model.named_parameters())
    trained = [by_name[name] for name, _ in layer.named_parameters()]
    for _ in range(2):  # the first call sets the scales
        made = step(model, trained, given, cotangent)
    assert 1e-4 < relative_error(made[0], expected[0]) < 0.1
    assert worst(made[1:], expected[1:]) < 0.3


@EACH
def test_quantised_weights(name: str) -> None:
    """torchao leaves the modules as they are, and replaces their weights by tensors of a class of its own."""
    quantization = pytest.importorskip("torchao.quantization")
    layer, (given, _) = layer_of(name).float(), example(name, dtype=torch.float32)
    plain = copy.deepcopy(layer)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        for one, other in zip(plain.modules(), layer.modules(), strict=True):
            if isinstance(one, nn.Linear):
                assert type(other) is nn.Linear and type(other.weight) is not type(one.weight)
                one.weight.copy_(other.weight.dequantize())
        assert relative_error(layer(*given), plain(*given)) < 1e-5


def on_a_gpu(name: str) -> tuple[nn.Module, list[Tensor], Tensor]:
    layer, (given, cotangent) = layer_of(name), example(name)
    return layer.cuda(), [x.detach().cuda().requires_grad_(x.requires_grad) for x in given], cotangent.cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@EACH
def test_save_on_cpu(name: str) -> None:
    layer, given, cotangent = on_a_gpu(name)
    expected = step(layer, list(layer.parameters()), given, cotangent)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        assert worst(step(layer, list(layer.parameters()), given, cotangent), expected) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; test_in_one_process has a replica on the CPU")
@EACH
def test_data_parallel(name: str) -> None:
    """Each GPU has one of the two batches."""
    layer, given, cotangent = on_a_gpu(name)
    given = [torch.cat([x, 1 - x]).detach().requires_grad_(x.requires_grad) for x in given]
    cotangent = torch.cat([cotangent, cotangent])
    expected = step(layer, list(layer.parameters()), given, cotangent)
    model = nn.DataParallel(layer, [0, 1])
    assert worst(step(model, list(layer.parameters()), given, cotangent), expected) < TOLERANCE


PROCESSES = 2

Gradients = list[Any]
Sharded = Callable[[nn.Module], tuple[nn.Module, Callable[[], Gradients]]]
"""Takes a layer. Returns the module to call, and what finds the gradients of all parameters after a backward."""


def whole(tensors: Any) -> Gradients:
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]


def gradients_of(module: nn.Module) -> Callable[[], Gradients]:
    return lambda: whole(x.grad for x in module.parameters())


def by_ddp(layer: nn.Module) -> tuple[nn.Module, Callable[[], Gradients]]:
    return nn.parallel.DistributedDataParallel(layer), gradients_of(layer)


def by_fsdp1(
    layer: nn.Module, strategy: str, policy: Any = None, original: bool = True
) -> tuple[nn.Module, Callable[[], Gradients]]:
    """original: whether the module keeps its parameters, or has one flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    before = {name: x.detach().clone() for name, x in layer.named_parameters()}
    wishes: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": original}
    model = FullyShardedDataParallel(layer, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy], **wishes)

    def find() -> Gradients:
        """The gradients as an optimizer sees them."""
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        with FullyShardedDataParallel.summon_full_params(model):
            after = {name.replace("_fsdp_wrapped_module.", ""): x for name, x in model.named_parameters()}
            return [before[name] - after[name].detach() for name in before]

    return model, find


def by_fsdp2(layer: nn.Module, each: bool) -> tuple[nn.Module, Callable[[], Gradients]]:
    from torch.distributed.fsdp import fully_shard

    inner = [x for x in layer.modules() if isinstance(x, nn.Linear | nn.LayerNorm)]
    for module in inner if each else ():
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
        "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=100),
    }
    made: dict[str, Sharded] = {
        "DDP": by_ddp,
        "FSDP2, whole": functools.partial(by_fsdp2, each=False),
        "FSDP2, each sub-module": functools.partial(by_fsdp2, each=True),
        "FSDP1, flat": functools.partial(by_fsdp1, strategy="FULL_SHARD", policy=policies["projections"], original=False),
    }
    for name, policy in policies.items():
        made[f"FSDP1, FULL_SHARD, {name}"] = functools.partial(by_fsdp1, strategy="FULL_SHARD", policy=policy)
    for name in ("whole", "projections and norms"):
        made[f"FSDP1, NO_SHARD, {name}"] = functools.partial(by_fsdp1, strategy="NO_SHARD", policy=policies[name])
    return made


def means(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What this process should find: every process has an input of its own, and gradients of parameters are means."""
    plain = layer_of(name).to(dtype)
    parameters = list(plain.parameters())
    each = [step(plain, parameters, *example(name, seed, dtype)) for seed in range(PROCESSES)]
    inputs = len(each[0]) - len(parameters)
    return [*each[dist.get_rank()][:inputs], *(torch.stack(x).mean(0) for x in zip(*(x[inputs:] for x in each), strict=True))]


def trained(model: nn.Module, find: Callable[[], Gradients], name: str) -> list[Tensor]:
    given, cotangent = example(name, dist.get_rank())
    o = model(*given)
    o.backward(cotangent)
    return [o.detach(), *(x.grad for x in given[:-1]), *find()]


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
    given, cotangent = example(name)
    expected = step(layer, list(layer.parameters()), given, cotangent)
    columns = {f"mha.linear_{x}": ColwiseParallel() for x in "qkvg"}
    parallelize_module(layer, mesh, {**columns, "linear": ColwiseParallel(), "mha.linear_o": RowwiseParallel()})
    layer.no_heads //= PROCESSES
    return worst(whole(step(layer, list(layer.parameters()), given, cotangent)), expected)


def refused() -> dict[str, str]:
    """What is said of a container that is sharded as if the layer called it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = {name: layer_of("starting node") for name in ("FSDP1", "FSDP2")}
    by_fsdp1(layers["FSDP1"], "FULL_SHARD", ModuleWrapPolicy({Attention}))
    fully_shard(layers["FSDP2"].mha)  # type: ignore[arg-type]
    said = {}
    for name, layer in layers.items():
        try:
            layer(*example("starting node")[0])
        except TypeError as error:
            said[name] = str(error)
    return said


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    errors = all_errors(dist.device_mesh.init_device_mesh("cpu", (PROCESSES,)))
    largest = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        found = {"errors": dict(zip(errors, largest.tolist(), strict=True)), "refused": refused()}
        torch.save(found, pathlib.Path(folder) / "found.pt")
    else:
        refused()
    dist.barrier()
    dist.destroy_process_group()


def started(process: Callable[[int, str], None], folder: pathlib.Path) -> Any:
    """What the processes have found."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo, which these processes talk through")
    from torch.multiprocessing.spawn import spawn

    spawn(process, (str(folder),), nprocs=PROCESSES)
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return started(process, tmp_path_factory.mktemp("processes"))


def test_over_processes(found: Any) -> None:
    assert len(found["errors"]) == len(LAYERS) * 11 + 2
    assert {name: error for name, error in found["errors"].items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("name", ["FSDP1", "FSDP2"])
def test_a_sharded_container_is_refused(name: str, found: Any) -> None:
    kind = {"FSDP1": "FullyShardedDataParallel", "FSDP2": "FSDPAttention"}[name]
    assert found["refused"][name] == (
        f"mha must be the Attention that the layer made, got {kind}: the layer never calls mha. "
        "Wrap or shard the whole layer, or the projections inside mha"
    )


def process_of_zero3(rank: int, folder: str) -> None:
    """DeepSpeed has no float64. It puts hooks on every module, except within a leaf."""
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    import deepspeed

    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage, "zero_allow_untested_optimizer": True}
    found: dict[str, Any] = {}
    for name in LAYERS:
        expected, (given, cotangent) = means(name, torch.float32), example(name, rank, torch.float32)
        for leaf in (False, True):
            layer = layer_of(name).float()
            if leaf:
                deepspeed.utils.set_z3_leaf_modules(layer, [type(layer)])
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            model, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=settings)
            assert all(not x.numel() for x in layer.parameters())
            if not leaf:
                try:
                    model(*given)
                except TypeError as error:
                    found[f"{name}, refused"] = str(error)
                continue
            o = model(*given)
            model.backward((o * cotangent).sum())
            gradients: Gradients = [x.grad for x in given[:-1]]
            gradients += [deepspeed.utils.safe_get_full_grad(x) for x in layer.parameters()]
            found[name] = worst([o.detach(), *gradients], expected)
    if rank == 0:
        torch.save(found, pathlib.Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_zero3(tmp_path: pathlib.Path) -> None:
    """A layer is right as a leaf, and else refused: it never calls its container, which has hooks."""
    pytest.importorskip("deepspeed")
    found = started(process_of_zero3, tmp_path)
    for name in LAYERS:
        assert found[name] < 1e-5, name
        assert re.search("has hooks .* give deepspeed.utils.set_z3_leaf_modules the layer's class", found[f"{name}, refused"])
