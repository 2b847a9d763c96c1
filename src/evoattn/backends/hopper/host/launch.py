"""Kernels as the compiler takes them, and launches that are planned once for tensors that lie in memory alike.

A launch takes addresses: sizes and strides are packed when it is planned, so that a call makes no views of its tensors.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
import tvm_ffi
from cutlass import Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from evoattn.backends.hopper.ahead import compiled

__all__ = [
    "Kernel",
    "Stand",
    "build",
    "channels",
    "deep",
    "ends",
    "even",
    "free",
    "given_pair",
    "live_rows",
    "note_copy",
    "note_tiles",
    "noting",
    "plan",
    "size",
    "terms",
    "types",
]

types = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.bool: cutlass.Uint8,
}

_OPTIONS = "--enable-tvm-ffi --gpu-arch=sm_90a"

_noted: contextvars.ContextVar[Noted | None] = contextvars.ContextVar("noted", default=None)


def size() -> Any:
    """A size known only when the kernel runs."""
    return cute.sym_int()


def free() -> Any:
    """A stride known only when the kernel runs."""
    return cute.sym_int64()


def even() -> Any:
    """A stride that is a multiple of 8 elements: 16 bytes of a 16-bit type."""
    return cute.sym_int64(divisibility=8)


@dataclasses.dataclass(frozen=True)
class Stand:
    """What stands for a tensor when a kernel is compiled: numbers that are fixed, and symbols for those that are not.

    Args:
        dtype: cutlass type of its elements.
        shape, stride: a number, or a symbol of `size`, `free` or `even`; one symbol is one number wherever it stands.
        align: bytes that divide its address.
    """

    dtype: Any
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    align: int

    def extents(self) -> tuple[Any, ...]:
        """Sizes, then strides."""
        return (*self.shape, *self.stride)


def channels(dtype: Any, sizes: tuple[Any, ...], d: int) -> Any:
    """What stands for a tensor [b,n,h,l,d] in either layout: rows of channels start on 16 bytes."""
    return Stand(dtype, (*sizes, d), (even(), even(), even(), even(), 1), 16)


def terms(dtype: Any) -> Any:
    """What stands for the terms of a key-wise bias, [r, keys * TERMS]."""
    return Stand(dtype, (size(), size()), (even(), 1), 16)


def ends() -> Any:
    """What stands for the rows' numbers of keys up to the last that counts, int32 [r]."""
    return Stand(cutlass.Int32, (size(),), (1,), 4)


def deep() -> Any:
    """What stands for a key-wise bias measured from the row's largest, as it is, float32 [r, keys]."""
    return Stand(cutlass.Float32, (size(), size()), (free(), 1), 4)


def shifts() -> Any:
    """What stands for what a pair bias is measured from, float32 [b|1,h|1,q]."""
    return Stand(cutlass.Float32, (size(), size(), size()), (free(), free(), 1), 4)


def given_pair(dtype: Any) -> Any:
    """What stands for a pair bias of any strides, [b|1,h|1,q,k]."""
    return Stand(dtype, (size(), size(), size(), size()), (free(), free(), free(), free()), dtype.width // 8)


def live_rows() -> tuple[Any, Any]:
    """What stands for the rows that a mask leaves to panels of keys, int32 [b,2,n] and [b, panels + 2]: see `live_rows`."""
    order = Stand(cutlass.Int32, (size(), 2, size()), (free(), free(), 1), 4)
    return order, Stand(cutlass.Int32, (size(), size()), (free(), 1), 4)


class Kernel:
    """A variant of a kernel: what it is depends on its name alone.

    Subclasses give `__call__` and the kernel itself.
    """

    name: str

    def name_after(self, dtype: Any, **options: Any) -> None:
        """Name this variant after its class and everything that it depends on."""
        words = [type(self).__name__, dtype.__name__]
        for option, value in options.items():
            if value is True:
                words.append(option)
            elif value is not False and value is not None:
                words.append(option + str(getattr(value, "__name__", value)))
        self.name = "-".join(words)

    def arguments(self) -> tuple[Any, ...]:
        """What stands for the arguments of `__call__` when it is compiled, without the stream; sizes and strides open."""
        raise NotImplementedError

    def __call__(self, *arguments: Any) -> None:
        """Start the kernel, in its host function's own language."""
        raise NotImplementedError

    def build(self) -> Any:
        """Compile it."""
        return build(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def symbols(stands: tuple[Any, ...]) -> list[Any]:
    """The symbols of all tensors, each once, in the order in which a launch takes their numbers."""
    found: dict[int, Any] = {}
    for stand in stands:
        if isinstance(stand, Stand):
            found.update((id(x), x) for x in stand.extents() if not isinstance(x, int))
    return list(found.values())


class Launch:
    """A kernel as it is compiled: it takes the numbers of all symbols at once, and addresses in place of tensors."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.stands = kernel, kernel.arguments()

    @cute.jit
    def __call__(self, extents: cute.Shape, stream: cuda.CUstream, *values):
        self.kernel(*self.arguments(extents, iter(values)), stream)

    def arguments(self, extents: Any, values: Iterator[Any]) -> Iterator[Any]:
        """The kernel's own arguments: tensors, None and numbers."""
        known = {
            id(symbol): cute.assume(extents[i], divby=symbol.divisibility) for i, symbol in enumerate(symbols(self.stands))
        }
        for stand in self.stands:
            if isinstance(stand, Stand):
                pointer = cute.make_ptr(stand.dtype, next(values), cute.AddressSpace.gmem, assumed_align=stand.align)
                shape, stride = (tuple(known.get(id(x), x) for x in axes) for axes in (stand.shape, stand.stride))
                yield cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            else:
                yield None if stand is None else next(values)


def build(kernel: Kernel) -> Any:
    """Compile a kernel for compute capability 9.0, on any machine, to be written as an object file.

    Callable where it stands, as the compiler would make it too, it would take 0.2 s more.
    """
    stands = kernel.arguments()
    extents = tuple((Int32 if symbol.width == 32 else Int64)(symbol.divisibility) for symbol in symbols(stands))
    values = [Int64(0) if isinstance(stand, Stand) else stand for stand in stands if stand is not None]
    return cute.compile(Launch(kernel), extents, make_fake_stream(), *values, options=_OPTIONS, no_jit_engine=True)


def fits(symbol: Any, value: int, extents: dict[int, int]) -> bool:
    """Whether a number may stand where a symbol does, or a fixed number; `extents` keeps what each symbol is."""
    if isinstance(symbol, int):
        return value == symbol
    return value % symbol.divisibility == 0 and extents.setdefault(id(symbol), value) == value


def strides(stand: Stand, shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The strides of a tensor; that of an axis of size 1, which nobody takes, is whatever the kernel wants."""
    wanted = [x if isinstance(x, int) else x.divisibility for x in stand.stride]
    return [want if size == 1 else given for size, given, want in zip(shape, stride, wanted, strict=True)]


@dataclasses.dataclass
class Noted:
    """What a pass is planned to do.

    Args:
        kernels: those that it launches, each as often as it does.
        copies: what it copies or lays out anew, each with the reason.
        tiles: of kernels that have some of their own, by name.
    """

    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    copies: list[str] = dataclasses.field(default_factory=list)
    tiles: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def noting() -> Iterator[Noted]:
    """Note what is planned meanwhile."""
    found = Noted()
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note_copy(text: str) -> None:
    """Say what a pass copies or lays out anew, and why, where it is planned to."""
    if (noted := _noted.get()) is not None:
        noted.copies.append(text)


def note_tiles(kernel: str, **tiles: int) -> None:
    """Say the tiles of a kernel, where they are chosen."""
    if (noted := _noted.get()) is not None:
        noted.tiles[kernel] = tiles


def plan(kernel: Kernel, device: torch.device, *arguments: Any) -> Callable[..., None]:
    """The launch of a kernel for tensors that lie in memory like `arguments`, as a function of their addresses alone.

    It takes one for each argument but the numbers, which come last, and passes on those that the variant takes.

    Args:
        kernel: compiled at its first launch if it is not yet, so that a plan can be described without that.
        device: where the tensors will be.
        arguments: tensors, on any device, None and numbers, as `kernel.arguments()` has them. Tensors give their shape and
            strides, and are not kept; numbers stay what they are.
    """
    function: Any = None
    if (noted := _noted.get()) is not None:
        noted.kernels.append(kernel)
    stands = kernel.arguments()
    extents: dict[int, int] = {}
    numbers = []
    taken = [i for i, stand in enumerate(stands) if isinstance(stand, Stand)]
    for stand, given in zip(stands, arguments, strict=True):
        if isinstance(stand, Stand):
            values = (*given.shape, *strides(stand, given.shape, given.stride()))
            if not all(fits(symbol, x, extents) for symbol, x in zip(stand.extents(), values, strict=True)):
                raise ValueError(f"{kernel.name} takes no tensor of shape {tuple(given.shape)}, strides {given.stride()}")
        elif stand is not None:
            numbers.append(given)
    known = tvm_ffi.Shape(tuple(extents[id(symbol)] for symbol in symbols(stands)))
    index = device.index
    # What Triton and torch's own compiler ask; torch.cuda wraps it in an object. A torch without CUDA can plan, and has none.
    stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def launch(*addresses: int | None) -> None:
        nonlocal function
        if function is None:
            function = compiled(kernel)
        function(known, stream(index), *[addresses[i] for i in taken], *numbers)

    return launch
