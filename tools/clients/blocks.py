"""The facts of a client's blocks that its module states, and the random problems that they are called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clients.weights import drawn_by, fill

__all__ = ["Block", "Call", "Options", "Problem", "pairs"]

Module = TypeVar("Module", bound=nn.Module)

Options = Mapping[str, Any]
"""Arguments of a call by name: a chunk size, a kernel switch."""

PADDING = 5
"""Positions of padding in the second sample, or in the only one."""


class Problem:
    """Random numbers and masks of one length, the same in every dtype.

    Args:
        residues: the length, padding included.
        dtype: of all tensors.
    """

    def __init__(self, residues: int, dtype: torch.dtype) -> None:
        self.residues = residues
        self.dtype = dtype
        self._rng = torch.Generator().manual_seed(residues)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers that want gradients."""
        return torch.randn(shape, generator=self._rng, dtype=torch.float64).to(self.dtype).requires_grad_()

    def mask(self) -> Tensor:
        """`[2, residues]`: 1 at residues, 0 at padding. The first sample is full, the second is padded."""
        return self._mask(self.residues, self.residues - PADDING)

    def atoms(self, window: int) -> Tensor:
        """`[2, atoms]`: 1 at the atoms of residues, three each; both samples are padded to whole windows."""
        length = -(-3 * self.residues // window) * window
        return self._mask(length, 3 * (self.residues - PADDING), first=3 * self.residues)

    def fill(self, module: Module) -> Module:
        """Give every parameter random numbers other than 0, as `weights.fill` does."""
        fill(module, drawn_by(self._rng, torch.float64)).requires_grad_()
        assert all(bool((x != 0).all()) for x in module.parameters())
        return module.to(self.dtype)

    def _mask(self, length: int, second: int, first: int | None = None) -> Tensor:
        return (torch.arange(length) < torch.tensor([[first or length], [second]])).to(self.dtype)


def pairs(mask: Tensor) -> Tensor:
    """The mask `[*, L, L]` of pairs of residues."""
    return mask[..., :, None] * mask[..., None, :]


@dataclasses.dataclass(frozen=True)
class Call:
    """A block that is built, and a call of it.

    Args:
        module: the block.
        run: calls it, with the leaves and options by name, and returns its outputs.
        leaves: the inputs that want gradients.
        masks: by the name of a leaf, 1 at residues and 0 at padding. No mask: every position counts.
        outputs: the leaf whose mask each output has.
    """

    module: nn.Module
    run: Callable[..., tuple[Tensor, ...]]
    leaves: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a client, and the options that it is called with.

    Args:
        name: what the table calls it.
        call: builds the block and a call of it for a problem.
        ways: options of the original and of ours alike. The first are those without chunks.
        switches: kernel switches. Ours runs with each of them too; the original runs without.
        like: options of the original that ours with a switch is compared with, by residues and switch: none, unless the
            switch changes the answer of the original itself.
    """

    name: str
    call: Callable[[Problem], Call]
    ways: tuple[Options, ...] = ({},)
    switches: tuple[Options, ...] = ()
    like: Callable[[int, Options], Options] = lambda residues, switch: {}
