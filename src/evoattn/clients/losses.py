"""The loss of Boltz-2 and BoltzGen that is a mean over the noised copies of a structure, with the memory of one copy.

The smooth lDDT keeps a dozen numbers for each pair of atoms that are near each other, of all copies, until the backward of the
whole model begins: that is where a training step takes most memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.clients.site import Count
from evoattn.core import guards
from evoattn.dispatch.autograd import once_differentiable


def by_copy(original: Callable[..., Tensor], count: Count) -> Callable[..., Tensor]:
    """A `smooth_lddt_loss` that takes the gradient of each copy at once, by the client's own function.

    The original computes what has no gradient or another one than that of the prediction, and what torch traces or transforms.
    The gradient of the gradient is an error.
    """

    def smooth_lddt_loss(
        pred_coords: Tensor,
        true_coords: Tensor,
        is_nucleotide: Tensor,
        coords_mask: Any = None,
        nucleic_acid_cutoff: float = 30.0,
        other_cutoff: float = 15.0,
        multiplicity: int = 1,
    ) -> Tensor:
        labels, cutoffs = (true_coords, is_nucleotide, coords_mask), (nucleic_acid_cutoff, other_cutoff)
        if not _has_copies(pred_coords, *labels, multiplicity):
            return original(pred_coords, *labels, *cutoffs, multiplicity)

        def loss(copy: Tensor, i: int) -> Tensor:
            one, structure = slice(i, i + 1), slice(i // multiplicity, i // multiplicity + 1)
            return original(copy, true_coords[one], is_nucleotide[structure], coords_mask[structure], *cutoffs, 1)

        result: Tensor = _Mean.apply(pred_coords, loss)  # type: ignore[no-untyped-call]
        return result

    return smooth_lddt_loss


def _has_copies(predicted: Tensor, true: Tensor, is_nucleotide: Tensor, mask: Any, multiplicity: int) -> bool:
    """Return whether a loss has a gradient for the prediction `[copies, atoms, 3]` alone, of more than one copy."""
    if not guards.only_computes() or not torch.is_grad_enabled() or not predicted.requires_grad or not isinstance(mask, Tensor):
        return False
    if any(x.requires_grad for x in (true, is_nucleotide, mask)) or predicted.shape != true.shape or len(predicted) < 2:
        return False
    return len(is_nucleotide) == len(mask) == len(predicted) / multiplicity


class _Mean(torch.autograd.Function):
    """The mean of a loss of each copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Callable[[Tensor, int], Tensor]) -> Tensor:
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):  # not those of a checkpoint around it
            for i in range(len(x)):
                with torch.enable_grad():
                    copy = x[i : i + 1].detach().requires_grad_()
                    of_copy = loss(copy, i)
                gradients += torch.autograd.grad(of_copy, copy)
                losses.append(of_copy.detach())
        ctx.save_for_backward(x, torch.cat(gradients) / len(x))  # a second derivative would be one of x
        return torch.stack(losses).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _, of_x = ctx.saved_tensors
        return of_x * gradient, None
