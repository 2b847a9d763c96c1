"""torch's default dtype changes no result and no planned memory."""

import ast
import dataclasses
import os
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layer_ways import inputs_of as layer_of
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.backends import Cotangents, Inputs
from evoattn.bench.attentions import inputs_of
from evoattn.bench.contender import Runner
from evoattn.bench.peers import PEERS
from evoattn.clients import calls, rf3
from evoattn.clients import openfold as openfold_client
from evoattn.clients.site import Count
from evoattn.compat import openfold
from evoattn.compat.cuequivariance import triangle_attention
from evoattn.compat.deepspeed import DS4Sci_EvoformerAttention
from evoattn.core.layouts import empty_outputs
from evoattn.empty_rows import means
from evoattn.workloads import Workload

DTYPES = [torch.bfloat16, torch.float16, torch.float64]
CASE = testing.Case(
    "default", n=3, h=2, lq=9, lk=11, d=8, mask="random", mask_bias="finite", pair_bias="b1hqk", lse_gradient=True
)
FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "scalar_tensor", "rand", "randn"}
FACTORIES |= {"linspace", "logspace", "eye"}
SOURCES = pathlib.Path(evoattn.__file__).parent


@pytest.fixture(params=DTYPES, ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that sets another default dtype; the test leaves the one that it found."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def equal(actual: Any, expected: Any) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("huge", [False, True], ids=["usual", "huge"])
def test_a_backend_gives_the_same_bits(backend: str, dtype: torch.dtype, huge: bool, other_default: Any) -> None:
    inputs = dataclasses.replace(CASE, dtype=dtype).make(seed=1)
    if huge and inputs.pair_bias is not None:
        inputs.pair_bias[..., 2, :] = -1e4
    expected = testing.run(inputs, backend).values
    other_default()
    actual = testing.run(inputs, backend).values
    equal(actual.values(), expected.values())


def test_the_same_numbers_are_drawn(other_default: Any) -> None:
    expected = CASE.make(seed=1)
    other_default()
    inputs = CASE.make(seed=1)
    for name in ("q", "mask", "mask_bias", "pair_bias", "do", "dlse"):
        equal([getattr(inputs, name)], [getattr(expected, name)])


def test_clients_make_the_same_masks(other_default: Any) -> None:
    """A mask of float16 would hold -inf for -1e9. One of float64 is refused by the `hopper` backend."""
    q = CASE.make(seed=1).q.transpose(2, 3)
    mask = torch.rand((*q.shape[:2], 1, 1, 9), generator=torch.Generator().manual_seed(1), dtype=torch.float64) > 0.4
    mask[:, 1] = False
    kernel = calls.kernel(None, Count())  # type: ignore[arg-type]
    flash = openfold_client.flash(None, Count())

    def masks() -> list[Tensor]:
        return [calls.additive_mask(mask), kernel(q, q, q, None, mask), flash(q, q, q, mask[:, :, 0, 0])]

    expected = masks()
    other_default()
    equal(masks(), expected)


def test_windows_of_atoms_have_the_same_mask(monkeypatch: pytest.MonkeyPatch, other_default: Any) -> None:
    def seen(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], **options: Any) -> Tensor:
        masks.append(biases[0])
        return q

    masks: list[Tensor] = []
    monkeypatch.setattr(rf3, "attention", seen)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 4))

    layer = types.SimpleNamespace(to_q=heads, to_k=heads, to_v=heads, to_g=heads, to_b=lambda z: z[..., :2], ln_0=lambda z: z)
    vars(layer).update(to_a=lambda x: x, linear_output_project=lambda s: s, kq_norm=False)
    a = torch.ones(1, 40, 8, dtype=torch.float32)
    forward = rf3.atoms(None, Count())
    for prepare in (lambda: None, other_default):
        prepare()
        forward(layer, a, a[0], torch.ones(40, 40, 8, dtype=torch.float32))
    equal(masks[:1], masks[1:])
    assert masks[0].isinf().any() and not masks[0].isinf().all()


def test_benchmarks_measure_the_same_problem(other_default: Any) -> None:
    """Inputs, weights and masks of problems and of layers, and dense attention with a mask."""
    cpu = torch.device("cpu")
    attention = Workload("x", 1, 3, 2, 5, 5, 8, True, True, "")
    triangle = dataclasses.replace(attention, n=5, layer="triangle")

    def make_problem() -> list[Tensor]:
        inputs = inputs_of(attention, torch.bfloat16, cpu)
        layer = layer_of(triangle, torch.float32, cpu)
        tensors = [inputs.q, inputs.mask, inputs.do, *layer.inputs.values(), layer.mask, *layer.module.parameters()]
        masked = dataclasses.replace(inputs, q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float(), pair_bias=None)
        return [x for x in [*tensors, Runner(PEERS["dense"], masked).forward()] if x is not None]

    expected = make_problem()
    assert all(x.isfinite().all() for x in expected)
    other_default()
    equal(make_problem(), expected)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=rng, dtype=torch.float32).requires_grad_() for shape in shapes]


def results(call: Any, *inputs: Tensor) -> list[Tensor]:
    o = call(*inputs)
    return [o, *torch.autograd.grad(o.square().sum(), inputs)]


def of_openfold(q: Tensor, k: Tensor, v: Tensor, pair: Tensor) -> Tensor:
    mask = torch.zeros(1, 2, 1, 1, 11, dtype=torch.float32)
    mask[:, 0] = -1e9
    return openfold.attention(q, k, v, [mask, pair])


def of_pairs(q: Tensor, k: Tensor, v: Tensor, pair: Tensor) -> Tensor:
    mask = torch.zeros(1, 2, 1, 9, 11, dtype=torch.float32)
    mask[..., 3, :] = -1e9
    return openfold.attention(q, k, v, [mask, pair])


def of_deepspeed(q: Tensor, k: Tensor, v: Tensor, pair: Tensor) -> Tensor:
    mask = torch.zeros(1, 2, 1, 1, 11, dtype=torch.float32)
    mask[:, 0] = -1e9
    return DS4Sci_EvoformerAttention(*(x.transpose(2, 3) for x in (q, k, v)), [mask, pair])


def of_cuequivariance(q: Tensor, k: Tensor, v: Tensor, pair: Tensor) -> Tensor:
    mask = torch.ones(1, 2, 1, 1, 11, dtype=torch.bool)
    mask[:, 0] = False
    output = triangle_attention(q, k, v, pair, mask=mask, return_aux=True)
    return output[0] + triangle_attention(q, k, v, pair, mask=mask) + output[1].detach()[..., None]


@pytest.mark.parametrize("call", [of_openfold, of_pairs, of_deepspeed, of_cuequivariance])
def test_a_drop_in_gives_the_same_bits_in_empty_rows(call: Any, other_default: Any) -> None:
    inputs = leaves((1, 2, 4, 9, 8), (1, 2, 4, 11, 8), (1, 2, 4, 11, 8), (1, 1, 4, 9, 11))
    expected = results(call, *inputs)
    other_default()
    equal(results(call, *inputs), expected)


def test_the_mask_for_kernels_is_float32(monkeypatch: pytest.MonkeyPatch, other_default: Any) -> None:
    """Kernels take no float64 mask bias, so a default of float64 must not make one."""
    seen: list[torch.dtype] = []

    def accept(*arguments: Any) -> bool:
        seen.append(arguments[3].dtype)
        return False

    monkeypatch.setattr(means, "has_kernels", lambda device: True)
    monkeypatch.setattr(means, "kernels_take", accept)
    other_default()
    of_cuequivariance(*leaves((1, 2, 4, 9, 8), (1, 2, 4, 11, 8), (1, 2, 4, 11, 8), (1, 1, 4, 9, 11)))
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [8, 32])
@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16], ids=str)
def test_hopper_plans_the_same_room(
    deterministic: bool, d: int, bias: torch.dtype, monkeypatch: pytest.MonkeyPatch, other_default: Any
) -> None:
    """Its kernels write statistics and parts of gradients as float32, whatever torch's default is."""
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from evoattn.backends.hopper import backward_launches, backward_plan, forward_plan, launch, planner

    rooms: list[int] = []
    numbers: list[float] = []
    add = planner.Workspace.add

    def noted(self: Any, x: Tensor | None) -> int:
        rooms.append(0 if x is None else x.nbytes)
        return add(self, x)

    def compiled(kernel: Any) -> Any:
        return lambda *arguments: numbers.extend(x for x in arguments if isinstance(x, float))

    monkeypatch.setattr(launch, "load_kernel", compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(backward_launches, "resident_clusters", lambda *arguments: 66)
    monkeypatch.setattr(planner.Workspace, "add", noted)
    q, k, v = (torch.zeros(1, 8, 2, 200, d, dtype=torch.bfloat16) for _ in range(3))
    pair = torch.zeros(1, 2, 200, 200, dtype=bias)
    out = empty_outputs(Inputs(q, k, v), "bnhld")
    needs = (True, True, True, False, True, False)
    inputs, cotangents = Inputs(q, k, v, pair_bias=pair), Cotangents(out.o)

    def planned() -> tuple[list[int], list[float]]:
        rooms.clear()
        numbers.clear()
        forward_plan.plan_forward(inputs, scale=0.17, layout="bnhld").run(inputs, out)
        options: dict[str, Any] = {"scale": 0.17, "layout": "bnhld", "needs": needs, "deterministic": deterministic}
        plan = backward_plan.plan_backward(cotangents, inputs, out, **options)
        plan.run(cotangents, inputs, out, (*inputs.qkv, None))
        return rooms.copy(), numbers.copy()

    expected = planned()
    other_default()
    assert planned() == expected
    assert len(expected[0]) > 4 and expected[1]


def undecided(source: str) -> list[int]:
    """Lines that make a tensor of torch's default dtype."""
    tree = ast.parse(source)
    of_strides = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "stride"}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in of_strides:
            continue
        functions = [node.func, *node.args[:1]] if _name(node.func) == "functools.partial" else [node.func]
        names = {_name(function) for function in functions}
        keywords = {keyword.arg for keyword in node.keywords}
        scalars = _name(node.func) == "torch.where" and len(node.args) == 3 and all(map(_is_number, node.args[1:]))
        if scalars or ("dtype" not in keywords and names & {f"torch.{name}" for name in FACTORIES}):
            lines.append(node.lineno)
    return lines


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is made of constants, `inf` and limits of dtypes, and so is a Python number."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) or _name(node) in ("torch.inf", "math.inf") or "finfo(" in _name(node)


def test_every_tensor_is_made_with_a_dtype() -> None:
    files = sorted(SOURCES.rglob("*.py"))
    assert len(files) > 150
    by_file = {str(path.relative_to(SOURCES)): undecided(path.read_text()) for path in files}
    assert {name: lines for name, lines in by_file.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.empty(3, device='meta')", [1]),
        ("functools.partial(torch.empty, device='meta')", [1]),
        ("torch.where(mask, 0.0, -1e9)", [1]),
        ("torch.where(mask, 0.0, x)", []),
        ("torch.where(mask, -torch.inf, 0.0)", [1]),
        ("torch.where(mask, 0.0, torch.finfo(s.dtype).min / 2)", [1]),
        ("torch.zeros(3, dtype=x.dtype)", []),
        ("torch.empty(z.shape, device='meta').stride()", []),
    ],
)
def test_the_scan_finds_a_tensor_without_a_dtype(source: str, lines: list[int]) -> None:
    assert undecided(source) == lines
