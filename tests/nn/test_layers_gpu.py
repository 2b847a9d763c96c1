"""Every layer on a GPU, with the Triton kernels of its norm, against dense float64 torch; checkpoints bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evoattn import backends
from evoattn.nn import TriangleAttention
from tests.helpers.dense_layers import MaskedSoftmax, triangle
from tests.nn.dense import Dense, leaves_of
from tests.nn.layer_cases import EACH, step, truth, worst

DEVICE = "cuda"

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def there(case: Dense, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor], Tensor]:
    """A layer, its inputs and its mask on the device."""
    inputs, mask = case.arguments(dtype)
    return case.layer(dtype).to(DEVICE), [x.detach().to(DEVICE).requires_grad_() for x in inputs], mask.to(DEVICE)


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layer_in_every_dtype_agrees_with_float64(case: Dense, dtype: torch.dtype) -> None:
    """No worse than three times what dense torch of the dtype loses, and the compiled layer no worse either."""
    layer, inputs, mask = there(case, dtype)
    swallowed = dtype != torch.float64
    expected = truth(case, layer, inputs, mask, swallowed)
    reference = case.reference(layer, dtype, swallowed)
    budget = 3 * worst(step(reference, reference.parameters, inputs, mask), expected) + 1e-6  # type: ignore[attr-defined]
    for call in (layer, torch.compile(layer, fullgraph=True)):
        assert worst(step(call, leaves_of(layer), inputs, mask), expected) < budget < 0.2


@EACH
def test_layer_under_autocast_agrees_with_float64(case: Dense) -> None:
    layer, inputs, mask = there(case, torch.float32)

    def under(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*inputs: Tensor, mask: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return call(*inputs, mask=mask)

        return run

    expected = truth(case, layer, inputs, mask, swallowed=True)
    reference = case.reference(layer, torch.float32, swallowed=True)
    budget = 3 * worst(step(under(reference), reference.parameters, inputs, mask), expected)  # type: ignore[attr-defined]
    assert worst(step(under(layer), leaves_of(layer), inputs, mask), expected) < budget < 0.2


def test_gradients_are_not_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a key among them: what they add to the gradients stays in the columns of one tensor."""
    if not next(status for status in backends() if status.name == "hopper").available:
        pytest.skip("triton makes each gradient apart")
    layer = TriangleAttention(128, 32, 4).to(DEVICE)
    z, mask = torch.randn(1, 96, 96, 128, device=DEVICE, requires_grad=True), torch.ones(1, 96, 96, device=DEVICE)
    mask[:, :5] = 0
    with torch.autocast(DEVICE, torch.bfloat16):
        output = layer(z, mask)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *args: pytest.fail("gradients are copied together"))
        output.float().square().sum().backward()
    assert z.grad is not None


@EACH
def test_checkpoint_is_bit_equal(case: Dense) -> None:
    """The fixture `poisoned` has switched determinism on."""
    layer, inputs, mask = there(case, torch.bfloat16)

    def again(*inputs: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(layer, *inputs, mask=mask, use_reentrant=False)  # type: ignore[no-any-return]

    actual = step(again, leaves_of(layer), inputs, mask)
    for x, y in zip(actual, step(layer, leaves_of(layer), inputs, mask), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("starting", [True, False])
def test_a_triangle_of_a_models_size(starting: bool) -> None:
    """Padded to 256 residues, 4 heads of 32: what the wide kernels of the backends take."""
    torch.manual_seed(0)
    layer = TriangleAttention(128, 32, 4, starting=starting).to(DEVICE)
    for x in layer.parameters():
        nn.init.normal_(x, std=0.1)
    nn.init.normal_(layer.layer_norm.weight, mean=1.0, std=0.1)  # around 0, v would be little but its offset
    double = TriangleAttention(128, 32, 4, starting=starting).double().to(DEVICE)
    double.load_state_dict(layer.state_dict())
    z = torch.randn(1, 256, 256, 128, device=DEVICE, requires_grad=True)
    kept = (torch.arange(256, device=DEVICE) < 200).double()
    mask = kept[:, None] * kept[None, :]
    double_z = z.detach().double().requires_grad_()
    cotangent = torch.randn_like(z) * mask[..., None].float()
    expected = double(double_z, mask[None])
    gradients = torch.autograd.grad(expected, [double_z, *double.parameters()], cotangent.double())
    inside = mask.bool()

    def lost(call: Callable[..., Tensor]) -> float:
        with torch.autocast(DEVICE, torch.bfloat16):
            output = call(z, mask[None].float())
        actual = torch.autograd.grad(output, [z, *layer.parameters()], cotangent.to(output.dtype))
        return worst([output[:, inside], *actual], [expected[:, inside], *gradients])

    assert lost(layer) < 3 * lost(lambda z, mask: triangle(layer, z, mask=mask, weights=MaskedSoftmax()))
