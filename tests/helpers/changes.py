"""Changes of modules after they were made: adapters, wrappers, hooks, pruning, weight norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm


class Adapter(nn.Linear):
    """A low-rank adapter, as peft, loralib and others write it: a subclass of Linear with a forward of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, dtype=base.weight.dtype)
        self.load_state_dict(base.state_dict())
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


class Wrapper(nn.Module):
    """A module around another one, as FSDP and peft have them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.inner(x)  # type: ignore[no-any-return]


def _own_forward(module: nn.Module) -> None:
    """Give a module a forward of its own, as accelerate's hooks do."""
    right = module.forward
    module.forward = lambda x: 2 * right(x)


def _hook_backward(module: nn.Module) -> None:
    def double(_: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else 2 * x for x in inputs)

    module.register_full_backward_hook(double)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda module: module.register_forward_hook(lambda *inputs: inputs[-1] * 2),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
    "backward hook": _hook_backward,
    "a forward of its own": _own_forward,
}
"""Changes of any module that takes a tensor."""

IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "pruned": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "parametrized": parametrizations.weight_norm,
    **HOOKS,
}
"""Changes of a linear module."""

INSTEAD: dict[str, Callable[[Any], nn.Module]] = {
    "adapter": Adapter,
    "wrapper": Wrapper,
    "sequential": lambda module: nn.Sequential(module),
}
"""Modules that replace a linear module."""


def change(layer: nn.Module, path: str, how: str) -> None:
    """Change the sub-module of a layer that has a path."""
    parent, _, name = path.rpartition(".")
    owner = layer.get_submodule(parent)
    if how in INSTEAD:
        setattr(owner, name, INSTEAD[how](getattr(owner, name)))
    else:
        IN_PLACE[how](getattr(owner, name))
