"""Calls go straight to a plan when nothing special is going on, and through the operators when anything is."""

import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import evoattn
from evoattn import testing
from tests.helpers.operators import Operators
from tests.helpers.planner import Planner

FORWARD, BACKWARD = torch.ops.evoattn.forward.default, torch.ops.evoattn.backward.default

LOOKS = 32
"""Twice as many calls as are kept of those that differ in their strides alone."""


def attend(*tensors: Tensor | None, **options: Any) -> Tensor:
    q, k, v, mask_bias, pair_bias = tensors
    return evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, backend="reference", **options)  # type: ignore


def way(*tensors: Tensor | None) -> str | None:
    """The way of a call of `attend`, if one like it is known."""
    q, k, v, mask_bias, pair_bias = tensors
    assert q is not None and k is not None and v is not None
    return testing.way(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, backend="reference")


def leaves(dtype: torch.dtype = torch.float32, **changes: Any) -> list[Tensor]:
    settings = {"n": 2, "lq": 5, "lk": 6, "d": 4, "mask_bias": "finite", "pair_bias": "b1hqk", "dtype": dtype, **changes}
    inputs = testing.Case("eager", **settings).make(seed=3)
    return [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.mask_bias, inputs.pair_bias) if x is not None]


def step(arguments: list[Tensor], **options: Any) -> list[Tensor]:
    output = attend(*arguments, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, arguments, cotangent)]


@pytest.mark.parametrize("case", testing.AWKWARD, ids=lambda case: case.name)
def test_eager_call_of_awkward_case_agrees_with_float64(case: testing.Case, planner: Planner) -> None:
    """Both ways give what the oracle gives, twice: when the call is worked out, and when it is known."""
    inputs = case.make(seed=1)
    for _ in range(2):
        testing.check(testing.run(inputs, "reference"), inputs)


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
@pytest.mark.parametrize("lead", [(), (1,), (2,), (2, 3)])
@pytest.mark.parametrize("pair_bias", ["11hqk", "b1hqk", None])
@pytest.mark.parametrize("gate", [None, "random"])
def test_plain_calls_go_straight_to_the_plan(
    planner: Planner, operators: Operators, lead: tuple[int, ...], layout: str, pair_bias: str | None, gate: str | None
) -> None:
    if not lead and pair_bias:
        pair_bias = pair_bias[1:]
    inputs = testing.Case("plain", lead=lead, layout=layout, mask="random", pair_bias=pair_bias, gate=gate).make(seed=2)  # type: ignore
    testing.check(testing.run(inputs, "reference"), inputs)
    assert operators.called() == []
    assert (planner.forwards, planner.backwards) == (1, 1)


@pytest.mark.parametrize("layout", ["bnlhd", "bnhld"])
@pytest.mark.parametrize("pair_bias", [None, (4, 1, 6), (1, 6)])
def test_global_attention_goes_straight_to_a_plan(
    planner: Planner, operators: Operators, pair_bias: tuple[int, ...] | None, layout: str
) -> None:
    """One query of heads that share their keys: the plan has the heads as queries of one head, and the tensors stay."""
    q, k, v = torch.randn(2, 3, 1, 4, 8), torch.randn(2, 3, 6, 1, 8), torch.randn(2, 3, 6, 1, 8)
    tensors = [x if layout == "bnlhd" else x.transpose(2, 3).contiguous() for x in (q, k, v)]
    biases = [] if pair_bias is None else [torch.randn(pair_bias)]
    arguments = [x.requires_grad_() for x in (*tensors, *biases)]
    for _ in range(2):
        output = attend(*arguments[:3], None, *(arguments[3:] or [None]), layout=layout)
        torch.autograd.grad(output.sum(), arguments)
    assert output.is_contiguous()
    assert operators.called() == []
    assert (planner.forwards, planner.backwards) == (2, 2)
    assert (planner.planned_forwards, planner.planned_backwards) == (1, 1)
    assert planner.shapes == {(2, 3, 1, 4, 8)}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("lead", [(1,), (2, 3)])
def test_explain_describes_the_plan_that_runs(planner: Planner, lead: tuple[int, ...], return_lse: bool) -> None:
    """It makes the plans of both passes, and the call finds them."""
    arguments = leaves(lead=lead)
    q, k, v, mask_bias, pair_bias = arguments
    options: dict[str, Any] = {"backend": "reference", "return_lse": return_lse}
    told = evoattn.explain(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, **options)
    assert told.backend == "reference"
    planned = planner.planned_forwards, planner.planned_backwards
    assert planned == (1, 1) and planner.forwards == planner.backwards == 0
    output = evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=pair_bias, **options)
    outputs = output if return_lse else (output,)
    torch.autograd.grad(outputs, arguments, [torch.randn_like(x) for x in outputs])
    assert (planner.planned_forwards, planner.planned_backwards) == planned
    assert (planner.forwards, planner.backwards) == (1, 1)


def test_operators_and_calls_share_their_plans(planner: Planner, operators: Operators) -> None:
    """The same canonical tensors, here seen by a function mode."""
    tensors = [x.detach() for x in leaves()]
    attend(*tensors)
    in_a_function_mode(tensors)
    assert operators.called() == ["forward"]
    assert planner.forwards == 2 and planner.planned_forwards == 1


def test_the_same_graph_of_autograd(planner: Planner, operators: Operators) -> None:
    """Only what requires a gradient is recorded, and nothing is where gradients are off."""
    tensors = leaves()
    assert not attend(*(x.detach() for x in tensors)).requires_grad
    with torch.no_grad():
        assert not attend(*tensors).requires_grad
    assert attend(*tensors).requires_grad
    with torch.inference_mode():
        assert attend(*tensors).is_inference()
    q, k, v, mask_bias, pair_bias = (x.detach() for x in tensors)
    output = attend(q, k, v, mask_bias, pair_bias.requires_grad_())
    (gradient,) = torch.autograd.grad(output.sum(), pair_bias)
    assert gradient.shape == pair_bias.shape
    assert operators.called() == []


def test_an_expanded_bias_has_its_gradient_in_the_expanded_shape(planner: Planner, operators: Operators) -> None:
    *others, pair_bias = leaves(lead=(2,), pair_bias="11hqk")
    expected = step([*others, pair_bias])
    expanded = pair_bias.detach().expand(2, -1, -1, -1, -1).requires_grad_()
    assert expanded.stride(0) == 0
    actual = step([*others, expanded])
    assert actual[-1].shape == expanded.shape
    torch.testing.assert_close(actual[-1].sum(0, keepdim=True), expected[-1])
    assert operators.called() == []


def test_an_input_changed_before_the_backward_is_noticed(planner: Planner) -> None:
    tensors = leaves()
    output = attend(*tensors)
    with torch.no_grad():
        tensors[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def negated(x: Tensor) -> Tensor:
    """The same values, as torch keeps them when it has put off to change their sign."""
    lazy = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert lazy.is_neg()
    return lazy


def in_a_function_mode(tensors: list[Tensor]) -> None:
    with Functions():
        attend(*tensors)


def traced(tensors: list[Tensor]) -> None:
    torch.jit.trace(lambda *x: attend(*x), tuple(tensors), check_trace=False)


SPECIAL: dict[str, Callable[[list[Tensor]], object]] = {
    "vmap": lambda x: torch.func.vmap(attend)(*(torch.stack([y, y]) for y in x)),
    "function mode": in_a_function_mode,
    "subclass": lambda x: attend(x[0].as_subclass(Subclass), *x[1:]),
    "subclass bias": lambda x: attend(*x[:4], x[4].as_subclass(Subclass)),
    "traceable subclass": lambda x: attend(*(TwoTensor(y, y.clone()) for y in x)),
    "negative": lambda x: attend(negated(x[0]), *x[1:]),
    "trace": traced,
    "meta": lambda x: attend(*(y.to("meta") for y in x)),
    "one head": lambda x: attend(x[0], x[1][..., :1, :].clone().requires_grad_(), *x[2:]),
    "shared mask bias": lambda x: attend(*x[:3], x[3][..., :1].clone().requires_grad_(), x[4]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("special", SPECIAL)
def test_special_calls_take_the_operator(planner: Planner, operators: Operators, special: str) -> None:
    """Also right after plain ones that look the same."""
    tensors = [x.detach() for x in leaves()]
    attend(*tensors)
    assert operators.called() == []
    SPECIAL[special](tensors)
    assert "forward" in operators.called()
    attend(*tensors)
    assert operators.called() == []


def test_a_dispatch_mode_sees_the_operators(planner: Planner) -> None:
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    tensors = leaves()
    output = attend(*tensors)  # recorded before the mode is on: its backward has to be seen all the same
    with Sees():
        attend(*tensors)
        output.sum().backward()
    assert {FORWARD, BACKWARD} <= set(seen)


def test_negative_tensors_have_their_sign(planner: Planner) -> None:
    """torch puts off to negate; memory holds the opposite sign. Cotangents come like that too."""
    tensors = [x.detach() for x in leaves()]
    torch.testing.assert_close(attend(negated(tensors[0]), *tensors[1:]), attend(*tensors))
    arguments = leaves()
    output = attend(*arguments)
    cotangent = torch.randn_like(output)
    expected = torch.autograd.grad(output, arguments, cotangent, retain_graph=True)
    for value, y in zip(torch.autograd.grad(output, arguments, negated(cotangent)), expected, strict=True):
        torch.testing.assert_close(value, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast(planner: Planner, operators: Operators, dtype: torch.dtype) -> None:
    """What autocast would cast takes the operator; what it leaves alone need not."""
    tensors = [x.detach() for x in leaves(dtype)]
    attend(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        o = attend(*tensors)
        assert o.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
        assert ("forward" in operators.called()) == (dtype == torch.float32)
        with torch.autocast("cpu", enabled=False):
            assert attend(*tensors).dtype == dtype
    operators.called()
    with torch.autocast("cpu", torch.float16):  # to the dispatcher the tensors look as they did
        assert attend(*tensors).dtype == (torch.float64 if dtype == torch.float64 else torch.float16)
        assert ("forward" in operators.called()) == (dtype != torch.float64)


def test_batched_cotangents_and_second_derivatives(planner: Planner, operators: Operators) -> None:
    arguments = leaves()
    output = attend(*arguments)
    cotangents = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(output, arguments, cotangents, is_grads_batched=True, retain_graph=True)
    assert operators.called() == ["backward"]
    looped = [torch.autograd.grad(output, arguments, cotangent, retain_graph=True) for cotangent in cotangents]
    for value, expected in zip(batched, zip(*looped, strict=True), strict=True):
        torch.testing.assert_close(value, torch.stack(expected))
    first = torch.autograd.grad(output.sum(), arguments, create_graph=True)  # a cotangent that needs no gradient itself
    for gradient in first:
        assert gradient.requires_grad
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(gradient.sum(), arguments[0], retain_graph=True)
    for value, right in zip(first, torch.autograd.grad(output.sum(), arguments), strict=True):
        torch.testing.assert_close(value, right)


def test_a_symbolic_zero_as_cotangent(planner: Planner, operators: Operators) -> None:
    arguments = leaves()
    output = attend(*arguments)
    zero = torch._efficientzerotensor(output.shape, dtype=output.dtype)
    assert all(not x.any() for x in torch.autograd.grad(output, arguments, zero))
    assert operators.called() == ["backward"]


def test_a_tensor_without_strides_is_left_to_validation(planner: Planner) -> None:
    q, *others = (x.detach() for x in leaves())
    with pytest.raises(TypeError, match="q must be a dense tensor"):
        attend(q.to_sparse(), *others)


def test_forward_mode_is_refused(planner: Planner) -> None:
    tensors = [x.detach() for x in leaves()]
    attend(*tensors)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attend(dual, *tensors[1:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_call_has_the_same_gradients(planner: Planner, reentrant: bool) -> None:
    arguments = leaves()
    expected = step(arguments)[1:]
    output = checkpoint(attend, *arguments, use_reentrant=reentrant)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(cotangent)
    for x, y in zip(arguments, expected, strict=True):
        torch.testing.assert_close(x.grad, y)
    assert planner.backwards == 2


def test_saved_tensor_hooks_may_change_the_strides(planner: Planner) -> None:
    """What comes back may lie elsewhere in memory, and otherwise."""
    arguments = leaves(strides="transposed")
    expected = step(arguments)
    packed = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.detach().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)):
        for value, y in zip(step(arguments), expected, strict=True):
            torch.testing.assert_close(value, y)
    assert packed


def test_saved_tensor_hooks_may_negate_lazily(planner: Planner) -> None:
    """What comes back is told from what was saved by a bit alone, in a backward like one that has been planned."""
    arguments = leaves()
    expected = step(arguments)

    def pack(x: Tensor) -> Tensor:
        return x if x.dtype == torch.bool else x.detach().neg()

    def unpack(x: Tensor) -> Tensor:
        return x if x.dtype == torch.bool else torch._neg_view(x)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for value, y in zip(step(arguments), expected, strict=True):
            torch.testing.assert_close(value, y)


def test_saved_tensor_hooks_may_leave_no_memory(planner: Planner) -> None:
    """torch's tensor of zeros that takes no memory looks like any other, but for its address."""
    arguments = leaves()
    step(arguments)

    def unpack(x: Tensor) -> Tensor:
        return x if x.dtype == torch.bool else torch._efficientzerotensor(x.shape, dtype=x.dtype)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        output = attend(*arguments)
        gradients = torch.autograd.grad(output, arguments, torch.ones_like(output))
    assert all(x.isfinite().all() for x in gradients)


def test_validation_is_not_skipped_for_what_looks_alike(planner: Planner) -> None:
    """1 equals True, and has its hash."""
    tensors = leaves()
    attend(*tensors, deterministic=True, scale=1.0, return_lse=False)
    for wrong, message in (
        ({"deterministic": 1}, "deterministic must be"),
        ({"scale": True}, "scale must be"),
        ({"return_lse": 0}, "return_lse must be"),
        ({"layout": ["bnlhd"]}, "layout must be"),
        ({"config": {}}, "config must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            attend(*tensors, **{"deterministic": True, "scale": 1.0, **wrong})
    with pytest.raises(TypeError, match="k must have the dtype of q"):
        attend(tensors[0], tensors[1].double(), *tensors[2:])
    with pytest.raises(ValueError, match="cannot run this problem"):
        attend(*tensors, config=evoattn.Config(block_q=16))


def test_settings_are_part_of_a_call(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Determinism and the precision of float32 products are looked at on every call."""
    tensors = [x.detach() for x in leaves()]
    for name in ("", "deterministic", "tf32", ""):
        deterministic = torch.are_deterministic_algorithms_enabled()
        before = torch.get_float32_matmul_precision()
        try:
            torch.use_deterministic_algorithms(name == "deterministic", warn_only=True)
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            attend(*tensors)
            assert way(*tensors) == "plan"
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_float32_matmul_precision(before)
    assert (planner.forwards, planner.planned_forwards) == (4, 3)


def test_settings_are_part_of_a_backward(planner: Planner, operators: Operators) -> None:
    """And what is forgotten between it and its forward is forgotten. It finds all gradients when few of them are asked for."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)  # torch tells one that was set from one that never was
    arguments = leaves()
    output = attend(*arguments)
    cotangent = torch.randn_like(output)

    def gradients(of: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(output, of, cotangent, retain_graph=True))

    expected = gradients(arguments)
    torch.testing.assert_close(gradients(arguments[1:]), expected[1:])
    torch.testing.assert_close(gradients(arguments[:1]), expected[:1])
    assert planner.planned_backwards == 1
    try:
        torch.set_float32_matmul_precision("high")
        gradients(arguments)
        assert planner.planned_backwards == 2
    finally:
        torch.set_float32_matmul_precision(precision)
    testing.forget()
    torch.testing.assert_close(gradients(arguments), expected)
    assert planner.planned_backwards == 3
    assert operators.called() == []


def test_alignment_is_part_of_a_call(planner: Planner) -> None:
    """Kernels load 16 bytes at a time where tensors start on a multiple of them."""
    q, k, v, mask_bias, pair_bias = (x.detach() for x in leaves())
    moved = torch.empty(pair_bias.numel() + 1)[1:].view(pair_bias.shape).copy_(pair_bias)
    for bias, plans in ((pair_bias, 1), (moved, 2), (pair_bias.clone(), 2), (moved, 2)):
        attend(q, k, v, mask_bias, bias)
        assert planner.planned_forwards == plans
        assert way(q, k, v, mask_bias, bias) == "plan"


def test_a_bias_is_not_taken_for_another(planner: Planner, operators: Operators) -> None:
    """A key-wise bias may have the shape of a pair bias that varies along nothing else."""
    q, k, v, mask_bias, _ = (x.detach() for x in leaves())
    pair_bias = mask_bias.detach()
    assert pair_bias.ndim == q.ndim
    by_key, by_pair = attend(q, k, v, mask_bias, None), attend(q, k, v, None, pair_bias)
    torch.testing.assert_close(by_key, by_pair)
    assert [way(q, k, v, *biases) for biases in ((mask_bias, None), (None, pair_bias))] == ["plan"] * 2
    assert planner.planned_forwards == 2
    assert operators.called() == []


def test_only_the_newest_looks_are_kept(planner: Planner, operators: Operators) -> None:
    """Of calls that differ in their strides alone, forward and backward; the forgotten ones find their plan again."""
    q, k, v, mask_bias, pair_bias = leaves()
    *lead, lq, lk = pair_bias.shape
    widest = torch.randn(*lead, lq, lk + LOOKS)
    biases = [widest[..., : lk + more].contiguous()[..., :lk].detach().requires_grad_() for more in (*range(LOOKS), 0)]
    for bias in biases:
        expected = evoattn.evoformer_attention(q, k, v, mask_bias=mask_bias, pair_bias=bias, backend="tiled")
        actual = attend(q, k, v, mask_bias, bias)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o.sum(), bias)[0] for o in (actual, expected)))
    assert operators.called() == []
    assert planner.planned_forwards == planner.planned_backwards == LOOKS
    ways = [way(q, k, v, mask_bias, bias) for bias in biases[1:]]
    assert ways == [None] * (LOOKS // 2) + ["plan"] * (LOOKS // 2)


def test_a_tensor_may_be_given_twice(planner: Planner, operators: Operators) -> None:
    """Keys that are values too are planned once, and told from keys and values that only look alike."""
    q, k, *_ = leaves(mask_bias=None, pair_bias=None)
    v = k.detach().neg().requires_grad_()
    attend(q, k, k, None, None)
    assert (way(q, v, v, None, None), way(q, k, v, None, None)) == ("plan", None)
    for keys, values in ((k, k), (k, v), (v, v), (k, v), (k, k)):
        actual = attend(q, keys, values, None, None)
        expected = evoattn.evoformer_attention(q, keys, values, backend="tiled")
        torch.testing.assert_close(actual, expected)
        of = [q, k, v]
        gradients = [torch.autograd.grad(o.square().sum(), of, allow_unused=True) for o in (actual, expected)]
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y)
    assert (planner.forwards, planner.backwards) == (6, 5)
    assert planner.planned_forwards == 1 and planner.planned_backwards <= 2
    assert [way(q, *keys_values, None, None) for keys_values in ((k, k), (v, v), (k, v))] == ["plan"] * 3


def test_nothing_is_recorded_in_inference_mode(planner: Planner, operators: Operators) -> None:
    """Not even where gradients are switched on inside of it."""
    tensors = leaves()
    with torch.inference_mode(), torch.enable_grad():
        output = attend(*tensors)
    assert output.is_inference() and not output.requires_grad
    assert operators.called() == []


@pytest.mark.parametrize("before", [True, False])
def test_a_tangent_of_the_cotangent_is_refused(planner: Planner, before: bool) -> None:
    """Forward over reverse, of a call that was recorded before duals came, or takes the operator among them.

    A derivative that is dropped in silence is worse than none.
    """
    tensors = leaves()
    output = attend(*tensors)
    with torch.autograd.forward_ad.dual_level():
        weight = torch.autograd.forward_ad.make_dual(torch.randn(4, 4), torch.randn(4, 4))
        output = output if before else attend(*tensors)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.autograd.grad((output @ weight).sum(), tensors[0])


def test_what_takes_the_operator_is_found_out_once(planner: Planner, operators: Operators) -> None:
    """Keys of one head want their gradient in that shape."""
    q, k, v, mask_bias, pair_bias = (x.detach() for x in leaves())
    one_head = k[..., :1, :].clone().requires_grad_()
    assert way(q, one_head, v, mask_bias, pair_bias) is None
    for _ in range(20):
        attend(q, one_head, v, mask_bias, pair_bias)
        assert way(q, one_head, v, mask_bias, pair_bias) == "operator"
    assert operators.called() == ["forward"] * 20 and planner.planned_forwards == 1


@pytest.mark.parametrize("wrong", [[1], None, torch.zeros(1).numpy()], ids=["list", "None", "array"])
@pytest.mark.parametrize("which", range(3))
def test_no_tensor_is_told_under_autocast_too(planner: Planner, which: int, wrong: Any) -> None:
    tensors: list[Any] = [x.detach().bfloat16() for x in leaves()]
    tensors[which] = wrong
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"{'qkv'[which]} must be a torch.Tensor"):
        attend(*tensors)


def test_a_kept_call_holds_no_tensor(planner: Planner) -> None:
    tensors = leaves()
    step(tensors)
    dead = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert [x() for x in dead] == [None] * len(dead)


@pytest.fixture
def another_torch() -> Iterator[None]:
    """A test that changes torch's internals leaves nothing behind that they said. Ask for it before `monkeypatch`."""
    yield
    testing.forget(torch_too=True)


@pytest.mark.parametrize("name", ["_dispatch_keys", "_dispatch_tls_local_exclude_set"])
def test_without_the_private_names_the_operator_is_called(
    name: str, another_torch: None, planner: Planner, operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of torch, which another torch may have renamed."""
    monkeypatch.delattr(torch._C, name)
    testing.forget(torch_too=True)
    step(leaves())
    assert operators.called() == ["forward", "backward"]


def test_compiled_code_sees_one_operator(planner: Planner) -> None:
    """After eager calls that look the same, and with a module's parameters."""
    torch._dynamo.reset()
    arguments = leaves()
    expected = step(arguments)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: list) -> Callable:
        graphs.append(copy.deepcopy(graph))
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*arguments), expected[0])
    assert FORWARD in {node.target for node in graphs[0].graph.nodes}


def test_a_backward_under_compiled_autograd(planner: Planner) -> None:
    torch._dynamo.reset()
    arguments = leaves()
    expected = step(arguments)
    output = attend(*arguments)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        output.backward(cotangent)
    for x, y in zip(arguments, expected[1:], strict=True):
        torch.testing.assert_close(x.grad, y)


def test_what_a_backward_tells_the_dispatcher_is_known(
    another_torch: None, planner: Planner, operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 tells it more while a backward runs. That is found in the first backward, and no earlier."""
    excluded, in_backward = torch._C._dispatch_tls_local_exclude_set, []

    def more() -> Any:
        keys = excluded()
        if torch._C._current_graph_task_id() == -1:
            return keys
        in_backward.append(True)
        return types.SimpleNamespace(raw_repr=lambda: keys.raw_repr() | 1 << 60)

    monkeypatch.setattr(torch._C, "_dispatch_tls_local_exclude_set", more)
    testing.forget(torch_too=True)
    tensors = leaves()
    attend(*tensors)
    assert not in_backward
    step(tensors)
    output = checkpoint(attend, *tensors, use_reentrant=True)
    output.sum().backward()  # type: ignore[union-attr]
    assert in_backward
    low = [x.detach().bfloat16().requires_grad_() for x in tensors]
    with torch.autocast("cpu"):
        output = checkpoint(attend, *low, use_reentrant=False)
    testing.forget(torch_too=True)  # so that the checkpoint works its call out while the backward runs
    output.sum().backward()  # type: ignore[union-attr]
    assert operators.called() == []
