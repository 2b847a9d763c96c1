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
from evoattn.core.problem import GRADIENTS, Needs
from evoattn.dispatch import lookup
from evoattn.dispatch.axes import canonicalise
from evoattn.dispatch.lookup import BackwardPass, ForwardPass, Options

LIBRARY = torch.library.Library("evoattn", "DEF")

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? mask_bias, Tensor? pair_bias, Tensor? gate"
_OPTIONS = "float? scale, str layout, bool deterministic, str backend, str config"
LIBRARY.define(f"forward({_INPUTS}, {_OPTIONS}) -> (Tensor o, Tensor lse, Tensor reference)")
LIBRARY.define(
    f"backward(Tensor? do, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, Tensor reference, bool[] needs, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask_bias, Tensor dpair_bias, Tensor dgate)"
)

forward = torch.ops.evoattn.forward.default
"""Canonical tensors -> (o, lse, reference); see `evoattn.backends` for the axes and `evoattn.core.numerics` for the last two.

No gradient flows through `reference`.
"""

backward = torch.ops.evoattn.backward.default
"""The gradients of `forward`; one that `needs` does not ask for is a tensor of no elements."""

INPUTS = len(Inputs._fields)
"""The number of inputs that `forward` takes before its options."""

_TENSORS = len(Cotangents._fields) + INPUTS + len(Outputs._fields)
"""The number of tensors that `backward` takes before `needs`, in the order of `BackwardPass.tensors`."""


def arguments_of(inputs: Inputs, options: Options) -> tuple[Any, ...]:
    """Return the arguments of `forward`."""
    return *inputs, *_texts(options)


def _texts(options: Options) -> tuple[Any, ...]:
    """Return options as plain values that an operator takes: a config as text, "" for none."""
    return *tuple(options)[:4], "" if options.config is None else options.config.to_text()


def values_of(arguments: Sequence[Any]) -> tuple[Inputs, Options]:
    """Return the arguments of `forward` as values."""
    return Inputs(*arguments[:INPUTS]), _options(*arguments[INPUTS:])


def _options(scale: float | None, layout: str, deterministic: bool, backend: str, config: str) -> Options:
    return Options(scale, layout, deterministic, backend, Config.from_text(config) if config else None)


def differentiate(work: BackwardPass) -> tuple[Tensor, ...]:
    """Run `backward`."""
    gradients: tuple[Tensor, ...] = backward(*work.tensors, list(work.needs), *_texts(work.options))
    return gradients


def _pass_of(arguments: Sequence[Any]) -> BackwardPass:
    """Return the arguments of `backward` as a value."""
    do, dlse, *inputs, o, lse, reference = arguments[:_TENSORS]
    needs, *texts = arguments[_TENSORS:]
    return BackwardPass(Inputs(*inputs), _options(*texts), Cotangents(do, dlse), Outputs(o, lse, reference), Needs(*needs))


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options = values_of(arguments)
    plan = lookup.find_plan(ForwardPass(inputs, options))
    outputs = empty_outputs(inputs, options.layout)
    plan.run(inputs, outputs)
    return tuple(outputs)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    work = _pass_of(arguments)
    plan = lookup.find_plan(work)
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
    wanted = (work.inputs.mask_bias, work.needs.mask_bias), (work.inputs.pair_bias, work.needs.pair_bias)
    biases = [x.new_empty(x.shape) if need and x is not None else None for x, need in wanted]
    return _in_order(empty_gradients(work.inputs, work.options.layout, work.needs), biases, work.inputs)


def _vmap_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The mapped axis becomes one more leading axis; a bias that is not mapped is broadcast along it."""
    inputs, options = values_of(arguments)
    expand = tuple([name in ("q", "k", "v", "gate") for name in Inputs._fields])
    mapped = Inputs(*_mapped(info.batch_size, in_dims[:INPUTS], inputs, expand))
    folded, axes = canonicalise(_with_rows(mapped))
    return tuple(axes.restore(x) for x in forward(*arguments_of(folded, options))), (0, 0, 0)


def _vmap_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """As forward, but with every bias expanded along the mapped axis: each sample has gradients of its own."""
    work = _pass_of(arguments)
    dims = in_dims[:_TENSORS]
    do, dlse, *mapped, o, lse, reference = _mapped(info.batch_size, dims, work.tensors, (True,) * _TENSORS)
    inputs = _with_rows(Inputs(*mapped))
    folded, axes = canonicalise(inputs, narrow=False)
    do, dlse, o, lse, reference = (None if x is None else axes.fold(x) for x in (do, dlse, o, lse, reference))
    work = work._replace(inputs=folded, cotangents=Cotangents(do, dlse), outputs=Outputs(o, lse, reference))  # type: ignore[arg-type]

    def unmapped(name: str, gradient: Tensor) -> Tensor:
        if not getattr(work.needs, name):
            return gradient.expand(info.batch_size, 0)
        pair = name == "pair_bias"
        gradient = axes.restore(gradient.unsqueeze(1) if pair else gradient).sum_to_size(getattr(inputs, name).shape)
        return gradient.squeeze(2) if pair else gradient

    gradients = [unmapped(*each) for each in zip(GRADIENTS, differentiate(work), strict=True)]
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
