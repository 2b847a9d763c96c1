"""Rows without a key on a GPU: kernels and torch agree, and the kernels can be captured in a CUDA graph.

python -m pytest -m gpu tests/empty_rows/test_kernels_gpu.py
"""

import pytest
import torch
from torch import Tensor

from evoattn import testing
from evoattn.compat.openfold import attention
from evoattn.empty_rows import means

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(dtype: torch.dtype, every: int, seed: int = 0) -> list[Tensor]:
    """q, k, v, the mask bias, the pair bias and the gradient of the output; one row in so many has no key, none for 0."""
    rng = torch.Generator("cuda").manual_seed(seed)

    def leaf(*sizes: int, add: float = 0.0) -> Tensor:
        return (torch.randn(*sizes, device="cuda", generator=rng) + add).to(dtype).requires_grad_()

    allowed = torch.rand(1, 150, 1, 1, 101, device="cuda", generator=rng) > 0.3
    allowed[..., 0] = True
    if every:
        allowed[:, ::every] = False
    mask = torch.where(allowed, 0.0, max(-1e9, torch.finfo(dtype).min)).to(dtype)
    lengths = (97, 101, 101)
    q, k, v = (leaf(1, 150, 4, length, 32, add=float(i == 2)) for i, length in enumerate(lengths))
    return [q, k, v, mask, leaf(1, 1, 4, 97, 101), torch.randn(q.shape, device="cuda", generator=rng).to(dtype)]


def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair: Tensor, do: Tensor) -> list[Tensor]:
    o = attention(q, k, v, [mask, pair])
    return [o, *torch.autograd.grad(o, [q, k, v, pair], do)]


def in_torch(monkeypatch: pytest.MonkeyPatch, inputs: list[Tensor]) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(means, "has_kernels", lambda device: False)
        return step(*inputs)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("every", [0, 1, 3, 140])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kernels_and_torch_agree(dtype: torch.dtype, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(dtype, every)
    expected = in_torch(monkeypatch, inputs)
    assert means.has_kernels(inputs[0].device)
    for actual, reference in zip(step(*inputs), expected, strict=True):
        assert testing.relative_error(actual, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_captured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph serves masks with and without empty rows: nothing is asked of the host."""
    inputs = make(dtype, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*inputs)
    for every in (3, 0, 1):
        others = make(dtype, every, seed=1 + every)
        with torch.no_grad():
            for copy, right in zip(inputs, others, strict=True):
                copy.copy_(right)
        graph.replay()
        for actual, expected in zip(captured, in_torch(monkeypatch, others), strict=True):
            assert testing.relative_error(actual, expected) < TOLERANCE[dtype]


def test_a_second_derivative_raises() -> None:
    q, k, v, mask, pair, _ = make(torch.bfloat16, 3)
    (dq,) = torch.autograd.grad(attention(q, k, v, [mask, pair]).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dq.square().sum(), q)
