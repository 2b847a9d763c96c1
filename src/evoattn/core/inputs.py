"""The arguments of a call as values: its tensors, what comes out, and what a backward starts from.

A tensor that a call may have besides is one more field here, and is then wherever these values go.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The tensors of a call, in the order of the operators, in a user's axes or in canonical ones, as each function says."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    mask_bias: Tensor | None = None
    pair_bias: Tensor | None = None
    gate: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, which are never missing."""
        return self.q, self.k, self.v

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that can have a gradient, in the order of `problem.GRADIENTS`."""
        return self.q, self.k, self.v, self.mask_bias, self.pair_bias, self.gate


class Outputs(NamedTuple):
    """The results of a forward: O, gated if there is a gate, and two numbers of each query, which do not depend on the gate."""

    o: Tensor
    lse: Tensor
    reference: Tensor

    def clear(self) -> None:
        """Write the outputs of queries without keys."""
        self.o.zero_()
        self.lse.fill_(float("-inf"))
        self.reference.zero_()


class SavedProbabilities(NamedTuple):
    """The tensors that a forward saves in place of `Outputs`, if its plan has `evoattn.backends.Plan.save_probabilities`.

    o is gated; it is None in a backward without a gate. Only the plan's backend knows how to read p.
    """

    o: Tensor | None
    p: Tensor


class Cotangents(NamedTuple):
    """The gradients of O and of lse, with which a backward starts; None for one that is not used."""

    do: Tensor | None = None
    dlse: Tensor | None = None
