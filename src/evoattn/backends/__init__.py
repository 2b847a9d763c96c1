"""The backends. Each is a module of this package with the names of `Backend`.

A backend imports neither another backend nor anything that calls one.

Canonical tensors, with any strides: q `[b,n,h,q,d]`, k `[b,n,h,k,d]`, v `[b,n,h,k,c]`, mask and mask_bias `[b|1,n|1,k]`,
pair_bias `[b|1,h|1,q|1,k|1]`, o like q with c channels, lse `[b,n,h,q]` measured from the row shift of `evoattn.numerics`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from evoattn.problem import Problem
from evoattn.tuning import Config

__all__ = ["Backend"]


class Backend(Protocol):
    """What a backend module has."""

    NAME: str
    """What users pass as `backend=`."""

    def availability(self) -> str | None:
        """None when it can run on this machine, else one line that says why not and what to do."""

    def unsupported(self, problem: Problem, config: Config) -> list[str]:
        """Every reason why it refuses a problem; empty when it takes it."""

    def resolve(self, problem: Problem, config: Config) -> Config:
        """The tile config that it would run a problem with."""

    def copies(self, pair_bias: Tensor | None, n: int) -> list[str]:
        """What it copies once a call because of how the tensors lie in memory, in words; `n` is the number of rows."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        mask_bias: Tensor | None,
        pair_bias: Tensor | None,
        *,
        scale: float,
        layout: str,
        config: Config,
    ) -> tuple[Tensor, Tensor]:
        """o in q's dtype, contiguous in the user's layout, and lse in float32 (float64 for float64), contiguous."""

    def backward(
        self,
        do: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        mask_bias: Tensor | None,
        pair_bias: Tensor | None,
        o: Tensor,
        lse: Tensor,
        *,
        scale: float,
        layout: str,
        needs: tuple[bool, ...],
        deterministic: bool,
        config: Config,
    ) -> tuple[Tensor | None, ...]:
        """The gradients that `needs` asks for, None for the others, each in its input's dtype.

        dq, dk and dv are contiguous in the user's layout, dmask_bias and dpair_bias in their canonical shapes.
        """
