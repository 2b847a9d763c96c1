"""Small calls on the CPU: dense, with the probabilities kept, and never more memory or products than dense torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import evoattn
from evoattn.bench.memory import peak_bytes
from evoattn.testing import Case, CaseInputs

CPU = torch.device("cpu")
GRADIENTS = ("q", "k", "v", "pair_bias")


def make(**sizes: Any) -> tuple[CaseInputs, list[Tensor]]:
    inputs = Case("small", **{"n": 3, "h": 2, "lq": 12, "lk": 12, "d": 8, "pair_bias": "b1hqk", **sizes}).make()
    return inputs, [x.requires_grad_() for name, x in inputs.differentiable.items() if name in GRADIENTS]


def attend(inputs: CaseInputs, **options: Any) -> Any:
    return evoattn.evoformer_attention(
        inputs.q, inputs.k, inputs.v, mask=inputs.mask, pair_bias=inputs.pair_bias, backend="tiled", **options
    )


def shapes_kept(o: Tensor) -> set[tuple[int, ...]]:
    return {tuple(x.shape) for x in o.grad_fn.saved_tensors if x is not None}  # type: ignore[union-attr]


def test_the_probabilities_are_kept() -> None:
    """In place of the statistic, which only the LSE needs."""
    inputs, _ = make()
    o = attend(inputs)
    (p,) = (x for x in o.grad_fn.saved_tensors if x is not None and x.shape == (6, 12, 12))
    torch.testing.assert_close(p.sum(-1), torch.ones(6, 12))
    assert not any(len(shape) == 4 for shape in shapes_kept(o) if shape != tuple(inputs.pair_bias.shape))  # type: ignore


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"n": 128, "h": 2, "lq": 129, "lk": 129}, {}),
        ({"n": 4097, "h": 8, "lq": 1, "lk": 16, "pair_bias": None}, {}),
        ({"n": 1025, "h": 8, "lq": 16, "lk": 16, "d": 32, "pair_bias": None}, {}),
        ({"dtype": torch.float16}, {}),
        ({}, {"config": evoattn.Config(block_q=12)}),
        ({}, {"return_lse": True}),
        ({}, {"huge": True}),
    ],
    ids=["scores", "keys", "channels", "narrow", "config", "lse", "huge_bias"],
)
def test_other_calls_keep_none(sizes: dict[str, Any], options: dict[str, Any]) -> None:
    inputs, _ = make(**sizes)
    if options.pop("huge", False):
        with torch.no_grad():
            inputs.pair_bias[..., 0, :] = -1e9  # type: ignore[index]
    output = attend(inputs, **options)
    o = output[0] if isinstance(output, tuple) else output
    n, h, lq, lk = (getattr(inputs.case, name) for name in ("n", "h", "lq", "lk"))
    assert (n * h, lq, lk) not in shapes_kept(o)


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
def test_both_ways_give_the_same_bits(layout: Any) -> None:
    """What recomputes the probabilities, by the operator, takes the same steps as what keeps them."""
    inputs, leaves = make(layout=layout, mask="random")
    actual = torch.autograd.grad(attend(inputs, layout=layout), leaves, inputs.do)
    recorded = torch.autograd.grad(attend(inputs, layout=layout), leaves, inputs.do, create_graph=True)
    many = torch.autograd.grad(
        attend(inputs, layout=layout), leaves, inputs.do.expand(2, *inputs.do.shape), is_grads_batched=True
    )
    for x, y, z in zip(actual, recorded, many, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(z, x.expand_as(z))
    with pytest.raises(RuntimeError, match="no second derivative"):
        recorded[0].sum().backward()


def test_rows_without_keys_have_no_output_and_no_gradients() -> None:
    inputs, leaves = make(mask="random")
    inputs.mask[:, 1] = False  # type: ignore[index]
    o = attend(inputs)
    gradients = torch.autograd.grad(o, leaves, inputs.do)
    assert not o[:, 1].any() and not any(x[:, 1].any() for x in gradients[:3])
    assert all(x.isfinite().all() for x in gradients)


def products(call: Any) -> int:
    """How many products of matrices a call takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.count for event in profiler.key_averages() if event.key in ("aten::bmm", "aten::baddbmm"))


def test_no_more_products_than_dense() -> None:
    inputs, leaves = make()
    fused, dense = (products(lambda way=way: torch.autograd.grad(way(inputs).sum(), leaves)) for way in (attend, dense_of))
    assert fused == dense == 6


def dense_of(inputs: CaseInputs) -> Tensor:
    """Attention as models write it in plain torch, all scores in memory; the additions are in place."""
    q, k, v = (x.transpose(-2, -3) for x in (inputs.q, inputs.k, inputs.v))  # [b,n,h,l,d]
    s = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))  # [b,n,h,q,k]
    if inputs.mask is not None:
        s += torch.zeros_like(inputs.mask, dtype=s.dtype).masked_fill(~inputs.mask, -1e9)[..., None, None, :]
    if inputs.pair_bias is not None:
        s += inputs.pair_bias
    return torch.matmul(torch.softmax(s, -1), v).transpose(-2, -3)


@pytest.mark.parametrize(
    "sizes",
    [{"n": 16, "h": 8, "d": 32}, {"n": 1, "h": 16, "d": 24}, {"n": 64, "h": 4, "d": 32}, {"n": 65, "h": 4, "d": 32}],
    ids=str,
)
def test_peak_memory_is_below_that_of_dense(sizes: dict[str, Any]) -> None:
    """From 128 residues on; the last has too many scores to be small."""
    inputs, leaves = make(lq=128, lk=128, **sizes)
    fused, dense = (
        peak_bytes(lambda way=way: torch.autograd.grad(way(inputs).sum(), leaves), CPU)  # type: ignore[misc]
        for way in (attend, dense_of)
    )
    assert fused < dense


@pytest.mark.parametrize(("n", "h", "length"), [(92, 4, 92), (64, 4, 64), (32, 4, 32), (16, 8, 127)])
def test_layers_one_after_the_other_take_hardly_more_memory_than_dense(n: int, h: int, length: int) -> None:
    """Their projections lie in memory as models have them, until the backward."""
    layers = torch.nn.ModuleList([torch.nn.Linear(16 * h, 48 * h) for _ in range(4)])
    x = torch.randn(1, n, length, 16 * h, dtype=torch.float32)

    def peak(attention: Any) -> int:
        def run() -> None:
            z = x
            for layer in layers:
                z = z + attention(*(y.unflatten(-1, (h, 16)) for y in layer(z).chunk(3, -1))).flatten(-2)
            torch.autograd.grad(z.sum(), list(layers.parameters()))

        return peak_bytes(run, CPU)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.transpose(-2, -3) for y in (q, k, v))
        return (torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v).transpose(-2, -3)

    assert peak(evoattn.evoformer_attention) < 1.15 * peak(plain), "gradients are copied to where the caller's layout has them"
