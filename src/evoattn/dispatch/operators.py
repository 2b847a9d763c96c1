"""The operators `evoattn::forward` and `evoattn::backward`: what they run, and their rules for autocast and vmap.

`dispatch.autograd` registers their derivatives. The backend is chosen when an operator runs, on real tensors, so that
torch.compile and torch.export see one opaque operator and no guard on what the choice looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.layouts import empty_gradients, empty_outputs
from evoattn.core.problem import GRADIENTS, Needs
from evoattn.dispatch import lookup
from evoattn.dispatch.axes import canonicalise
from evoattn.dispatch.custom_operator import LIBRARY, CustomOperator
from evoattn.dispatch.lookup import BackwardPass, ForwardPass, Settings

_INPUTS = len(Inputs._fields)
_TENSORS = len(Cotangents._fields) + _INPUTS + len(Outputs._fields)
"""The number of tensors that `backward` takes, in the order of `BackwardPass.tensors`."""


def _run_forward(inputs: Inputs, settings: Settings) -> tuple[Tensor, ...]:
    plan = lookup.find_plan(ForwardPass(inputs, settings))
    outputs = empty_outputs(inputs, settings.layout)
    plan.run(inputs, outputs)
    return tuple(outputs)


def _outline_forward(inputs: Inputs, settings: Settings) -> tuple[Tensor, ...]:
    return tuple(empty_outputs(inputs, settings.layout))


FORWARD = CustomOperator(
    "forward", (Inputs, Settings), "(Tensor o, Tensor lse, Tensor reference)", _run_forward, _outline_forward
)

forward = FORWARD.operator
"""Canonical tensors -> (o, lse, reference); see `evoattn.backends` for the axes and `evoattn.core.numerics` for the last two.

No gradient flows through `reference`.
"""


def _pass(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, needs: Sequence[bool], settings: Settings) -> BackwardPass:
    return BackwardPass(inputs, settings, cotangents, outputs, Needs(*needs))


def _run_backward(*values: Any) -> tuple[Tensor, ...]:
    work = _pass(*values)
    plan = lookup.find_plan(work)
    written = empty_gradients(work.inputs, work.settings.layout, work.needs)
    return _in_order(written, plan.run(work.cotangents, work.inputs, work.outputs, written), work.inputs)


def _outline_backward(*values: Any) -> tuple[Tensor, ...]:
    work = _pass(*values)
    wanted = (work.inputs.mask_bias, work.needs.mask_bias), (work.inputs.pair_bias, work.needs.pair_bias)
    biases = [x.new_empty(x.shape) if need and x is not None else None for x, need in wanted]
    return _in_order(empty_gradients(work.inputs, work.settings.layout, work.needs), biases, work.inputs)


def _in_order(written: tuple[Tensor | None, ...], biases: Sequence[Tensor | None], inputs: Inputs) -> tuple[Tensor, ...]:
    """dq, dk, dv and dgate, and those of the biases, in the order of `GRADIENTS`; one that is not wanted has no elements."""
    gradients = (*written[:3], *biases, *written[3:])
    return tuple([inputs.q.new_empty(0) if x is None else x for x in gradients])


BACKWARD = CustomOperator(
    "backward",
    (Cotangents, Inputs, Outputs, "bool[] needs", Settings),
    f"({', '.join(f'Tensor d{name}' for name in GRADIENTS)})",
    _run_backward,
    _outline_backward,
)
"""The gradients of `forward`; one that `needs` does not ask for is a tensor of no elements."""


def differentiate(work: BackwardPass) -> tuple[Tensor, ...]:
    """Run `backward`."""
    gradients: tuple[Tensor, ...] = BACKWARD.operator(*work.tensors, list(work.needs), *work.settings)
    return gradients


def _map_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The mapped axis becomes one more leading axis; a bias that is not mapped is broadcast along it."""
    inputs, settings = FORWARD.values(arguments)
    expand = tuple([name in ("q", "k", "v", "gate") for name in Inputs._fields])
    mapped = Inputs(*_mapped(info.batch_size, in_dims[:_INPUTS], inputs, expand))
    folded, axes = canonicalise(_with_rows(mapped))
    return tuple(axes.restore(x) for x in forward(*folded, *settings)), (0, 0, 0)


def _map_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """As forward, but with every bias expanded along the mapped axis: each sample has gradients of its own."""
    work = _pass(*BACKWARD.values(arguments))
    do, dlse, *mapped, o, lse, reference = _mapped(info.batch_size, in_dims[:_TENSORS], work.tensors, (True,) * _TENSORS)
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

        inputs, settings = FORWARD.values(arguments)
        inputs = inputs._replace(q=cast(inputs.q), k=cast(inputs.k), v=cast(inputs.v), gate=cast(inputs.gate))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return forward(*inputs, *settings)

    def uncast_backward(*arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return BACKWARD.operator(*arguments)

    LIBRARY.impl("forward", cast_forward, key)
    LIBRARY.impl("backward", uncast_backward, key)


torch.library.register_vmap(FORWARD.name, _map_forward, lib=LIBRARY)
torch.library.register_vmap(BACKWARD.name, _map_backward, lib=LIBRARY)
for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _autocast(_device_type, _key)
