"""Calls that something watches or transforms go through the operators: modes, hooks, transforms and subclasses."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.dispatch.calls import BACKWARD, FORWARD, attend, in_a_function_mode, leaves, step, way
from tests.helpers import seams
from tests.helpers.operators import Operators
from tests.helpers.planner import Planner


class Subclass(Tensor):
    pass


def negated(x: Tensor) -> Tensor:
    """The same values, as torch keeps them when it has put off to change their sign."""
    lazy = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert lazy.is_neg()
    return lazy


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


@pytest.fixture
def another_torch() -> Iterator[None]:
    """A test that changes torch's internals leaves nothing behind that they said. Ask for it before `monkeypatch`."""
    yield
    seams.forget(torch_too=True)


@pytest.mark.parametrize("name", ["_dispatch_keys", "_dispatch_tls_local_exclude_set"])
def test_without_the_private_names_the_operator_is_called(
    name: str, another_torch: None, planner: Planner, operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of torch, which another torch may have renamed."""
    monkeypatch.delattr(torch._C, name)
    seams.forget(torch_too=True)
    step(leaves())
    assert operators.called() == ["forward", "backward"]


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
    seams.forget(torch_too=True)
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
    seams.forget(torch_too=True)  # so that the checkpoint works its call out while the backward runs
    output.sum().backward()  # type: ignore[union-attr]
    assert operators.called() == []
