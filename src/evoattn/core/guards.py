"""Remember earlier calls by the properties of their tensors, and ask torch whether an operator would only compute.

| function | what it tells |
|---|---|
| `recall`, `remember` | the value of an earlier call whose tensors had the same properties |
| `is_seen` | torch compiles, or a function mode or forward mode is on: torch must see the operator |
| `autocasts` | autocast is on; None if this thread traces, transforms or has a dispatch mode |
| `ordinary` | these tensors are no subclasses or wrappers and have no lazy negation |
| `is_transformed` | `torch.func` transforms the call, or forward mode differentiates it |
| `only_computes` | an operator would only compute, by `is_seen` and `autocasts` |
| `is_plain` | `only_computes`, and these tensors are ordinary |

torch has no public function for `autocasts` and `ordinary`. So the dispatcher's state of this thread is compared with that of a
new thread, and the dispatch keys of a tensor with those of a new tensor.

The properties are class, dispatch keys in this thread, dtype, device, shape, strides, `requires_grad` and alignment.
`TensorGuards`, with which torch.compile guards compiled code, compares all but the last at once. To compare them one by one
from Python took half of a call's time. `dispatch.lookup` keeps the plans: a call that is forgotten here finds its plan there.
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
from torch.utils._python_dispatch import TorchDispatchMode

_ORDINARY = frozenset((Tensor, torch.nn.Parameter))

_PRIVATE = (
    "_current_graph_task_id",
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set",
    "_get_dispatch_stack_at",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_dynamo.guards.TensorGuards",
)
"""The private names of torch that this module needs. With a torch that lacks one, every call is an `OperatorCall`."""

_MOST = 16
"""Values that are kept for one key, each for tensors with other properties."""


class _Signature:
    """The properties of a call's tensors. It holds none of the tensors.

    `first` is None, or, if a tensor is given twice, the index of each tensor's first place: guards take distinct tensors.
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
        """Return whether other tensors, as many, have the same properties."""
        distinct = tensors
        if self.first is not None:
            if any(x is not tensors[i] for x, i in zip(tensors, self.first, strict=True)):
                return False
            distinct = [x for place, (x, i) in enumerate(zip(tensors, self.first, strict=True)) if place == i]
        return bool(self.guards.check(*distinct)) and _misaligned(tensors) == self.misaligned


def _misaligned(tensors: list[Tensor]) -> list[int]:
    """Return the indices of tensors that do not start on a multiple of 16 bytes."""
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return [place for place, x in enumerate(tensors) if x.data_ptr() & 15] if addresses & 15 else []


@functools.lru_cache(maxsize=8192, typed=True)
def _known(*key: Any) -> list[tuple[_Signature, Any]]:
    """Return the values of one key, the newest first; `typed`, because 1 is not True to validation."""
    return []


def forget() -> None:
    _known.cache_clear()


def recall(key: tuple[Any, ...], tensors: list[Any]) -> Any:
    """Return the value that was kept for tensors with these properties, or None."""
    for signature, value in _known(*key):
        if signature.fits(tensors):
            return value
    return None


def remember(key: tuple[Any, ...], tensors: list[Tensor], value: Any) -> None:
    """Keep a value in front of the others of its key, and drop the oldest beyond `_MOST`."""
    known = _known(*key)
    known.insert(0, (_Signature(tensors), value))
    del known[_MOST:]


def is_seen() -> bool:
    """Return whether torch must see an operator: it compiles, a function mode or forward mode is on, or it cannot tell."""
    if torch.compiler.is_compiling() or not _states():
        return True
    return torch._C._len_torch_function_stack() > 0 or getattr(forward_ad, "_current_level", 0) >= 0


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether `torch.func` transforms the call, or a tensor has a tangent. An operator would pass none on, silently."""
    return torch._C._are_functorch_transforms_active() or has_tangent(*tensors)


def has_tangent(*tensors: object) -> bool:
    """Return whether forward mode differentiates one of these tensors."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def autocasts() -> bool | None:
    """Return whether autocast is on; None in a state in which an operator would do more than compute."""
    state = _state()
    casts = _states().get(state)
    if casts is None and _is_only_watched():
        return _states_if_watched().get(state)
    if casts is None and torch._C._current_graph_task_id() != -1:  # a backward runs in this thread
        casts = _states_in_backward().get(state)
    return casts


def _state() -> tuple[int, int]:
    """Return the dispatcher's state of this thread: tracing, transforms, modes and autocast."""
    return torch._C._dispatch_tls_local_include_set().raw_repr(), torch._C._dispatch_tls_local_exclude_set().raw_repr()


@functools.cache
def _states() -> dict[tuple[int, int], bool]:
    """Return the states of a new thread, in which an operator only computes, and whether autocast is on in each."""
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


class Onlooker(TorchDispatchMode):
    """A mode that looks at torch's operations and changes none. It need not see ours: calls compute as they do without it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Else torch imports its compiler at the first operation, which takes 2 s. Nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _is_only_watched() -> bool:
    """Return whether the one dispatch mode of this thread is an `Onlooker`."""
    return torch._C._len_torch_dispatch_stack() == 1 and isinstance(torch._C._get_dispatch_stack_at(0), Onlooker)


@functools.cache
def _states_if_watched() -> dict[tuple[int, int], bool]:
    """Return the states of a new thread with an `Onlooker`, and whether autocast is on in each."""
    states: dict[tuple[int, int], bool] = {}

    def ask() -> None:
        for inference in (False, True):
            with torch.inference_mode(inference), Onlooker():  # type: ignore[no-untyped-call]
                _note_states(states)

    _in_a_new_thread(ask)
    return states


def _note_states(states: dict[tuple[int, int], bool]) -> None:
    """Note the state of this thread without autocast, and with autocast for the CPU, for GPUs and for both."""
    for devices in ((), ("cpu",), ("cuda",), ("cpu", "cuda")):
        for device in devices:
            torch.set_autocast_enabled(device, True)
        states[_state()] = bool(devices)
        for device in devices:
            torch.set_autocast_enabled(device, False)


@functools.cache
def _states_in_backward() -> dict[tuple[int, int], bool]:
    """Return the states in which an operator only computes while a backward runs, and whether autocast is on in each.

    A checkpoint runs its forward again under autocast.

    Call this inside a backward only. On a machine with a GPU the first backward of a process, even one on
    the CPU, counts the GPUs and starts a thread for each. Neither survives a fork, and a forward on the CPU must.
    """
    states: dict[tuple[int, int], bool] = {}

    def ask() -> None:
        _InBackward.apply(torch.zeros((), dtype=torch.float32, requires_grad=True), states).backward()  # type: ignore[no-untyped-call]

    _in_a_new_thread(ask)
    return states


def _in_a_new_thread(ask: Callable[[], None]) -> None:
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


class _InBackward(torch.autograd.Function):
    """A backward that notes its state: torch 2.11 excludes the dispatch key of named tensors in one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, states: dict[tuple[int, int], bool]) -> Tensor:
        ctx.states = states
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        _note_states(ctx.states)
        return dx, None


def ordinary(tensors: list[Tensor]) -> bool:
    """Return whether each tensor has the dispatch keys of a new one: no lazy negation, wrapper or symbolic zero."""
    if any(x.__class__ not in _ORDINARY for x in tensors):
        return False
    device = tensors[0].device
    if device.type == "meta":
        return False
    plain = _keys_of_new(device)
    return all(torch._C._dispatch_keys(x).raw_repr() in plain for x in tensors)


@functools.cache
def _keys_of_new(device: torch.device) -> list[int]:
    """Return the dispatch keys of a new tensor, in and out of inference mode."""
    keys = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.append(torch._C._dispatch_keys(torch.empty(0, dtype=torch.float32, device=device)).raw_repr())
    return keys


def is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether an operation on these tensors would only compute."""
    return only_computes() and ordinary([x for x in tensors if x is not None])


def only_computes() -> bool:
    """Return whether torch neither compiles nor traces nor transforms, so that it need not see an operator."""
    return not is_seen() and autocasts() is not None


def forget_torch() -> None:
    """Drop what torch's internals have told."""
    for answers in (_states, _states_if_watched, _states_in_backward, _keys_of_new):
        answers.cache_clear()
