"""Calls that were wrong once, on the CPU. Each test was red before its cause was mended."""

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import evoattn
from evoattn import evoformer_attention, testing
from evoattn.backends import triton as triton_backend
from evoattn.compat.cuequivariance import triangle_attention
from evoattn.core.config import Config
from evoattn.core.problem import Problem

CPU_BACKENDS = ("tiled", "reference")


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor) -> Tensor:
        return evoformer_attention(q, k, v, pair_bias=pair_bias)


def qkv(*lead: int, length: int = 6, heads: int = 2, channels: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, length, heads, channels, generator=generator).to(dtype) for _ in range(3)]


def exported(module: Attention, arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    return torch.export.export(module, arguments).module()


def strictly_exported(module: Attention, arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    return torch.export.export(module, arguments, strict=True).module()


def by_make_fx(module: Attention, arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    return make_fx(module)(*arguments)


def traced(module: Attention, arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, arguments, check_trace=False)


@pytest.mark.parametrize("capture", [exported, strictly_exported, by_make_fx, traced])
def test_a_graph_of_an_expanded_pair_bias_takes_another(capture: Callable[..., Callable[..., Tensor]]) -> None:
    q, k, v = qkv(2, 3)
    expanded, own = torch.randn(1, 1, 2, 6, 6).expand(2, 3, 2, 6, 6), torch.randn(2, 3, 2, 6, 6)
    graph = capture(Attention(), (q, k, v, expanded))
    torch.testing.assert_close(graph(q, k, v, own), evoformer_attention(q, k, v, pair_bias=own))


@pytest.mark.parametrize("way", ["jvp", "jacfwd"])
def test_forward_mode_is_refused_in_compiled_code(way: str) -> None:
    q, k, v = qkv(1, 3)

    def call(x: Tensor) -> Tensor:
        return evoformer_attention(x, k, v)

    ways = {
        "jvp": lambda: torch.compile(lambda x, t: torch.func.jvp(call, (x,), (t,))[1])(q, torch.ones_like(q)),
        "jacfwd": lambda: torch.compile(torch.func.jacfwd(lambda x: call(x).sum()))(q),
    }
    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        ways[way]()


@pytest.mark.parametrize("size", [1e4, 1e7])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_probabilities_sum_to_one_beside_large_scores(backend: str, size: float) -> None:
    """Two keys of equal score: with v = 1 the sum of dv over keys is the sum of do over queries."""
    q = torch.full((1, 1, 3, 1, 1), size)
    k, v = torch.ones(1, 1, 2, 1, 1), torch.ones(1, 1, 2, 1, 1, requires_grad=True)
    evoformer_attention(q, k, v, scale=1.0, backend=backend).sum().backward()
    torch.testing.assert_close(v.grad.sum(), torch.tensor(3.0))


@pytest.mark.parametrize("bias", [-1e9, -1e5, 3e4, 3e38, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_pair_bias_that_is_the_same_for_all_keys_changes_nothing(backend: str, bias: float) -> None:
    case = testing.Case("plain", n=3, lq=9, lk=7, pair_bias="b1hqk")
    inputs = case.make(seed=1)
    pair_bias = torch.zeros_like(inputs.pair_bias)  # type: ignore[arg-type]
    expected = testing.run(dataclasses.replace(inputs, pair_bias=pair_bias), backend).values
    pair_bias[..., ::2, :] = bias
    values = testing.run(dataclasses.replace(inputs, pair_bias=pair_bias), backend).values
    lse = values.pop("lse")
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(lse[..., ::2], expected["lse"][..., ::2] + bias)


@pytest.mark.parametrize("bias", [-1e9, -100.0])
@pytest.mark.parametrize("off", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_keys_that_both_biases_leave_tell_what_the_pair_bias_is_measured_from(backend: str, off: float, bias: float) -> None:
    """A pair bias that is large at all keys that the mask bias of one row leaves, and at no others."""
    inputs = testing.Case("plain", n=3, lq=9, lk=7, mask_bias="finite", pair_bias="b1hqk").make(seed=1)
    mask_bias, pair_bias = torch.zeros_like(inputs.mask_bias), torch.zeros_like(inputs.pair_bias)  # type: ignore[arg-type]
    mask_bias[:, 1, ..., 4:] = off
    inputs = dataclasses.replace(inputs, mask_bias=mask_bias)
    expected = testing.run(dataclasses.replace(inputs, pair_bias=pair_bias), backend).values["o"][:, 1]
    pair_bias[..., 3, :4] = bias
    o = testing.run(dataclasses.replace(inputs, pair_bias=pair_bias), backend).values["o"][:, 1]
    torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("mask_bias", [-1e300, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_float64_bias_that_float32_cannot_hold_stays_finite(backend: str, mask_bias: float) -> None:
    q, k, v = qkv(1, 2)
    bias = torch.full((1, 2, 6), mask_bias, dtype=torch.float64)
    o = evoformer_attention(q, k, v, mask_bias=bias, backend=backend)
    torch.testing.assert_close(o, evoformer_attention(q, k, v, backend=backend))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_nan_cotangent_of_an_empty_query_goes_nowhere(backend: str) -> None:
    """`torch.where(lse.isfinite(), lse * lse, 0)` has one, as its derivative is 0 times -inf there."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 2))
    pair_bias = torch.zeros(1, 1, 2, 6, 6)
    pair_bias[..., 0, :] = -torch.inf
    _, lse = evoformer_attention(q, k, v, pair_bias=pair_bias, return_lse=True, backend=backend)
    torch.where(lse.isfinite(), lse * lse, 0).sum().backward()
    assert k.grad is not None and k.grad.isfinite().all() and k.grad.norm() > 0


def test_the_interpreter_is_not_given_what_it_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "interprets", lambda: True)
    problem = Problem("cpu", None, torch.float32, 1, 2, 2, 6, 6, 8, 8, pair_bias=torch.bfloat16)
    assert triton_backend.unsupported(problem, Config()) == ["Triton's interpreter computes bfloat16 wrongly"]
    assert triton_backend.unsupported(dataclasses.replace(problem, pair_bias=torch.float16), Config()) == []


@pytest.mark.parametrize("shape", [(1, 64, 1), (64, 1)], ids=["one number a row", "without a batch axis"])
def test_the_gradient_of_a_mask_bias_that_is_broadcast_is_rounded_once(shape: tuple[int, ...]) -> None:
    """In bfloat16, where terms that were rounded one by one cancelled to something else."""
    q, k, v = qkv(1, 64, length=12, dtype=torch.bfloat16)
    mask_bias = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    double = [x.detach().double() for x in (q, k, v, mask_bias)]
    double[3].requires_grad_()
    generator = torch.Generator().manual_seed(1)
    do, dlse = torch.randn(q.shape, generator=generator).to(q.dtype), torch.randn(1, 64, 2, 12, generator=generator)

    def gradient(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, backend: str) -> Tensor:
        o, lse = evoformer_attention(q, k, v, mask_bias=mask_bias, return_lse=True, backend=backend)
        return torch.autograd.grad((o, lse), mask_bias, (do.to(o.dtype), dlse.to(lse.dtype)))[0]

    expected = gradient(*double, "reference")  # type: ignore[arg-type]
    assert testing.relative_error(gradient(q, k, v, mask_bias, "tiled"), expected) < 3e-3


def test_a_mask_that_two_axes_fit_is_refused() -> None:
    q, k, v = qkv(2, 3, 2)
    with pytest.raises(ValueError, match="can be read as"):
        evoformer_attention(q, k, v, mask=torch.ones(2, 1, 1, 6, dtype=torch.bool))
    mask = torch.rand(2, 1, 1, 6) > 0.5
    expected = evoformer_attention(q, k, v, mask=mask.expand(2, 3, 2, 1, 1, 6))
    torch.testing.assert_close(evoformer_attention(q, k, v, mask=mask[None, None]), expected)


def test_a_mask_of_rows_with_unit_axes_is_read_as_documented() -> None:
    q, k, v = qkv(2, 3, 4)
    mask = torch.rand(4, 1, 1, 6) > 0.3
    expected = evoformer_attention(q, k, v, mask=mask.expand(2, 3, 4, 1, 1, 6))
    torch.testing.assert_close(evoformer_attention(q, k, v, mask=mask), expected)


def test_calls_inside_vmap_equal_calls_outside() -> None:
    q, k, v = qkv(1, 3)

    def call(x: Tensor) -> Tensor:
        assert evoattn.explain(x, k, v).backend is not None
        return evoformer_attention(x, k, v)

    torch.testing.assert_close(torch.vmap(call)(q[None])[0], evoformer_attention(q, k, v))
    bias = torch.zeros(1, 1, 2, 6, 6)
    heads_first = [x.transpose(2, 3) for x in (q, k, v)]
    outputs = torch.vmap(lambda x: triangle_attention(x, *heads_first[1:], bias, return_aux=True))(heads_first[0][None])
    for value, expected in zip(outputs, triangle_attention(*heads_first, bias, return_aux=True), strict=True):
        torch.testing.assert_close(value[0], expected)


def test_a_scale_that_is_no_number_is_refused_in_compiled_code() -> None:
    q, k, v = qkv(1, 3)
    torch.compiler.reset()
    with pytest.raises(ValueError, match="scale must be finite"):
        torch.compile(lambda x: evoformer_attention(x, k, v, scale=float("nan")))(q)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_masked_key_far_above_the_only_key_that_is_left(backend: str, dtype: torch.dtype) -> None:
    """Its pair bias, measured from the dtype's lowest number, overflowed: NaN."""
    case = testing.Case(
        "masked_key_above", n=2, h=1, lq=4, lk=2, d=32, dtype=dtype, mask="padding", pair_bias="111qk", pair_fill="lowest"
    )
    inputs = case.make(seed=1)
    assert inputs.mask is not None and inputs.pair_bias is not None
    inputs.mask[:] = torch.tensor([True, False])
    inputs.pair_bias[..., 0, :] = torch.tensor([torch.finfo(dtype).min, 0.25], dtype=dtype)
    assert testing.judge(inputs, backend) == testing.Outcome("held")
