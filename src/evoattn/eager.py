"""The short way of an eager call: straight to a backend's plan, without torch's dispatcher, without views.

A call goes this way when the operators of `evoattn.ops` would do nothing but compute: the arguments are ordinary tensors that
lie in memory as canonical ones do, and torch is neither compiling nor tracing nor transforming. Then its result is theirs. What
has been checked and worked out is kept for calls that look alike. Everything else goes through the operators.

On two cores of an AMD EPYC a call with both biases, kernels not counted, takes 16 us this way and 56 through the operator.
"""

from __future__ import annotations

import dataclasses
import functools
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
from evoattn.validation import compute_dtype, key_axes

__all__ = ["Call", "find", "forget"]

_ORDINARY = frozenset((Tensor, torch.nn.Parameter))

_PRIVATE = (
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set",
    "_len_torch_function_stack",
)
"""What this module needs of torch's internals. A torch without them only loses the short way."""


@dataclasses.dataclass(eq=False)
class Call:
    """Calls that look alike. Empty until `fill`; then `direct` says whether they go the short way.

    Args:
        run: the forward that the backend planned.
        options: scale, layout, deterministic, backend and config as the operators take them.
        o, lse: (shape, stride, dtype) of the outputs, in the user's axes.
        records: whether autograd has to know of the call.
    """

    filled: bool = False
    direct: bool = False
    run: Callable[..., None] | None = None
    options: tuple[Any, ...] = ()
    o: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None
    lse: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None = None
    records: bool = False

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """o and lse in the user's axes, of q, k, v, mask, mask_bias and pair_bias; lse measured from the row shift."""
        if self.records:
            return _record(self, *tensors)  # type: ignore[no-untyped-call, no-any-return]
        return self.compute(tensors)

    def compute(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
        """o and lse in the user's axes."""
        device = tensors[0].device  # type: ignore[union-attr]
        (o_shape, o_stride, o_dtype), (shape, stride, dtype) = self.o, self.lse  # type: ignore[misc]
        o = torch.empty_strided(o_shape, o_stride, dtype=o_dtype, device=device)
        lse = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        self.run(*tensors, o, lse)  # type: ignore[misc]
        return o, lse

    def fill(self, tensors: tuple[Tensor | None, ...], canonical: Canonical, options: tuple[Any, ...]) -> None:
        """Keep a call whose arguments have been checked. One that does not go the short way is found out once."""
        if self.filled:
            return
        q, k, v = canonical.q, canonical.k, canonical.v
        inputs = (q, k, v, canonical.mask, canonical.mask_bias, canonical.pair_bias)
        self.options = options
        self.records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        self.filled = True
        if not _ordinary(tensors) or not _in_order(canonical) or not _same_memory(tensors, inputs):
            return
        self.run = ops.choose_forward(*inputs, *options).run
        heads_inside = options[1] == "bnlhd"
        h, l = q.shape[-3:-1]
        sizes = (*canonical.lead, *((l, h) if heads_inside else (h, l)), v.shape[-1])
        self.o = (sizes, _contiguous(sizes), q.dtype)
        sizes = (*canonical.lead, h, l)
        self.lse = (sizes, _contiguous(sizes), accumulate_dtype(q.dtype))
        self.direct = self.run is not None


@functools.lru_cache(maxsize=4096, typed=True)
def _kept(*alike: Any) -> Call:
    """One Call for all calls that look alike; `typed`, because 1 is not True to validation."""
    return Call()


@functools.lru_cache(maxsize=4096)
def _kept_backward(*alike: Any) -> ops.Choice:
    """The backward of a Call for cotangents that look alike; empty until the first. One without a `run` takes the operator."""
    return ops.Choice()


def forget() -> None:
    """Check, choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    ops.forget()
    _kept.cache_clear()
    _kept_backward.cache_clear()


def find(tensors: tuple[Any, ...], scale: Any, *options: Any) -> Call | None:
    """The Call of these arguments, or None where torch has to see an operator, or cannot be asked.

    Args:
        tensors: q, k, v, mask, mask_bias, pair_bias, as the user gave them.
        scale, options: all else that a result depends on.
    """
    if torch.compiler.is_compiling():
        return None
    states = _states()
    casts = states.get(_state()) if states else None
    if casts is None or torch._C._len_torch_function_stack() or getattr(forward_ad, "_current_level", 0) >= 0:
        return None
    looks = _looks(tensors)
    if looks is None or not (scale is None or scale.__class__ is float or scale.__class__ is int):
        return None
    if casts and any(compute_dtype(x) != x.dtype for x in tensors[:3]):
        return None
    try:
        return _kept(looks, torch.is_grad_enabled(), ops.settings(tensors[0].dtype), scale, *options)
    except TypeError:  # an option that has no hash: validation has the words for it
        return None


def _looks(tensors: tuple[Any, ...], *, saved: bool = False) -> tuple[Any, ...] | None:
    """What a call may depend on in its tensors; None where one of them is no ordinary tensor.

    What the dispatcher sees in a tensor takes as long to ask as all else. Of what a forward saved it is known, but for a lazy
    negation and a tensor without memory, which a hook may have put in its place.
    """
    looks: list[Any] = []
    try:
        for x in tensors:
            if x is None:
                looks.append(None)
            elif x.__class__ in _ORDINARY:
                address = x.data_ptr()
                keys = (x.is_neg(), address == 0) if saved else torch._C._dispatch_keys(x).raw_repr()
                looks.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad, address % 16 == 0, keys))
            else:
                return None
    except RuntimeError:  # sparse, nested, dead after a transform: without strides, or without memory
        return None
    return tuple(looks)


def _state() -> tuple[int, int]:
    """What this thread has told the dispatcher to do besides computing: tracing, transforms, modes, autocast, all of it."""
    return torch._C._dispatch_tls_local_include_set().raw_repr(), torch._C._dispatch_tls_local_exclude_set().raw_repr()


@functools.cache
def _states() -> dict[tuple[int, int], bool]:
    """States in which an operator would only compute, and whether autocast is on: those of a thread that was just started."""
    if not all(hasattr(torch._C, name) for name in _PRIVATE):
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
        _LookInBackward.apply(torch.zeros((), requires_grad=True), states).backward()  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return states


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
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        """o and lse in the user's axes."""
        o, lse = call.compute(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Straight to the plan as well, unless this pass is itself recorded, traced or transformed."""
        if do is None and dlse is None:
            return (None,) * 7
        saved = (do, dlse, *ctx.saved_tensors)
        of_q, of_k, of_v, _, of_mask_bias, of_pair_bias = ctx.needs_input_grad[1:]
        needs = (of_q, of_k, of_v, of_mask_bias, of_pair_bias)
        run = _find_backward(ctx.call, saved, needs)
        _, _, q, k, v, _, mask_bias, pair_bias, _, _ = saved
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
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _state() not in _states():
        return None
    of_cotangents, of_saved = _looks(saved[:2]), _looks(saved[2:], saved=True)
    if of_cotangents is None or of_saved is None or torch._C._len_torch_function_stack():
        return None
    choice = _kept_backward(call, of_cotangents, of_saved, needs, ops.settings(saved[2].dtype))
    if choice.backend is None:
        canonical = _canonical_backward(call, saved, needs)
        if not _ordinary(saved) or not _same_memory(saved, canonical):
            return None
        chosen = ops.choose_backward(*canonical, needs, *call.options)  # type: ignore[call-arg]
        choice.run, choice.backend = chosen.run, chosen.backend
    return choice.run


def _canonical_backward(call: Call, saved: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse on the axes that the forward gave them."""
    do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse = saved
    layout = call.options[1]
    c = canonicalise(
        to_canonical(q, layout),
        to_canonical(k, layout),
        to_canonical(v, layout),
        key_axes(mask, q.ndim),
        key_axes(mask_bias, q.ndim),
        pair_bias,
        narrow=not needs[4],
    )
    do, o = (None if x is None else c.fold(to_canonical(x, layout)) for x in (do, o))
    dlse, lse = (None if x is None else c.fold(x) for x in (dlse, lse))
    return do, dlse, c.q, c.k, c.v, c.mask, c.mask_bias, c.pair_bias, o, lse


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
