"""Kernels whose arguments are NamedTuples: a tensor with its strides is one `View`, sizes are one tuple, constants another.

Triton takes tuples itself, but not their fields one by one: `do_not_specialize` does not reach into a tuple, so each new length
would compile anew. So `kernel` writes a flat kernel around a function. It has a parameter for each field: tensors first, then
numbers, then constants. It makes the tuples of them and calls the function, which Triton inlines.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

import triton
import triton.language as tl

from evoattn.backends.triton.launch import Kernel, Launch, Strided, units

__all__ = ["Constant", "Inner", "Number", "PairView", "Pointer", "RowView", "View", "kernel", "pair_view", "view"]

Pointer = Annotated[Any, "pointer"]
"""A tensor. Whether it starts on 16 bytes makes another variant of the kernel."""
Number = Annotated[Any, "number"]
"""A number of which there are no variants."""
Inner = Annotated[Any, "inner"]
"""An innermost stride. Whether it is 1 or a multiple of 16 makes another variant."""
Constant = Annotated[Any, "constant"]
"""A constant of a variant."""


class View(NamedTuple):
    """A tensor `[b,n,h,l,c]` with its strides. All but the innermost are in units of a grain (`launch.grain`)."""

    p: Pointer
    b: Number
    n: Number
    h: Number
    l: Number
    c: Inner


class PairView(NamedTuple):
    """A pair bias `[b|1,h|1,q|1,k|1]` with its strides, 0 along axes of size 1. The first three are in units of a grain."""

    p: Pointer
    b: Number
    h: Number
    q: Number
    k: Inner


class RowView(NamedTuple):
    """What each row has of all keys, `[b|1,n|1,*]`: the row bias, or the runs of its live tiles (`prepare.RowBias`)."""

    p: Pointer
    b: Number
    n: Number


def view(tensor: Strided | None, grain: int) -> View:
    """A view for a plan, which gets its tensor when it is launched."""
    return View(None, *units(tensor, 5, grain))


def pair_view(tensor: Strided | None, grain: int) -> PairView:
    """A view of a pair bias for a plan."""
    return PairView(None, *units(tensor, 4, grain))


class _Field(NamedTuple):
    """A field of an argument, which is a parameter of the flat kernel.

    Args:
        name: of the parameter.
        argument, field: of the function.
        kind: see above.
    """

    name: str
    argument: str
    field: str
    kind: Any


class _Structured(Kernel):
    """A kernel of a function whose parameters are annotated with NamedTuples.

    Args:
        function: the body.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.body = triton.jit(function)
        self.classes: dict[str, Any] = {name: kind for name, kind in get_type_hints(function).items() if name != "return"}
        fields = [
            _Field(field if kind == Constant else f"{argument}_{field}", argument, field, kind)
            for argument, group in self.classes.items()
            for field, kind in get_type_hints(group, include_extras=True).items()
        ]
        tensors = [x.name for x in fields if x.kind == Pointer]
        self._numbers = [i for i, x in enumerate(fields) if x.kind in (Number, Inner)]
        self._constants = [(i, x.name) for i, x in enumerate(fields) if x.kind == Constant]
        parameters = [*tensors, *(fields[i].name for i in self._numbers), *(f"{x}: tl.constexpr" for _, x in self._constants)]
        flat = self._flat(function, parameters, fields)
        super().__init__(triton.jit(flat, do_not_specialize=[x.name for x in fields if x.kind == Number]))

    def _flat(self, function: Callable[..., None], parameters: list[str], fields: list[_Field]) -> Callable[..., None]:
        """A function of these parameters that calls the body, with a source that Triton can read."""
        name, module = function.__name__, function.__module__
        made = {x: ", ".join(f"{y.field}={y.name}" for y in fields if y.argument == x) for x in self.classes}
        called = "".join(f"        {x}={self.classes[x].__name__}({given}),\n" for x, given in made.items())
        source = f"def {name}(\n    {', '.join(parameters)},\n):\n    body(\n{called}    )\n"
        path = f"<{module}.{name}>"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        scope = {"__name__": module, "body": self.body, "tl": tl, **{x.__name__: x for x in self.classes.values()}}
        exec(compile(source, path, "exec", annotations.compiler_flag), scope)
        flat: Callable[..., None] = scope[name]
        return flat

    def plan(self, programs: int, *_: float, through_map: Any = None, **values: Any) -> Launch:
        """See `Kernel.plan`.

        Args:
            programs: how many.
            through_map: as there.
            values: each argument, with None in the place of tensors; and Triton's options.
        """
        fields = [field for argument in self.classes for field in values.pop(argument)]
        constants = {name: fields[i] for i, name in self._constants}
        return super().plan(programs, *[fields[i] for i in self._numbers], through_map=through_map, **constants, **values)


def kernel(function: Callable[..., None]) -> _Structured:
    """Make a kernel of a function. Annotate each of its parameters with a NamedTuple of the kinds of fields above."""
    return _Structured(function)
