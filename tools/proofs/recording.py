"""Record as text what calls launch on GPUs that are not there.

Public functions are called with tensors on "meta", which say that they are on a GPU. The operators of the package then plan and
run as they do there. In place of a launch, a line is written: which code, how many programs, which memory, which numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from evoattn.core import guards
from evoattn.core.devices import Card, planned_for
from evoattn.empty_rows import means
from proofs import hopper_code, triton_code

__all__ = ["Recorder", "on_card"]

_SHIFT = 44
"""Memory of each tensor begins at a multiple of 2**44, so that an address says where it belongs."""

_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh")
"""Operations that only make memory, or none."""


@dataclasses.dataclass
class Recorder:
    """The lines of one call, and the kernels that it launches.

    Args:
        lines: what was launched, in order.
        triton: Triton's kernels by key.
        hopper: Hopper's kernels by name.
    """

    lines: list[str] = dataclasses.field(default_factory=list)
    triton: dict[str, triton_code.Source] = dataclasses.field(default_factory=dict)
    hopper: dict[str, Any] = dataclasses.field(default_factory=dict)
    _roles: dict[int, str] = dataclasses.field(default_factory=dict)
    _numbers: dict[int, int] = dataclasses.field(default_factory=dict)
    _held: list[Any] = dataclasses.field(default_factory=list)
    _made: int = 0

    def start(self, **roles: Tensor | None) -> None:
        """Begin a call, whose tensors have names."""
        forget()
        self.lines, self._made = [], 0
        self._roles, self._numbers, self._held = {}, {}, []
        for name, tensor in roles.items():
            if tensor is not None:
                self._roles.setdefault(self._number(tensor), name)

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's memory."""
        memory = tensor.untyped_storage()
        if memory._cdata not in self._numbers:
            self._numbers[memory._cdata] = len(self._held) + 1
            self._held.append(memory)
        return self._numbers[memory._cdata]

    def address(self, tensor: Tensor) -> int:
        """The address that a tensor on "meta" has."""
        return (self._number(tensor) << _SHIFT) + int(tensor.storage_offset()) * tensor.element_size() if tensor.numel() else 0

    def told(self, value: Any) -> str:
        """An argument of a launch: memory by its role, or a number."""
        if isinstance(value, Tensor):
            value = self.address(value)
        if hasattr(value, "base") and isinstance(value.base, Tensor):  # a tensor descriptor
            shape, strides, block = (list(map(int, x)) for x in (value.shape, value.strides, value.block_shape))
            return f"map({self.told(value.base)} {shape} {strides} {block})".replace(", ", ",")
        if isinstance(value, int) and value >> _SHIFT:
            number, offset = value >> _SHIFT, value & ((1 << _SHIFT) - 1)
            if number not in self._roles:
                self._made += 1
                self._roles[number] = f"m{self._made}[{self._held[number - 1].nbytes()}]"
            return self._roles[number] + (f"+{offset}" if offset else "")
        return repr(value)

    def launched_triton(self, source: triton_code.Source, grid: tuple[int, ...], arguments: list[Any]) -> None:
        self.triton[source.key] = source
        told = " ".join(map(self.told, arguments))
        self.lines.append(f"triton {{{source.key}}} {'x'.join(map(str, grid))} | {told}  # {source.name.split()[0]}")

    def launched_hopper(self, kernel: Any, extents: tuple[int, ...], arguments: list[Any]) -> None:
        self.hopper[kernel.name] = kernel
        told = " ".join(map(self.told, arguments))
        self.lines.append(f"hopper {{{kernel.name}}} {' '.join(map(str, extents))} | {told}  # {kernel.name}")

    def computed(self, name: str, tensors: list[Tensor], results: list[Tensor]) -> None:
        """A step of torch's own."""
        told = [f"{self.told(x)}{list(x.shape)}{list(x.stride())}".replace(", ", ",") for x in tensors]
        made = [f"{self.told(x)}{list(x.shape)}{list(x.stride())}".replace(", ", ",") for x in results]
        self.lines.append(f"torch {name} {' '.join(told)} -> {' '.join(made)}")


class _Steps(TorchDispatchMode):
    """Has the package's operators run as on a GPU, and writes down torch's own that compute."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "evoattn":
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        made = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _ALLOCATES:
            leaves = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            results = [x for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, Tensor)]
            if any(x.device.type == "meta" for x in (*leaves, *results)):
                self.recorder.computed(name, leaves, results)
        return made


def forget() -> None:
    """Empty all caches of the package, so that no call depends on those before it."""
    for function in _caches(len(sys.modules)):
        function.cache_clear()


@functools.cache
def _caches(modules: int) -> list[Any]:
    """The functions of the package that remember."""
    owners = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "evoattn"]
    return list({id(x): x for owner in owners for x in vars(owner).values() if hasattr(x, "cache_clear")}.values())


_EAGER: dict[str, Any] = {
    "is_seen": lambda: False,
    "autocasts": lambda: False,
    "ordinary": lambda tensors: True,
    "recall": lambda *_: None,
    "remember": lambda *_: None,
}
"""The answer of `evoattn.core.guards` to the first eager call of a kind."""


class _Nothing:
    """Stands for a stream or a context of a GPU."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    cuda_stream = 0


@contextlib.contextmanager
def on_card(card: Card, recorder: Recorder) -> Iterator[None]:
    """Have tensors on "meta" be tensors of a card, which is not there, and write down what is launched."""
    address, autocast, (major, minor) = torch.Tensor.data_ptr, torch.is_autocast_enabled, card.capability

    def data_ptr(tensor: Tensor) -> int:
        return recorder.address(tensor) if tensor.device.type == "meta" else address(tensor)

    patched: Any = [
        (torch.Tensor, "data_ptr", data_ptr),
        (torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type in ("meta", "cuda"))),
        (torch.cuda, "device", lambda *_: _Nothing()),
        (torch.cuda, "current_device", lambda: None),
        (torch.cuda, "current_stream", lambda *_: _Nothing()),
        (torch, "is_autocast_enabled", lambda kind="cuda": autocast("cuda" if kind == "meta" else kind)),
        (torch._C, "_len_torch_dispatch_stack", lambda: 0),
        *((guards, name, value) for name, value in _EAGER.items()),
        (means, "has_kernels", lambda device: True),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(planned_for(card))
        stack.enter_context(triton_code.driven(GPUTarget("cuda", 10 * major + minor, 32), recorder.launched_triton))
        stack.enter_context(hopper_code.driven(recorder.launched_hopper))
        for owner, name, value in patched:
            stack.enter_context(_replaced(owner, name, value))
        stack.enter_context(_Steps(recorder))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have an attribute be another one."""
    missing, _ = object(), getattr(owner, name)
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
