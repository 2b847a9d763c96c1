"""`CustomOperator`: how every operator of `torch.ops.evoattn` is defined. Nothing else registers anything with torch."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

LIBRARY = torch.library.Library("evoattn", "DEF")


class CustomOperator:
    """An operator of torch whose arguments are the fields of named tuples, one after the other.

    Its functions take the named tuples. It is one step to torch, which traces and transforms it as a whole.

    Args:
        name: of the operator.
        takes: its arguments: classes of named tuples, and single arguments as a schema has them, such as "bool[] needs".
        returns: its results, as a schema has them.
        run: computes the results, no two of which may share memory.
        outline: returns empty tensors like the results.
    """

    def __init__(
        self, name: str, takes: Sequence[Any], returns: str, run: Callable[..., Any], outline: Callable[..., Any]
    ) -> None:
        self.name, self.takes = f"evoattn::{name}", takes
        LIBRARY.define(f"{name}({', '.join(map(_schema, takes))}) -> {returns}")
        LIBRARY.impl(name, lambda *arguments: run(*self.values(arguments)), "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, lambda *arguments: outline(*self.values(arguments)), lib=LIBRARY)
        self.operator = getattr(torch.ops.evoattn, name).default

    def values(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments of the operator as the values that its functions take."""
        left = iter(arguments)
        return [next(left) if isinstance(kind, str) else kind(*[next(left) for _ in kind._fields]) for kind in self.takes]

    def differentiate(self, save: Callable[..., None], gradients: Callable[..., Sequence[Tensor | None]]) -> None:
        """Register the derivative. `save` takes a context, the values and the results.

        `gradients` takes the context and a cotangent of each result. It returns a gradient or None for each argument, up to the
        last one that can have a gradient.
        """
        count = sum(1 if isinstance(kind, str) else len(kind._fields) for kind in self.takes)

        def save_values(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            save(ctx, self.values(inputs), output)

        def all_gradients(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
            found = tuple(gradients(ctx, *cotangents))
            return found + (None,) * (count - len(found))

        torch.library.register_autograd(self.name, all_gradients, setup_context=save_values, lib=LIBRARY)

    def refuse_derivative(self, why: str) -> None:
        """Have a derivative of the operator raise RuntimeError with this message."""

        def refuse(ctx: Any, *cotangents: Tensor) -> NoReturn:
            raise RuntimeError(why)

        torch.library.register_autograd(self.name, refuse, lib=LIBRARY)


def _schema(kind: Any) -> str:
    """The arguments that a named tuple stands for, by the types of its fields."""
    if isinstance(kind, str):
        return kind
    types = {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(kind).items()}
    return ", ".join(f"{kinds[0].__name__}{'?' * (len(kinds) > 1)} {name}" for name, kinds in types.items())
