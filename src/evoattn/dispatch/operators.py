"""The operators `evoattn::forward` and `evoattn::backward`: schemas, fake functions, autocast, vmap.

`dispatch.autograd` registers their derivatives.
Nothing else registers anything with torch. The backend is chosen when an operator runs, on real tensors, so that torch.compile
and torch.export see one opaque operator and no guard on what the choice looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.core.config import Config
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.layouts import empty_gradients, empty_outputs
from evoattn.core.problem import GRADIENTS
from evoattn.dispatch import lookup
from evoattn.dispatch.axes import canonicalise
from evoattn.dispatch.lookup import Backward, Forward, Options

LIBRARY = torch.library.Library("evoattn", "DEF")

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? mask_bias, Tensor? pair_bias"
_OPTIONS = "float? scale, str layout, bool deterministic, str backend, str config"
_GATE = "Tensor? gate=None"
LIBRARY.define(f"forward({_INPUTS}, {_OPTIONS}, {_GATE}) -> (Tensor o, Tensor lse, Tensor reference)")
LIBRARY.define(
    f"backward(Tensor? do, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, Tensor reference, bool[] needs, {_OPTIONS}, {_GATE})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask_bias, Tensor dpair_bias, Tensor dgate)"
)

forward = torch.ops.evoattn.forward.default
"""Canonical tensors -> (o, lse, reference); see `evoattn.backends` for the axes and `evoattn.core.numerics` for the last two.

No gradient flows through `reference`.
"""

backward = torch.ops.evoattn.backward.default
"""The gradients of `forward`; one that `needs` does not ask for is a tensor of no elements.

`needs` has an entry for each of `problem.GRADIENTS`. Those that are missing at its end are not wanted: a graph that was stored
before there was a gate has five.
"""


_COUNT = len(Inputs._fields) - 1
"""How many inputs the operators take in a row; the gate is their last argument, and torch may leave it out if it is None."""

_GATE_AT = _COUNT + 5
"""Where `forward` takes the gate, after the options."""


def arguments_of(inputs: Inputs, options: Options) -> tuple[Any, ...]:
    """Values as the arguments of `forward`."""
    return (*tuple(inputs)[:_COUNT], *_texts(options), inputs.gate)


def _texts(options: Options) -> tuple[Any, ...]:
    """Options as plain values that an operator takes; a config as text, and "" for none."""
    return *tuple(options)[:4], "" if options.config is None else options.config.to_text()


def split(arguments: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Split a flat list (values, vmap dims or needs_input_grad) into inputs and options."""
    return Inputs(*arguments[:_COUNT], *arguments[_GATE_AT:]), tuple(arguments[_COUNT:_GATE_AT])


def values_of(arguments: Sequence[Any]) -> tuple[Inputs, Options]:
    """The arguments of `forward` as values."""
    inputs, (scale, layout, deterministic, backend, config) = split(arguments)
    return inputs, Options(scale, layout, deterministic, backend, Config.from_text(config) if config else None)


def differentiate(work: Backward) -> tuple[Tensor, ...]:
    """`backward` of a pass."""
    tensors = (*work.cotangents, *tuple(work.inputs)[:_COUNT], *work.outputs)
    gradients: tuple[Tensor, ...] = backward(*tensors, list(work.needs), *_texts(work.options), work.inputs.gate)
    return gradients


def _split_backward(arguments: Sequence[Any]) -> tuple[Cotangents, tuple[Any, ...], Outputs, Any]:
    """The arguments of `backward`, or something that there is for each: cotangents, those of `forward`, outputs, needs."""
    start = 2 + _COUNT
    outputs, needs = Outputs(*arguments[start : start + 3]), arguments[start + 3]
    return Cotangents(*arguments[:2]), (*arguments[2:start], *arguments[start + 4 :]), outputs, needs


def _pass_of(arguments: Sequence[Any]) -> Backward:
    """The arguments of `backward` as a value."""
    cotangents, forward_arguments, outputs, needs = _split_backward(arguments)
    inputs, options = values_of(forward_arguments)
    return Backward(inputs, options, cotangents, outputs, (*needs, *(False,) * (len(GRADIENTS) - len(needs))))


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options = values_of(arguments)
    plan = lookup.plan(Forward(inputs, options))
    outputs = empty_outputs(inputs, options.layout)
    plan.run(inputs, outputs)
    return tuple(outputs)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    work = _pass_of(arguments)
    plan = lookup.plan(work)
    written = empty_gradients(work.inputs, work.options.layout, work.needs)
    return _in_order(written, plan.run(work.cotangents, work.inputs, work.outputs, written), work.inputs)


def _in_order(written: tuple[Tensor | None, ...], biases: Sequence[Tensor | None], inputs: Inputs) -> tuple[Tensor, ...]:
    """dq, dk, dv and dgate, and those of the biases, in the order of `GRADIENTS`; one that is not wanted has no elements."""
    gradients = (*written[:3], *biases, *written[3:])
    return tuple([inputs.q.new_empty(0) if x is None else x for x in gradients])


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options = values_of(arguments)
    return tuple(empty_outputs(inputs, options.layout))


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    work = _pass_of(arguments)
    wanted = zip(work.inputs.differentiable[3:5], work.needs[3:5], strict=True)
    biases = [x.new_empty(x.shape) if need and x is not None else None for x, need in wanted]
    return _in_order(empty_gradients(work.inputs, work.options.layout, work.needs), biases, work.inputs)


def _vmap_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The mapped axis becomes one more leading axis; a bias that is not mapped is broadcast along it."""
    inputs, options = values_of(arguments)
    expand = tuple([name in ("q", "k", "v", "gate") for name in Inputs._fields])
    mapped = Inputs(*_mapped(info.batch_size, split(in_dims)[0], inputs, expand))
    folded, axes = canonicalise(_with_rows(mapped))
    return tuple(axes.restore(x) for x in forward(*arguments_of(folded, options))), (0, 0, 0)


def _vmap_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """As forward, but with every bias expanded along the mapped axis: each sample has gradients of its own."""
    work = _pass_of(arguments)
    cotangent_dims, forward_dims, output_dims, _ = _split_backward(in_dims)
    dims = (*cotangent_dims, *split(forward_dims)[0], *output_dims)
    do, dlse, *mapped, o, lse, reference = _mapped(info.batch_size, dims, work.tensors, (True,) * len(dims))  # type: ignore[arg-type]
    inputs = _with_rows(Inputs(*mapped))
    folded, axes = canonicalise(inputs, narrow=False)
    do, dlse, o, lse, reference = (None if x is None else axes.fold(x) for x in (do, dlse, o, lse, reference))
    work = work._replace(inputs=folded, cotangents=Cotangents(do, dlse), outputs=Outputs(o, lse, reference))  # type: ignore[arg-type]
    gradients, needs = list(differentiate(work)), work.needs
    for i, x in enumerate(inputs.differentiable):
        if not needs[i]:
            gradients[i] = gradients[i].expand(info.batch_size, 0)
            continue
        gradient = gradients[i].unsqueeze(1) if i == 4 else gradients[i]
        gradients[i] = axes.restore(gradient).sum_to_size(x.shape)  # type: ignore[union-attr]
    if needs[4]:
        gradients[4] = gradients[4].squeeze(2)
    return tuple(gradients), (0,) * len(GRADIENTS)


def _with_rows(inputs: Inputs) -> Inputs:
    """Mapped canonical tensors with the axis n, of size 1, in the pair bias as well."""
    pair_bias = inputs.pair_bias
    return inputs._replace(pair_bias=None if pair_bias is None else pair_bias.unsqueeze(2))


def _mapped(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None], expand: Sequence[bool]) -> tuple[Any, ...]:
    """Each tensor with the mapped axis first, of size 1 if it is not mapped, or expanded."""
    moved: list[Tensor | None] = []
    for x, axis, expanded in zip(tensors, dims, expand, strict=True):
        if x is not None:
            x = x.unsqueeze(0) if axis is None else x.movedim(axis, 0)
            x = x.expand(size, *x.shape[1:]) if expanded else x
        moved.append(x)
    return tuple(moved)


def _autocast(device_type: str, key: str) -> None:
    """Under autocast q, k, v and gate take its dtype, as torch's own attention does.

    Biases keep their dtypes: every backend reads any float dtype, and a mask bias of -1e9 does not fit in float16. A backward
    has the dtypes of its forward, whatever is on.
    """
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast_forward(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(x: Tensor | None) -> Any:
            return x if x is None or x.dtype == torch.float64 else x.to(dtype)

        inputs, options = values_of(arguments)
        inputs = inputs._replace(q=cast(inputs.q), k=cast(inputs.k), v=cast(inputs.v), gate=cast(inputs.gate))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return forward(*arguments_of(inputs, options))

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
