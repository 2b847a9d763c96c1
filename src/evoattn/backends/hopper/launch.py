"""Kernels for the compiler, and launches that are planned once for tensors with the same layout.

A launch takes addresses: sizes and strides are packed when it is planned, so that a call makes no views of its tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
import tvm_ffi
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from evoattn.backends.hopper.ahead import load_kernel
from evoattn.core import attempts

types = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.bool: cutlass.Uint8,
}

OPTIONS = "--enable-tvm-ffi --gpu-arch=sm_90a"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A stand-in for a tensor when a kernel is compiled: fixed numbers, and symbols for the others.

    Args:
        dtype: cutlass type of its elements.
        shape, stride: numbers, or symbols of cute; one symbol is one number wherever it stands.
        align: bytes that divide its address.
    """

    dtype: Any
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    align: int

    def extents(self) -> tuple[Any, ...]:
        """Sizes, then strides."""
        return (*self.shape, *self.stride)


def sym_stride(multiple: int = 1) -> Any:
    """A stride known only when the kernel runs, a multiple of so many elements."""
    return cute.sym_int64(divisibility=multiple)


class Tensors:
    """Makes the stand-ins for the tensors of one kernel.

    Their sizes are known only when the kernel runs. A letter of `axes` is one size wherever it stands, "?" a size of its own.
    Fixed sizes follow.
    """

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype
        self._sizes: dict[str, Any] = {}

    def _shape(self, axes: str, fixed: tuple[int, ...] = ()) -> tuple[Any, ...]:
        for axis in set(axes) - {"?"} - set(self._sizes):
            self._sizes[axis] = cute.sym_int()
        return (*(cute.sym_int() if axis == "?" else self._sizes[axis] for axis in axes), *fixed)

    def lines(self, axes: str, *fixed: int, dtype: Any = None) -> TensorSpec:
        """Of `dtype`, or that of the kernel. The last axis is contiguous and starts on 16 bytes of a 16-bit type."""
        shape = self._shape(axes, fixed)
        return TensorSpec(dtype or self.dtype, shape, (*(sym_stride(8) for _ in shape[1:]), 1), 16)

    def floats(self, axes: str, *fixed: int, align: int = 4) -> TensorSpec:
        """Of float32. The last axis is contiguous and starts on `align` bytes."""
        shape = self._shape(axes, fixed)
        return TensorSpec(Float32, shape, (*(sym_stride(align // 4) for _ in shape[1:]), 1), align)

    def strided(self, axes: str, dtype: Any) -> TensorSpec:
        """Of any strides."""
        shape = self._shape(axes)
        return TensorSpec(dtype, shape, tuple(sym_stride() for _ in shape), dtype.width // 8)

    def pair_bias(self, dtype: Any, *, vector: bool) -> TensorSpec:
        """[b|1,h|1,q,k], of any strides, or with lines that start on two numbers."""
        if not vector:
            return self.strided("??qk", dtype)
        return TensorSpec(dtype, self._shape("??qk"), (*(sym_stride(2) for _ in range(3)), 1), dtype.width // 4)

    def fours(self, axis: str, dtype: Any) -> TensorSpec:
        """Contiguous, seen as [fours, 4]."""
        return TensorSpec(dtype, self._shape(axis, (4,)), (4, 1), dtype.width // 2)

    def ends(self) -> TensorSpec:
        """The rows' numbers of keys up to the last that counts, int32 [r]."""
        return TensorSpec(Int32, self._shape("?"), (1,), 4)

    def live_rows(self) -> dict[str, TensorSpec]:
        """The rows that a mask leaves to panels of keys, int32 [b,2,n] and [b, panels + 2]: see `lib.live_rows`."""
        b, n, c, panels = self._shape("????")
        order = TensorSpec(Int32, (b, 2, n), (sym_stride(), sym_stride(), 1), 4)
        return {"mOrder": order, "mStarts": TensorSpec(Int32, (c, panels), (sym_stride(), 1), 4)}


class KernelVariant:
    """A variant of a kernel: a frozen dataclass whose fields are all that its code depends on."""

    channels: int

    @property
    def steps(self) -> int:
        """Products of 16 channels."""
        return -(-self.channels // 16)

    @functools.cached_property
    def name(self) -> str:
        """The class and the options of this variant."""
        words = [type(self).__name__]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not False and value is not None:
                words.append(field.name if value is True else field.name + str(getattr(value, "__name__", value)))
        return "-".join(words)

    def arguments(self) -> dict[str, Any]:
        """List the arguments of `__call__`: a `TensorSpec` for a tensor, a number of the right type, None for what is absent.

        Launches, host functions and kernels find them by these names, in this order.
        """
        raise NotImplementedError

    def __call__(self, args: Any, stream: cuda.CUstream) -> None:
        """Start the kernel, in the language of host functions."""
        raise NotImplementedError


def select(args: Any, names: str) -> Any:
    """Return the arguments of these names. What the copy engine alone reads or writes is no parameter of a kernel."""
    return namedtuple("Arguments", names)(*(getattr(args, name) for name in names.split()))


def symbols(specs: Iterable[Any]) -> list[Any]:
    """The symbols of all tensors, each once, in the order in which a launch takes their numbers."""
    every: dict[int, Any] = {}
    for spec in specs:
        if isinstance(spec, TensorSpec):
            every.update((id(x), x) for x in spec.extents() if not isinstance(x, int))
    return list(every.values())


class CompiledEntry:
    """A kernel as it is compiled: it takes the numbers of all symbols at once, and addresses in place of tensors."""

    def __init__(self, kernel: KernelVariant):
        self.kernel, self.specs = kernel, kernel.arguments()

    @cute.jit
    def __call__(self, extents: cute.Shape, stream: cuda.CUstream, *values):
        args = namedtuple("Arguments", self.specs)(*self.arguments(extents, iter(values)))
        self.kernel(args, stream)

    def arguments(self, extents: Any, values: Iterator[Any]) -> Iterator[Any]:
        """The kernel's own arguments: tensors, None and numbers."""
        specs = self.specs.values()
        known = {id(symbol): cute.assume(extents[i], divby=symbol.divisibility) for i, symbol in enumerate(symbols(specs))}
        for spec in specs:
            if isinstance(spec, TensorSpec):
                pointer = cute.make_ptr(spec.dtype, next(values), cute.AddressSpace.gmem, assumed_align=spec.align)
                shape, stride = (tuple(known.get(id(x), x) for x in axes) for axes in (spec.shape, spec.stride))
                yield cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
            else:
                yield None if spec is None else next(values)


def build(kernel: KernelVariant) -> Any:
    """Compile a kernel for compute capability 9.0, on any machine, to be written as an object file.

    A function that can be called at once would take 0.2 s more.
    """
    entry = CompiledEntry(kernel)
    specs = entry.specs.values()
    extents = tuple((Int32 if symbol.width == 32 else Int64)(symbol.divisibility) for symbol in symbols(specs))
    values = [Int64(0) if isinstance(spec, TensorSpec) else spec for spec in specs if spec is not None]
    return cute.compile(entry, extents, make_fake_stream(), *values, options=OPTIONS, no_jit_engine=True)


def fits(symbol: Any, value: int, extents: dict[int, int]) -> bool:
    """True if a number fits a symbol, or equals a fixed number; `extents` remembers the number of each symbol."""
    if isinstance(symbol, int):
        return value == symbol
    return value % symbol.divisibility == 0 and extents.setdefault(id(symbol), value) == value


def fit_strides(spec: TensorSpec, shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The strides of a tensor. An axis of size 1 has any stride that the kernel wants."""
    wanted = [x if isinstance(x, int) else x.divisibility for x in spec.stride]
    return [want if size == 1 else own for size, own, want in zip(shape, stride, wanted, strict=True)]


def plan_launch(
    kernel: KernelVariant, device: torch.device, tensors: Mapping[str, Any], **numbers: float
) -> Callable[..., None]:
    """The launch of a kernel for tensors that lie in memory like these, as a function of their addresses alone.

    It takes an address for each of `tensors`, in this order, and passes on those that the variant takes.

    Args:
        kernel: compiled at its first launch if it is not yet, so that a plan can be described without that.
        device: where the tensors will be.
        tensors: by the names that `kernel.arguments()` has, on any device. They give their shape and strides, and are not kept.
        numbers: the others of these arguments, by name. They stay what they are.
    """
    function: Any = None
    specs = kernel.arguments()
    extents: dict[int, int] = {}
    for name, spec in specs.items():
        if isinstance(spec, TensorSpec):
            tensor = tensors[name]
            values = (*tensor.shape, *fit_strides(spec, tensor.shape, tensor.stride()))
            if not all(fits(symbol, x, extents) for symbol, x in zip(spec.extents(), values, strict=True)):
                raise ValueError(f"{kernel.name} takes no tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    places = list(tensors)
    positions = [places.index(name) for name, spec in specs.items() if isinstance(spec, TensorSpec)]
    constants = [numbers[name] for name, spec in specs.items() if not isinstance(spec, TensorSpec | None)]
    known = tvm_ffi.Shape(tuple(extents[id(symbol)] for symbol in symbols(specs.values())))
    index = device.index
    # What Triton and torch's own compiler ask; torch.cuda wraps it in an object. A torch without CUDA can plan, and has none.
    stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def launch(*addresses: int | None) -> None:
        nonlocal function
        if function is None:
            function = load_kernel(kernel)
        if attempts.given_up():
            return
        function(known, stream(index), *[addresses[i] for i in positions], *constants)

    return launch
