"""The kernels of the layers' norm in Triton's interpreter, against float64.

Triton reads TRITON_INTERPRET when a kernel is defined, so these tests need a process of their own: run from the ordinary suite,
this file starts itself once more with the variable set.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.interpreted import INTERPRETED, PARTS, run

pytest.importorskip("triton")
if not INTERPRETED:

    @pytest.mark.parametrize("part", PARTS)
    def test_in_the_interpreter(part: str) -> None:
        """All tests below, in a process where Triton interprets."""
        run(__file__, part)

else:
    from tests.helpers import interpreter

    interpreter.patch()

    from evoattn.kit import norm
    from evoattn.nn import TriangleAttention, project
    from evoattn.testing import relative_error

    pytestmark = pytest.mark.usefixtures("poisoned")

    NARROW = (torch.float32, torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("dtype", NARROW)
    @pytest.mark.parametrize("out", NARROW)
    @pytest.mark.parametrize("shape", [(1, 1), (70, 24), (35, 128), (5, 1030)])
    def test_both_passes(dtype: torch.dtype, out: torch.dtype, shape: tuple[int, int]) -> None:
        """Rows far from 0, whose variance is small beside their mean; no worse than plain torch of the same dtypes."""
        torch.manual_seed(0)
        x, dy = (torch.randn(shape) + 3).to(dtype), torch.randn(shape).to(out)
        scale, shift = torch.randn(2, shape[1])
        leaves = [t.double().requires_grad_() for t in (x, scale, shift)]
        expected = F.layer_norm(leaves[0], shape[1:], leaves[1], leaves[2])
        expected = [expected, *torch.autograd.grad(expected, leaves, dy.double())]
        errors = []
        for module in (norm, project):
            output, mean, rstd = module.normalise(x, scale, shift, 1e-5, out)
            actual = [output, *module.normalise_backward(dy, x, mean, rstd, scale, shift, (True, True, True))]
            assert [t.dtype for t in actual] == [out, dtype, torch.float32, torch.float32]
            assert all(t.isfinite().all() for t in actual)
            errors.append([relative_error(a, b) for a, b in zip(actual, expected, strict=True) if b.abs().max() > 0])
        for kernel, plain in zip(*errors, strict=True):
            assert kernel <= 1.5 * plain + 2e-6

    @pytest.mark.parametrize("channels", [24, 100, 128, 1030])
    def test_rows_of_equal_channels(channels: int) -> None:
        """Their norm is 0, although their mean is a rounded sum."""
        x = (100 * torch.randn(20, 1, generator=torch.Generator().manual_seed(0))).expand(20, channels).contiguous()
        output, mean, _ = norm.normalise(x, None, None, 1e-5, torch.float32)
        assert not output.any() and torch.equal(mean, x[:, :1])

    def test_strided_rows_and_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
        """Each program goes through more than one tile, and the last tile is not full."""
        monkeypatch.setattr(norm, "processors", lambda device: 1)
        torch.manual_seed(0)
        x, dy = torch.randn(300, 70)[:, 3:67], torch.randn(300, 64)
        scale, shift = torch.randn(2, 64)
        for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            results = []
            for module in (norm, project):
                output, mean, rstd = module.normalise(x, scale, shift, 1e-5, torch.float32)
                results.append([output, *module.normalise_backward(dy, x, mean, rstd, scale, shift, needs)])
            for a, b in zip(*results, strict=True):
                assert (a is None) == (b is None)
                if b is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(("scaled", "shifted"), [(True, False), (False, False)])
    def test_without_scale_or_shift(scaled: bool, shifted: bool) -> None:
        torch.manual_seed(0)
        x, dy, scale = torch.randn(9, 24), torch.randn(9, 24), torch.randn(24) if scaled else None
        results = []
        for module in (norm, project):
            output, mean, rstd = module.normalise(x, scale, None, 1e-5, torch.float32)
            results.append(
                [output, *module.normalise_backward(dy, x, mean, rstd, scale, None, (True, scaled, False))[: 1 + scaled]]
            )
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_in_a_layer(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
        """A whole layer with the kernels, and with plain torch: outputs and gradients, z transposed in memory too."""
        torch.manual_seed(0)
        layer = TriangleAttention(24, 8, 2, starting=False)
        for x in layer.parameters():
            torch.nn.init.normal_(x)
        z = torch.randn(1, 3, 3, 24).requires_grad_()
        results = []
        for kernels in (True, False):
            called = []
            monkeypatch.setattr(
                project, "has_kernel", lambda rows, kernels=kernels, called=called: called.append(rows) or kernels
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = layer(z) + layer(z.transpose(1, 2)).transpose(1, 2)
            cotangent = torch.ones_like(output).normal_(generator=torch.Generator().manual_seed(1))
            results.append([output, *torch.autograd.grad(output, [z, *layer.parameters()], cotangent)])
            assert len(called) == 6  # two forwards, and two backwards that normalise again
        expected = copy.deepcopy(layer).double()
        double_z = z.detach().double().requires_grad_()
        output = expected(double_z) + expected(double_z.transpose(1, 2)).transpose(1, 2)
        truth = [output, *torch.autograd.grad(output, [double_z, *expected.parameters()], cotangent.double())]
        fused, plain = (max(map(relative_error, actual, truth)) for actual in results)
        assert fused < 3 * plain
