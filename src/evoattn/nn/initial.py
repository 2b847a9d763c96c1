"""The parameters that layers start with, also after a deferred initialisation.

FSDP and others make a model on the meta device, call `to_empty()`, and then `reset_parameters()` of its modules: of all in any
order, or only of those that own parameters. So each projection itself has to start as AlphaFold's does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn


def _normal(factor: float) -> Callable[[Tensor], Tensor]:
    """He's normal numbers for a factor of 2, LeCun's for 1."""
    return lambda weight: nn.init.normal_(weight, std=(factor / weight.shape[1]) ** 0.5)


_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": nn.init.zeros_,
    "xavier": nn.init.xavier_uniform_,
    "he": _normal(2),
    "lecun": _normal(1),
}


def start(module: nn.Linear, weight: str, bias: float = 0.0) -> None:
    """Initialise a projection by "zeros", "xavier", "he" or "lecun", now and at each later `module.reset_parameters()`.

    It remains an `nn.Linear`, the type itself: quantisation takes no subclass.
    """
    parameters = module.__dict__["_parameters"]  # not the module: a cycle would keep its memory until the next collection
    module.reset_parameters = functools.partial(_start, parameters, weight, bias)  # type: ignore[method-assign]
    module.reset_parameters()


def _start(parameters: dict[str, Tensor | None], weight: str, bias: float) -> None:
    for name, initialise in (("weight", _WEIGHTS[weight]), ("bias", functools.partial(nn.init.constant_, val=bias))):
        x = parameters.get(name)
        if x is not None:
            initialise(x)


class Layer(nn.Module):
    """A module whose parameters are all those of modules inside it."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters as a new layer does."""
        for module in self.modules():
            if module is not self and any(x is not None for x in module._parameters.values()):
                module.reset_parameters()  # type: ignore[operator]
