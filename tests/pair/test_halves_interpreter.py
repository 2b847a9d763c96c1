"""Float32 inference of the pair operators by products of float16, in Triton's interpreter, against float64."""

from typing import Any

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

    from evoattn.core.numerics import products_in
    from evoattn.kit import halves
    from evoattn.nn import Transition, TriangleAttention
    from evoattn.pair import launching
    from evoattn.pair.multiplication import call as multiplication
    from evoattn.pair.multiplication import steps as multiplication_steps
    from evoattn.pair.operators import Operator
    from evoattn.pair.products import call as product_call
    from evoattn.pair.products import steps as product_steps
    from evoattn.pair.transitions import call as transition
    from evoattn.pair.values import MultiplicationOptions, TransitionOptions
    from evoattn.testing import relative_error
    from tests.pair import problems, transitions

    pytestmark = pytest.mark.usefixtures("poisoned")

    @pytest.fixture(autouse=True)
    def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Kernels take tensors of the CPU here, and few rows are many. The weights that are split."""
        split: list[Any] = []
        pack = launching.packed
        monkeypatch.setattr(launching, "FEWEST_ROWS", 1)
        monkeypatch.setattr(launching, "packed", lambda weight: split.append(weight) or pack(weight))
        problems.watch_steps(monkeypatch, multiplication_steps)
        return split

    def frozen(parameters: Any) -> Any:
        return type(parameters)(*[None if x is None else x.detach() for x in parameters])

    def doubles(parameters: Any) -> Any:
        return type(parameters)(*[None if x is None else x.double() for x in parameters])

    # channels, hidden channels, length: sizes below, at and above those of tiles
    SIZES = ((16, 24, 5), (32, 16, 16), (24, 40, 19), (16, 16, 1))
    ALL_SIZES = (
        *((sizes, True) for sizes in SIZES),
        (SIZES[0], False),
        *(pytest.param(sizes, False, marks=pytest.mark.slow) for sizes in (*SIZES[1:], (16, 16, 70))),
    )

    @pytest.mark.parametrize(("sizes", "outgoing"), ALL_SIZES, ids=str)
    def test_multiplications_are_no_further_from_float64_than_float32(
        sizes: tuple[int, int, int], outgoing: bool, launches: list[Any]
    ) -> None:
        """Half of the cases have a mask, biases, weights of the norms and the residual."""
        channels, hidden, length = sizes
        parameters = frozen(problems.weights(channels, hidden, bias=outgoing, dtype=torch.float32))
        z, mask, _ = problems.inputs((2 if length < 70 else 1,), length, channels, torch.float32)
        given = (z.detach(), mask if outgoing else None, parameters, MultiplicationOptions(outgoing, 1e-5, residual=outgoing))
        y = problems.call(*given)
        right = multiplication.reference(given[0].double(), given[1], doubles(parameters), given[3])
        plain = multiplication.reference(*given)
        assert relative_error(y, right) <= max(relative_error(plain, right), 3e-7)
        assert len(launches) == 4

    @pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "relu"])
    @pytest.mark.parametrize("sizes", [(16, 96, 70), (24, 40, 5), (32, 64, 64)], ids=str)
    def test_transitions_are_no_further_from_float64_than_float32(
        sizes: tuple[int, int, int], gated: bool, launches: list[Any]
    ) -> None:
        channels, hidden, rows = sizes
        parameters = frozen(transitions.weights(channels, hidden, gated=gated, bias=gated, dtype=torch.float32))
        x, mask, _ = transitions.inputs((rows,), channels, torch.float32)
        given = (x.detach(), mask if gated else None, parameters, TransitionOptions(1e-5, residual=gated))
        y = transitions.call(*given)
        right = transition.reference(given[0].double(), given[1], doubles(parameters), given[3])
        plain = transition.reference(*given)
        assert relative_error(y, right) <= max(relative_error(plain, right), 3e-7)
        assert len(launches) == (3 if gated else 2)

    def problem() -> tuple[Any, ...]:
        parameters = frozen(problems.weights(16, 16, bias=True, dtype=torch.float32))
        z, mask, _ = problems.inputs((1,), 9, 16, torch.float32)
        return z.detach(), mask, parameters, MultiplicationOptions(False, 1e-5, residual=True)

    def test_the_result_may_be_z() -> None:
        z, mask, parameters, options = problem()
        right, named = problems.call(z, mask, parameters, options), parameters._asdict()
        assert multiplication.triangle_multiplication(z, mask, direction="incoming", residual=True, out=z, **named) is z
        assert torch.equal(z, right)

    def test_who_is_computed_as_before(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """TF32, few rows, gradients, and other dtypes."""
        z, mask, parameters, options = problem()
        with products_in("tf32"):
            problems.call(z, mask, parameters, options)
        problems.call(z.requires_grad_(), mask, parameters, options)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            problems.call(z, mask, parameters, options)
        monkeypatch.setattr(launching, "FEWEST_ROWS", 82)
        with torch.no_grad():
            problems.call(z, mask, parameters, options)
        assert not launches

    @pytest.mark.filterwarnings("ignore:invalid value encountered")
    def test_infinities_and_nan_stay_where_float32_has_them() -> None:
        z, _, parameters, options = problem()
        z[0, 2, 3, 4], z[0, 5, 5, 1] = torch.nan, torch.inf
        y, plain = problems.call(z, None, parameters, options), multiplication.reference(z, None, parameters, options)
        assert torch.equal(y.isnan(), plain.isnan()) and y.isfinite().any()
        rows, options = z.view(-1, 16), TransitionOptions(1e-5, residual=False)
        given = frozen(transitions.weights(16, 32, gated=True, bias=True, dtype=torch.float32))
        y, plain = transitions.call(rows, None, given, options), transition.reference(rows, None, given, options)
        assert torch.equal(y.isnan(), plain.isnan())

    @pytest.mark.parametrize("kind", ["heavy tails", "rows of all sizes"])
    def test_squares_of_numbers_of_all_sizes(kind: str) -> None:
        """Each row of both halves has its own unit. Squares are several, and not of whole tiles."""
        rng = torch.Generator().manual_seed(6)
        ab = torch.randn(6, 2, 80, 80, generator=rng)
        ab = ab * (torch.exp(3 * torch.randn(ab.shape, generator=rng)) if kind == "heavy tails" else 1)
        ab = ab * (torch.logspace(-18, 18, 80)[:, None] if kind == "rows of all sizes" else 1)
        right, plain = ab[:3].double() @ ab[3:].double().mT, ab[:3] @ ab[3:].mT
        size = ab[:3].double().norm(dim=-1)[..., None] * ab[3:].double().norm(dim=-1)[..., None, :]
        y = product_steps.multiply_squares(ab.clone())
        errors = [((x - right) / size).square().mean().sqrt().item() for x in (y, plain)]
        assert errors[0] <= max(errors[1], 2.0**-24)

    def test_a_weight_is_packed_in_as_many_numbers() -> None:
        w = torch.randn(24, 40)
        memory = launching.packed(w)
        assert memory.shape == w.shape and memory.dtype == torch.float32
        hi, lo = memory.view(-1).view(torch.float16).double().view(2, *w.shape)
        unit = memory.as_strided((24, 1), (1, 1), w.numel()).double()
        assert relative_error(unit * (hi + lo / 2048), w.double()) < 1e-7
        assert halves.PRECISION == "float16x3"

    @pytest.fixture
    def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Products of layers go to the kernels, small ones too. The shapes of their weights."""
        shapes: list[Any] = []
        run_product = product_steps.product

        def watched(x: Any, w: Any, *arguments: Any, **named: Any) -> torch.Tensor:
            shapes.append(tuple(w.hi.shape))
            return run_product(x, w, *arguments, **named)

        monkeypatch.setattr(product_steps, "product", watched)
        monkeypatch.setattr(product_call, "takes", lambda *_: True)
        monkeypatch.setattr(product_call, "_OLDEST", (0, 0))
        monkeypatch.setattr(product_call, "SMALLEST", 1)
        return shapes

    @pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
    def test_a_triangle_attention_projects_by_the_kernels(starting: bool, taken: list[Any]) -> None:
        """Norm, queries, keys, values, gates and the pair bias in one product, and the output in another."""
        torch.manual_seed(1)
        layer = TriangleAttention(16, 8, 4, starting=starting, residual=True)
        for x in layer.parameters():
            torch.nn.init.normal_(x, std=0.3)
        z, mask, _ = problems.inputs((1,), 9, 16, torch.float32)
        with torch.no_grad():
            y = layer(z, mask)
            shapes = list(taken)
            right = layer.double()(z.double(), mask.double())
        assert shapes == [(132, 16), (16, 32)]
        assert relative_error(y, right) < 5e-7

    @pytest.mark.parametrize("activation", ["relu", "swiglu"])
    def test_a_wide_transition_multiplies_by_the_kernels(
        activation: str, taken: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Operator, "has_kernels", lambda *_: False)
        layer = Transition(32, activation=activation)
        for x in layer.parameters():
            torch.nn.init.normal_(x, std=0.3)
        x, _, _ = transitions.inputs((2, 9), 32, torch.float32)
        with torch.no_grad():
            y = layer(x)
            shapes = list(taken)
            right = layer.double()(x.double())
        assert shapes == [(128, 32)] * (1 if activation == "relu" else 2) + [(32, 128)]
        assert relative_error(y, right) < 5e-7

    def test_what_layers_leave_to_torch(taken: list[Any]) -> None:
        x, w, b = torch.randn(5, 16), torch.randn(8, 16), torch.randn(8)
        assert product_call.linear_of_layer(x, w, b) is not None
        with products_in("tf32"):
            assert product_call.linear_of_layer(x, w, b) is None
        assert product_call.linear_of_layer(x, w, b, gate=torch.randn(5, 16, requires_grad=True)) is None
        assert product_call.linear_of_layer(x, w, b, norm=(b.bfloat16(), b, 1e-5)) is None

    def test_gates_and_norms_of_any_strides(taken: list[Any]) -> None:
        """A gate from a convolution has its channels first. A norm may be a column of a stack."""
        x, w, gate = torch.randn(6, 16), torch.randn(8, 16), torch.randn(16, 6).t()
        stack = torch.randn(16, 3)
        results = [product_call.linear_of_layer(x, w, None, gate=g) for g in (gate, gate.contiguous())]
        column = stack[:, 1]
        results += [product_call.linear_of_layer(x, w, None, norm=(y, None, 1e-5)) for y in (column, column.contiguous())]
        assert all(y is not None for y in results)
        assert torch.equal(*results[:2]) and torch.equal(*results[2:])  # type: ignore[arg-type]

    @pytest.mark.parametrize("which", ["weight and bias", "weight", "bias", "neither"])
    def test_norms_without_weight_or_bias(which: str, taken: list[Any]) -> None:
        x, w = torch.randn(7, 24), torch.randn(8, 24)
        weight, bias = (torch.randn(24) if name in which else None for name in ("weight", "bias"))
        y = product_call.linear_of_layer(x, w, None, norm=(weight, bias, 1e-5))
        affine = (None if z is None else z.double() for z in (weight, bias))
        assert y is not None
        assert relative_error(y, F.layer_norm(x.double(), (24,), *affine) @ w.double().T) < 4e-7
