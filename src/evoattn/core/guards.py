"""A memory of earlier calls: what a call with tensors of the same properties led to.

The module asks torch two questions:
- Would an operator do nothing but compute? Then torch neither compiles, traces nor transforms, and the tensors are ordinary.
- Do the tensors have the properties of an earlier call's? These are class, dispatch keys in this thread, dtype, device, shape,
  strides and `requires_grad`. `TensorGuards`, with which torch.compile guards compiled code, compares all of them at once. To
  compare them one by one from Python took half of a call's time.

`dispatch.lookup` makes and keeps the plans. A call that is forgotten here finds its plan there.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ORDINARY = frozenset((Tensor, torch.nn.Parameter))

_PRIVATE = (
    "_current_graph_task_id",
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set",
    "_len_torch_function_stack",
    "_dynamo.guards.TensorGuards",
)
"""What this module needs of torch's internals. With a torch that lacks them every call goes through the operators."""

_MOST = 16
"""Values that are kept for one key, each for tensors with other properties."""


class _Signature:
    """What a call may depend on in its tensors. It holds none of them.

    Args:
        first: for each tensor the place where it is first given, if one is given twice, which the guards do not allow.
    """

    __slots__ = ("first", "guards", "misaligned")

    def __init__(self, tensors: list[Tensor]) -> None:
        first = [next(i for i, y in enumerate(tensors) if y is x) for x in tensors]
        self.first = None if len(set(first)) == len(tensors) else first
        self.misaligned = _misaligned(tensors)
        tensors = [tensors[i] for i in sorted(set(first))]
        # "dynamic" by its own name only: a number is what a size has to be, and None would be any
        sizes: Any = [list(x.shape) for x in tensors]
        strides: Any = [list(x.stride()) for x in tensors]
        guards = torch._C._dynamo.guards.TensorGuards
        self.guards = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def fits(self, tensors: list[Any]) -> bool:
        """Whether as many arguments have the same properties."""
        distinct = tensors
        if self.first is not None:
            if any(x is not tensors[i] for x, i in zip(tensors, self.first, strict=True)):
                return False
            distinct = [x for place, (x, i) in enumerate(zip(tensors, self.first, strict=True)) if place == i]
        return bool(self.guards.check(*distinct)) and _misaligned(tensors) == self.misaligned


def _misaligned(tensors: list[Tensor]) -> list[int]:
    """The places of tensors that do not start on a multiple of 16 bytes."""
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return [place for place, x in enumerate(tensors) if x.data_ptr() & 15] if addresses & 15 else []


@functools.lru_cache(maxsize=8192, typed=True)
def _known(*key: Any) -> list[tuple[_Signature, Any]]:
    """The values of one key, the newest first; `typed`, because 1 is not True to validation."""
    return []


def forget() -> None:
    """Keep no value any longer."""
    _known.cache_clear()


def recall(key: tuple[Any, ...], tensors: list[Any]) -> Any:
    """The value that was kept for arguments with these properties, or None."""
    for signature, value in _known(*key):
        if signature.fits(tensors):
            return value
    return None


def remember(key: tuple[Any, ...], tensors: list[Tensor], value: Any) -> None:
    """Keep a value. It is the first that is asked from now on. The oldest is forgotten."""
    known = _known(*key)
    known.insert(0, (_Signature(tensors), value))
    del known[_MOST:]


def is_seen() -> bool:
    """Whether torch has to see an operator, or cannot be asked: it compiles, a function mode or forward mode is on."""
    if torch.compiler.is_compiling() or not _states():
        return True
    return torch._C._len_torch_function_stack() > 0 or getattr(forward_ad, "_current_level", 0) >= 0


def autocasts() -> bool | None:
    """Whether autocast is on; None in a state in which an operator would do more than compute."""
    state = _state()
    casts = _states().get(state)
    if casts is None and torch._C._current_graph_task_id() != -1:  # a backward runs in this thread
        casts = _states_in_backward().get(state)
    return casts


def _state() -> tuple[int, int]:
    """What this thread has told the dispatcher to do besides computing: tracing, transforms, modes, autocast, all of it."""
    return torch._C._dispatch_tls_local_include_set().raw_repr(), torch._C._dispatch_tls_local_exclude_set().raw_repr()


@functools.cache
def _states() -> dict[tuple[int, int], bool]:
    """States in which an operator would only compute, and whether autocast is on: those of a thread that was just started."""
    try:
        operator.attrgetter(*_PRIVATE)(torch._C)
    except AttributeError:
        return {}
    states: dict[tuple[int, int], bool] = {}

    def ask() -> None:
        for inference in (False, True):
            with torch.inference_mode(inference):
                _note_states(states)

    _in_a_new_thread(ask)
    return states


def _note_states(states: dict[tuple[int, int], bool]) -> None:
    """Note the state of a thread without autocast, and what it would be with autocast for the CPU, for GPUs, or for both."""
    for devices in ((), ("cpu",), ("cuda",), ("cpu", "cuda")):
        for device in devices:
            torch.set_autocast_enabled(device, True)
        states[_state()] = bool(devices)
        for device in devices:
            torch.set_autocast_enabled(device, False)


@functools.cache
def _states_in_backward() -> dict[tuple[int, int], bool]:
    """States in which an operator would only compute while a backward runs, and whether autocast is on.

    It is on where a checkpoint runs its forward again.

    Found when the caller runs a backward, never before. On a machine with a GPU the first backward of a process, even one on
    the CPU, counts the GPUs and starts a thread for each. Neither survives a fork, and a forward on the CPU must.
    """
    states: dict[tuple[int, int], bool] = {}

    def ask() -> None:
        _InBackward.apply(torch.zeros((), dtype=torch.float32, requires_grad=True), states).backward()  # type: ignore[no-untyped-call]

    _in_a_new_thread(ask)
    return states


def _in_a_new_thread(ask: Callable[[], None]) -> None:
    """Ask the dispatcher in a thread that has told it nothing yet."""
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


class _InBackward(torch.autograd.Function):
    """torch 2.11 tells the dispatcher more while it runs a backward: to leave out what serves named tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, states: dict[tuple[int, int], bool]) -> Tensor:
        ctx.states = states
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        _note_states(ctx.states)
        return dx, None


def ordinary(tensors: list[Tensor]) -> bool:
    """Whether the dispatcher sees in each what it sees in a new tensor: no lazy negation, no wrapper, no symbolic zero."""
    if any(x.__class__ not in _ORDINARY for x in tensors):
        return False
    device = tensors[0].device
    if device.type == "meta":
        return False
    plain = _keys_of_new(device)
    return all(torch._C._dispatch_keys(x).raw_repr() in plain for x in tensors)


@functools.cache
def _keys_of_new(device: torch.device) -> list[int]:
    """What the dispatcher sees in a new tensor, in and out of inference mode."""
    keys = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.append(torch._C._dispatch_keys(torch.empty(0, dtype=torch.float32, device=device)).raw_repr())
    return keys


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether an operation on these tensors would do nothing but compute."""
    return only_computes() and ordinary([x for x in tensors if x is not None])


def only_computes() -> bool:
    """Whether torch neither compiles nor traces nor transforms, so that nobody has to see what is done."""
    return not is_seen() and autocasts() is not None


def forget_torch() -> None:
    """Ask torch's internals anew, and for the states of a thread that has told the dispatcher nothing."""
    for answers in (_states, _states_in_backward, _keys_of_new):
        answers.cache_clear()
