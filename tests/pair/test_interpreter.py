"""The kernels of triangle multiplication in Triton's interpreter, against the same steps in plain torch."""

import pytest
import torch
from torch import Tensor

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

    from evoattn.pair import autograd, torch_steps, triton_steps
    from evoattn.pair.values import Options, Weights
    from evoattn.testing import relative_error
    from tests.pair.problems import inputs, weights

    pytestmark = pytest.mark.usefixtures("poisoned")

    TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
    # channels, hidden channels, length, batch: padded to 8 and 16, sizes that fill no tile, and one that fills all
    SIZES = ((16, 16, 9, 2), (24, 40, 5, 1), (32, 16, 8, 1))

    def step(steps: object, dtype: torch.dtype, sizes: tuple[int, ...], direction: str, needs_weights: bool) -> list[Tensor]:
        """The result, and the gradients of z and of the weights. Half of the cases have a mask, biases and the residual."""
        channels, hidden, length, batch = sizes
        whole = direction == "outgoing"
        given = weights(channels, hidden, bias=whole, dtype=torch.float32)
        given = Weights(*[x if x is None else x.detach().to(dtype if x.ndim == 2 else torch.float32) for x in given])
        if steps is torch_steps:  # it wants biases of the products' dtype
            given = Weights(
                *[x if x is None or "norm" in name else x.to(dtype) for name, x in zip(Weights._fields, given, strict=True)]
            )
        z, mask, do = (x.detach() for x in inputs((batch,), length, channels, torch.float32))
        options = Options(whole, 1e-5, residual=whole)
        mask = mask if whole else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(autograd, "_steps", lambda z, weights: steps)
            made, ab, t = autograd.forward(z, mask, given, options)
            dz, found = autograd.backward(do.to(made.dtype), z, mask, ab, t, given, options, needs_weights)
        assert (found is not None) == needs_weights
        return [made, dz, *[x for x in found or () if x is not None]]

    @pytest.mark.parametrize("dtype", list(TOLERANCE))
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    @pytest.mark.parametrize("direction", ["outgoing", "incoming"])
    def test_steps(dtype: torch.dtype, sizes: tuple[int, ...], direction: str) -> None:
        found, wanted = (step(steps, dtype, sizes, direction, True) for steps in (triton_steps, torch_steps))
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted]
        for x, y in zip(found, wanted, strict=True):
            assert x.isfinite().all() and relative_error(x, y.double()) < TOLERANCE[dtype]

    def test_the_gradient_of_z_alone_is_the_same() -> None:
        both, alone = (step(triton_steps, torch.float32, SIZES[0], "outgoing", needs) for needs in (True, False))
        assert len(alone) == 2 and torch.equal(alone[1], both[1])
