"""The short way of an eager call: straight to a backend's plan, without torch's dispatcher, without views.

A call goes this way when the operators of `evoattn.ops` would do nothing but compute: the arguments are ordinary tensors that
lie in memory as canonical ones do, and torch is neither compiling nor tracing nor transforming. Then its result is theirs. What
has been checked and worked out is kept for calls that look alike. Everything else goes through the operators.

Whether a call looks like one that is kept, its tensors are asked all at once, by what torch.compile asks before it runs what it
compiled (`TensorGuards`): class, what the dispatcher sees in each in this thread, dtype, device, shape, strides, whether it
requires a gradient. Asked from Python one by one that was half of a call's time.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from evoattn import ops
from evoattn.canonical import Canonical, canonicalise
from evoattn.layouts import to_canonical, to_user
from evoattn.numerics import accumulate_dtype
from evoattn.validation import check_no_tangent, compute_dtype, key_axes

__all__ = ["Call", "find", "forget"]

_ORDINARY = frozenset((Tensor, torch.nn.Parameter))

_PRIVATE = (
    "_current_graph_task_id",
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set",
    "_len_torch_function_stack",
    "_dynamo.guards.TensorGuards",
)
"""What this module needs of torch's internals. A torch without them only loses the short way."""

_MOST = 16
"""So many calls are kept whose q and k have one shape and whose options are the same, and so many backwards of a call."""


class _Look:
    """What a call may depend on in its tensors. It holds none of them.

    Args:
        first: for each tensor the place where it is first given, if one is given twice, which the guards do not allow.
    """

    __slots__ = ("aligned", "first", "guards")

    def __init__(self, given: list[Tensor]) -> None:
        first = [next(i for i, y in enumerate(given) if y is x) for x in given]
        self.first = None if len(set(first)) == len(given) else first
        self.aligned = _aligned(given)
        given = [given[i] for i in sorted(set(first))]
        # "dynamic" by its own name only: a number is what a size has to be, and None would be any
        sizes: Any = [list(x.shape) for x in given]
        strides: Any = [list(x.stride()) for x in given]
        guards = torch._C._dynamo.guards.TensorGuards
        self.guards = guards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def fits(self, given: list[Any]) -> bool:
        """Whether as many arguments look the same."""
        distinct = given
        if self.first is not None:
            if any(x is not given[i] for x, i in zip(given, self.first, strict=True)):
                return False
            distinct = [x for place, (x, i) in enumerate(zip(given, self.first, strict=True)) if place == i]
        return bool(self.guards.check(*distinct)) and _aligned(given) == self.aligned


def _aligned(given: list[Tensor]) -> list[bool]:
    """Which tensors start on a multiple of 16 bytes."""
    return [x.data_ptr() % 16 == 0 for x in given]


def _keep(kept: list[Any], new: Any) -> None:
    """The newest first, which is also the first that is asked, and the oldest forgotten."""
    kept.insert(0, new)
    del kept[_MOST:]


@dataclasses.dataclass(eq=False)
class _Backward:
    """The backward of a call for cotangents and saved tensors that look alike.

    Args:
        asks: which cotangents are missing, and torch's settings. Which gradients are needed is the same for all of a call.
        look: of do, dlse and what was saved, where they are given.
        run: what the backend planned; None where it plans nothing.
    """

    asks: tuple[Any, ...]
    look: _Look
    run: Callable[..., tuple[Tensor | None, Tensor | None]] | None


@dataclasses.dataclass(eq=False)
class Call:
    """Calls that look alike. Empty until `fill`; then `direct` says whether they go the short way.

    Args:
        alike: where it is kept once it is filled: with those that differ in how their tensors look, if at all.
        casts: whether autocast was on, which then would cast nothing.
        records: whether autograd has to know of the call.
        look: of the arguments that are given.
        run: the forward that the backend planned.
        options: scale, layout, deterministic, backend and config as the operators take them.
        o, lse: (shape, stride, dtype) of the outputs, in the user's axes; the reference is like lse.
    """

    alike: list[Call]
    casts: bool
    records: bool = False
    direct: bool = False
    look: _Look | None = None
    run: Callable[..., None] | None = None
    options: tuple[Any, ...] = ()
    o: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None
    lse: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """o, lse and reference (`evoattn.numerics`) in the user's axes, of q, k, v, mask, mask_bias and pair_bias."""
        if self.records:
            return _record(self, *tensors)  # type: ignore[no-untyped-call, no-any-return]
        return self.compute(tensors)

    def compute(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """o, lse and reference in the user's axes."""
        device = tensors[0].device  # type: ignore[union-attr]
        (o_shape, o_stride, o_dtype), (shape, stride, dtype) = self.o, self.lse  # type: ignore[misc]
        o = torch.empty_strided(o_shape, o_stride, dtype=o_dtype, device=device)
        lse = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        reference = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.run(*tensors, o, lse, reference)  # type: ignore[misc]
        return o, lse, reference

    def fill(self, tensors: tuple[Tensor | None, ...], canonical: Canonical, options: tuple[Any, ...]) -> None:
        """Keep a call whose arguments have been checked. One that does not go the short way is found out once."""
        if self.look is not None or not _ordinary(tensors):
            return
        q, k, v = canonical.q, canonical.k, canonical.v
        inputs = (q, k, v, canonical.mask, canonical.mask_bias, canonical.pair_bias)
        self.options = options
        watched = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self.records = watched and any(x is not None and x.requires_grad for x in tensors)
        self.look = _Look([x for x in tensors if x is not None])
        if _in_order(canonical) and _same_memory(tensors, inputs):
            self.run = ops.choose_forward(*inputs, *options).run
            self.direct = self.run is not None
        heads_inside = options[1] == "bnlhd"
        h, l = q.shape[-3:-1]
        sizes = (*canonical.lead, *((l, h) if heads_inside else (h, l)), v.shape[-1])
        self.o = (sizes, _contiguous(sizes), q.dtype)
        sizes = (*canonical.lead, h, l)
        self.lse = (sizes, _contiguous(sizes), accumulate_dtype(q.dtype))
        _keep(self.alike, self)


@functools.lru_cache(maxsize=4096, typed=True)
def _kept(*alike: Any) -> list[Call]:
    """The Calls of one shape of q and k and the same options, newest first; `typed`, because 1 is not True to validation."""
    return []


@functools.lru_cache(maxsize=4096)
def _kept_backwards(call: Call) -> list[_Backward]:
    """The backwards of a call that have been planned."""
    return []


def forget() -> None:
    """Check, choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    ops.forget()
    _kept.cache_clear()
    _kept_backwards.cache_clear()


def find(tensors: tuple[Any, ...], scale: Any, *options: Any) -> Call | None:
    """The Call of these arguments, or None where torch has to see an operator, or cannot be asked.

    Args:
        tensors: q, k, v, mask, mask_bias, pair_bias, as the user gave them.
        scale, options: all else that a result depends on.
    """
    if torch.compiler.is_compiling():
        return None
    if not _states() or torch._C._len_torch_function_stack() or getattr(forward_ad, "_current_level", 0) >= 0:
        return None
    if not (scale is None or scale.__class__ is float or scale.__class__ is int):
        return None
    missing = tuple([x is None for x in tensors])
    try:
        q, k, *_ = tensors
        alike = _kept(q.shape, k.shape, missing, torch.is_grad_enabled(), ops.settings(q.dtype), scale, *options)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, an option that has no hash, a tensor without a shape
        return None
    given = [x for x in tensors if x is not None]
    for call in alike:
        if call.look.fits(given):  # type: ignore[union-attr]
            return None if call.casts and _would_cast(tensors) else call
    if any(missing[:3]) or any(x.__class__ not in _ORDINARY for x in given):
        return None
    casts = _casts()
    return None if casts is None or (casts and _would_cast(tensors)) else Call(alike, casts)


def _would_cast(tensors: tuple[Any, ...]) -> bool:
    """Whether autocast would give q, k or v another dtype."""
    return any(compute_dtype(x) != x.dtype for x in tensors[:3])


def _state() -> tuple[int, int]:
    """What this thread has told the dispatcher to do besides computing: tracing, transforms, modes, autocast, all of it."""
    return torch._C._dispatch_tls_local_include_set().raw_repr(), torch._C._dispatch_tls_local_exclude_set().raw_repr()


def _casts() -> bool | None:
    """Whether autocast is on; None in a state in which an operator would do more than compute."""
    state = _state()
    casts = _states().get(state)
    if casts is None and torch._C._current_graph_task_id() != -1:  # a backward runs in this thread
        casts = _states_in_backward().get(state)
    return casts


@functools.cache
def _states() -> dict[tuple[int, int], bool]:
    """States in which an operator would only compute, and whether autocast is on: those of a thread that was just started."""
    try:
        operator.attrgetter(*_PRIVATE)(torch._C)
    except AttributeError:
        return {}
    states: dict[tuple[int, int], bool] = {}

    def look() -> None:
        for inference in (False, True):
            with torch.inference_mode(inference):
                states[_state()] = False
                for device in ("cpu", "cuda"):
                    torch.set_autocast_enabled(device, True)
                    states[_state()] = True
                    torch.set_autocast_enabled(device, False)

    _in_a_new_thread(look)
    return states


@functools.cache
def _states_in_backward() -> dict[tuple[int, int], bool]:
    """The state in which an operator would only compute while a backward runs.

    Found when the caller runs a backward, never before. On a machine with a GPU the first backward of a process, even one on
    the CPU, counts the GPUs and starts a thread for each. Neither survives a fork, and a forward on the CPU must.
    """
    states: dict[tuple[int, int], bool] = {}

    def look() -> None:
        _LookInBackward.apply(torch.zeros((), requires_grad=True), states).backward()  # type: ignore[no-untyped-call]

    _in_a_new_thread(look)
    return states


def _in_a_new_thread(look: Callable[[], None]) -> None:
    """Look at the dispatcher in a thread that has told it nothing yet."""
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()


class _LookInBackward(torch.autograd.Function):
    """torch 2.11 tells the dispatcher more while it runs a backward: to leave out what serves named tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, states: dict[tuple[int, int], bool]) -> Tensor:
        ctx.states = states
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.states[_state()] = False
        return dx, None


def _ordinary(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the dispatcher sees in each what it sees in a new tensor: no lazy negation, no wrapper, no symbolic zero."""
    device = next(x.device for x in tensors if x is not None)
    if device.type == "meta":
        return False
    plain = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            plain.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return all(x is None or torch._C._dispatch_keys(x).raw_repr() in plain for x in tensors)


def _in_order(canonical: Canonical) -> bool:
    """Whether a contiguous tensor in the user's leading axes is contiguous in the canonical ones."""
    axes = [axis for axis in canonical.batch + canonical.rows if canonical.lead[axis] != 1]
    return axes == sorted(axes)


def _same_memory(given: tuple[Tensor | None, ...], canonical: tuple[Tensor | None, ...]) -> bool:
    """Whether the canonical tensors are views from the same start, and have all elements of those that get a gradient."""
    return all(
        x is None
        or y is None
        or (y.numel() > 0 and x.data_ptr() == y.data_ptr() and (not x.requires_grad or x.numel() == y.numel()))
        for x, y in zip(given, canonical, strict=True)
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class EvoformerAttention(torch.autograd.Function):
    """A Call as autograd sees it; profilers show it by this name."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """o, lse and reference in the user's axes."""
        o, lse, reference = call.compute(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(reference)
        ctx.save_for_backward(*tensors, o, lse, reference)
        return o, lse, reference

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Straight to the plan as well, unless this pass is itself recorded, traced or transformed."""
        if do is None and dlse is None:
            return (None,) * 7
        if getattr(forward_ad, "_current_level", 0) >= 0:
            check_no_tangent(do, dlse)
        saved = (do, dlse, *ctx.saved_tensors)
        of_q, of_k, of_v, _, of_mask_bias, of_pair_bias = ctx.needs_input_grad[1:]
        needs = (of_q, of_k, of_v, of_mask_bias, of_pair_bias)
        run = _find_backward(ctx.call, saved, needs)
        _, _, q, k, v, _, mask_bias, pair_bias, _, _, _ = saved
        if run is None:
            dq, dk, dv, dmask_bias, dpair_bias = _through_operator(ctx.call, saved, needs)
        else:
            dq, dk, dv = (_like(x) if need else None for x, need in zip((q, k, v), needs, strict=False))
            dmask_bias, dpair_bias = run(*saved, dq, dk, dv)
        if dmask_bias is not None and dmask_bias.shape != mask_bias.shape:
            dmask_bias = dmask_bias.reshape(mask_bias.shape)
        if dpair_bias is not None and dpair_bias.shape != pair_bias.shape:
            dpair_bias = dpair_bias.reshape(pair_bias.shape)
        return None, dq, dk, dv, None, dmask_bias, dpair_bias


_record = super(torch.autograd.Function, EvoformerAttention).apply
"""`EvoformerAttention.apply` without its questions about transforms, which `find` has asked."""


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _find_backward(
    call: Call, saved: tuple[Any, ...], needs: tuple[bool, ...]
) -> Callable[..., tuple[Tensor | None, Tensor | None]] | None:
    """The plan of this backward, or None where the operator has to run it.

    Hooks may have put other tensors in the place of those that were saved, so all are looked at again.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_function_stack():
        return None
    given = [x for x in saved if x is not None]
    asks = (saved[0] is None, saved[1] is None, ops.settings(saved[2].dtype))
    backwards = _kept_backwards(call)
    for known in backwards:
        if known.asks == asks and known.look.fits(given):
            return known.run
    if _casts() is None or not _ordinary(saved):
        return None
    canonical = _canonical_backward(call, saved, needs)
    if not _same_memory(saved, canonical):
        return None
    run = ops.choose_backward(*canonical, needs, *call.options).run  # type: ignore[call-arg]
    _keep(backwards, _Backward(asks, _Look(given), run))
    return run


def _canonical_backward(call: Call, saved: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference on the axes that the forward gave them."""
    do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference = saved
    layout = call.options[1]
    c = canonicalise(
        to_canonical(q, layout),
        to_canonical(k, layout),
        to_canonical(v, layout),
        key_axes(mask, q),
        key_axes(mask_bias, q),
        pair_bias,
        narrow=not needs[4],
    )
    do, o = (None if x is None else c.fold(to_canonical(x, layout)) for x in (do, o))
    dlse, lse, reference = (None if x is None else c.fold(x) for x in (dlse, lse, reference))
    return do, dlse, c.q, c.k, c.v, c.mask, c.mask_bias, c.pair_bias, o, lse, reference


def _through_operator(call: Call, saved: tuple[Any, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
    """The gradients by `ops.backward`, which torch can trace and transform, and which refuses a second derivative."""
    gradients = ops.backward(*_canonical_backward(call, saved, needs), list(needs), *call.options)
    layout = call.options[1]
    shaped: list[Tensor | None] = []
    for i, (gradient, need) in enumerate(zip(gradients, needs, strict=True)):
        if i < 3 and need:
            gradient = to_user(gradient, layout).reshape(saved[2 + i].shape)
        shaped.append(gradient if need else None)
    return shaped
