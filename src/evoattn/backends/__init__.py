"""The backends. Each is a module of this package with the names of `Backend`, and those of `Passes` or of `Plans`.

A backend imports neither another backend nor anything that calls one.

Canonical tensors, with any strides: q `[b,n,h,q,d]`, k `[b,n,h,k,d]`, v `[b,n,h,k,c]`, mask and mask_bias `[b|1,n|1,k]`,
pair_bias `[b|1,h|1,q|1,k|1]`, o like q with c channels, lse and reference `[b,n,h,q]` as in `evoattn.numerics`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from evoattn.problem import Problem
from evoattn.tuning import Config

__all__ = ["Backend", "Passes", "Plans"]


class Backend(Protocol):
    """What every backend module has.

    One may also have `faster(problem) -> tuple[str, str] | None`: the backend that runs a problem in less time, and why; `auto`
    then goes to that one, if it takes the problem.
    """

    NAME: str
    """What users pass as `backend=`."""

    def availability(self) -> str | None:
        """None when it can run on this machine, else one line that says why not and what to do."""

    def unsupported(self, problem: Problem, config: Config) -> list[str]:
        """Every reason why it refuses a problem; empty when it takes it."""

    def resolve(self, problem: Problem, config: Config) -> Config:
        """The tile config that it would run a problem with."""

    def copies(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> list[str]:
        """What it copies once a call because of how the canonical tensors lie in memory, in words."""


class Passes(Backend, Protocol):
    """A backend that computes a pass when it is called."""

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """o in q's dtype, contiguous in the user's layout; lse and reference in float32 (float64 for float64), contiguous."""

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
        reference: Tensor,
        *,
        scale: float,
        layout: str,
        needs: tuple[bool, ...],
        deterministic: bool,
        config: Config,
    ) -> tuple[Tensor | None, ...]:
        """The gradients that `needs` asks for, None for the others, each in its input's dtype. dlse is the cotangent of lse.

        dq, dk and dv are contiguous in the user's layout, dmask_bias and dpair_bias in their canonical shapes.
        """


class Plans(Backend, Protocol):
    """A backend that first plans a pass, for all calls that look alike.

    A plan serves all tensors that lie in memory like those it was made for: same dtype, device, strides of the canonical axes,
    and a start on a multiple of 16 bytes or not. It may be called with them in other shapes, so it has to go by addresses and
    by what it was planned with. It holds no tensor, and looks at nothing that can change but its arguments and torch's
    precision of float32 products. In return nothing but the plan is run on an eager call (see `evoattn.eager`).
    """

    def plan_forward(
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
    ) -> Callable[..., None]:
        """`Passes.forward` as a function of (q, k, v, mask, mask_bias, pair_bias, o, lse, reference).

        It writes the last three.
        """

    def plan_backward(
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
        reference: Tensor,
        *,
        scale: float,
        layout: str,
        needs: tuple[bool, ...],
        deterministic: bool,
        config: Config,
    ) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
        """`Passes.backward` as a function of (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference, dq, dk,
        dv).

        It writes dq, dk and dv where they are given, and returns dmask_bias and dpair_bias.
        """

    def resolve_backward(self, problem: Problem, config: Config) -> dict[str, dict[str, int]]:
        """The tiles of every kernel of the backward that a problem needs, by the kernel's name."""
