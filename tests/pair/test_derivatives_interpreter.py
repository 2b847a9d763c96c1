"""Every derivative that torch can ask the pair operators for, by their kernels in Triton's interpreter: right, or refused."""

from collections.abc import Callable
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

    from torch import Tensor
    from torch.autograd import forward_ad
    from torch.utils.checkpoint import checkpoint

    from evoattn.nn import Transition, TriangleMultiplication
    from evoattn.pair.multiplication import steps as multiplication_steps
    from evoattn.pair.transitions import steps as transition_steps
    from evoattn.pair.values import MultiplicationOptions, TransitionOptions
    from tests.helpers.surroundings import ALL_MODES
    from tests.pair import problems, transitions
    from tests.pair.problems import watch_steps, worst

    pytestmark = [
        pytest.mark.usefixtures("poisoned"),
        pytest.mark.filterwarnings("ignore:There is a performance drop"),
    ]

    QUICK_MODES = ("none", "torch.device", "dispatch mode")
    MODES = [pytest.param(mode, marks=[] if mode in QUICK_MODES else [pytest.mark.slow]) for mode in ALL_MODES]
    """All of them, of which some are quick: a first derivative is quick in each."""

    class Problem:
        """An operator of x, of one of its weights, and of both; the same in dense float64; a point and two directions."""

        def __init__(self, name: str) -> None:
            kind = problems if name == "multiplication" else transitions
            if name == "multiplication":
                self.weights: Any = problems.weights(16, 16, bias=True, dtype=torch.float32)
                x, _, do = problems.inputs((1,), 3, 16, torch.float32)
                self.options: Any = MultiplicationOptions(True, 1e-5, residual=True)
            else:
                self.weights = transitions.weights(16, 16, gated=True, bias=True, dtype=torch.float32)
                x, _, do = transitions.inputs((3,), 16, torch.float32)
                self.options = TransitionOptions(1e-5, residual=True)
            self.kind, self.x, self.do = kind, x.detach(), do
            self.weights = type(self.weights)(*[y.detach() for y in self.weights])
            self.named = "p_in_weight" if name == "multiplication" else "a_weight"
            self.weight: Tensor = getattr(self.weights, self.named)

        def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            weights = self.weights if weight is None else self.weights._replace(**{self.named: weight})
            return self.kind.call(x, None, weights, self.options)

        def dense(self, x: Tensor) -> Tensor:
            weights = type(self.weights)(*[y.double() for y in self.weights])
            return self.kind.dense(x.double(), None, weights, self.options)

        def loss(self, x: Tensor) -> Tensor:
            return (self(x) * self.do).sum()

        def dense_loss(self, x: Tensor) -> Tensor:
            return (self.dense(x) * self.do).sum()

    @pytest.fixture(params=["multiplication", "transition"])
    def problem(request: pytest.FixtureRequest) -> Problem:
        return Problem(request.param)

    @pytest.fixture(autouse=True)
    def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Kernels take tensors of the CPU here. The steps that ran."""
        ran = watch_steps(monkeypatch, transition_steps, "forward", "launch_backward")
        watch_steps(monkeypatch, multiplication_steps, "gate_in", "gate_in_backward")
        return ran

    @pytest.mark.parametrize("mode", ALL_MODES)
    def test_a_first_derivative_in_every_mode(problem: Problem, mode: str) -> None:
        x = problem.x.clone().requires_grad_()
        with ALL_MODES[mode](torch.device("cpu")):
            (dx,) = torch.autograd.grad(problem(x), x, problem.do)
        expected = torch.func.grad(problem.dense_loss)(problem.x)
        assert worst([dx], [expected]) < 1e-5

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("batched", [False, True])
    def test_a_second_derivative_raises_in_every_mode(problem: Problem, mode: str, batched: bool) -> None:
        """By x, by a weight, and by the cotangent alone: a gradient is linear in it, which `functional.jvp` uses."""
        x, weight, do = (y.clone().requires_grad_() for y in (problem.x, problem.weight, problem.do))
        cotangent = torch.stack([do, do]) if batched else do
        with ALL_MODES[mode](torch.device("cpu")):
            (dx,) = torch.autograd.grad(problem(x, weight), x, cotangent, create_graph=True, is_grads_batched=batched)
            for by in (x, weight, do):
                with pytest.raises(RuntimeError, match="no second derivative"):
                    torch.autograd.grad(dx.square().sum(), by, retain_graph=True)

    def test_a_second_derivative_of_a_compiled_call_raises(problem: Problem) -> None:
        """Not with AOTAutograd, which loses second derivatives of any function that saves no input."""
        x = problem.x.clone().requires_grad_()
        compiled = torch.compile(problem.__call__, backend="eager", fullgraph=True)
        (dx,) = torch.autograd.grad(compiled(x), x, problem.do, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.square().sum(), x)

    @pytest.mark.parametrize("mode", MODES)
    def test_gradients_of_many_cotangents_in_every_mode(problem: Problem, mode: str) -> None:
        x = problem.x.clone().requires_grad_()
        with ALL_MODES[mode](torch.device("cpu")):
            cotangents = torch.stack([problem.do, 2 * problem.do])
            (dx,) = torch.autograd.grad(problem(x), x, cotangents, is_grads_batched=True)
        expected = torch.func.grad(problem.dense_loss)(problem.x)
        assert worst([dx[0], dx[1]], [expected, 2 * expected]) < 1e-5

    TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor], Tensor]] = {
        "grad": lambda f, loss, x: torch.func.grad(loss)(x),
        "vjp": lambda f, loss, x: torch.func.vjp(f, x)[1](torch.ones_like(f(x)))[0],
        "jvp": lambda f, loss, x: torch.func.jvp(f, (x,), (x.sin(),))[1],
        "jacrev": lambda f, loss, x: torch.func.jacrev(f)(x),
        "jacfwd": lambda f, loss, x: torch.func.jacfwd(f)(x),
        "hessian": lambda f, loss, x: torch.func.hessian(loss)(x),
        "grad of grad": lambda f, loss, x: torch.func.grad(lambda y: torch.func.grad(loss)(y).square().sum())(x),
        "vmap": lambda f, loss, x: torch.vmap(f)(torch.stack([x, 2 * x])),
        "grads of samples": lambda f, loss, x: torch.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x])),
    }

    @pytest.mark.parametrize("mode", ["none", "torch.device"])
    @pytest.mark.parametrize("transform", TRANSFORMS)
    def test_transforms_of_torch_func_are_right(problem: Problem, transform: str, mode: str) -> None:
        """Plain torch computes them."""
        with ALL_MODES[mode](torch.device("cpu")):
            actual = TRANSFORMS[transform](problem, problem.loss, problem.x)
        expected = TRANSFORMS[transform](problem.dense, problem.dense_loss, problem.x.double())
        assert worst([actual], [expected]) < 1e-4

    @pytest.mark.parametrize("mode", ["none", "torch.device"])
    @pytest.mark.parametrize("of", ["x", "weight"])
    def test_dual_numbers_are_right(problem: Problem, of: str, mode: str) -> None:
        tangent = {"x": problem.x, "weight": problem.weight}[of].sin()
        with forward_ad.dual_level(), ALL_MODES[mode](torch.device("cpu")):
            dual = forward_ad.make_dual({"x": problem.x, "weight": problem.weight}[of], tangent)
            output = problem(dual) if of == "x" else problem(problem.x, dual)
            actual = forward_ad.unpack_dual(output).tangent
        step = {"x": (tangent, None), "weight": (0, tangent)}[of]

        def near(size: float) -> Tensor:
            moved = problem.weight if step[1] is None else problem.weight.double() + size * step[1]
            problem.weights = problem.weights._replace(**{problem.named: moved})
            return problem.dense(problem.x.double() + size * step[0])

        assert worst([actual], [(near(1e-5) - near(-1e-5)) / 2e-5]) < 1e-4

    @pytest.mark.parametrize("mode", ["none", "torch.device", "dispatch mode"])
    def test_forward_over_reverse_raises(problem: Problem, mode: str) -> None:
        x = problem.x.clone().requires_grad_()
        with ALL_MODES[mode](torch.device("cpu")):
            output = problem(x)
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="backward of layers .* no forward-mode"):
                torch.autograd.grad(output, x, forward_ad.make_dual(problem.do, problem.do))

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoints_in_every_mode(problem: Problem, reentrant: bool, mode: str) -> None:
        x = problem.x.clone().requires_grad_()
        with ALL_MODES[mode](torch.device("cpu")):
            checkpoint(problem, x, use_reentrant=reentrant).backward(problem.do)
        assert worst([x.grad], [torch.func.grad(problem.dense_loss)(problem.x)]) < 1e-5  # type: ignore[list-item]

    LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
        "outgoing": lambda **options: TriangleMultiplication(16, 16, **options),
        "SwiGLU": lambda dropout, **options: Transition(16, 1, **options),
    }

    @pytest.mark.parametrize(
        "needs", ["both", *(pytest.param(x, marks=pytest.mark.slow) for x in ("z", "parameters", "nothing"))]
    )
    @pytest.mark.parametrize(
        ("training", "residual", "dropout"), [(False, False, 0.25), (True, True, 0.25), (True, False, 0.25), (True, True, 0.0)]
    )
    @pytest.mark.parametrize("layer", LAYERS)
    def test_an_output_of_a_layer_changed_in_place(
        layer: str, training: bool, residual: bool, dropout: float, needs: str
    ) -> None:
        """With every option, and whatever has a gradient."""
        torch.manual_seed(0)
        module = (
            LAYERS[layer](residual=residual, dropout=dropout).train(training).requires_grad_(needs in ("parameters", "both"))
        )
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        z = torch.randn(1, 3, 3, 16).requires_grad_(needs in ("z", "both"))
        leaves = [x for x in (z, *module.parameters()) if x.requires_grad]
        scale, values = torch.randn(1, 3, 3, 16), []
        for in_place in (False, True):
            torch.manual_seed(1)
            output = module(z)
            output = output.mul_(scale).relu_() if in_place else (output * scale).relu()
            values.append([output.detach(), *(torch.autograd.grad(output.sum(), leaves) if leaves else ())])
        assert worst(values[1], values[0]) < 1e-6

    @pytest.mark.parametrize(
        ("needs", "mode"),
        [
            ("x", "none"),
            ("weight", "none"),
            *(pytest.param("both", mode, marks=[] if mode in QUICK_MODES else [pytest.mark.slow]) for mode in ALL_MODES),
        ],
    )
    def test_an_output_changed_in_place_in_every_mode(problem: Problem, needs: str, mode: str) -> None:
        x, weight = problem.x.clone(), problem.weight.clone()
        leaves = [y.requires_grad_() for name, y in (("x", x), ("weight", weight)) if needs in (name, "both")]
        with ALL_MODES[mode](torch.device("cpu")):
            expected = torch.autograd.grad((problem(x, weight) * problem.do).relu().sum(), leaves)
            output = problem(x, weight)
            output *= problem.do
            actual = torch.autograd.grad(output.relu_().sum(), leaves)
        assert worst(list(actual), list(expected)) < 1e-6
