"""Surroundings of a call: modes of torch, functions put in the place of torch's, DTensors, torch.compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Surrounding = Callable[[torch.device], contextlib.AbstractContextManager[Any]]
"""Makes a context for tensors of a device."""


class _FunctionMode(TorchFunctionMode):
    """Sees every function of torch, and calls it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    """Sees every operator, and calls it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES: dict[str, Surrounding] = {
    "torch.device": lambda device: device,
    "function mode": lambda _: _FunctionMode(),
    "dispatch mode": lambda _: _DispatchMode(),  # type: ignore[no-untyped-call]
}
"""Modes that change no number."""


def _flop_counter(_: torch.device) -> contextlib.AbstractContextManager[Any]:
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton

    return FlopCounterMode(display=False)


COUNTERS: dict[str, Surrounding] = {"flop counter": _flop_counter}
"""Modes that look at every module, so that layers call their sub-modules."""


@contextlib.contextmanager
def _default_device(device: torch.device) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


ALL_MODES: dict[str, Surrounding] = {
    "none": lambda _: contextlib.nullcontext(),
    **MODES,
    **COUNTERS,
    "set_default_device": _default_device,
    "save_on_cpu": lambda _: torch.autograd.graph.save_on_cpu(),
}
"""These, and the modes that random layers are not drawn with."""


def _in_place_of(owner: Any, name: str, function: Callable[..., Any]) -> Surrounding:
    return lambda _: mock.patch.object(owner, name, function)


_forward, _norm, _linear, _call = nn.Linear.forward, nn.LayerNorm.forward, F.linear, nn.Module.__call__


@functools.wraps(_forward)
def _wrapped_forward(self: nn.Linear, x: Tensor) -> Tensor:
    return 0.5 * _forward(self, x)


@functools.wraps(_linear)
def _halved_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return 0.5 * _linear(x, weight, bias)


def _halved_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    out = _call(self, *args, **kwargs)
    return 0.5 * out if isinstance(self, nn.Linear) else out


INSTEAD: dict[str, Surrounding] = {
    "Linear.forward": _in_place_of(nn.Linear, "forward", lambda self, x: 0.5 * _forward(self, x)),
    "Linear.forward, wrapped": _in_place_of(nn.Linear, "forward", _wrapped_forward),
    "LayerNorm.forward": _in_place_of(nn.LayerNorm, "forward", lambda self, x: 2 * _norm(self, x)),
    "Module.__call__": _in_place_of(nn.Module, "__call__", _halved_call),
    "F.linear": _in_place_of(F, "linear", _halved_linear),
}
"""Functions that a program puts in the place of torch's, as profilers and fake quantisation do. They change numbers."""

COMPILERS = {"compiled": "eager", "compiled by AOTAutograd": "aot_eager"}
"""Backends of torch.compile that generate no code."""

DTENSORS = "DTensors"
"""All tensors of the call, and the parameters, are DTensors of one process."""


def distribute(layer: nn.Module, tensors: list[Any], device: torch.device) -> list[Any]:
    """Make parameters DTensors of one process, and return the tensors as such. Those with a gradient are leaves again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module, distribute_tensor

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    distribute_module(layer, mesh)
    return [x if x is None else distribute_tensor(x.detach(), mesh).requires_grad_(x.requires_grad) for x in tensors]


def like(x: Tensor, other: Tensor) -> Tensor:
    """The tensor, as a DTensor if another one is."""
    return type(other).from_local(x, other.device_mesh, other.placements) if hasattr(other, "placements") else x  # type: ignore[attr-defined]


def local(x: Tensor | None) -> Tensor | None:
    """The part of a DTensor that this process holds; any other tensor as it is."""
    return x if x is None or not hasattr(x, "to_local") else x.to_local()
