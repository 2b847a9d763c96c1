"""The transition by its kernels in Triton's interpreter: against float64, and as torch's operator."""

from typing import Any

import pytest
import torch

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

    import evoattn.pair
    from evoattn.pair.transitions import steps
    from evoattn.pair.values import TransitionOptions as Options
    from evoattn.pair.values import TransitionWeights as Weights
    from tests.pair.problems import differentiated, watch_steps, worst
    from tests.pair.transitions import call, inputs, is_close, truth, weights

    pytestmark = pytest.mark.usefixtures("poisoned")

    DTYPES = (torch.float32, torch.bfloat16, torch.float16)
    # channels, hidden channels, shape of the rows: sizes that fill no tile, and some that fill all
    SIZES = ((16, 96, (2, 70)), (24, 40, (5,)), (32, 64, (64,)))

    @pytest.fixture(autouse=True)
    def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Kernels take tensors of the CPU here. The steps that ran."""
        return watch_steps(monkeypatch, steps, "forward", "launch_backward")

    CASES = [(dtype, SIZES[0]) for dtype in DTYPES] + [(torch.float32, sizes) for sizes in SIZES[1:]]

    @pytest.mark.parametrize(("dtype", "sizes"), CASES, ids=str)
    @pytest.mark.parametrize(
        ("gated", "bias"),
        [
            pytest.param(True, True, id="swiglu-bias"),
            pytest.param(False, False, id="relu-plain"),
            pytest.param(True, False, id="swiglu-plain", marks=pytest.mark.slow),
            pytest.param(False, True, id="relu-bias", marks=pytest.mark.slow),
        ],
    )
    def test_transition_kernels_agree_with_float64(
        dtype: torch.dtype, sizes: tuple[Any, ...], gated: bool, bias: bool, launches: list[str]
    ) -> None:
        """Half of the cases have a mask, biases, weights of the norm and the residual."""
        channels, hidden, shape = sizes
        parameters = weights(channels, hidden, gated=gated, bias=bias, dtype=dtype)
        x, mask, do = inputs(shape, channels, dtype)
        options = Options(1e-5, residual=bias)
        actual = differentiated(call(x, mask if bias else None, parameters, options), x, parameters, do)
        assert {y.dtype for y in actual} == {dtype}
        assert is_close(actual, x, mask if bias else None, parameters, options, do)
        assert launches == ["forward", "launch_backward"]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_chunks_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
        """The last one is smaller."""
        monkeypatch.setattr(steps, "CHUNK", 64)
        parameters = weights(16, 32, gated=True, bias=True, dtype=dtype)
        x, mask, do = inputs((150,), 16, dtype)
        options = Options(1e-5, residual=True)
        actual = differentiated(call(x, mask, parameters, options), x, parameters, do)
        assert {y.dtype for y in actual} == {dtype}
        assert is_close(actual, x, mask, parameters, options, do)
        assert launches == ["forward", "launch_backward", "launch_backward", "launch_backward"]

    def problem(gated: bool = True) -> tuple[Any, ...]:
        """x in float32 beside products in float32, a mask, biases, the residual: arguments of `call`, and a cotangent."""
        parameters = weights(16, 32, gated=gated, bias=True, dtype=torch.float32)
        x, mask, do = inputs((9, 2), 16, torch.float32)
        return (x, mask, parameters, Options(1e-5, residual=True)), do

    def test_autocast() -> None:
        (x, mask, parameters, options), do = problem()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x, mask, parameters, options)
        actual = differentiated(out, x, parameters, do)
        assert {y.dtype for y in actual} == {torch.float32}
        assert worst(actual, truth(x, mask, parameters, options, do)) < 2e-2

    def test_one_bias_of_two() -> None:
        (x, mask, parameters, options), do = problem()
        parameters = parameters._replace(b_bias=None, norm_bias=None)
        actual = differentiated(call(x, mask, parameters, options), x, parameters, do)
        assert worst(actual, truth(x, mask, parameters, options, do)) < 2e-6

    @pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_large_hidden_values(dtype: torch.dtype) -> None:
        """silu and its derivative are finite where exp is not."""
        (x, mask, parameters, options), do = problem()
        larger = parameters._replace(a_weight=1e3 * parameters.a_weight)
        parameters = Weights(*[y.detach().to(dtype).requires_grad_() for y in larger])  # type: ignore[union-attr]
        x = x.detach().to(dtype).requires_grad_()
        actual = differentiated(call(x, mask, parameters, options), x, parameters, do)
        assert is_close(actual, x, mask, parameters, options, do)

    def test_frozen_weights(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """The gradient of x is the same bit for bit, and nothing is made for the weights."""
        (x, mask, parameters, options), do = problem()
        both = differentiated(call(x, mask, parameters, options), x, parameters, do)[1]
        monkeypatch.setattr(steps, "with_weights", None)
        frozen: Any = [y.detach() for y in parameters]
        (gradient,) = torch.autograd.grad(call(x, mask, Weights(*frozen), options), x, do)
        assert torch.equal(gradient, both)

    @pytest.mark.parametrize("contiguous", [True, False])
    def test_into_x_itself(launches: list[str], contiguous: bool) -> None:
        (x, mask, parameters, _), _ = problem()
        x = x.detach() if contiguous else x.detach().transpose(0, 1).contiguous().transpose(0, 1)
        frozen: Any = {name: y.detach() for name, y in parameters._asdict().items()}
        right = evoattn.pair.transition(x, mask, residual=True, **frozen)
        assert evoattn.pair.transition(x, mask, residual=True, out=x, **frozen) is x
        assert torch.equal(x, right)
        assert launches == ["forward", "forward"]

    @pytest.mark.parametrize("shared", ["mask", "a_bias"])
    def test_into_x_that_shares_memory_with_what_is_read(shared: str) -> None:
        """A program would read what another one has written."""
        parameters = weights(16, 32, gated=True, bias=True, dtype=torch.float32)
        x, mask, _ = (y.detach() for y in inputs((150,), 16, torch.float32))
        frozen: Any = {name: y.detach() for name, y in parameters._asdict().items()}
        frozen["mask"] = mask
        frozen[shared] = x.flatten()[: frozen[shared].numel()]
        copies = {name: y.clone() for name, y in frozen.items()}
        right = evoattn.pair.transition(x.clone(), residual=True, **copies)
        assert torch.equal(evoattn.pair.transition(x, residual=True, out=x, **frozen), right)

    def test_into_x_without_a_copy() -> None:
        (x, mask, parameters, options), _ = problem()
        rows, factors = x.detach().flatten(0, 1), mask.flatten()
        assert steps.forward(rows, factors, parameters, options, out=rows)[0] is rows

    @pytest.mark.parametrize("size", [1.0, *(pytest.param(size, marks=pytest.mark.slow) for size in (100.0, 1e6))])
    @pytest.mark.parametrize("channels", [16, 24, 64, 100, 128])
    def test_rows_of_equal_channels(channels: int, size: float) -> None:
        """Their norm is 0, and so is the gradient through ReLU. Their mean is a rounded sum."""
        rng = torch.Generator().manual_seed(1)
        x = (size * torch.randn(20, 1, generator=rng)).expand(20, channels).contiguous().requires_grad_()
        a, out = torch.randn(32, channels, generator=rng), torch.randn(channels, 32, generator=rng)
        y = evoattn.pair.transition(x, activation="relu", a_weight=a, out_weight=out)
        (dx,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=rng))
        assert not y.any() and not dx.any()

    def test_only_x_and_weights_are_saved() -> None:
        (x, mask, parameters, options), _ = problem()
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
            call(x, mask, parameters, options)
        assert {y.data_ptr() for y in saved} == {y.data_ptr() for y in (x, mask, *parameters)}

    def test_weights_of_any_strides() -> None:
        (x, mask, parameters, options), do = problem()
        turned: Any = [y if y.ndim == 1 else y.detach().t().contiguous().t().requires_grad_() for y in parameters]
        actual = differentiated(call(x, mask, Weights(*turned), options), x, Weights(*turned), do)
        assert worst(actual, truth(x, mask, parameters, options, do)) < 2e-6

    @pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
    def test_torch_compile_sees_one_operator(gated: bool, launches: list[str]) -> None:
        (x, mask, parameters, options), do = problem(gated)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        actual = differentiated(compiled(x, mask, parameters, options), x, parameters, do)
        assert worst(actual, truth(x, mask, parameters, options, do)) < 2e-6
        assert launches == ["forward", "launch_backward"]

    @pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
    def test_the_operators_are_well_defined(gated: bool) -> None:
        (x, mask, parameters, _), _ = problem(gated)
        operators = torch.ops.evoattn
        rows = (x.detach().flatten(0, 1).requires_grad_(), mask.flatten(), *parameters, 1e-5, True)
        torch.library.opcheck(operators.transition.default, rows)
        saved = [y if y is None else y.detach() for y in (torch.randn_like(rows[0]), *rows[:2], *parameters)]
        checks = ("test_schema", "test_faketensor")  # it has no derivative
        torch.library.opcheck(operators.transition_backward.default, (*saved, 1e-5, True, True), test_utils=checks)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_many_cotangents_at_once() -> None:
        (x, mask, parameters, options), do = problem()
        (dx,) = torch.autograd.grad(call(x, mask, parameters, options), x, torch.stack([do, 2 * do]), is_grads_batched=True)
        expected = truth(x, mask, parameters, options, do)[1]
        assert worst([dx[0], dx[1]], [expected, 2 * expected]) < 2e-6

    def test_a_second_derivative_raises() -> None:
        (x, mask, parameters, options), do = problem()
        (dx,) = torch.autograd.grad(call(x, mask, parameters, options), x, do, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.sum(), x)
