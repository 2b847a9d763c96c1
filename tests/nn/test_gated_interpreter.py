"""The gate, output product and residual of triangle attention in one launch, in Triton's interpreter."""

import pytest
import torch
from torch import nn

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

    from evoattn.nn import gated
    from tests.nn.gated import SHAPES, check_kernel, check_layer

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(("shape", "hidden", "bias"), SHAPES)
    def test_the_kernel_does_the_same(shape: tuple[int, ...], hidden: int, bias: bool, dtype: torch.dtype) -> None:
        check_kernel(shape, hidden, bias, dtype, "cpu")

    @pytest.mark.parametrize(
        ("starting", "transposed"),
        [(False, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(False, False), (True, False), (True, True)])],
    )
    def test_a_layer_ends_in_one_launch(starting: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        check_layer(starting, transposed, "cpu", monkeypatch)

    def test_what_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gated, "has_kernel", lambda z: True)
        z, g, linear = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 4, 16).bfloat16(), nn.Linear(16, 16).requires_grad_(False)
        assert gated.takes(z, g, linear)
        assert not gated.takes(z, g.float(), linear) and not gated.takes(z.half(), g, linear)
        assert not gated.takes(z.transpose(1, 2), g, linear)
        assert not gated.takes(z, g, nn.Linear(16, 256).requires_grad_(False)), "wider than a program holds"
        assert not gated.takes(z, g, nn.Linear(16, 16)), "a gradient is wanted"
        assert not gated.takes(z, g, nn.Linear(16, 16).requires_grad_(False).double())
        assert not gated.takes(z, g, linear, (None, torch.ones(1, requires_grad=True))), "what o is made of wants a gradient"
        strided = nn.Linear(16, 16).requires_grad_(False)
        strided.bias = nn.Parameter(torch.randn(32)[::2], requires_grad=False)
        assert not gated.takes(z, g, strided)
        linear.register_forward_hook(lambda *_: None)
        assert not gated.takes(z, g, linear), "somebody has to see it called"
