"""Layers that are copied, offloaded, adapted or transformed: output and all gradients are those of the layer alone."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim.swa_utils import AveragedModel

from evoattn.testing import relative_error
from tests.nn.wrapped import LAYERS, TOLERANCE, Call, Leaves, example, layer_of, step, worst

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(deprecated|quantiz|observer|jit).*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


EACH = pytest.mark.parametrize("name", LAYERS)


def forget(layer: nn.Module) -> None:
    """Make a layer useless, so that whoever still reads its parameters is found out."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)


def copied(how: Callable[[nn.Module], nn.Module], layer: nn.Module) -> tuple[Call, Leaves]:
    duplicate = how(layer)
    forget(layer)
    return duplicate, list(duplicate.parameters())


def saved(layer: nn.Module) -> nn.Module:
    memory = io.BytesIO()
    torch.save(layer, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)  # type: ignore[no-any-return]


def by_functional_call(layer: nn.Module) -> tuple[Call, Leaves]:
    parameters = {name: x.detach().clone().requires_grad_() for name, x in layer.named_parameters()}
    forget(layer)
    return lambda *inputs: functional_call(layer, parameters, inputs), list(parameters.values())


def with_copies_of_saved_tensors(layer: nn.Module) -> tuple[Call, Leaves]:
    """On a CPU `save_on_cpu` copies nothing. Here its hooks do."""

    def call(*inputs: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.device, x.clone()), lambda packed: packed[1]):
            return layer(*inputs)

    return call, list(layer.parameters())


def replica(layer: nn.Module) -> tuple[Call, Leaves]:
    """A replica of DataParallel, less its copy to a GPU: weights are tensors, and there are no parameters."""
    from torch.nn.parallel import replicate

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[x.clone() for x in tensors] for _ in devices]

    module = sys.modules["torch.nn.parallel.replicate"]  # the function has the name of its module
    with mock.patch.object(module, "_broadcast_coalesced_reshape", broadcast):
        (copy,) = replicate(layer, [0])
    assert not list(copy.parameters())
    return copy, list(layer.parameters())


def averaged(layer: nn.Module) -> tuple[Call, Leaves]:
    """The mean of two states, which is the layer's own."""
    states = [copy.deepcopy(layer) for _ in range(2)]
    with torch.no_grad():
        for x, y in zip(*(state.parameters() for state in states), strict=True):
            change = torch.randn_like(x)
            x += change
            y -= change
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

    def call(*inputs: Tensor) -> Any:
        output = model(*inputs)
        assert seen and all(x.min_val.isfinite() for x in seen)  # type: ignore[union-attr]
        return output

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
def test_a_wrapped_layer_keeps_outputs_and_gradients(wrapper: str, name: str) -> None:
    layer, (inputs, cotangent) = layer_of(name), example(name)
    expected = step(layer, list(layer.parameters()), inputs, cotangent)
    call, leaves = ALONE[wrapper](layer)
    assert worst(step(call, leaves, inputs, cotangent), expected) < TOLERANCE


@EACH
def test_an_ensemble(name: str) -> None:
    """`vmap` over stacked parameters. All models share the first input; the other inputs are mapped too."""
    models = [layer_of(name, seed) for seed in range(3)]
    cases = [example(name, seed) for seed in range(3)]
    shared = cases[0][0][0]
    each = [
        step(model, list(model.parameters()), [shared, *inputs[1:]], cotangent)
        for model, (inputs, cotangent) in zip(models, cases, strict=True)
    ]
    expected = [torch.stack(x) for x in zip(*each, strict=True)]
    expected[1] = expected[1].sum(0)
    actual = step(*ensemble(models, [inputs[1:] for inputs, _ in cases], shared), torch.stack([do for _, do in cases]))
    assert worst(actual, expected) < TOLERANCE


def ensemble(models: list[nn.Module], others: list[list[Tensor]], shared: Tensor) -> tuple[Call, Leaves, list[Tensor]]:
    """All models as one call of the stacked inputs, its leaves, and these inputs."""
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")
    mapped = [torch.stack(x).detach() for x in zip(*others, strict=True)]
    inputs = [shared, *(x.requires_grad_() for x in mapped[:-1]), mapped[-1]]

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> Any:
        return functional_call(base, (parameters, buffers), inputs)

    every = vmap(run, (0, 0, None, *[0 for _ in mapped]))
    return functools.partial(every, parameters, buffers), list(parameters.values()), inputs


def test_a_compiled_ensemble() -> None:
    models = [layer_of("ending node", seed) for seed in range(2)]
    (z, mask), cotangent = example("ending node")
    call, leaves, inputs = ensemble(models, [[mask], [mask]], z)
    cotangent = torch.stack([cotangent, -cotangent])
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert worst(step(compiled, leaves, inputs, cotangent), step(call, leaves, inputs, cotangent)) < TOLERANCE


@EACH
def test_torch_func_grad_is_refused_by_torch(name: str) -> None:
    """torch's own refusal of any operator of `torch.library`: see docs/errors.md."""
    layer, (inputs, _) = layer_of(name), example(name)
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        torch.func.grad(lambda x: layer(x, *inputs[1:]).sum())(inputs[0])


def traced(layer: nn.Module, inputs: list[Tensor]) -> Any:
    """Traced, saved and loaded."""
    memory = io.BytesIO()
    torch.jit.save(torch.jit.trace(layer, tuple(inputs), check_trace=False), memory)
    memory.seek(0)
    return torch.jit.load(memory)


@EACH
def test_traced_layer_agrees_with_the_layer(name: str) -> None:
    """It is of other values, and is right for other lengths too."""
    layer = layer_of(name)
    loaded = traced(layer, example(name, seed=9)[0])
    by_name = dict(loaded.named_parameters())
    parameters = [by_name[name] for name, _ in layer.named_parameters()]
    for length in (6, 9):
        inputs, cotangent = example(name, length=length)
        expected = step(layer, list(layer.parameters()), inputs, cotangent)
        assert worst(step(loaded, parameters, inputs, cotangent), expected) < TOLERANCE


@EACH
def test_a_trace_in_float32(name: str) -> None:
    """The means of rows without a key are a call of Python, which no saved graph holds."""
    layer: Any = layer_of(name).float().requires_grad_(False)
    inputs, _ = example(name, dtype=torch.float32)
    with pytest.raises(RuntimeError, match='takes no mask with empty_rows="mean": pass empty_rows="native"'):
        traced(layer, inputs)
    layer.empty_rows = "native"
    torch.testing.assert_close(traced(layer, inputs)(*inputs), layer(*inputs))


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
        adapter = loralib.Linear(old.in_features, old.out_features, r=2, bias=old.bias is not None).double()
        adapter.load_state_dict(old.state_dict(), strict=False)
        nn.init.normal_(adapter.lora_B)
        layer.set_submodule(name, adapter)
        modules[name] = adapter
    return layer, lambda: {f"{name}.weight": x.weight + x.scaling * x.lora_B @ x.lora_A for name, x in modules.items()}


@EACH
@pytest.mark.parametrize("adapt", [by_peft, by_loralib])
def test_adapters(adapt: Callable[[nn.Module], tuple[nn.Module, Callable[[], dict[str, Tensor]]]], name: str) -> None:
    """The same as the products of the adapters added to the weights; the gradients are those of the adapters."""
    plain, (inputs, cotangent) = layer_of(name), example(name)
    model, weights = adapt(copy.deepcopy(plain))
    leaves = [x for n, x in model.named_parameters() if "lora_" in n]
    assert len(leaves) == 2 * len(projections(plain)) >= 6
    expected = step(lambda *inputs: functional_call(plain, weights(), inputs), leaves, inputs, cotangent)
    assert worst(step(model, leaves, inputs, cotangent), expected) < TOLERANCE


@EACH
def test_cpu_offload(name: str) -> None:
    """accelerate keeps the weights elsewhere, and the modules have none outside their forward. Weights get no gradient then."""
    accelerate = pytest.importorskip("accelerate")
    layer, (inputs, cotangent) = layer_of(name), example(name)
    expected = step(layer, [], inputs, cotangent)
    accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))
    assert all(x.is_meta for x in layer.parameters())
    assert worst(step(layer, [], inputs, cotangent), expected) < TOLERANCE


@EACH
def test_quantised(name: str) -> None:
    """torch.ao quantises only float32. Dynamic quantisation has no gradient; training with simulated 8 bits has all."""
    layer, (inputs, cotangent) = layer_of(name).float(), example(name, dtype=torch.float32)
    expected = step(layer, list(layer.parameters()), inputs, cotangent)
    with torch.no_grad():
        actual = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8)(*inputs)
    assert 1e-4 < relative_error(actual, expected[0]) < 0.1
    layer.qconfig = torch.ao.quantization.get_default_qat_qconfig("onednn")
    model = torch.ao.quantization.prepare_qat(layer.train())
    by_name = dict(model.named_parameters())
    trained = [by_name[name] for name, _ in layer.named_parameters()]
    for _ in range(2):  # the first call sets the scales
        outputs = step(model, trained, inputs, cotangent)
    assert 1e-4 < relative_error(outputs[0], expected[0]) < 0.1
    assert worst(outputs[1:], expected[1:]) < 0.3


@EACH
def test_quantised_weights(name: str) -> None:
    """torchao leaves the modules as they are, and replaces their weights by tensors of a class of its own."""
    quantization = pytest.importorskip("torchao.quantization")
    layer, (inputs, _) = layer_of(name).float(), example(name, dtype=torch.float32)
    plain = copy.deepcopy(layer)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        for x, y in zip(plain.modules(), layer.modules(), strict=True):
            if isinstance(x, nn.Linear):
                assert type(y) is nn.Linear and type(y.weight) is not type(x.weight)
                x.weight.copy_(y.weight.dequantize())
        assert relative_error(layer(*inputs), plain(*inputs)) < 1e-5


def on_a_gpu(name: str) -> tuple[nn.Module, list[Tensor], Tensor]:
    layer, (inputs, cotangent) = layer_of(name), example(name)
    return layer.cuda(), [x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs], cotangent.cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@EACH
def test_save_on_cpu_changes_no_gradient(name: str) -> None:
    layer, inputs, cotangent = on_a_gpu(name)
    expected = step(layer, list(layer.parameters()), inputs, cotangent)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        assert worst(step(layer, list(layer.parameters()), inputs, cotangent), expected) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs two GPUs; test_a_wrapped_layer_keeps_outputs_and_gradients has a replica on the CPU",
)
@EACH
def test_data_parallel(name: str) -> None:
    """Each GPU has one of the two batches."""
    layer, inputs, cotangent = on_a_gpu(name)
    inputs = [torch.cat([x, 1 - x]).detach().requires_grad_(x.requires_grad) for x in inputs]
    cotangent = torch.cat([cotangent, cotangent])
    expected = step(layer, list(layer.parameters()), inputs, cotangent)
    model = nn.DataParallel(layer, [0, 1])
    assert worst(step(model, list(layer.parameters()), inputs, cotangent), expected) < TOLERANCE
