"""Launches that are planned once and then repeated, past the look-up of Triton's JIT."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from evoattn.core import attempts
from evoattn.kit import cards, compiling
from evoattn.kit.strides import Strided

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel. Triton 3.9 warns that products and sums will not be fused by default from 3.10 on."""

_MAP_ALIGNMENT = 16

collecting: contextvars.ContextVar[list[Collected] | None] = contextvars.ContextVar("collecting", default=None)
"""A list to which a first launch adds what it would start, and does not start it (`ahead`)."""


class Collected(NamedTuple):
    """The kernel of a launch: its `triton.jit` function, what that returned for it, and the kernel for a worker."""

    jitted: Any
    kernel: Any
    wanted: compiling.Wanted


class TensorMap(NamedTuple):
    """The place of a tensor among those of a launch, and the fields of its descriptor but for the tensor itself."""

    place: int
    fields: dict[str, list[int]]


def tensor_map(place: int, tensor: Strided, block: tuple[int, ...]) -> TensorMap:
    """Let a kernel load `block`-sized tiles of a tensor of four axes, 0 outside it.

    The copy engine wants strides along axes of size 1 to be multiples of 16 elements too.
    """
    steps = [
        _MAP_ALIGNMENT if size == 1 and axis < 3 else step
        for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride, strict=True))
    ]
    return TensorMap(place, {"shape": list(tensor.shape), "strides": steps, "block_shape": list(block)})


class FlatKernel:
    """A `triton.jit` function of tensors, then numbers, then constants, whose launches are planned once and then repeated."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.constants = tuple(p.name for p in getattr(jitted, "params", ()) if p.is_constexpr)

    def plan(self, programs: int, *numbers: float, through_map: TensorMap | None = None, **constants: Any) -> Launch:
        """Plan a launch of `programs` programs. Only the tensors are missing, and its place among others (`overlap`)."""
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


@dataclasses.dataclass(eq=False)
class Launch:
    """One launch, for tensors that always have the same dtypes and alignment, on one device.

    The first goes through Triton's own look-up, which takes most of a small call with 45 arguments. Later ones
    start its kernel directly, with addresses in place of tensors, so that the driver need not examine every pointer.
    """

    kernel: FlatKernel
    programs: int
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    through_map: TensorMap | None = None
    _again: Callable[[list[Any]], None] | None = dataclasses.field(default=None, init=False)
    _compiling: attempts.Compilation | None = dataclasses.field(default=None, init=False)

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the tensors' device, which is the current one."""
        if self._again is None or attempts.given_up():
            self._first(tensors)
        else:
            self._again(compiling.with_descriptor(self.through_map, [*map(Tensor.data_ptr, tensors)], tensors))

    def _first(self, tensors: tuple[Tensor, ...]) -> None:
        arguments = compiling.with_descriptor(self.through_map, list(tensors), tensors)
        options = {**OPTIONS, **self.constants}

        def ask() -> Any:
            return self.kernel.jitted.warmup(*arguments, *self.numbers, grid=(self.programs,), **options)

        kernels, attempt = collecting.get(), attempts.current()
        if kernels is not None:
            kernels.append(Collected(self.kernel.jitted, ask(), self._wanted(tensors)))
            return
        if attempt is not None:
            if self._again is None and (compilation := self._compilation(tensors, ask)) is not None:
                attempt.give_up(compilation)
            if attempt.is_given_up:
                return
        compiled = self.kernel.jitted[(self.programs,)](*arguments, *self.numbers, **options)
        if hasattr(compiled, "result"):  # from Triton 3.7 on, where another thread compiles it ahead
            compiled = compiled.result()
        if repeats(tensors[0]):
            fixed = (*self.numbers, *[self.constants[name] for name in self.kernel.constants])
            self._again = _plan_repeat(compiled, self.programs, fixed, tensors[0].device.index)

    def _compilation(self, tensors: tuple[Tensor, ...], ask: Callable[[], Any]) -> attempts.Compilation | None:
        """The compilation of the kernel beside the program. None: the kernel is there, or the launch has to wait for it."""
        if self._compiling is not None and not self._compiling.done():
            return self._compiling
        wanted = self._wanted(tensors)
        if wanted.capability is None:  # the interpreter, or an AMD GPU, whose compiler also depends on the size of tensors
            return None
        self._compiling = compiling.compilation(wanted, self.kernel.jitted, ask)
        return self._compiling

    def _wanted(self, tensors: tuple[Tensor, ...]) -> compiling.Wanted:
        stubs = tuple(compiling.Stub(x.dtype, x.data_ptr() & 15) for x in tensors)
        module, name = self.kernel.jitted.fn.__module__, self.kernel.jitted.fn.__name__
        capability = cards.capability(tensors[0].device)
        return compiling.Wanted(module, name, stubs, self.numbers, self.constants, self.through_map, capability)


def _plan_repeat(compiled: Any, programs: int, fixed: tuple[Any, ...], device: int) -> Callable[[list[Any]], None]:
    """Launch a compiled kernel with these addresses, numbers and constants on the current stream."""
    from triton import knobs
    from triton.runtime import driver

    hooks, current_stream = knobs.runtime, driver.active.get_current_stream

    def again(addresses: list[Any]) -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            compiled[(programs, 1, 1)](*addresses, *fixed)
            return
        stream, function, metadata = current_stream(device), compiled.function, compiled.packed_metadata
        compiled.run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *fixed)

    return again


def repeats(tensor: Tensor) -> bool:
    """Return whether a launch for this tensor can be repeated directly.

    Triton 3.3 has no knobs. AMD's compiler also depends on the size of tensors.
    """
    return hasattr(triton, "knobs") and tensor.is_cuda and not cards.on_amd()


def launch_kernel(kernel: FlatKernel, programs: int, tensors: tuple[Tensor, ...], **values: Any) -> None:
    """Launch a kernel that belongs to no plan, as those of `nn`, `pair` and `empty_rows`, on the device of its first tensor.

    Tensors are on one device, in the order of the kernel's parameters; `values` are its other arguments, and Triton's options.
    """
    first = tensors[0]
    signature = tuple([(x.dtype, x.data_ptr() & 15) for x in tensors])
    launch = _plan_once(kernel, first.device, signature, programs, tuple(values.items()))
    if not first.is_cuda or torch.cuda.current_device() == first.device.index:
        launch(*tensors)
        return
    with torch.cuda.device(first.device):
        launch(*tensors)


@functools.lru_cache(maxsize=4096)
def _plan_once(kernel: FlatKernel, device: torch.device, signature: Any, programs: int, values: tuple[Any, ...]) -> Launch:
    """The launch of all calls whose tensors have these dtypes and alignments."""
    return kernel.plan(programs, **dict(values))
