"""Kernels whose arguments are tuples: a tensor with its strides is one `View`, sizes are one tuple, constants another.

Triton takes tuples itself, but not their fields one by one: `do_not_specialize` does not reach into a tuple, so each new length
would compile anew. So `kernel` writes a flat kernel around a function. It has a parameter for each field: tensors first, then
numbers, then constants. It builds the tuples from them and calls the function, which Triton inlines. So of

    Variant = namedtuple("Variant", "BLOCK WAIT")

    @kernel
    def scale_kernel(x: View, factor: Number, V: Variant) -> None: ...

it makes, with `body` for the function,

    def scale_kernel(x_p, x_b, x_n, x_h, x_l, x_c, factor, BLOCK: tl.constexpr, WAIT: tl.constexpr):
        body(x=View(p=x_p, b=x_b, n=x_n, h=x_h, l=x_l, c=x_c), factor=factor, V=Variant(BLOCK=BLOCK, WAIT=WAIT))
"""

from __future__ import annotations

import linecache
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import triton
import triton.language as tl

from evoattn.kit.launch import FlatKernel, Launch
from evoattn.kit.strides import Strided, strides, units

if TYPE_CHECKING:
    Pointer = Any  # Triton's values have no types outside of its compiler
    Number = Any
    Specialised = Any
    Constant = Any
else:  # a kernel may name no global classes but named tuples

    class Pointer(NamedTuple):
        """A tensor. Whether it starts on 16 bytes makes another variant of the kernel."""

    class Number(NamedTuple):
        """A number of which there are no variants. A field of a namedtuple in lower case is one."""

    class Specialised(NamedTuple):
        """A number of which there are variants: 1, multiples of 16, and others. Innermost strides are such numbers."""

    class Constant(NamedTuple):
        """A constant of a variant. A field of a namedtuple in upper case is one."""


class View(NamedTuple):
    """A tensor `[b,n,h,l,c]` with its strides. All but the innermost are in units of a grain (`strides.grain`)."""

    p: Pointer
    b: Number
    n: Number
    h: Number
    l: Number
    c: Specialised


class PairView(NamedTuple):
    """A pair bias `[b|1,h|1,q|1,k|1]` with its strides, 0 along axes of size 1. The first three are in units of a grain."""

    p: Pointer
    b: Number
    h: Number
    q: Number
    k: Specialised


class RowView(NamedTuple):
    """A tensor `[b|1,n|1,*]` with its first two strides: the key bias, or the runs of its live tiles (`key_bias.KeyBias`)."""

    p: Pointer
    b: Number
    n: Number


class Affine(NamedTuple):
    """The weight and the bias of a norm or of a product."""

    w: Pointer
    b: Pointer


Sizes = namedtuple("Sizes", "n h lq lk scale")
"""Rows, heads, queries, keys, and the factor on q k."""


def view(tensor: Strided | None, grain: int) -> View:
    """A view for a plan, which gets its tensor when it is launched."""
    return View(None, *units(tensor, 5, grain))


def lse_view(tensor: Strided | None) -> View:
    """A view of what each query has, `[b,n,h,q]`, for a plan."""
    b, n, h, q = strides(tensor, 4)
    return View(None, b, n, h, q, 0)


def pair_view(tensor: Strided | None, grain: int) -> PairView:
    """A view of a pair bias for a plan."""
    return PairView(None, *units(tensor, 4, grain))


def row_view(tensor: Strided | None, grain: int = 1) -> RowView:
    """A view of a tensor `[b|1,n|1,*]` for a plan."""
    b, n, _ = strides(tensor, 3)
    return RowView(None, b // grain, n // grain)


class _Field(NamedTuple):
    """A parameter of the flat kernel: an argument of the function, or a field of one."""

    name: str
    argument: str
    field: str | None
    kind: Any

    def of(self, values: dict[str, Any]) -> Any:
        """Its value among those of all arguments."""
        value = values[self.argument]
        return value if self.field is None else getattr(value, self.field)


def _fields(argument: str, kind: Any) -> list[_Field]:
    if not kind._fields:
        return [_Field(argument, argument, None, kind)]
    hints = get_type_hints(kind)
    kinds = {field: hints.get(field, Constant if field.isupper() else Number) for field in kind._fields}
    return [_Field(x if kind is Constant else f"{argument}_{x}", argument, x, kind) for x, kind in kinds.items()]


class StructuredKernel(FlatKernel):
    """A kernel of a function whose parameters are annotated with one of the kinds above, or with a tuple of them."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.body = triton.jit(function)
        kinds = {name: kind for name, kind in get_type_hints(function).items() if name != "return"}
        self.arguments = {argument: _fields(argument, kind) for argument, kind in kinds.items()}
        fields = [field for each in self.arguments.values() for field in each]
        self._numbers = [x for x in fields if x.kind in (Number, Specialised)]
        self._constants = [x for x in fields if x.kind is Constant]
        self.tensors = [x.name for x in fields if x.kind is Pointer]
        numbers = [x.name for x in self._numbers]
        flat = self._flat(function, [*self.tensors, *numbers, *(f"{x.name}: tl.constexpr" for x in self._constants)], kinds)
        super().__init__(triton.jit(flat, do_not_specialize=[x.name for x in fields if x.kind is Number]))

    def _flat(self, function: Callable[..., None], parameters: list[str], kinds: dict[str, Any]) -> Callable[..., None]:
        """A function of these parameters that calls the body, with a source that Triton can read."""
        name, module, called = function.__name__, function.__module__, ""
        for argument, fields in self.arguments.items():
            group = f"{kinds[argument].__name__}({', '.join(f'{x.field}={x.name}' for x in fields)})"
            called += f"        {argument}={group if kinds[argument]._fields else argument},\n"
        source = f"def {name}(\n    {', '.join(parameters)},\n):\n    body(\n{called}    )\n"
        path = f"<{module}.{name}>"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        scope = {"__name__": module, "body": self.body, "tl": tl, **{x.__name__: x for x in kinds.values()}}
        exec(compile(source, path, "exec", annotations.compiler_flag), scope)
        flat: Callable[..., None] = scope[name]
        return flat

    def plan(self, programs: int, *_: float, through_map: Any = None, **values: Any) -> Launch:
        """See `FlatKernel.plan`.

        Args:
            programs: how many.
            through_map: as `FlatKernel.plan` takes it.
            values: each argument but tensors, of which views have None, and but WAIT (`overlap`); and Triton's options.
        """
        numbers = [x.of(values) for x in self._numbers]
        constants = {x.name: x.of(values) for x in self._constants if x.argument in values}
        options = {name: value for name, value in values.items() if name not in self.arguments}
        return super().plan(programs, *numbers, through_map=through_map, **constants, **options)


kernel = StructuredKernel
"""The decorator of such a function."""
