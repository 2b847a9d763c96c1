"""Float32 products by their kernels in Triton's interpreter: against float64, and numbers that are not finite."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.interpreted import INTERPRETED, run

pytest.importorskip("triton")
if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        """All tests below, in a process where Triton interprets."""
        run(__file__, "not slow")

else:
    from tests.helpers import interpreter

    interpreter.patch()

    from evoattn.pair.products import call, steps
    from tests.pair.products import KINDS, draw, error, in_order, is_close

    pytestmark = pytest.mark.usefixtures("poisoned")

    SIZES = ((5, 70, 96), (65, 33, 100), (1, 16, 48))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_products_are_no_further_from_float64_than_float32(sizes: tuple[int, int, int], kind: str) -> None:
        x, w, _ = draw(1, *sizes, kind)
        assert is_close(steps.product(steps.split(x), steps.split_weights([w])), in_order(x, w), x, w)

    def test_hi_alone_has_the_error_of_tf32() -> None:
        x, w, _ = draw(2, 40, 30, 64, "normal")
        y = steps.product(steps.split(x, low=False), steps.split_weights([w], low=False))
        assert 1e-5 < error(y, x.double() @ w.double().T) < 5e-4

    def test_the_epilogue() -> None:
        """base + mask * gate * sigmoid(x w^T + bias), where two samples share a gate."""
        x, w, bias = draw(3, 12, 20, 32, "normal")
        gate, base, mask = torch.rand(6, 20), torch.randn(12, 20), (torch.arange(12) % 3 > 0).float()
        halves = steps.split(x), steps.split_weights([w[:7], w[7:]])
        y = steps.product(*halves, bias, opened=True, gate=gate, mask=mask, base=base, samples=2, positions=3)
        opened = torch.sigmoid(x.double() @ w.double().T + bias)
        shared = gate.view(2, 1, 3, 20).expand(2, 2, 3, 20).reshape(12, 20)  # [b,s,l]
        assert error(y, base + mask[:, None] * shared * opened) < 2e-7
        plain = steps.product(*halves, base=base)
        assert steps.product(*halves, base=base, out=base) is base and torch.equal(base, plain)

    def whole(x: steps.Halves) -> Tensor:
        assert x.lo is not None
        return (x.hi.double() + x.lo.double() / 2048) * x.unit.double()[:, None]

    @pytest.mark.parametrize("channels", [64, 100])
    def test_what_is_split(channels: int) -> None:
        rng = torch.Generator().manual_seed(4)
        x, a, b = (torch.randn(9, channels, generator=rng) for _ in range(3))
        d, e, f = x.double(), a.double(), b.double()
        norm = F.layer_norm(d, (channels,))
        assert error(whole(steps.split(x)), d) < 1.3e-7
        assert error(whole(steps.split(x, kind="norm")), norm) < 3e-7
        assert error(whole(steps.split(x, a, b, kind="adapt")), norm * e + f) < 3e-7
        assert error(whole(steps.split(x, a, kind="gate")), d * e.sigmoid()) < 3e-7
        assert error(whole(steps.split(x, a, kind="swiglu")), F.silu(d) * e) < 3e-7
        assert error(whole(steps.split(x, a, b, kind="swiglu")), F.silu(d) * e * f) < 3e-7
        assert error(whole(steps.split(x, factor=a[0])), d * e[0]) < 2e-7

    def test_bfloat16_is_written_and_split() -> None:
        """The result is that of float32, rounded once; and what bfloat16 has is split without a loss."""
        x, w, bias = draw(7, 40, 30, 64, "normal")
        halves = steps.split(x, low=False), steps.split_weights([w], low=False)
        low = steps.product(*halves, bias, dtype=torch.bfloat16)
        assert torch.equal(low, steps.product(*halves, bias).bfloat16())
        wide = low.float()
        for kind, others in (("", 0), ("gate", 1), ("swiglu", 1), ("swiglu", 2)):
            split, right = (steps.split(y, *[y.flip(0)] * others, kind=kind, low=False) for y in (low, wide))
            assert torch.equal(split.hi, right.hi) and torch.equal(split.unit, right.unit)

    @pytest.mark.filterwarnings("ignore:invalid value encountered")
    def test_infinities_and_nan_give_what_float32_gives() -> None:
        x, w, _ = draw(5, 40, 50, 96, "normal")
        x[3, 5] = w[8, 3] = torch.inf
        x[7, 1] = torch.nan
        x[9, 2], x[9, 4] = -torch.inf, torch.inf
        w[4, 5] = x[20, 3] = 0
        x[11], w[9] = 0, 0
        x[12] *= 1e-37
        x[13] *= 1e37
        y, right = steps.product(steps.split(x), steps.split_weights([w])), x @ w.T
        finite = right.isfinite()
        assert not finite.all() and torch.equal(y[~finite].nan_to_num(), right[~finite].nan_to_num())
        assert torch.equal(y.isnan(), right.isnan())
        assert ((y - right)[finite].abs() <= 1e-5 * right[finite].abs().clamp(min=1e-37)).float().mean() > 0.99

    def test_strides_of_all_tensors() -> None:
        x, w, bias = draw(6, 12, 20, 32, "normal")
        right = steps.product(steps.split(x), steps.split_weights([w]), bias, mask=torch.full((12,), 0.5))
        turned = steps.split(x.t().contiguous().t()), steps.split_weights([w.t().contiguous().t()])
        strided = torch.stack([bias, bias], 1)[:, 0]
        assert torch.equal(steps.product(*turned, strided, mask=torch.tensor(0.5).expand(12)), right)

    def test_a_sum_over_many_rows_is_no_further_from_float64_than_float32() -> None:
        rng = torch.Generator().manual_seed(8)
        dy, x = (torch.randn(12_000, 16, generator=rng) for _ in range(2))
        assert is_close(call._across(dy, x, True), dy.t() @ x, dy.t(), x.t())

    @pytest.mark.parametrize("rows", [2048, 24], ids=["at once", "in parts"])
    def test_gradients_are_no_further_from_float64_than_float32(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(call, "_ROWS", rows)
        x, w, bias = (y.requires_grad_() for y in draw(5, 65, 33, 100, "normal"))
        dy = torch.randn(5, 13, 33, generator=torch.Generator().manual_seed(6))
        y = call._differentiable(x.view(5, 13, 100), w, bias, True)
        dx, dw, dbias = torch.autograd.grad(y, (x, w, bias), dy.movedim(0, 1).contiguous().movedim(0, 1))
        dy = dy.view(65, 33)
        x, w = x.detach(), w.detach()
        assert is_close(y.detach().view(65, 33) - bias.detach(), in_order(x, w), x, w)
        assert is_close(dx, in_order(dy, w.t()), dy, w.t()) and is_close(dw, in_order(dy.t(), x.t()), dy.t(), x.t())
        assert torch.allclose(dbias, dy.sum(0), rtol=1e-6, atol=1e-5)

    def test_only_what_needs_a_gradient_has_one() -> None:
        x, w, bias = draw(5, 16, 16, 32, "normal")
        for needs in ((True, False, False), (False, True, False), (False, False, True)):
            sources = [y.clone().requires_grad_(need) for y, need in zip((x, w, bias), needs, strict=True)]
            call._differentiable(*sources, True).sum().backward()
            assert [y.grad is not None for y in sources] == list(needs)
        x = x.requires_grad_()
        (dx,) = torch.autograd.grad(call._differentiable(x, w, None, True).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            dx.sum().backward()
