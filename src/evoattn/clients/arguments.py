"""Arguments of clients' layers, for layers of `evoattn.nn`. The file of each client has those that only its layers take.

Masks may lack leading axes along which they do not vary, and so may the pair representation of an attention with pair bias.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from evoattn.core import attempts
from evoattn.core.own_code import unwrapped
from evoattn.dispatch.axes import with_axes

_IGNORED = (
    "chunk_size",
    "chunk_heads",
    "ckpt_chunk_size",
    "_inplace_chunk_size",
    "inplace_safe",
    "flash_mask",
    "triangle_attention",
    "triangle_multiplicative",
)
"""Arguments that change no answer, beside those of which only the beginning is known."""


Layer = Callable[..., Tensor]
"""A layer of `evoattn.nn`."""


class UnknownArgument(TypeError):  # noqa: N818
    """A client's layer was called with an argument that `evoattn.nn` does not know. Nothing was computed."""


class ClientsOwn(UnknownArgument):
    """A client's layer was called in a way in which it has an answer of its own, which is kept."""


def ignore(switches: dict[str, Any]) -> None:
    """Raise UnknownArgument unless every argument is a kernel switch, a chunk size, or permits overwriting an input."""
    for name in switches:
        if not name.startswith(("use_", "_chunk", "_checkpoint")) and name not in _IGNORED:
            raise UnknownArgument(f"evoattn.nn.replace does not know the argument {name!r} of this layer")


def positions(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments after `self` that a method takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward = unwrapped(forward)
    return tuple(name for name, x in inspect.signature(forward).parameters.items() if x.kind in kinds)[1:]


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments given by position, or raise UnknownArgument if there are too many or one is given twice."""
    if len(args) > len(names):
        raise UnknownArgument(f"the layer takes {len(names)} arguments by position, got {len(args)}")
    first = names[: len(args)]
    twice = [name for name in first if name in kwargs]
    if twice:
        raise UnknownArgument(f"the layer got two values for the argument {twice[0]!r}")
    return {**dict(zip(first, args, strict=True)), **kwargs}


def forwards(*inputs: str) -> Callable[..., Tensor]:
    """A call of the layer with the tensors that the client names `inputs`, in the order of the layer, and with its `mask`."""
    return functools.partial(_forward, inputs)  # which can be pickled


def _forward(inputs: tuple[str, ...], layer: Layer, **arguments: Any) -> Tensor:
    tensors = [arguments.pop(name, None) for name in inputs]
    mask = arguments.pop("mask", None)
    ignore(arguments)
    return layer(*tensors) if mask is None else layer(*tensors, mask=with_axes(mask, tensors[0].ndim - 1))


def triangle(layer: Layer, x: Tensor, mask: Tensor | None = None, *, transpose_bias: bool = False, **switches: Any) -> Tensor:
    """Call the layer with OpenFold's arguments, and with an option of `evoattn.nn`."""
    ignore(switches)
    return layer(x, None if mask is None else with_axes(mask, x.ndim - 1), transpose_bias=transpose_bias)


def multiplication(
    layer: Layer, z: Tensor, *, inplace_safe: bool = False, _add_with_inplace: bool = False, **arguments: Any
) -> Tensor:
    """Call the layer with OpenFold's arguments. If z may be overwritten, the update may have to be added to it, in place.

    Template stacks keep z and drop what the layer returns. OpenFold-3 adds nothing if it calls cuEquivariance.
    """
    update = forwards("z")(layer, z=z, **arguments)
    adds = inplace_safe and _add_with_inplace and not arguments.get("use_cueq_triangle_kernels")
    if adds:
        attempts.check()  # z is the caller's
    return z.add_(update) if adds else update
