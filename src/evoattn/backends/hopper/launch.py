"""Kernels for the compiler, and launches that are planned once for tensors with the same layout.

A launch takes addresses: sizes and strides are packed when it is planned, so that a call makes no views of its tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
import tvm_ffi
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream

from evoattn.backends.hopper.ahead import load_kernel

types = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.bool: cutlass.Uint8,
}

OPTIONS = "--enable-tvm-ffi --gpu-arch=sm_90a"


def sym_sizes(count: int) -> list[Any]:
    """Sizes known only when the kernel runs."""
    return [cute.sym_int() for _ in range(count)]


def sym_stride(multiple: int = 1) -> Any:
    """A stride known only when the kernel runs, a multiple of so many elements."""
    return cute.sym_int64(divisibility=multiple)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A stand-in for a tensor when a kernel is compiled: fixed numbers, and symbols for the others.

    Args:
        dtype: cutlass type of its elements.
        shape, stride: numbers, or symbols of `sym_sizes` and `sym_stride`; one symbol is one number wherever it stands.
        align: bytes that divide its address.
    """

    dtype: Any
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    align: int

    def extents(self) -> tuple[Any, ...]:
        """Sizes, then strides."""
        return (*self.shape, *self.stride)


def lines_spec(dtype: Any, *shape: Any) -> TensorSpec:
    """A stand-in for a tensor whose last axis is contiguous and starts on 16 bytes of a 16-bit type."""
    return TensorSpec(dtype, shape, (*(sym_stride(8) for _ in shape[1:]), 1), 16)


def float32_spec(*shape: Any, align: int = 4) -> TensorSpec:
    """A stand-in for a float32 tensor whose last axis is contiguous and starts on `align` bytes."""
    return TensorSpec(Float32, shape, (*(sym_stride(align // 4) for _ in shape[1:]), 1), align)


def strided_spec(dtype: Any, *shape: Any) -> TensorSpec:
    """A stand-in for a tensor of any strides."""
    return TensorSpec(dtype, shape, tuple(sym_stride() for _ in shape), dtype.width // 8)


def pair_bias_spec(dtype: Any, queries: Any, keys: Any, *, vector: bool) -> TensorSpec:
    """A stand-in for a pair bias [b|1,h|1,q,k]: of any strides, or with lines that start on two numbers."""
    shape = (*sym_sizes(2), queries, keys)
    if not vector:
        return strided_spec(dtype, *shape)
    return TensorSpec(dtype, shape, (*(sym_stride(2) for _ in range(3)), 1), dtype.width // 4)


def key_ends_spec() -> TensorSpec:
    """A stand-in for the rows' numbers of keys up to the last that counts, int32 [r]."""
    return TensorSpec(Int32, tuple(sym_sizes(1)), (1,), 4)


def live_rows_spec() -> tuple[TensorSpec, TensorSpec]:
    """A stand-in for the rows that a mask leaves to panels of keys, int32 [b,2,n] and [b, panels + 2]: see `lib.live_rows`."""
    b, n, c, panels = sym_sizes(4)
    order = TensorSpec(Int32, (b, 2, n), (sym_stride(), sym_stride(), 1), 4)
    return order, TensorSpec(Int32, (c, panels), (sym_stride(), 1), 4)


class KernelVariant:
    """A variant of a kernel: a frozen dataclass whose fields are all that its code depends on.

    Subclasses give `arguments`, and `__call__`, which starts the kernel in its host function's own language.
    """

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

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__` when it is compiled, without the stream; sizes and strides open."""
        raise NotImplementedError

    def __call__(self, *arguments: Any) -> None:
        """Start the kernel."""
        raise NotImplementedError


def symbols(specs: tuple[Any, ...]) -> list[Any]:
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
        self.kernel(*self.arguments(extents, iter(values)), stream)

    def arguments(self, extents: Any, values: Iterator[Any]) -> Iterator[Any]:
        """The kernel's own arguments: tensors, None and numbers."""
        known = {id(symbol): cute.assume(extents[i], divby=symbol.divisibility) for i, symbol in enumerate(symbols(self.specs))}
        for spec in self.specs:
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
    specs = kernel.arguments()
    extents = tuple((Int32 if symbol.width == 32 else Int64)(symbol.divisibility) for symbol in symbols(specs))
    values = [Int64(0) if isinstance(spec, TensorSpec) else spec for spec in specs if spec is not None]
    return cute.compile(CompiledEntry(kernel), extents, make_fake_stream(), *values, options=OPTIONS, no_jit_engine=True)


def fits(symbol: Any, value: int, extents: dict[int, int]) -> bool:
    """True if a number fits a symbol, or equals a fixed number; `extents` remembers the number of each symbol."""
    if isinstance(symbol, int):
        return value == symbol
    return value % symbol.divisibility == 0 and extents.setdefault(id(symbol), value) == value


def fit_strides(spec: TensorSpec, shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The strides of a tensor. An axis of size 1 has any stride that the kernel wants."""
    wanted = [x if isinstance(x, int) else x.divisibility for x in spec.stride]
    return [want if size == 1 else own for size, own, want in zip(shape, stride, wanted, strict=True)]


def plan_launch(kernel: KernelVariant, device: torch.device, *arguments: Any) -> Callable[..., None]:
    """The launch of a kernel for tensors that lie in memory like `arguments`, as a function of their addresses alone.

    It takes one for each argument but the numbers, which come last, and passes on those that the variant takes.

    Args:
        kernel: compiled at its first launch if it is not yet, so that a plan can be described without that.
        device: where the tensors will be.
        arguments: tensors, on any device, None and numbers, as `kernel.arguments()` has them. Tensors give their shape and
            strides, and are not kept; numbers stay what they are.
    """
    function: Any = None
    specs = kernel.arguments()
    extents: dict[int, int] = {}
    numbers = []
    positions = [i for i, spec in enumerate(specs) if isinstance(spec, TensorSpec)]
    for spec, argument in zip(specs, arguments, strict=True):
        if isinstance(spec, TensorSpec):
            values = (*argument.shape, *fit_strides(spec, argument.shape, argument.stride()))
            if not all(fits(symbol, x, extents) for symbol, x in zip(spec.extents(), values, strict=True)):
                raise ValueError(f"{kernel.name} takes no tensor of shape {tuple(argument.shape)}, strides {argument.stride()}")
        elif spec is not None:
            numbers.append(argument)
    known = tvm_ffi.Shape(tuple(extents[id(symbol)] for symbol in symbols(specs)))
    index = device.index
    # What Triton and torch's own compiler ask; torch.cuda wraps it in an object. A torch without CUDA can plan, and has none.
    stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def launch(*addresses: int | None) -> None:
        nonlocal function
        if function is None:
            function = load_kernel(kernel)
        function(known, stream(index), *[addresses[i] for i in positions], *numbers)

    return launch
