"""Triangle multiplication by its kernels in Triton's interpreter: against float64, and as torch's operator."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

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

    from evoattn.pair import Split, triangle_multiplication
    from evoattn.pair.multiplication import steps
    from evoattn.pair.values import MultiplicationOptions as Options
    from evoattn.pair.values import MultiplicationWeights as Weights
    from tests.pair.problems import call, differentiated, inputs, truth, watch_steps, weights, worst

    pytestmark = pytest.mark.usefixtures("poisoned")

    TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
    # channels, hidden channels, length, batch: sides are padded to 8 and 16; sizes that fill no tile, and some that fill all
    SIZES = ((16, 16, 9, 2), (24, 40, 5, 1), (32, 16, 8, 1))

    @pytest.fixture(autouse=True)
    def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Kernels take tensors of the CPU here. The steps that ran."""
        return watch_steps(monkeypatch, steps, "gate_in", "gate_out", "gate_out_backward", "gate_in_backward")

    CASES = [(dtype, SIZES[0]) for dtype in TOLERANCE] + [(torch.float32, sizes) for sizes in SIZES[1:]]
    BOTH_WAYS = [(*case, outgoing) for outgoing in (True, False) for case in CASES]
    """Quick: the outgoing ones, and one that is incoming."""

    @pytest.mark.parametrize(
        ("dtype", "sizes", "outgoing"),
        [pytest.param(*x, marks=pytest.mark.slow if i > len(CASES) else []) for i, x in enumerate(BOTH_WAYS)],
        ids=str,
    )
    def test_multiplication_kernels_agree_with_float64(
        dtype: torch.dtype, sizes: tuple[int, ...], outgoing: bool, launches: list[str]
    ) -> None:
        """Half of the cases have a mask, biases, weights of norms and the residual."""
        channels, hidden, length, batch = sizes
        parameters = weights(channels, hidden, bias=outgoing, dtype=dtype)
        z, mask, do = inputs((batch,), length, channels, dtype)
        options = Options(outgoing, 1e-5, residual=outgoing)
        actual = differentiated(call(z, mask if outgoing else None, parameters, options), z, parameters, do)
        assert {x.dtype for x in actual} == {dtype}
        assert worst(actual, truth(z, mask if outgoing else None, parameters, options, do)) < TOLERANCE[dtype]
        assert launches == ["gate_in", "gate_out", "gate_out_backward", "gate_in_backward"]

    def problem() -> tuple[Any, ...]:
        """z in float32 beside products in float32, a mask, biases, the residual: arguments of `call`, and a cotangent."""
        parameters, (z, mask, do) = weights(16, 16, bias=True, dtype=torch.float32), inputs((1,), 5, 16, torch.float32)
        return (z, mask, parameters, Options(True, 1e-5, residual=True)), do

    def test_autocast() -> None:
        (z, mask, parameters, options), do = problem()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(z, mask, parameters, options)
        actual = differentiated(out, z, parameters, do)
        assert {x.dtype for x in actual} == {torch.float32}
        assert worst(actual, truth(z, mask, parameters, options, do)) < 2e-2

    def test_frozen_weights(launches: list[str]) -> None:
        """The gradient of z is the same bit for bit, and nothing is made for the weights."""
        (z, mask, parameters, options), do = problem()
        both = differentiated(call(z, mask, parameters, options), z, parameters, do)[1]
        frozen: Any = [x.detach() for x in parameters]
        (gradient,) = torch.autograd.grad(call(z, mask, Weights(*frozen), options), z, do)
        assert torch.equal(gradient, both)

    def test_weights_of_any_strides() -> None:
        (z, mask, parameters, options), do = problem()
        turned: Any = [x if x.ndim == 1 else x.detach().t().contiguous().t().requires_grad_() for x in parameters]
        actual = differentiated(call(z, mask, Weights(*turned), options), z, Weights(*turned), do)
        assert worst(actual, truth(z, mask, parameters, options, do)) < 2e-6

    @pytest.mark.parametrize("contiguous", [True, False])
    def test_into_z_itself(launches: list[str], contiguous: bool) -> None:
        (z, mask, parameters, _), _ = problem()
        z = z.detach() if contiguous else z.detach().transpose(1, 2).contiguous().transpose(1, 2)
        frozen: Any = {name: x.detach() for name, x in parameters._asdict().items()}
        right = triangle_multiplication(z, mask, residual=True, **frozen)
        output = triangle_multiplication(z, mask, residual=True, out=z, **frozen)
        assert output is z and torch.equal(z, right)
        assert launches == ["gate_in", "gate_out"] * 2

    def test_autograd_learns_that_z_was_written() -> None:
        (z, mask, parameters, _), _ = problem()
        frozen: Any = {name: x.detach() for name, x in parameters._asdict().items()}
        z = z.exp()  # which keeps its result for its gradient
        with torch.no_grad():
            triangle_multiplication(z, mask, residual=True, out=z, **frozen)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    def test_into_memory_that_overlaps_z() -> None:
        (z, mask, parameters, _), _ = problem()
        frozen: Any = {name: x.detach() for name, x in parameters._asdict().items()}
        memory = torch.cat([z.detach().flatten(), torch.zeros(16)])
        z, out = memory[:-16].view(z.shape), memory[16:].view(z.shape)
        right = triangle_multiplication(z, mask, residual=True, **frozen)
        assert torch.equal(triangle_multiplication(z, mask, residual=True, out=out, **frozen), right)

    def test_torch_compile_sees_one_operator(launches: list[str]) -> None:
        (z, mask, parameters, options), do = problem()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        actual = differentiated(compiled(z, mask, parameters, options), z, parameters, do)
        assert worst(actual, truth(z, mask, parameters, options, do)) < 2e-6
        assert len(launches) == 4

    @pytest.mark.parametrize("channels", [24, pytest.param(100, marks=pytest.mark.slow)])
    def test_rows_of_equal_channels(channels: int) -> None:
        """The norm of each of z is 0, and so is that of the product, whose channels are equal too. The update is the bias."""
        parameters = weights(channels, channels, bias=True, dtype=torch.float32)
        ones: Any = {name: torch.ones_like(x) for name, x in parameters._asdict().items() if name[1:].startswith("_in")}
        plain: Any = {"norm_in_weight": None, "norm_in_bias": None, "norm_out_weight": None, "norm_out_bias": None}
        parameters = parameters._replace(**ones, **plain)
        z = 100 * torch.randn(1, 5, 5, 1, generator=torch.Generator().manual_seed(1)).expand(1, 5, 5, channels).contiguous()
        actual = call(z, None, parameters, Options(True, 1e-5, residual=False))
        wanted = parameters.p_out_bias * parameters.g_out_bias.sigmoid()  # type: ignore[operator, union-attr]
        torch.testing.assert_close(actual, wanted.expand(z.shape), rtol=1e-6, atol=1e-6)

    def test_the_operators_are_well_defined() -> None:
        (z, mask, parameters, _), _ = problem()
        operators = torch.ops.evoattn
        square = (z, mask, *parameters, True, 1e-5, True)
        torch.library.opcheck(operators.triangle_multiplication.default, square)
        out, ab, t = operators.triangle_multiplication.default(*square)
        saved = [x.detach() for x in (torch.randn_like(out), z, mask, ab, t, *parameters)]
        checks = ("test_schema", "test_faketensor")  # it has no derivative
        backward = operators.triangle_multiplication_backward.default
        torch.library.opcheck(backward, (*saved, True, 1e-5, True, True), test_utils=checks)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_many_cotangents_at_once() -> None:
        (z, mask, parameters, options), do = problem()
        (dz,) = torch.autograd.grad(call(z, mask, parameters, options), z, torch.stack([do, 2 * do]), is_grads_batched=True)
        expected = truth(z, mask, parameters, options, do)[1]
        assert worst([dz[0], dz[1]], [expected, 2 * expected]) < 2e-6

    def test_a_second_derivative_raises() -> None:
        (z, mask, parameters, options), do = problem()
        (dz,) = torch.autograd.grad(call(z, mask, parameters, options), z, do, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dz.sum(), z)

    def test_the_halves_are_freed_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
        """Before the result is allocated."""
        import weakref

        halves: list[Any] = []
        make, finish = steps.gate_in, steps.gate_out

        def kept(*arguments: Any) -> torch.Tensor:
            output = make(*arguments)
            halves.append(weakref.ref(output))
            return output

        def finished(*arguments: Any) -> torch.Tensor:
            halves.append(halves[-1]() is None)
            return finish(*arguments)

        monkeypatch.setattr(steps, "gate_in", kept)
        monkeypatch.setattr(steps, "gate_out", finished)
        (z, mask, parameters, options), _ = problem()
        with torch.no_grad():
            call(z, mask, parameters, options)
        call(z, mask, parameters, options)
        assert [halves[1], halves[3]] == [True, False]

    @pytest.fixture
    def group() -> Iterator[Any]:
        """A group of this process alone."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()

    @pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
    @pytest.mark.parametrize(
        ("outgoing", "axis"),
        [(True, -3), (False, -2), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(True, -2), (False, -3)])],
    )
    def test_the_part_of_a_process(outgoing: bool, axis: int, group: Any, launches: list[str]) -> None:
        """Kernels take the positions of a part as squares of side 1. The part here is the whole."""
        parameters, (z, mask, do) = weights(16, 24, bias=outgoing, dtype=torch.float32), inputs((2,), 9, 16, torch.float32)
        options, split = Options(outgoing, 1e-5, residual=outgoing), Split(group, axis, 9)
        named: Any = {"direction": "outgoing" if outgoing else "incoming", "residual": outgoing, "split": split}
        actual = differentiated(triangle_multiplication(z, mask, **named, **parameters._asdict()), z, parameters, do)
        assert worst(actual, truth(z, mask, parameters, options, do)) < 2e-6
        frozen = {name: x if x is None else x.detach() for name, x in parameters._asdict().items()}
        z = z.detach().clone()
        output = triangle_multiplication(z, mask, **named, **frozen, out=z)  # type: ignore[arg-type]
        assert output is z and torch.equal(output, actual[0])
        assert launches == ["gate_in", "gate_out", "gate_out_backward", "gate_in_backward", "gate_in", "gate_out"]
