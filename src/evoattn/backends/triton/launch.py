"""What a plan needs to know about tensors and the device (strides, precision, shared memory), and launches that repeat."""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends.triton.release import REPEATS
from evoattn.core import devices
from evoattn.core.numerics import float32_products

__all__ = [
    "Kernel",
    "Launch",
    "Layout",
    "Strided",
    "ahead",
    "capability",
    "contiguous",
    "describe_map",
    "empty",
    "far_apart",
    "folds",
    "grain",
    "head_block",
    "is_wide",
    "keeps_compiled",
    "layout_for",
    "on_amd",
    "precision",
    "programs_at_once",
    "settle_key",
    "shared_memory_limit",
    "split",
    "split_precision",
    "strided",
    "strides",
    "tensor_map",
    "units",
]

_FOLDABLE_SCALE = 1e-3
"""Below this, bias / scale could leave float32's range for a bias that is itself in range."""

_MAX_GRAIN = 16
_MAX_SPLIT_CHANNELS = 128
_MAX_TILE_ROWS = 256

_NO_DEVICE_LIMIT = 1 << 30
_UNKNOWN_CACHE = 32 << 20
_UNKNOWN_PROGRAMS = 396  # three on each processor of an H200

_OPTIONS = {"enable_fp_fusion": True}
"""What every kernel is compiled with. Triton 3.9 warns that products and sums will not be fused by default from 3.10 on."""

ahead: contextvars.ContextVar[list[tuple[Any, Any]] | None] = contextvars.ContextVar("ahead", default=None)
"""Where a first launch puts its `triton.jit` function and what that compiles, in place of starting it (`triton.ahead`)."""


class Strided(NamedTuple):
    """What a launch depends on in a tensor that is there, or will be when it is launched."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = True  # whether its first element lies on a multiple of 16 bytes


def strided(tensor: Tensor) -> Strided:
    """The record of a tensor."""
    return Strided(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Strided:
    """The record of a tensor that a plan makes when it runs."""
    stride, steps = 1, []
    for size in reversed(shape):
        steps.append(stride)
        stride *= size
    return Strided(shape, tuple(reversed(steps)), dtype)


def empty(like: Strided, device: torch.device) -> Tensor:
    """Memory for a record. torch.empty takes 1.9 us of the host, this 1.1."""
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)


def on_amd() -> bool:
    """Whether torch was built for AMD's GPUs, whose Triton backend knows no TF32 in general."""
    return torch.version.hip is not None


def precision(dtype: torch.dtype) -> str:
    """Triton's input_precision for matmuls of `dtype`: float32 is exact unless torch is told that TF32 will do."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if float32_products() == "tf32" and not on_amd() else "ieee"


def split_precision(dtype: torch.dtype, channels: int) -> str:
    """Like `precision`, but float32 goes through the tensor cores as three TF32 products where that is as exact.

    A float32 number is the sum of two TF32 numbers to 22 bits. Measured on H200 against float64: 2.6e-7, where exact products
    on the ALUs lose 5.3e-7 (their sums round more often) and take two to twenty times as long. Above 128 channels the parts
    are far from fitting in registers: the kernel of the pair bias' gradient spills kilobytes.
    """
    exact = precision(dtype)
    splits = dtype == torch.float32 and exact == "ieee" and channels <= _MAX_SPLIT_CHANNELS and not on_amd()
    return "tf32x3" if splits else exact


def head_block(channels: int) -> int:
    """The power of two, at least 16 (the smallest matmul), that holds `channels`."""
    return max(16, 1 << (channels - 1).bit_length())


def folds(scale: float) -> bool:
    """Whether biases may be divided by the scale, so that the matmul's accumulator starts from them."""
    return scale >= _FOLDABLE_SCALE and math.isfinite(scale)


def grain(*tensors: Strided | None) -> int:
    """The largest power of two up to 16 that divides every stride of the tensors but their innermost one.

    Kernels take strides in units of it, as a constant: so a row of 24 channels still loads 16 bytes at a time, and the only
    variants are five grains, whatever the lengths. Where two rows lie 2**31 elements apart it is 1: kernels turn units back
    into elements in 32 bits, which such a stride does not fit.
    """
    common = _MAX_GRAIN
    for tensor in tensors:
        if tensor is not None:
            if len(tensor.shape) > 1 and tensor.shape[-2] > 1 and tensor.stride[-2] >= 1 << 31:
                return 1
            for size, step in zip(tensor.shape[:-1], tensor.stride[:-1], strict=True):
                common = math.gcd(common, step if size > 1 else 0)
    return common


def strides(tensor: Strided | None, axes: int) -> tuple[int, ...]:
    """Strides with 0 along axes of size 1, which are thereby broadcast; zeros for a tensor that is not given."""
    if tensor is None:
        return (0,) * axes
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride, strict=True))


def units(tensor: Strided | None, axes: int, grain: int) -> tuple[int, ...]:
    """`strides`, all but the innermost in units of `grain`."""
    *outer, inner = strides(tensor, axes)
    return (*(step // grain for step in outer), inner)


def is_wide(*tensors: Strided | None) -> bool:
    """Whether offsets inside one (b, n, h) can pass 2**31 elements, so that loops over keys must count in 64 bits."""
    return any(_extent(tensor) >= 1 << 31 for tensor in tensors if tensor is not None)


def far_apart(stats: Strided) -> bool:
    """Whether the two halves of statistics lie so far apart that the way from an lse to its delta does not fit 32 bits."""
    return stats.stride[0] >= 1 << 31


def _extent(tensor: Strided) -> int:
    return sum((size + _MAX_TILE_ROWS) * step for size, step in zip(tensor.shape[-2:], tensor.stride[-2:], strict=True))


class Layout(NamedTuple):
    """How kernels walk through some tensors: strides of all in units of `grain`, and whether offsets are long."""

    grain: int
    strides: tuple[int, ...]
    wide: bool


def layout_for(*tensors: Strided | None) -> Layout:
    """The layout of the tensors; that of no tensor where one is not given."""
    if None in tensors:
        return Layout(1, (0, 0, 0, 0), False)
    common = grain(*tensors)
    each = (units(tensor, len(tensor.shape), common) for tensor in tensors if tensor is not None)
    return Layout(common, sum(each, ()), is_wide(*tensors))


def tensor_map(tensor: Strided, block: tuple[int, ...]) -> dict[str, list[int]]:
    """What `describe_map` needs, to let a kernel load `block`-sized tiles of the tensor, 0 outside it.

    The copy engine wants strides along axes of size 1 to be multiples of 16 elements too.
    """
    steps = [
        _MAX_GRAIN if size == 1 and axis < 3 else step
        for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride, strict=True))
    ]
    return {"shape": list(tensor.shape), "strides": steps, "block_shape": list(block)}


def describe_map(tensor: Tensor, fields: dict[str, list[int]]) -> Any:
    """A tensor descriptor. Its constructor only checks what the plan has seen to, and takes 3 us of the host."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=tensor)
    return descriptor


def split(length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Cut `length` rows into (start, rows, block): whole blocks, and what is left in the smallest tile that holds it.

    397 queries in tiles of 128 alone would compute 29% too many scores; 3 tiles of 128 and one of 16 compute 1%.
    """
    whole = length // block * block
    left = length - whole
    small = max(16, 1 << (left - 1).bit_length()) if left else 0
    if left and small >= block:
        yield 0, length, block
        return
    if whole:
        yield 0, whole, block
    if left:
        yield whole, left, small


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on `device`."""
    card = devices.planned()
    return _shared_memory_of(device) if card is None else card.shared_memory


@functools.cache
def _shared_memory_of(device: torch.device) -> int:
    if device.type != "cuda":
        return _NO_DEVICE_LIMIT
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def cache_bytes(device: torch.device) -> int:
    """Bytes of second-level cache of `device`."""
    card = devices.planned()
    return _cache_of(device) if card is None else card.cache_bytes


@functools.cache
def _cache_of(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "L2_cache_size", 0) or _UNKNOWN_CACHE


def programs_at_once(device: torch.device, num_warps: int, max_registers: int) -> int:
    """Programs of so many warps that run on `device` at a time, if registers are what limits them; 0: 255 a thread."""
    card = devices.planned()
    if card is not None:
        return card.processors * _programs_of_a_processor(card.registers, 32, num_warps, max_registers)
    return _programs_of(device, num_warps, max_registers)


@functools.cache
def _programs_of(device: torch.device, num_warps: int, max_registers: int) -> int:
    if device.type != "cuda":
        return _UNKNOWN_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    registers, threads = getattr(properties, "regs_per_multiprocessor", 2**16), getattr(properties, "warp_size", 32)
    return properties.multi_processor_count * _programs_of_a_processor(registers, threads, num_warps, max_registers)


def _programs_of_a_processor(registers: int, warp: int, num_warps: int, max_registers: int) -> int:
    return max(registers // (num_warps * warp * (max_registers or 255)), 1)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None elsewhere."""
    card = devices.card(device)
    return None if card is None else card.capability


class Kernel:
    """A jitted kernel whose launches are planned once and then repeated.

    Args:
        jitted: a `triton.jit` function that takes tensors, then numbers, then compile-time constants.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.constants = tuple(p.name for p in getattr(jitted, "params", ()) if p.is_constexpr)

    def plan(
        self, programs: int, *numbers: float, through_map: tuple[int, dict[str, list[int]]] | None = None, **constants: Any
    ) -> Launch:
        """A launch of `programs` programs that lacks nothing but tensors, and its place among those of the call (`overlap`).

        through_map: which of them goes through a tensor map, and what that map is (see `tensor_map`).
        """
        settle_key(self.jitted)
        return Launch(self, programs, numbers, constants, through_map)


def settle_key(jitted: Any) -> None:
    """Have Triton compute the key of a jitted function after those of all that it calls.

    A function's key has the global constants of those that it calls only if their keys are known by then. So the same kernel
    would have another key, and be compiled again, in a process that launches kernels in another order.
    """
    if getattr(jitted, "hash", "") is not None:  # it is known; the interpreter has none
        return
    for name in jitted.fn.__code__.co_names:
        settle_key(jitted.fn.__globals__.get(name))
    jitted.cache_key  # noqa: B018 (it is computed when it is looked up)


class Launch:
    """One launch, for tensors that always have the same dtypes and alignment, on one device.

    The first goes through Triton's own look-up, which takes most of a small call with 45 arguments. What that found is launched
    directly from then on: with addresses in place of tensors, which also spares the driver's look at every pointer.
    """

    def __init__(
        self,
        kernel: Kernel,
        programs: int,
        numbers: tuple[float, ...],
        constants: dict[str, Any],
        through_map: tuple[int, dict[str, list[int]]] | None,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.numbers = numbers
        self.constants = constants
        self.through_map = through_map
        self._compiled: Any = None
        self._fixed: tuple[Any, ...] = ()
        self._device = -1
        self._stream: Any = None
        self._hooks: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the tensors' device, which is the current one."""
        compiled = self._compiled
        if compiled is None:
            self._first(tensors)
            return
        arguments = self._mapped(tensors, [*map(Tensor.data_ptr, tensors)])
        if self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            compiled[(self.programs, 1, 1)](*arguments, *self._fixed)
            return
        stream = self._stream(self._device)
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *self._fixed
        )

    def _mapped(self, tensors: tuple[Tensor, ...], arguments: list[Any]) -> list[Any]:
        """The arguments, with a descriptor in the place of the tensor that goes through a map."""
        if self.through_map is not None:
            which, fields = self.through_map
            arguments[which] = describe_map(tensors[which], fields)
        return arguments

    def _first(self, tensors: tuple[Tensor, ...]) -> None:
        arguments, options = self._mapped(tensors, list(tensors)), {**_OPTIONS, **self.constants}
        kernels = ahead.get()
        if kernels is not None:
            asked = self.kernel.jitted.warmup(*arguments, *self.numbers, grid=(self.programs,), **options)
            kernels.append((self.kernel.jitted, asked))
            return
        compiled = self.kernel.jitted[(self.programs,)](*arguments, *self.numbers, **options)
        if hasattr(compiled, "result"):  # from Triton 3.7 on, where another thread compiles it ahead
            compiled = compiled.result()
        if not keeps_compiled(tensors[0]):
            return
        from triton import knobs
        from triton.runtime import driver

        self._fixed = (*self.numbers, *[self.constants[name] for name in self.kernel.constants])
        self._device = tensors[0].device.index
        self._stream = driver.active.get_current_stream
        self._hooks = knobs.runtime
        self._compiled = compiled


def keeps_compiled(tensor: Tensor) -> bool:
    """Whether a launch for this tensor can be repeated directly; AMD's compiler also looks at how large tensors are."""
    return REPEATS and tensor.is_cuda and not on_amd()
