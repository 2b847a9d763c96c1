"""Layers of clients, or stand-ins for them, beside what `evoattn.nn.replace` makes of them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evoattn.clients.registry import known

__all__ = [
    "CHANNELS",
    "Doubled",
    "assert_close",
    "assert_equal_gradients",
    "assert_wrapped",
    "edges",
    "filled",
    "gradients",
    "installed",
    "normal",
    "outcome",
    "register",
]

CHANNELS = 8


def register(monkeypatch: pytest.MonkeyPatch, names: Mapping[type[nn.Module], str]) -> None:
    """Take stand-ins for the layers or blocks of clients with these names."""
    for kind, name in names.items():
        monkeypatch.setitem(known(), f"{kind.__module__}.{kind.__qualname__}", known()[name])


def installed(module: str) -> Any:
    """A client's module; the test is skipped if the client is not installed."""
    pytest.importorskip(module.partition(".")[0], reason="the client is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some warn when they are imported
        return importlib.import_module(module)


def filled(module: nn.Module) -> Any:
    """In float64, with parameters that are far from 0."""
    torch.manual_seed(1)
    module.double()
    for name, x in module.named_parameters():
        nn.init.normal_(x, std=0.3)
        x.data += name.endswith("weight") and x.ndim == 1
    return module


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def edges(*lead: int) -> Tensor:
    """A mask of pairs of 7 residues."""
    return (torch.rand(*lead, 7, 7, generator=torch.Generator().manual_seed(5)) > 0.3).double()


def gradients(output: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    return [output, *torch.autograd.grad(output, leaves, cotangent)]


def outcome(block: Any, inputs: Sequence[Tensor | None], *more: Any, **options: Any) -> list[Tensor]:
    """Outputs, the next random number, and gradients for `given` and all parameters."""
    torch.manual_seed(3)
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    output = block(*leaves, *more, **options)
    outputs = [x for x in (output if isinstance(output, tuple) else (output,)) if x is not None]
    after = torch.rand(3).double()  # to be compared as closely as all else
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in outputs)
    used = [x for x in (*leaves, *block.parameters()) if x is not None]
    return [*outputs, after, *torch.autograd.grad(total, used)]  # type: ignore[arg-type]


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], limit: float = 1e-9) -> None:
    """`limit` is that of float64."""
    for x, y in zip(actual, expected, strict=True):
        tolerance = limit if x.dtype == torch.float64 else 2e-4
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_equal_gradients(original: nn.Module, replaced: Any, x: Tensor, *more: Tensor | None) -> None:
    """Outputs and all gradients, of x and of every parameter, are equal. `made` is a module, or calls `theirs`."""
    parameters = list((replaced if isinstance(replaced, nn.Module) else original).parameters())
    actual = gradients(replaced(x, *more), [x, *parameters])
    assert_close(actual, gradients(original(x, *more), [x, *original.parameters()]), 1e-10)


class Doubled(nn.Module):
    """An adapter for modules of any size."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale  # type: ignore[no-any-return]


def assert_wrapped(original: nn.Module, replaced: nn.Module, check: Callable[[], None]) -> None:
    """`check` passes with an adapter around each norm and projection, one at a time, after the layer was replaced."""
    for path, child in list(original.named_modules()):
        if not isinstance(child, nn.Linear | nn.LayerNorm):
            continue
        parent, _, name = path.rpartition(".")
        holders = [x.get_submodule(parent) for x in (original, replaced)]
        kept = [getattr(x, name) for x in holders]
        for holder, module in zip(holders, kept, strict=True):
            setattr(holder, name, Doubled(module))
        check()
        for holder, module in zip(holders, kept, strict=True):
            setattr(holder, name, module)
    check()
