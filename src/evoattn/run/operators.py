"""The operators `evoattn::forward` and `evoattn::backward`: schemas, fake functions, autocast, vmap. Autograd: `run.autograd`.

Nothing else registers anything with torch. The backend is chosen when an operator runs, on real tensors, so that torch.compile
and torch.export see one opaque operator and no guard on what the choice looks at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.call.canonical import canonicalise
from evoattn.inputs import Cotangents, Inputs, Options, Outputs
from evoattn.layouts import empty_gradients, empty_outputs
from evoattn.run import plans

__all__ = ["LIBRARY", "backward", "forward"]

LIBRARY = torch.library.Library("evoattn", "DEF")

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? mask_bias, Tensor? pair_bias"
_OPTIONS = "float? scale, str layout, bool deterministic, str backend, str config"
LIBRARY.define(f"forward({_INPUTS}, {_OPTIONS}) -> (Tensor o, Tensor lse, Tensor reference)")
LIBRARY.define(
    f"backward(Tensor? do, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, Tensor reference, bool[5] needs, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask_bias, Tensor dpair_bias)"
)

forward = torch.ops.evoattn.forward.default
"""Canonical tensors -> (o, lse, reference); see `evoattn.backends` for the axes and `evoattn.numerics` for the last two.

No gradient flows through `reference`.
"""

backward = torch.ops.evoattn.backward.default
"""The gradients of `forward`; one that `needs` does not ask for is a tensor of no elements."""


_COUNT = len(Inputs._fields)


def _of_forward(arguments: tuple[Any, ...]) -> tuple[Inputs, Options]:
    """The arguments of `forward` as values."""
    return Inputs(*arguments[:_COUNT]), Options(*arguments[_COUNT:])


def _of_backward(arguments: tuple[Any, ...]) -> tuple[Cotangents, Inputs, Outputs, tuple[bool, ...], Options]:
    """The arguments of `backward` as values."""
    cotangents, inputs, rest = arguments[:2], arguments[2 : 2 + _COUNT], arguments[2 + _COUNT :]
    return Cotangents(*cotangents), Inputs(*inputs), Outputs(*rest[:3]), tuple(rest[3]), Options(*rest[4:])


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options = _of_forward(arguments)
    plan = plans.forward(inputs, options)
    outputs = empty_outputs(inputs, options.layout)
    plan.run(inputs, outputs)
    return tuple(outputs)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    cotangents, inputs, outputs, needs, options = _of_backward(arguments)
    plan = plans.backward(cotangents, inputs, outputs, needs, options)
    of_qkv = empty_gradients(inputs, options.layout, needs)
    gradients = (*of_qkv, *plan.run(cotangents, inputs, outputs, of_qkv))
    return tuple([inputs.q.new_empty(0) if x is None else x for x in gradients])


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options = _of_forward(arguments)
    return tuple(empty_outputs(inputs, options.layout))


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    _, inputs, _, needs, options = _of_backward(arguments)
    wanted = zip(inputs.differentiable[3:], needs[3:], strict=True)
    biases = [x.new_empty(x.shape) if need and x is not None else None for x, need in wanted]
    gradients = (*empty_gradients(inputs, options.layout, needs), *biases)
    return tuple([inputs.q.new_empty(0) if x is None else x for x in gradients])


def _vmap_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The mapped axis becomes one more leading axis; a bias that is not mapped is broadcast along it."""
    inputs, options = _of_forward(arguments)
    mapped = Inputs(*_mapped(info.batch_size, in_dims, inputs, expanded=3))
    folded, axes = canonicalise(_with_rows(mapped))
    return tuple(axes.restore(x) for x in forward(*folded, *options)), (0, 0, 0)


def _vmap_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """As forward, but with every bias expanded along the mapped axis: each sample has gradients of its own."""
    cotangents, inputs, outputs, needs, options = _of_backward(arguments)
    tensors = (*cotangents, *inputs, *outputs)
    do, dlse, *mapped, o, lse, reference = _mapped(info.batch_size, in_dims, tensors, expanded=len(tensors))
    given = _with_rows(Inputs(*mapped))
    folded, axes = canonicalise(given, narrow=False)
    do, dlse, o, lse, reference = (None if x is None else axes.fold(x) for x in (do, dlse, o, lse, reference))
    gradients = list(backward(do, dlse, *folded, o, lse, reference, needs, *options))
    for i, x in enumerate(given.differentiable):
        if not needs[i]:
            gradients[i] = gradients[i].expand(info.batch_size, 0)
            continue
        gradient = gradients[i].unsqueeze(1) if i == 4 else gradients[i]
        gradients[i] = axes.restore(gradient).sum_to_size(x.shape)  # type: ignore[union-attr]
    if needs[4]:
        gradients[4] = gradients[4].squeeze(2)
    return tuple(gradients), (0,) * 5


def _with_rows(inputs: Inputs) -> Inputs:
    """Mapped canonical tensors with the axis n, of size 1, in the pair bias as well."""
    pair_bias = inputs.pair_bias
    return inputs._replace(pair_bias=None if pair_bias is None else pair_bias.unsqueeze(2))


def _mapped(
    size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...], *, expanded: int
) -> tuple[Any, ...]:
    """Each tensor with the mapped axis first, of size 1 where it is not mapped, or expanded for the first few."""
    moved: list[Tensor | None] = []
    for i, (x, axis) in enumerate(zip(tensors, in_dims, strict=False)):
        if x is not None:
            x = x.unsqueeze(0) if axis is None else x.movedim(axis, 0)
            x = x.expand(size, *x.shape[1:]) if i < expanded else x
        moved.append(x)
    return tuple(moved)


def _autocast(device_type: str, key: str) -> None:
    """Under autocast q, k and v take its dtype, as torch's own attention does. Biases keep theirs: every backend reads any
    float dtype, and a mask bias of -1e9 does not fit in float16. A backward has the dtypes of its forward, whatever is on."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return forward(*(x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)), *rest)

    def uncast_backward(*arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return backward(*arguments)

    LIBRARY.impl("forward", cast_forward, key)
    LIBRARY.impl("backward", uncast_backward, key)


LIBRARY.impl("forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("evoattn::forward", _fake_forward, lib=LIBRARY)
torch.library.register_fake("evoattn::backward", _fake_backward, lib=LIBRARY)
torch.library.register_vmap("evoattn::forward", _vmap_forward, lib=LIBRARY)
torch.library.register_vmap("evoattn::backward", _vmap_backward, lib=LIBRARY)
for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _autocast(_device_type, _key)
