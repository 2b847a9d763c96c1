"""The public call: strides, gradients only where asked, layouts, determinism, memory."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.api import Layout
from evoattn.backends import Inputs, Plan, reference, tiled
from evoattn.bench.memory import peak_bytes
from evoattn.core.problem import GRADIENTS
from tests.dispatch.calls import make
from tests.helpers import seams


def call(inputs: testing.CaseInputs, **options: object) -> Tensor:
    return evoattn.evoformer_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        mask=inputs.mask,
        mask_bias=inputs.mask_bias,
        pair_bias=inputs.pair_bias,
        gate=inputs.gate,
        **options,
    )  # type: ignore[call-overload]


sizes = st.integers(0, 9)
channels = st.integers(1, 12)
axis_patterns = st.sampled_from([None, "b1hqk", "bnhqk", "1hqk", "nhqk", "hqk", "qk", "b11qk", "b1h1k", "b1hq1", "11qk", "k"])


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    n=st.integers(1, 4),
    h=st.integers(1, 3),
    lq=sizes,
    lk=sizes,
    d=channels,
    c=channels,
    layout=st.sampled_from(["bnlhd", "bnhld"]),
    strides=st.sampled_from(["contiguous", "transposed", "sliced"]),
    mask=st.sampled_from([None, "random", "padding", "empty_rows"]),
    mask_bias=st.sampled_from([None, "finite", "minus_1e9", "minus_inf", "minus_1e9_rows"]),
    pair_bias=axis_patterns,
    gate=st.sampled_from([None, "random", "large"]),
    blocks=st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1024, 4096, None])),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_stride(blocks: tuple[int, int, int | None], seed: int, **fields: object) -> None:
    """Shapes, strides, broadcasting and tiles drawn at random, forward and all gradients, in float64.

    Absolute beside relative: the gradient of a handful of numbers may cancel to nearly nothing.
    """
    inputs = testing.Case("hypothesis", lse_gradient=True, dtype=torch.float64, **fields).make(seed=seed)  # type: ignore[arg-type]
    config = evoattn.Config(block_q=blocks[0], block_k=blocks[1], score_bytes=blocks[2])
    expected = testing.oracle(inputs).values
    for results in (testing.run(inputs, "tiled", config=config), testing.run(inputs, "reference")):
        for name, value in results.values.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
@pytest.mark.parametrize("strides", ["contiguous", "transposed", "sliced"])
def test_the_output_is_contiguous_and_the_arguments_are_views(layout: str, strides: str) -> None:
    inputs = make(layout=layout, strides=strides, lead=(2,))
    assert call(inputs, layout=layout).is_contiguous()
    assert evoattn.explain(inputs.q, inputs.k, inputs.v, layout=layout).copies == []


@pytest.mark.parametrize("pattern", ["b1hqk", "11hqk", "1nhqk", "bnhqk", "b11qk", "b1h1k", "hqk"])
def test_canonical_tensors_are_views(pattern: str) -> None:
    """No argument is copied on its way to a backend, whatever the pair bias varies along."""
    inputs = make(lead=(2,), pair_bias=pattern, layout="bnhld")
    assert inputs.mask_bias is not None and inputs.pair_bias is not None
    c = seams.canonical(inputs)
    for name in ("q", "k", "v", "pair_bias"):
        assert getattr(c, name).untyped_storage().data_ptr() == getattr(inputs, name).untyped_storage().data_ptr(), name


@pytest.mark.parametrize(
    ("lead", "expected"),
    [((48, 1), (1, 48)), ((1, 5, 1), (1, 5)), ((2, 5, 1), (2, 5)), ((2, 3), (2, 3)), ((1, 1), (1, 1)), ((7,), (1, 7))],
    ids=str,
)
def test_rows_that_share_a_pair_bias_are_rows(lead: tuple[int, ...], expected: tuple[int, int]) -> None:
    """Whatever the leading axes: a backend that shares the pair bias over rows must see them as n."""
    inputs = make(lead=lead[:-1], n=lead[-1], mask="random", pair_bias="1" * len(lead) + "hqk", layout="bnhld")
    c = seams.canonical(inputs)
    assert c.pair_bias is not None and (tuple(c.q.shape[:2]), c.pair_bias.shape[0]) == (expected, 1)
    assert c.q.untyped_storage().data_ptr() == inputs.q.untyped_storage().data_ptr()
    testing.check(testing.run(inputs, "tiled"), inputs)


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
@pytest.mark.parametrize(
    ("lead", "of_pair", "expected"),
    [
        ((48, 1), (1, 1), (1, 48)),
        ((1, 5, 1), (1, 1, 1), (1, 5)),
        ((2, 5, 1), (2, 1, 1), (2, 5)),
        ((5, 2, 1), (1, 2, 1), (2, 5)),
        ((2, 5, 3), (2, 1, 1), (2, 15)),
        ((48, 1), None, (1, 48)),
    ],
    ids=str,
)
def test_a_backend_gets_rows_that_share_a_pair_bias_as_n(
    lead: tuple[int, ...],
    of_pair: tuple[int, ...] | None,
    expected: tuple[int, int],
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a whole call, without a copy of any argument."""
    seen: list[Inputs] = []
    real = reference.plan_forward

    def spy(inputs: Inputs, **options: Any) -> Plan:
        seen.append(inputs)
        return real(inputs, **options)

    monkeypatch.setattr(reference, "plan_forward", spy)
    sizes = (4, 2, 8) if layout == "bnlhd" else (2, 4, 8)
    q, k, v = (torch.randn(*lead, *sizes) for _ in range(3))
    mask = torch.rand(*lead, 4) > 0.2
    pair_bias = None if of_pair is None else torch.randn(*of_pair, 2, 4, 4)
    evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias, layout=layout, backend="reference")
    ((*got, got_mask, _, got_pair, _),) = seen
    assert {tuple(x.shape[:2]) for x in (*got, got_mask)} == {expected}
    arguments = (q, k, v, mask, pair_bias)
    assert [x if x is None else x.data_ptr() for x in (*got, got_mask, got_pair)] == [
        x if x is None else x.data_ptr() for x in arguments
    ]
    assert got_pair is None or got_pair.shape == (expected[0] if 2 in of_pair else 1, 2, 4, 4)  # type: ignore[operator]


def test_an_expanded_pair_bias_is_not_materialised() -> None:
    """A stride-0 axis is taken as broadcast when no gradient is wanted, and read in place when one is."""
    inputs = make(lead=(2,), n=5, pair_bias="11hqk")
    assert inputs.pair_bias is not None
    expanded = inputs.pair_bias.expand(2, 5, *inputs.pair_bias.shape[2:])
    expanded_inputs = dataclasses.replace(inputs, pair_bias=expanded)
    torch.testing.assert_close(call(expanded_inputs), call(inputs))
    c = seams.canonical(expanded_inputs)
    assert c.pair_bias is not None and c.pair_bias.numel() == inputs.pair_bias.numel()
    leaf = inputs.pair_bias.clone().requires_grad_()
    (through_expand,) = torch.autograd.grad(
        call(dataclasses.replace(inputs, pair_bias=leaf.expand(expanded.shape))), leaf, inputs.do
    )
    (direct,) = torch.autograd.grad(call(dataclasses.replace(inputs, pair_bias=leaf)), leaf, inputs.do)
    torch.testing.assert_close(through_expand, direct)
    middle = leaf.expand(expanded.shape)
    (each,) = torch.autograd.grad(call(dataclasses.replace(inputs, pair_bias=middle)), middle, inputs.do)
    assert each.shape == middle.shape
    torch.testing.assert_close(each.sum_to_size(leaf.shape), direct)
    assert (each != 0).all(), "every expanded element has a gradient of its own"


@pytest.mark.parametrize("asked", [("q",), ("k", "v"), ("pair_bias",), ("mask_bias",), ("q", "pair_bias")])
def test_only_the_gradients_asked_for_are_computed(asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, ...]] = []
    real = tiled.plan_backward

    def spy(*arguments: Any, needs: tuple[bool, ...], **options: Any) -> Plan:
        plan = real(*arguments, needs=needs, **options)
        return dataclasses.replace(plan, run=lambda *args: seen.append(needs) or plan.run(*args))

    monkeypatch.setattr(tiled, "plan_backward", spy)
    seams.forget()
    inputs = make()
    leaves = {name: x.requires_grad_(name in asked) for name, x in inputs.differentiable.items()}
    call(inputs).backward(inputs.do)
    assert seen == [tuple(name in asked for name in GRADIENTS)]
    assert {name for name, x in leaves.items() if x.grad is not None} == set(asked)


def test_no_gradient_no_graph() -> None:
    inputs = make()
    assert not call(inputs).requires_grad
    inputs.q.requires_grad_()
    with torch.no_grad():
        assert not call(inputs).requires_grad
    with torch.inference_mode():
        assert not call(inputs).requires_grad
    assert call(inputs).requires_grad


def test_gradient_through_the_lse_alone() -> None:
    inputs = make(lse_gradient=True)
    q = inputs.q.double().requires_grad_()
    arguments = (inputs.k.double(), inputs.v.double())
    _, lse = evoattn.evoformer_attention(q, *arguments, mask_bias=inputs.mask_bias, return_lse=True)
    assert inputs.dlse is not None and inputs.mask_bias is not None
    (actual,) = torch.autograd.grad(lse, q, inputs.dlse.double())
    s = torch.einsum("bnqhd,bnkhd->bnhqk", q, arguments[0]) * q.shape[-1] ** -0.5 + inputs.mask_bias.double()
    (expected,) = torch.autograd.grad(s.logsumexp(-1), q, inputs.dlse.double())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_gradcheck(backend: str) -> None:
    """Finite differences, the one judge that knows no formula."""
    inputs = make(dtype=torch.float64, n=2, lq=3, lk=4, d=3, c=2)
    leaves = [x.requires_grad_() for x in inputs.differentiable.values()]

    def function(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor) -> tuple[Tensor, Tensor]:
        return evoattn.evoformer_attention(
            q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, return_lse=True, backend=backend, config=None
        )

    assert torch.autograd.gradcheck(function, leaves)


def test_against_torch_attention() -> None:
    """The oracle itself is checked here: torch's own attention, in float64, with the biases summed."""
    inputs = make(dtype=torch.float64, layout="bnhld")
    assert inputs.mask_bias is not None and inputs.pair_bias is not None
    bias = inputs.mask_bias + inputs.pair_bias
    expected = torch.nn.functional.scaled_dot_product_attention(inputs.q[0], inputs.k[0], inputs.v[0], attn_mask=bias[0])
    torch.testing.assert_close(call(inputs, layout="bnhld")[0], expected)
    torch.testing.assert_close(testing.oracle(inputs).values["o"][0], expected)


def test_a_row_of_padding_is_the_ordinary_softmax() -> None:
    """mask_bias = -1e9 at every key changes nothing: not the output, not one gradient; the LSE moves by -1e9."""
    plain = make(mask_bias=None, n=2)
    padded = dataclasses.replace(plain, mask_bias=torch.full((1, 2, 1, 1, 20), -1e9))
    actual, expected = testing.run(padded, "tiled").values, testing.run(plain, "tiled").values
    for name in ("o", "dq", "dk", "dv", "dpair_bias"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual["lse"].double(), expected["lse"].double() - 1e9, rtol=1e-7, atol=0)


def test_a_row_without_keys_is_zero_and_has_no_gradient() -> None:
    inputs = make(mask="empty_rows", mask_bias=None, n=4)
    results = testing.run(inputs, "tiled").values
    for name in ("o", "dq", "dk", "dv"):
        assert (results[name][:, ::3] == 0).all(), name
    assert (results["lse"][:, ::3] == -torch.inf).all()


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_two_deterministic_runs_are_bit_equal(backend: str) -> None:
    inputs = make(lq=130, lk=150, n=6)
    first, second = (testing.run(inputs, backend, deterministic=True).values for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_deterministic_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make()

    def asked(**options: object) -> bool:
        return evoattn.explain(inputs.q, inputs.k, inputs.v, **options).problem.deterministic  # type: ignore[arg-type]

    assert (asked(), asked(deterministic=True)) == (False, True)
    torch.use_deterministic_algorithms(True)
    try:
        assert (asked(), asked(deterministic=False)) == (True, False)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
def test_gate_multiplies_the_output_alone(layout: Layout, backend: str) -> None:
    """It multiplies O by its sigmoid, leaves the LSE alone, and leaves O out of what the backward keeps but for the gated O."""
    inputs = make(layout=layout, gate="random", dtype=torch.float64)
    gated, lse = call(inputs, layout=layout, backend=backend, return_lse=True)
    o, expected = call(dataclasses.replace(inputs, gate=None), layout=layout, backend=backend, return_lse=True)
    torch.testing.assert_close(gated, o * torch.sigmoid(inputs.gate))  # type: ignore[arg-type]
    assert torch.equal(lse, expected)
    leaves = [x.requires_grad_() for x in inputs.differentiable.values()]
    saved = call(inputs, layout=layout, backend=backend)
    kept = {x.data_ptr() for x in saved.grad_fn.saved_tensors if x is not None}  # type: ignore[union-attr]
    more = 3 if backend == "reference" else 2  # O with both numbers of the statistic, or with the probabilities
    assert kept >= {saved.data_ptr(), *(x.data_ptr() for x in leaves)} and len(kept) == len(leaves) + more


def test_scores_in_flight_are_bounded() -> None:
    """Never n*l*l: forward and backward of a problem whose scores take 151 MB allocate a small part of that."""
    inputs = testing.Case("memory", n=64, h=4, lq=384, lk=384, mask_bias="finite", pair_bias="b1hqk").make()
    scores = 64 * 4 * 384 * 384 * 4
    for leaf in inputs.differentiable.values():
        leaf.requires_grad_()
    peak = peak_bytes(lambda: call(inputs, backend="tiled").backward(inputs.do), torch.device("cpu"))
    outputs = sum(x.numel() * 4 for x in (inputs.q, inputs.k, inputs.v, inputs.do)) + 4 * 384 * 384 * 4
    assert outputs < peak < outputs + 24 * 2**20 < scores / 3


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
@pytest.mark.parametrize("pair_bias", [None, (1, 1, 4, 1, 40), (2, 1, 1, 1, 40), (4, 1, 1), (1, 40), (40,)])
def test_one_query_of_heads_that_share_their_keys(pair_bias: tuple[int, ...] | None, layout: Layout) -> None:
    """Global attention: the heads become queries of one head. The same as with keys of every head, and laid out the same."""
    q, k = torch.randn(2, 3, 1, 4, 8), torch.randn(2, 3, 40, 1, 8)
    tensors = [q, k, torch.randn_like(k), *([] if pair_bias is None else [torch.randn(pair_bias)])]
    cotangents = torch.randn(2, 3, 1, 4, 8), torch.randn(2, 3, 4, 1)
    if layout == "bnhld":
        tensors[:3], cotangents = [x.transpose(2, 3) for x in tensors[:3]], (cotangents[0].transpose(2, 3), cotangents[1])
    leaves = [x.clone().requires_grad_() for x in tensors]
    actual = evoattn.evoformer_attention(*leaves[:3], pair_bias=(*leaves[3:], None)[0], layout=layout, return_lse=True)
    full = [x.clone().requires_grad_() for x in tensors]
    heads = 3 if layout == "bnlhd" else 2
    q, k, v = (x.expand(*x.shape[:heads], 4, *x.shape[heads + 1 :]) for x in full[:3])
    expected = evoattn.evoformer_attention(q, k, v, pair_bias=(*full[3:], None)[0], layout=layout, return_lse=True)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
        assert x.is_contiguous() and x.shape == y.shape
    gradients = torch.autograd.grad(actual, leaves, cotangents)
    for x, y in zip(gradients, torch.autograd.grad(expected, full, cotangents), strict=True):
        torch.testing.assert_close(x, y)
    problem = evoattn.explain(*leaves[:3], pair_bias=(*leaves[3:], None)[0], layout=layout).problem
    assert (problem.h, problem.lq, problem.lk) == (1, 4, 40)


def test_the_keys_in_flight_are_bounded() -> None:
    """Of many rows with few queries each a block holds few: its copies of keys and values stay small, not its scores alone."""
    inputs = make(n=4096, h=2, lq=1, lk=16, d=16, gradients=("q", "k", "v"))
    for leaf in inputs.differentiable.values():
        leaf.requires_grad_()
    peak = peak_bytes(lambda: call(inputs, backend="tiled").backward(inputs.do), torch.device("cpu"))
    outputs = inputs.k.nbytes + inputs.v.nbytes + 3 * inputs.q.nbytes
    assert outputs < peak < outputs + 24 * 2**20


def test_keys_that_heads_share_are_not_copied() -> None:
    k = torch.randn(1, 64, 256, 1, 8, requires_grad=True)
    q = torch.randn(1, 64, 1, 8, 8, requires_grad=True)
    peak = peak_bytes(lambda: evoattn.evoformer_attention(q, k, k, backend="tiled").sum().backward(), torch.device("cpu"))
    assert peak < 7 * k.nbytes, "of every head they would take 8 times as much"
