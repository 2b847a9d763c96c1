"""`evoattn.pair.linear` without a GPU: torch computes it; and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from evoattn.pair import linear
from evoattn.pair.products.call import any_linear


def test_torch_computes_it_on_a_cpu_with_gradients() -> None:
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((2, 3, 8), (4, 8), (4,)))
    y = linear(x, w, b)
    assert torch.equal(y, F.linear(x, w, b))
    assert all(g is not None for g in torch.autograd.grad(y.sum(), (x, w, b)))


X, W, B = torch.ones(3, 8), torch.ones(4, 8), torch.ones(4)
REFUSED = {
    "x must be a torch.Tensor": (None, W, B, {}),
    "weight must be .N, K.": (X, W[:, :3], B, {}),
    "bias must be .4.": (X, W, torch.ones(5), {}),
    "must have one dtype": (X, W.double(), B, {}),
    "precision must be 'exact' or 'tf32', got 'bf16'": (X, W, B, {"precision": "bf16"}),
    "weight must be of a floating-point dtype": (X, W.long(), B, {}),
}


@pytest.mark.parametrize(("message", "call"), REFUSED.items(), ids=REFUSED)
def test_arguments_that_do_not_fit_are_refused(message: str, call: tuple) -> None:  # type: ignore[type-arg]
    x, w, b, options = call
    with pytest.raises((TypeError, ValueError), match=message):
        linear(x, w, b, **options)


def test_the_compiler_traces_large_products_of_a_gpu() -> None:
    """It asks for no setting of evoattn's, which it could not trace."""
    with FakeTensorMode():
        x, w = (torch.empty(rows, 512, dtype=torch.float32, device="cuda") for rows in (4096, 512))
        y = torch.compile(lambda x, w: any_linear(x, w, None), fullgraph=True, backend="eager")(x, w)
    assert y.shape == (4096, 512)
