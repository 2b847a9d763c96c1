"""Layers in place of a client's: what is shared, what is refused, and what is changed later."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evoattn.nn as evoattn_nn
from evoattn.clients.registry import known


class Toy(evoattn_nn.TriangleAttention):
    """Stands for OpenFold's: the same parameters, and a forward of its own."""

    def __init__(self) -> None:
        super().__init__(8, 4, 2, starting=False)
        self.c_hidden = 4
        for x in self.parameters():
            nn.init.normal_(x)

    def forward(self, x: Tensor, mask: Any = None, chunk_size: Any = None, window: Any = None, **switches: Any) -> Tensor:  # type: ignore[override]
        return self.helped()

    def helped(self) -> Tensor:
        return helper()


def helper() -> Tensor:
    size()
    return deeper()


def _size() -> int:
    return 0


size = functools.lru_cache(1)(_size)
"""A cache that the file makes, as einops makes one."""


def deeper() -> Tensor:
    raise AssertionError("the client's own forward was called")


def own_forward() -> Any:
    """Expect that the client's own forward runs."""
    return pytest.raises(AssertionError, match="the client's own forward was called")


class Model(nn.Module):
    """A client's model with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Toy(), nn.Linear(8, 8)])

    def forward(self, z: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](z, None, chunk_size=4, use_lma=True))  # type: ignore[no-any-return]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose layer is taken for OpenFold's."""
    monkeypatch.setitem(known(), f"{__name__}.Toy", known()["openfold.model.triangular_attention.TriangleAttention"])
    torch.manual_seed(0)
    return Model()


def test_parameters_are_shared_and_keep_their_names(model: Model) -> None:
    before = dict(model.named_parameters())
    own = evoattn_nn.TriangleAttention(8, 4, 2, starting=False)
    own.load_state_dict(model.layers[0].state_dict())
    assert evoattn_nn.replace(model) == ["layers.0"]
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() == model.state_dict().keys()
    assert all(after[name] is before[name] for name in before)
    z = torch.randn(1, 5, 5, 8)
    assert torch.equal(model(z), model.layers[1](own(z)))
    with torch.no_grad():
        model.layers[0].mha.linear_o.bias.add_(1)
    assert torch.allclose(model(z), model.layers[1](own(z) + 1), atol=1e-5)
    assert model.double()(z.double()).dtype == torch.float64


def test_replaced_layer_copies_pickles_and_compiles(model: Model) -> None:
    """A copy has parameters of its own, and a model that was pickled computes the same."""
    evoattn_nn.replace(model)
    z = torch.randn(1, 5, 5, 8)
    expected = model(z)
    copied = copy.deepcopy(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(z), expected)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    assert torch.equal(copied(z), expected)
    torch.testing.assert_close(torch.compile(copied, fullgraph=True, backend="aot_eager")(z), expected)


def test_what_is_not_known_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="no layer of Linear is known"):
        evoattn_nn.replace(nn.Linear(3, 3))
    evoattn_nn.replace(model)
    with pytest.warns(UserWarning, match="does not know the argument 'window'"), own_forward():
        model.layers[0](torch.randn(1, 5, 5, 8), window=3)
    model.layers[0].mha.q_norm = nn.LayerNorm(4)
    with pytest.raises(ValueError, match="a Toy has other parameters"):
        evoattn_nn.replace(model)
    del model.layers[0].mha.q_norm
    model.layers[0].mha.linear_q.precision = torch.float32
    with pytest.raises(ValueError, match="mha.linear_q is computed in a precision of its own"):
        evoattn_nn.replace(model)


class Halved(Toy):
    """Overrides what is called."""

    def forward(self, *args: Any, **named: Any) -> Tensor:  # type: ignore[override]
        return 0.5 * super().forward(*args, **named)


class Helped(Toy):
    """Overrides what the forward calls."""

    def helped(self) -> Tensor:
        return 0.5 * super().helped()


class Named(Toy):
    """Overrides nothing that computes."""

    def title(self) -> str:
        return "a method of its own"


def test_a_layer_that_overrides_the_clients_forward_is_refused(model: Model) -> None:
    for kind, method in ((Halved, "forward"), (Helped, "helped")):
        model.layers[0] = kind()
        with pytest.raises(ValueError, match=f"a {kind.__name__} overrides {method} of {__name__}.Toy"):
            evoattn_nn.replace(model)
        assert type(model.layers[0]) is kind
    model.layers[0] = Toy()
    model.layers[0].forward = lambda *_, **__: None
    with pytest.raises(ValueError, match="a Toy overrides forward"):
        evoattn_nn.replace(model)
    model.layers[0] = Named()
    assert evoattn_nn.replace(model) == ["layers.0"] == evoattn_nn.replace(model)
    assert isinstance(model.layers[0], Named) and model.layers[0].title() and type(model.layers[0]).__name__ == "Named"
    model(torch.randn(1, 5, 5, 8))


class Adapted(nn.Module):
    """A projection with an adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(x)  # type: ignore[no-any-return]


def test_adapters_that_are_added_later(model: Model) -> None:
    """They compute and get gradients, in copies too. The layer may also have had them before it was replaced."""
    z, layer = torch.randn(1, 5, 5, 8), model.layers[0]
    evoattn_nn.replace(model)
    before = layer(z)
    layer.mha.linear_q = Adapted(layer.mha.linear_q)
    own = evoattn_nn.TriangleAttention(8, 4, 2, starting=False)
    own.mha.linear_q = Adapted(own.mha.linear_q)  # type: ignore[assignment]
    own.load_state_dict(layer.state_dict())
    after = layer(z)
    assert torch.equal(after, own(z)) and not torch.equal(after, before)
    after.sum().backward()
    assert layer.mha.linear_q.more.weight.grad.any()
    copied = copy.deepcopy(layer)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(z), after)
    with torch.no_grad():
        layer.mha.linear_q.more.weight.zero_()
    assert torch.equal(copied(z), after)
    assert evoattn_nn.replace(model) == ["layers.0"]
    assert not torch.equal(layer(z), after)


def test_a_projection_that_is_exchanged_before_a_compiled_call(model: Model) -> None:
    z, layer = torch.randn(1, 5, 5, 8), model.layers[0]
    evoattn_nn.replace(model)
    layer.mha.linear_q = nn.Linear(8, 8, bias=False)
    torch.compiler.reset()
    output = torch.compile(layer, backend="eager")(z)
    torch.testing.assert_close(output, layer(z))


@pytest.mark.parametrize(("name", "value"), [("inf", 0.5), ("starting", True)])
def test_settings_that_are_changed_later(name: str, value: Any, model: Model) -> None:
    """The next call has them, also that of a copy and a compiled one."""
    z, mask, layer = torch.randn(1, 5, 5, 8), torch.eye(5)[None], model.layers[0]
    own = evoattn_nn.TriangleAttention(8, 4, 2, starting=False)
    own.load_state_dict(layer.state_dict())
    evoattn_nn.replace(model)
    torch.compiler.reset()
    calls = (layer, torch.compile(layer, backend="eager"))
    for call in calls:
        torch.testing.assert_close(call(z, mask), own(z, mask))
    for x in (layer, own):
        setattr(x, name, value)
    for call in (*calls, copy.deepcopy(layer)):
        torch.testing.assert_close(call(z, mask), own(z, mask))


class Precise(nn.Linear):
    """Stands for OpenFold's linear layer, which may compute in a dtype of its own."""

    precision: Any = None

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        self.precision = None


def test_a_precision_that_is_set_later_is_left_to_the_client(model: Model) -> None:
    layer = model.layers[0]
    layer.mha.linear_q = Precise()
    evoattn_nn.replace(model)
    layer(torch.randn(1, 5, 5, 8))
    layer.mha.linear_q.precision = torch.float64
    with pytest.warns(UserWarning, match="mha.linear_q is computed in a precision of its own"), own_forward():
        layer(torch.randn(1, 5, 5, 8))


def replica(module: nn.Module) -> Any:
    """What `DataParallel` makes of a module for another device: here with parameters that are twice as large."""
    replicated: Any = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        replicated._modules[name] = replica(child)
    for name, x in module._parameters.items():
        if x is None:
            replicated._parameters[name] = None
        else:
            setattr(replicated, name, 2 * x.detach())
    return replicated


def test_a_replica_computes_with_its_own_parameters(model: Model) -> None:
    z, layer = torch.randn(1, 5, 5, 8), model.layers[0]
    evoattn_nn.replace(model)
    before, own = layer(z), copy.deepcopy(layer)
    with torch.no_grad():
        for x in own.parameters():
            x.mul_(2)
    assert torch.equal(replica(layer)(z), own(z))
    assert torch.equal(layer(z), before)


def test_hooks_inside_a_replaced_layer(model: Model) -> None:
    """Those on projections run. For those on a module that ours does not call, the client's own forward runs."""
    z, layer, seen = torch.randn(1, 5, 5, 8), model.layers[0], list[str]()
    evoattn_nn.replace(model)
    layer.mha.linear_q.register_forward_hook(lambda *_: seen.append("q"))
    layer(z)
    assert seen == ["q"]
    hook = layer.mha.register_forward_hook(lambda *_: seen.append("mha"))
    with pytest.warns(UserWarning, match="mha has hooks, and evoattn.nn does not call it"), own_forward():
        layer(z)
    hook.remove()
    before = layer(z)
    layer.mha.forward = lambda *_: z
    with pytest.warns(UserWarning, match="mha has a forward of its own"), own_forward():
        layer(z)
    del layer.mha.forward
    assert torch.equal(layer(z), before)


def put_in_place(function: Any) -> Any:
    """A function of a program, with the name of the one that it calls. Its code lies in no package."""
    names: dict[str, Any] = {"function": function, "functools": functools}
    code = "@functools.wraps(function)\ndef put(*args, **named):\n    return function(*args, **named)\n"
    exec(compile(code, "program.py", "exec"), names)
    return names["put"]


@pytest.mark.parametrize("name", ["forward", "helped"])
def test_a_method_that_a_program_has_replaced_is_called(name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `replace` it is refused. Later the client's own forward runs, and ours again once the method is back."""
    z, layer = torch.randn(1, 5, 5, 8), model.layers[0]
    original = vars(Toy)[name]
    monkeypatch.setattr(Toy, name, put_in_place(original))
    with pytest.raises(ValueError, match=f"the layer is a Toy, and a program has replaced {name} of {__name__}"):
        evoattn_nn.replace(model)
    monkeypatch.setattr(Toy, name, original)
    evoattn_nn.replace(model)
    before = layer(z, None, 4)
    monkeypatch.setattr(Toy, name, put_in_place(original))
    with pytest.warns(UserWarning, match=f"a program has replaced {name}"), own_forward():
        layer(z)
    monkeypatch.setattr(Toy, name, original)
    assert torch.equal(layer(z, None, 4), before), "the names of its arguments are known again"


def same_name(function: Any) -> Any:
    """A function of a program that has the name of the client's, and does not say what it wraps."""
    names: dict[str, Any] = {"function": function, "__name__": "program"}
    exec(compile(f"def {function.__name__}(*args):\n    return function(*args)\n", "program.py", "exec"), names)
    return names[function.__name__]


class Proxy:
    """Stands for the proxies of profilers: they have all attributes of what they call."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.mark.parametrize("name", ["helper", "deeper"])
@pytest.mark.parametrize("put", [put_in_place, same_name, functools.partial, Proxy])
def test_a_function_that_a_method_calls_is_called(put: Any, name: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is called by another one."""
    z = torch.randn(1, 5, 5, 8)
    evoattn_nn.replace(model)
    model(z)
    monkeypatch.setitem(globals(), name, put(globals()[name]))
    with pytest.warns(UserWarning, match=f"a program has replaced {name}"), own_forward():
        model(z)
    with pytest.raises(ValueError, match=f"a program has replaced {name}"):
        evoattn_nn.replace(Toy())


def test_methods_that_a_class_inherits_and_restored_ones(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is put on a class that inherits it is called, and once it is gone the layer is known again."""
    model.layers[0] = Named()
    z, original = torch.randn(1, 5, 5, 8), Toy.forward
    evoattn_nn.replace(model)
    before = model(z)
    for put in (put_in_place(original), functools.partialmethod(original), nn.Identity.forward):
        monkeypatch.setattr(Named, "forward", put, raising=False)
        with pytest.raises(ValueError, match="a Named overrides forward"):
            evoattn_nn.replace(Named())
        with pytest.warns(UserWarning, match="a Named overrides forward"), contextlib.suppress(AssertionError, TypeError):
            model(z)
        monkeypatch.delattr(Named, "forward")
        assert torch.equal(model(z), before) and evoattn_nn.replace(Named()) == [""]


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
def test_calls_of_torchs_classes_that_a_program_has_replaced(
    kind: Any, name: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    z, layer = torch.randn(1, 5, 5, 8), model.layers[0]
    evoattn_nn.replace(model)
    before, original = layer(z), getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, x: 2 * original(self, x), raising=False)
    assert not torch.allclose(layer(z), before)
    monkeypatch.undo()
    layer.mha.linear_q._call_impl = lambda x: 2 * nn.Linear.forward(layer.mha.linear_q, x)


class Scaled(Tensor):
    """Stands for a weight in 8 bits."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result.as_subclass(Tensor) if func is F.linear else result


@pytest.mark.parametrize("where", ["attribute", "buffer"])
def test_a_weight_of_a_subclass_that_is_no_parameter(where: str) -> None:
    layer, z = evoattn_nn.TriangleAttention(8, 4, 2), torch.randn(1, 5, 5, 8)
    for x in layer.parameters():
        nn.init.normal_(x)
    before, weight = layer(z), layer.mha.linear_v.weight.data.as_subclass(Scaled)
    del layer.mha.linear_v.weight
    layer.mha.linear_v.register_buffer("weight", weight) if where == "buffer" else setattr(layer.mha.linear_v, "weight", weight)
    assert not torch.allclose(layer(z), before)


def test_tools_may_hook_every_module(model: Model) -> None:
    z, seen = torch.randn(1, 5, 5, 8), set[nn.Module]()
    evoattn_nn.replace(model)
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: seen.add(module))
    with pytest.warns(UserWarning, match="mha has hooks"), own_forward():
        model(z)
    own = evoattn_nn.PairBlock(8, 8, 4, 2).eval()
    for module in own.modules():
        module.register_forward_hook(lambda module, *_: seen.add(module))
    own(z)
    assert seen == {*own.modules()}


def test_arguments_by_position(model: Model) -> None:
    layer, z, mask = model.layers[0], torch.randn(1, 5, 5, 8), (torch.rand(1, 5, 5) > 0.3).float()
    evoattn_nn.replace(model)
    assert torch.equal(layer(z, mask, 4), layer(x=z, mask=mask))
    with pytest.warns(UserWarning, match="does not know the argument 'window'"), own_forward():
        layer(z, mask, 4, 3)
    for wrong in (lambda: layer(z, mask, 4, 3, 2), lambda: layer(z, mask, mask=mask)):
        with pytest.warns(UserWarning, match="by position, got 5|two values"), pytest.raises(TypeError):
            wrong()


class Pairs(nn.Module):
    """Stands for Boltz-2's attention with pair bias."""

    def __init__(self) -> None:
        super().__init__()
        self.c_s, self.num_heads, self.head_dim, self.inf = 16, 4, 4, 1e6
        self.proj_q = nn.Linear(16, 16)
        self.proj_k, self.proj_v, self.proj_g, self.proj_o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.proj_z = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4, bias=False), nn.Identity())

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
        raise AssertionError("the client's own forward was called")


def test_arguments_of_boltz_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known(), f"{__name__}.Pairs", known()["boltz.model.layers.attentionv2.AttentionPairBias"])
    layer, s, k_in, z, mask = Pairs(), torch.randn(2, 6, 16), torch.randn(2, 6, 16), torch.randn(1, 6, 6, 8), torch.ones(2, 6)
    evoattn_nn.replace(layer)
    assert torch.equal(layer(s, z, mask, k_in, 2), layer(s, z, mask=mask, k_in=k_in, multiplicity=2))
