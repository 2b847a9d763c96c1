"""The operators as torch sees them: opcheck, compile, export, autocast, vmap, meta tensors."""

import copy
import math
import shutil
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.backends import Cotangents, Inputs, Outputs
from tests.helpers import seams

FORWARD, BACKWARD = torch.ops.evoattn.forward.default, torch.ops.evoattn.backward.default

Options = tuple[float | None, str, bool, str, str]
"""Of an operator: scale, layout, deterministic, backend, config."""

OPTIONS: Options = (None, "bnlhd", False, "tiled", "")


def forward(inputs: Inputs, options: Options = OPTIONS) -> Outputs:
    """The operator of values."""
    return Outputs(*FORWARD(*inputs, *options))


def differentiate(
    cotangents: Cotangents, inputs: Inputs, outputs: Outputs, needs: list[bool], options: Options = OPTIONS
) -> tuple[Tensor, ...]:
    """The operator of values."""
    gradients: tuple[Tensor, ...] = BACKWARD(*cotangents, *inputs, *outputs, needs, *options)
    return gradients


def canonical(requires_grad: bool = True, **changes: object) -> Inputs:
    settings = {
        "mask": "random",
        "mask_bias": "finite",
        "pair_bias": "b1hqk",
        "gate": "random",
        "layout": "bnhld",
        "lq": 6,
        "lk": 7,
        "d": 4,
        **changes,
    }
    folded = seams.canonical(testing.Case("op", **settings).make(seed=5))  # type: ignore[arg-type]
    leaves = (x if x is None or x.dtype == torch.bool else x.detach().clone().requires_grad_(requires_grad) for x in folded)
    return Inputs._make(leaves)


@pytest.mark.parametrize("layout", [pytest.param("bnlhd", marks=pytest.mark.slow), "bnhld"])
@pytest.mark.parametrize(
    "biases", [{}, {"mask": None, "mask_bias": None}, {"pair_bias": None, "dtype": torch.bfloat16}, {"gate": None}]
)
def test_opcheck_forward(biases: dict, layout: str) -> None:
    inputs = canonical(**biases)
    torch.library.opcheck(FORWARD, (*inputs, None, layout, False, "tiled", ""))


def test_opcheck_backward() -> None:
    inputs = canonical(requires_grad=False)
    outputs = forward(inputs)
    for needs in ([True] * 6, [False, True, False, False, True, False], [False] * 5 + [True]):
        cotangents = (torch.randn_like(outputs.o), torch.randn_like(outputs.lse))
        torch.library.opcheck(BACKWARD, (*cotangents, *inputs, *outputs, needs, *OPTIONS))


def test_fake_strides_are_real_strides() -> None:
    """A wrong stride in a fake function shows only when compiled code reads the output, so all four are compared here."""
    for layout in ("bnlhd", "bnhld"):
        for backend in ("tiled", "reference"):
            inputs = canonical(requires_grad=False)
            options: Options = (None, layout, False, backend, "")
            meta = Inputs._make(None if x is None else x.to("meta") for x in inputs)
            real, fake = (both_passes(each, options, torch.ones_like) for each in (inputs, meta))
            for a, b in zip(real, fake, strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def both_passes(inputs: Inputs, options: Options, of_o: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """The outputs and all gradients, of the cotangent that a function makes of o."""
    outputs = forward(inputs, options)
    needs = [x is not None for x in inputs.differentiable]
    return *outputs, *differentiate(Cotangents(of_o(outputs.o), torch.sin(outputs.lse)), inputs, outputs, needs, options)


def attend(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor, gate: Tensor | None = None) -> Tensor:
    return evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, gate=gate)


def leaves(length: int, seed: int = 0, gate: bool = False) -> list[Tensor]:
    case = testing.Case("op", n=2, lq=length, lk=length, mask_bias="finite", pair_bias="b1hqk", gate="random" if gate else None)
    return [x.requires_grad_() for x in case.make(seed=seed).differentiable.values()]


def step(function: Callable[..., Tensor], length: int, gate: bool = False) -> list[Tensor]:
    arguments = leaves(length, gate=gate)
    output = function(*arguments)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, arguments, cotangent)]


@pytest.mark.parametrize("gate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compile_fullgraph_without_recompiling(gate: bool) -> None:
    """Forward and backward as one graph each, and one compilation for every length."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: list) -> Callable:
        graphs.append(copy.deepcopy(graph))
        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    compiled = torch.compile(
        attend, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend)
    )
    for length in (16, 21, 40):
        for value, expected in zip(step(compiled, length, gate), step(attend, length, gate), strict=True):
            torch.testing.assert_close(value, expected)
    assert len(graphs) == 2, f"{len(graphs)} graphs for three lengths: a length was compiled again"
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if "evoattn" in str(node.target)]
    assert targets == ["evoattn.forward.default", "evoattn.backward.default"]


def test_compile_with_inductor_marks_lengths_dynamic_by_itself() -> None:
    torch._dynamo.reset()
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if compiler else "aot_eager")
    for length in (16, 24):
        for value, expected in zip(step(compiled, length), step(attend, length), strict=True):
            torch.testing.assert_close(value, expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for value, expected in zip(step(compiled, 33), step(attend, 33), strict=True):
            torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.slow), True])
def test_compiled_code_takes_any_scale(dynamic: bool | None) -> None:
    """One that is an argument, which becomes a symbol when it changes, and one of the number of channels."""
    torch._dynamo.reset()

    def attend(q: Tensor, scale: float) -> Tensor:
        expected = evoattn.evoformer_attention(q, q, q, scale=scale)
        return expected + evoattn.evoformer_attention(q, q, q, scale=1 / math.sqrt(q.shape[-1]))

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for channels, scale in ((4, 0.3), (8, 0.4), (16, 0.5)):
        q = torch.randn(1, 2, 5, 2, channels)
        torch.testing.assert_close(compiled(q, scale), attend(q, scale))


@pytest.mark.parametrize("gate", [False, True])
def test_export_keeps_the_operator(gate: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Tensor:
            return attend(*arguments)

    arguments = tuple(x.detach() for x in leaves(12, gate=gate))
    exported = torch.export.export(Module(), arguments)
    assert any(node.target is FORWARD for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(*arguments), attend(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_as_torch_attention_does(dtype: torch.dtype) -> None:
    q, k, v, mask_bias, pair_bias, gate = leaves(16, gate=True)
    with torch.autocast("cpu", dtype):
        actual = attend(q, k, v.detach().to(dtype), mask_bias, pair_bias)
        gated = attend(q, k, v.detach().to(dtype), mask_bias, pair_bias, gate)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(2, 3).flatten(0, 1) for x in (q, k, v)), attn_mask=(mask_bias + pair_bias)[0]
        )
    assert actual.dtype == expected.dtype == dtype
    torch.testing.assert_close(actual[0].transpose(1, 2), expected, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(actual, (q, k, mask_bias, pair_bias), torch.randn_like(actual))
    assert [g.dtype for g in gradients] == [torch.float32] * 4
    assert gated.dtype == dtype
    torch.testing.assert_close(gated, actual * torch.sigmoid(gate.to(dtype)), rtol=0.02, atol=0.02)
    with torch.autocast("cpu", dtype):
        assert torch.equal(gated, attend(q, k, v.detach().to(dtype), mask_bias, pair_bias, gate.to(dtype)))
    assert [g.dtype for g in torch.autograd.grad(gated, (q, gate), torch.randn_like(gated))] == [torch.float32] * 2


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_backward_is_not_cast(backend: str) -> None:
    """Of a forward outside of autocast, which a training loop may have left too late."""
    q, k, v, mask_bias, pair_bias = leaves(16)
    o = evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, backend=backend)
    cotangent = torch.randn_like(o)
    expected = torch.autograd.grad(o, (q, k, v, pair_bias), cotangent, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(o, (q, k, v, pair_bias), cotangent)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_what_has_the_dtype_of_autocast_is_not_cast_further(backend: str) -> None:
    """Neither on the way of the operators nor straight: sums stay in float32."""
    q, k, v, mask_bias, pair_bias = (x.detach().to(torch.bfloat16).requires_grad_() for x in leaves(16))
    results = []
    for casts in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            o = evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, backend=backend)
            cotangent = torch.ones_like(o)
            results.append((o.detach(), *torch.autograd.grad(o, (q, k, v, mask_bias, pair_bias), cotangent)))
    for others in results[1:]:
        for a, b in zip(others, results[0], strict=True):
            assert torch.equal(a, b)


def test_autocast_leaves_float64_and_biases_alone() -> None:
    x = [leaf.detach().double() for leaf in leaves(8)]
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*x).dtype == torch.float64
    q, k, v, mask_bias, pair_bias = (leaf.detach() for leaf in leaves(8))
    mask_bias[..., 3] = -1e9  # float16 cannot hold it: cast, it would be -inf
    mask_bias[:, 0] = -1e9
    with torch.autocast("cpu", torch.float16):
        _, lse = evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, return_lse=True)
    assert lse.isfinite().all()


def test_export_and_compile_need_no_guard_on_the_backend() -> None:
    """An unknown problem is refused when it runs, with the backend's own message, also under compile."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: evoattn.evoformer_attention(q, q, q, backend="tiled", config=evoattn.Config(num_warps=4)), backend="eager"
    )
    with pytest.raises(ValueError, match="num_warps=4"):
        compiled(torch.randn(1, 2, 8, 2, 4))


IN_DIMS = {
    "all": (0, 0, 0, 0, 0, 0),
    "pair_shared": (0, 0, 0, 0, None, None),
    "q_alone": (1, None, None, None, None, None),
    "bias_alone": (None, None, None, 0, 2, None),
    "gate_alone": (None, None, None, None, None, 1),
}


@pytest.mark.parametrize("in_dims", IN_DIMS.values(), ids=IN_DIMS)
@pytest.mark.parametrize("lead", [(1,), (2,)])
def test_vmap_equals_a_loop(in_dims: tuple[int | None, ...], lead: tuple[int, ...]) -> None:
    inputs = testing.Case("vmap", lead=lead, n=2, lq=5, lk=6, d=4, mask_bias="finite", pair_bias="b1hqk", gate="random")
    samples = [inputs.make(seed) for seed in range(3)]
    names = ("q", "k", "v", "mask_bias", "pair_bias", "gate")
    stacked = []
    for name, axis in zip(names, in_dims, strict=True):
        values = [getattr(m, name) for m in samples]
        stacked.append(values[0] if axis is None else torch.stack(values, axis))
    each = [[x if axis is None else x.select(axis, i) for x, axis in zip(stacked, in_dims, strict=True)] for i in range(3)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it falls back to a loop of its own
        output = torch.func.vmap(attend, in_dims)(*stacked)
    torch.testing.assert_close(output, torch.stack([attend(*x) for x in each]))


@pytest.mark.parametrize("in_dims", IN_DIMS.values(), ids=IN_DIMS)
@pytest.mark.parametrize("lead", [(1,), (2,)])
def test_vmap_of_backward_gives_each_sample_its_gradients(in_dims: tuple[int | None, ...], lead: tuple[int, ...]) -> None:
    samples = [canonical(False, lead=lead, layout="bnhld", mask_bias="finite", n=2) for _ in range(3)]
    axes = (*in_dims[:3], None, *in_dims[3:])
    mapped = [x[0] if axis is None else torch.stack(x, axis) for x, axis in zip(zip(*samples, strict=True), axes, strict=True)]  # type: ignore[arg-type]
    mask = samples[0][3]

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        return both_passes(Inputs(*tensors), OPTIONS, torch.cos)[3:]

    assert mask is not None
    batched = torch.func.vmap(gradients, axes)(*mapped)
    looped = [
        gradients(*(x if axis is None else x.select(axis, i) for x, axis in zip(mapped, axes, strict=True))) for i in range(3)
    ]
    for value, expected in zip(batched, zip(*looped, strict=True), strict=True):
        torch.testing.assert_close(value, torch.stack(expected))


@pytest.mark.parametrize("gate", [False, True])
def test_batched_cotangents_equal_a_loop(gate: bool) -> None:
    arguments = leaves(8, gate=gate)
    output = attend(*arguments)
    cotangents = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, arguments, cotangents, is_grads_batched=True, retain_graph=True)
    looped = [torch.autograd.grad(output, arguments, cotangent, retain_graph=True) for cotangent in cotangents]
    for value, expected in zip(batched, zip(*looped, strict=True), strict=True):
        torch.testing.assert_close(value, torch.stack(expected))


def test_forward_mode_says_that_there_is_none() -> None:
    """torch would return a tangent of zero."""
    arguments = tuple(x.detach() for x in leaves(8))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(attend, arguments, tuple(torch.ones_like(x) for x in arguments))
    with torch.autograd.forward_ad.dual_level():
        pair_bias = torch.autograd.forward_ad.make_dual(arguments[4], torch.ones_like(arguments[4]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attend(*arguments[:4], pair_bias)
        assert attend(*arguments).isfinite().all()


def test_second_derivatives_say_that_there_are_none() -> None:
    q, k, v, mask_bias, pair_bias = leaves(8)
    (dq,) = torch.autograd.grad(attend(q, k, v, mask_bias, pair_bias).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(dq.sum(), q)
