"""Layers whose sub-modules were changed after they were made: each change is computed, or refused in a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from evoattn.nn import (
    AttentionPairBias,
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSAPairWeightedAveraging,
    MSARowAttentionWithPairBias,
    OuterProductMean,
    TemplatePointwiseAttention,
    TriangleAttention,
)
from evoattn.nn.submodules import has_global_hooks, has_hooks_inside
from tests.helpers.changes import IN_PLACE, INSTEAD, change
from tests.helpers.surroundings import ALL_MODES

pytestmark = pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm|quantiz|deprecated).*")


def triangle(starting: bool) -> TriangleAttention:
    torch.manual_seed(0)
    layer = TriangleAttention(16, 8, 2, starting, empty_rows="native").double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def by_calls(layer: TriangleAttention, z: Tensor) -> Tensor:
    """The layer as its paper writes it: every sub-module is called."""
    x = z if layer.starting else z.transpose(-2, -3)
    normed, mha = layer.layer_norm(x), layer.mha
    q, k, v = (
        y(normed).unflatten(-1, (layer.no_heads, -1)).transpose(-2, -3) for y in (mha.linear_q, mha.linear_k, mha.linear_v)
    )
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + layer.linear(normed).movedim(-1, -3).unsqueeze(-4)
    o = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
    assert mha.linear_g is not None
    output: Tensor = mha.linear_o(o * mha.linear_g(normed).sigmoid())
    return output if layer.starting else output.transpose(-2, -3)


def assert_as_called(layer: TriangleAttention) -> None:
    """Output and all gradients are those of a layer that calls its sub-modules, after a step of an optimizer too."""
    torch.manual_seed(1)
    z = torch.randn(1, 6, 6, 16, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.3)
    layer.eval()  # spectral norm iterates in training
    leaves = [z, *(p for p in layer.parameters() if p.requires_grad)]
    actual, wanted = layer(z), by_calls(layer, z)
    cotangent = torch.randn_like(wanted)
    torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
    gradients = (torch.autograd.grad(x, leaves, cotangent, allow_unused=True) for x in (actual, wanted))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("path", ["mha.linear_q", "mha.linear_g", "mha.linear_o", "linear"])
@pytest.mark.parametrize("how", [*IN_PLACE, *INSTEAD])
def test_a_changed_projection_is_called_as_a_module(how: str, path: str, starting: bool) -> None:
    layer = triangle(starting)
    layer(torch.randn(1, 6, 6, 16, dtype=torch.float64))  # a change after a call counts too
    change(layer, path, how)
    assert_as_called(layer)


@pytest.mark.parametrize("how", ["forward hook", "forward pre-hook", "backward hook", "a forward of its own", "wrapper"])
def test_a_changed_norm_is_called_as_a_module(how: str) -> None:
    layer = triangle(starting=True)
    change(layer, "layer_norm", how)
    assert_as_called(layer)


@pytest.mark.parametrize("norm", [nn.RMSNorm(16), nn.Identity(), nn.LayerNorm((6, 16)), nn.Softmax(-1)])
def test_a_norm_of_another_class_is_called_as_a_module(norm: nn.Module) -> None:
    layer = triangle(starting=True)
    layer.layer_norm = norm.double()  # type: ignore[assignment]
    assert_as_called(layer)


def test_a_hook_on_all_modules_sees_each() -> None:
    layer, seen = triangle(starting=True), []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module)):
        layer(torch.randn(1, 6, 6, 16, dtype=torch.float64))
    assert {*seen} == {*layer.modules()}


@pytest.mark.parametrize("register", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_every_kind_of_hook_on_all_modules_is_seen(register: str) -> None:
    with getattr(torch.nn.modules.module, f"register_module_{register}_hook")(lambda *_: None):
        assert has_global_hooks()
    assert not has_global_hooks()


def test_quantised_projections_are_called() -> None:
    layer = triangle(starting=True).float()
    z = torch.randn(1, 6, 6, 16)
    torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, torch.qint8, inplace=True)
    with torch.no_grad():
        torch.testing.assert_close(layer(z), by_calls(layer, z), rtol=1e-3, atol=1e-3)


def test_a_copy_uses_its_own_modules() -> None:
    layer = triangle(starting=True)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.mha.linear_q.weight.zero_()
    assert_as_called(other)
    assert_as_called(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_under_autocast_and_beside_a_narrower_input(dtype: torch.dtype) -> None:
    layer = triangle(starting=True).float()
    change(layer, "mha.linear_q", "adapter")
    z = torch.randn(1, 6, 6, 16)
    wanted = by_calls(layer, z).detach()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        actual = layer(z.to(dtype))
    assert actual.dtype == torch.bfloat16
    assert float((actual.detach().float() - wanted).norm() / wanted.norm()) < 0.05


FUNCTIONS = {
    "forward of Linear": (nn.Linear, "forward"),
    "forward of LayerNorm": (nn.LayerNorm, "forward"),
    "linear": (F, "linear"),
    "layer_norm": (F, "layer_norm"),
}


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_torch_that_a_program_has_replaced_is_called(
    name: str, starting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, (owner, function) = triangle(starting), FUNCTIONS[name]
    before, original = layer(z := torch.randn(1, 6, 6, 16, dtype=torch.float64)), getattr(owner, function)
    monkeypatch.setattr(owner, function, lambda *args, **named: original(*args, **named) / 2)
    assert_as_called(layer)
    monkeypatch.undo()
    assert torch.equal(triangle(starting)(z), before)


class Halves(TorchFunctionMode):
    """Stands for fake quantisation in a mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y / 2 if func is F.linear else y


@pytest.mark.parametrize("starting", [True, False])
def test_a_mode_sees_each_projection(starting: bool) -> None:
    layer, z, products = triangle(starting), torch.randn(1, 6, 6, 16, dtype=torch.float64), []
    with Halves():
        torch.testing.assert_close(layer(z), by_calls(layer, z), rtol=1e-10, atol=1e-10)

    class Counts(Halves):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.append(func is F.linear)
            return func(*args, **(kwargs or {}))

    with Counts():
        layer(z)
    assert sum(products) == 6
    products.clear()
    with torch.device("cpu"), Counts():
        layer(z)
    assert sum(products) == 6


def test_a_call_of_modules_that_a_program_has_replaced_sees_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen, original = triangle(starting=True), [], nn.Module.__call__

    def call(self: nn.Module, *args: Tensor, **named: Tensor) -> Tensor:
        seen.append(self)
        return original(self, *args, **named)  # type: ignore[no-any-return]

    monkeypatch.setattr(nn.Module, "__call__", call)
    layer(torch.randn(1, 6, 6, 16, dtype=torch.float64))
    assert {*seen} == {*layer.modules()}


class Observed(nn.Parameter):
    """A weight that a program wants to see multiplied."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", ""))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_weight_with_functions_of_its_own_sees_the_product() -> None:
    layer = triangle(starting=True)
    layer.mha.linear_q.weight = Observed(layer.mha.linear_q.weight.detach())
    layer(torch.randn(1, 6, 6, 16, dtype=torch.float64))
    assert "linear" in Observed.seen


class Twice(nn.Module):
    """A module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **named: Any) -> Any:
        return 2 * self.inner(*args, **named)


def _own_forward(module: nn.Module) -> None:
    original = module.forward
    module.forward = lambda *args, **named: 2 * original(*args, **named)


AROUND: dict[str, Callable[[nn.Module, str, nn.Module], Any]] = {
    "hook": lambda _, __, module: module.register_forward_hook(lambda *inputs: 2 * inputs[-1]),
    "a forward of its own": lambda _, __, module: _own_forward(module),
    "wrapper": lambda parent, name, module: setattr(parent, name, Twice(module)),
}


@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("name", ["starting", "ending", "rows", "columns", "templates", "bias", "condition", "keys", "global"])
def test_what_is_put_around_a_container_is_called(name: str, how: str) -> None:
    torch.manual_seed(0)
    m, z = torch.randn(1, 5, 6, 16), torch.randn(1, 6, 6, 16)
    made: dict[str, tuple[nn.Module, tuple[Tensor | None, ...]]] = {
        "starting": (TriangleAttention(16, 8, 2), (z, torch.ones(1, 6, 6))),
        "ending": (TriangleAttention(16, 8, 2, starting=False), (z, torch.tril(torch.ones(1, 6, 6)))),
        "rows": (MSARowAttentionWithPairBias(16, 16, 8, 2), (m, z, torch.ones(1, 5, 6))),
        "columns": (MSAColumnAttention(16, 8, 2), (m, torch.ones(1, 5, 6))),
        "templates": (TemplatePointwiseAttention(8, 16, 8, 2), (torch.randn(1, 3, 6, 6, 8), z, torch.ones(1, 3))),
        "bias": (AttentionPairBias(16, 16, 8, 2), (m, z[None], None, torch.ones(1, 5, 6))),
        "condition": (AttentionPairBias(16, 16, 8, 2, 12), (m, z[None], torch.randn(1, 5, 6, 12))),
        "keys": (AttentionPairBias(16, 16, 8, 2), (m, torch.randn(1, 1, 6, 4, 16))),
        "global": (MSAColumnGlobalAttention(16, 8, 2), (m, torch.ones(1, 5, 6))),
    }
    layer, inputs = made[name]
    named = {"keys": torch.randn(1, 5, 4, 16)} if name == "keys" else {}
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    expected, seen = layer(*inputs, **named), []
    path = {"columns": "_msa_att.mha", "global": "global_attention"}.get(name, "mha")
    mha: Any = layer.get_submodule(path)
    mha.linear_o.register_forward_hook(lambda *_: seen.append("inside"))
    parent, _, attribute = path.rpartition(".")
    AROUND[how](layer.get_submodule(parent), attribute, mha)
    torch.testing.assert_close(layer(*inputs, **named), 2 * expected, rtol=1e-4, atol=1e-4)
    assert seen == ["inside"]


M, Z, MASK = (1, 5, 6, 16), (1, 6, 6, 8), (1, 5, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "starting node": (lambda: TriangleAttention(16, 8, 2), ((1, 6, 6, 16), (1, 6, 6))),
    "ending node": (lambda: TriangleAttention(16, 8, 2, starting=False), ((1, 6, 6, 16), (1, 6, 6))),
    "rows": (lambda: MSARowAttentionWithPairBias(16, 8, 8, 2), (M, Z, MASK)),
    "columns": (lambda: MSAColumnAttention(16, 8, 2), (M, MASK)),
    "global columns": (lambda: MSAColumnGlobalAttention(16, 8, 2), (M, MASK)),
    "outer product mean": (lambda: OuterProductMean(16, 8, 4), (M, MASK)),
    "averaging": (lambda: MSAPairWeightedAveraging(16, 8, 8, 2), (M, Z, (1, 6, 6))),
    "templates": (lambda: TemplatePointwiseAttention(8, 16, 8, 2), ((1, 3, 6, 6, 8), (1, 6, 6, 16), (1, 3))),
    "pair bias": (lambda: AttentionPairBias(16, 8, 8, 2), ((1, 5, 6, 16), (1, 1, 6, 6, 8))),
    "condition": (lambda: AttentionPairBias(16, 8, 8, 2, 12), ((1, 5, 6, 16), (1, 1, 6, 6, 8), (1, 5, 6, 12))),
}
"""How each layer is made, and the shapes of what it takes."""


def layer_and_inputs(name: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    make, shapes = LAYERS[name]
    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    inputs = [torch.randn(shape) for shape in shapes]
    if name not in ("pair bias", "condition"):
        inputs[-1] = torch.ones(shapes[-1])
    return layer, inputs


UNDER_MODES = [
    pytest.param(name, mode, id=f"{name}-{mode}")
    for name in LAYERS
    for mode in ALL_MODES
    if not (name in ("outer product mean", "averaging") and mode in ("function mode", "flop counter"))
]
"""All layers under all modes, but for two that are dense torch, which has all derivatives, where modules are called."""


@pytest.mark.parametrize(("name", "mode"), UNDER_MODES)
def test_a_second_derivative_raises(name: str, mode: str) -> None:
    layer, inputs = layer_and_inputs(name)
    x = inputs[0] = inputs[0].requires_grad_().clone()  # FlopCounterMode takes no gradient of a leaf
    parameters = list(layer.parameters())
    with ALL_MODES[mode](torch.device("cpu")):
        (dx,) = torch.autograd.grad(layer(*inputs).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.square().sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.square().sum(), parameters, allow_unused=True)


@pytest.mark.parametrize(("name", "mode"), UNDER_MODES)
def test_a_second_derivative_by_many_cotangents_raises(name: str, mode: str) -> None:
    """Also that by the cotangents, in which a gradient is linear."""
    layer, args = layer_and_inputs(name)
    args = args[:-1] if name not in ("pair bias", "condition") else args
    x = args[0] = args[0].requires_grad_().clone()
    with ALL_MODES[mode](torch.device("cpu")):
        out = layer(*args)
        cotangents = torch.randn(2, *out.shape, requires_grad=True)
        (dx,) = torch.autograd.grad(out, x, cotangents, create_graph=True, is_grads_batched=True)
        for leaf in (x, cotangents):
            with pytest.raises(RuntimeError, match="no second derivative"):
                torch.autograd.grad(dx.square().sum(), leaf, retain_graph=True)


@pytest.mark.parametrize(("name", "mode"), UNDER_MODES)
def test_a_forward_mode_derivative_raises(name: str, mode: str) -> None:
    """Of a layer, and of its backward."""
    layer, inputs = layer_and_inputs(name)
    x = inputs[0] = inputs[0].requires_grad_().clone()
    with ALL_MODES[mode](torch.device("cpu")), forward_ad.dual_level():
        with pytest.raises((NotImplementedError, RuntimeError), match=r"forward AD|forward mode|forward-mode"):
            layer(forward_ad.make_dual(x, torch.ones_like(x)), *inputs[1:])
        out = layer(*inputs)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.autograd.grad(out, x, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


@pytest.mark.parametrize("needs", ["input", "parameters", "both"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_an_output_changed_in_place(name: str, training: bool, residual: bool, dropout: float, needs: str) -> None:
    layer, inputs = layer_and_inputs(name)
    for module in layer.train(training).modules():
        options = {"residual": residual, "dropout": dropout}
        vars(module).update({option: value for option, value in options.items() if option in vars(module)})
    inputs[0].requires_grad_(needs != "parameters")
    leaves = [x for x in (inputs[0], *layer.requires_grad_(needs != "input").parameters()) if x.requires_grad]
    scale, gradients = torch.randn(layer(*inputs).shape), []
    for in_place in (False, True):
        torch.manual_seed(1)
        out = layer(*inputs)
        out = out.mul_(scale).relu_() if in_place else (out * scale).relu()
        gradients.append(torch.autograd.grad(out.sum(), leaves))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_many_cotangents_at_once(name: str) -> None:
    layer, args = layer_and_inputs(name)
    args = args[:-1] if name not in ("pair bias", "condition") else args
    parameters, out = list(layer.parameters()), layer(*args)
    cotangents = torch.randn(3, *out.shape)
    actual = torch.autograd.grad(out, parameters, cotangents, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(out, parameters, cotangent, retain_graph=True) for cotangent in cotangents]
    for one, others in zip(actual, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["starting node", "ending node", "columns", "global columns"])
def test_float64_under_autocast_has_gradients(name: str) -> None:
    layer, (x, *_) = layer_and_inputs(name)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x.double().requires_grad_())
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("mask", [(1, 1, 6), (1, 5, 6), (1, 5, 1), (1, 1, 1)])
def test_a_mask_that_broadcasts_in_global_attention(mask: tuple[int, ...]) -> None:
    layer, (m, _) = layer_and_inputs("global columns")
    torch.manual_seed(2)
    weights = (torch.rand(mask) > 0.3).float()
    torch.testing.assert_close(layer(m, weights), layer(m, weights.expand(MASK).contiguous()))


def test_a_layer_with_an_adapter_compiles() -> None:
    layer = triangle(starting=True)
    change(layer, "mha.linear_q", "adapter")
    z = torch.randn(1, 6, 6, 16, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(z), by_calls(layer, z), rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_hooks_inside_are_found_wherever_they_are() -> None:
    module = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), nn.Sequential(nn.Linear(2, 2)))
    assert not has_hooks_inside(module)
    module[1][0].register_forward_hook(lambda *_: None)
    assert has_hooks_inside(module)
