"""The backends. Each is a module of this package with the names of `Backend`.

A backend imports neither another backend nor anything that calls one.

Canonical tensors, with any strides: q `[b,n,h,q,d]`, k `[b,n,h,k,d]`, v `[b,n,h,k,c]`, mask and mask_bias `[b|1,n|1,k]`,
pair_bias `[b|1,h|1,q|1,k|1]`, gate and o `[b,n,h,q,c]`, lse and reference `[b,n,h,q]` as in `evoattn.core.numerics`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from evoattn.compile.workers import Task
from evoattn.core.config import Config
from evoattn.core.inputs import Cotangents, Inputs, Outputs, SavedProbabilities
from evoattn.core.problem import Problem

GATED_FORWARD = "multiplied in the forward's epilogue"
GATED_AFTER = "multiplied by a kernel of its own after the forward's: there two steps are faster"
GATED_BACKWARD = "in the backward with delta, in one pass"
"""A plan's words for where its kernels multiply the gate."""

AUTO_ORDER = ("hopper", "triton", "tiled")
"""`auto` takes the first of these that has no objection."""

BACKENDS = (*AUTO_ORDER, "reference")
"""Every name that `backend=` takes besides "auto"."""

COMPILERS = {name: f"evoattn.backends.{name}.ahead" for name in ("hopper", "triton")}
"""The module of each backend that compiles kernels before they are launched. It imports the backend's compiler.

Its function `needed(make)` lists the kernels of a plan as `Needed`, and launches nothing. `make` makes the plan, for the card
of `devices.planned_for`, and the arguments that it would be run with, on the device "meta". `evoattn warm` runs the tasks. The
helpers of `compile.beside` import the module before they have a kernel.
"""


@dataclasses.dataclass(frozen=True)
class Description:
    """A plan in words and numbers.

    Args:
        config: the tiles as a `Config`, where one describes all of the pass.
        kernels: the tiles of each kernel, by its name, where kernels have tiles of their own.
        copies: what is copied or laid out anew once a call because of how the tensors lie in memory, each with the reason.
        gate: where the gate is multiplied, if there is one.
        tuned: what `evoattn tune` has found the tiles for on this machine, "forward", "backward" or "both"; None for others.
    """

    config: Config | None = None
    kernels: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    copies: tuple[str, ...] = ()
    gate: str | None = None
    tuned: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One pass of all calls whose tensors lie in memory alike.

    They have the same dtype, device and strides of the canonical axes, and start on a multiple of 16 bytes or not. A plan may
    be run with tensors in other shapes that start where the canonical ones do: it goes by addresses, and by what it was planned
    with. It holds no tensor. It depends on nothing that can change but its arguments, torch's precision of float32 products and
    torch's number of threads.

    Args:
        run: of a forward, a function of (inputs, outputs) that writes the outputs. Of a backward, a function of (cotangents,
            inputs, outputs, (dq, dk, dv, dgate)) that writes the last four where they are given, and returns dmask_bias and
            dpair_bias in their canonical shapes, None where they are not wanted.
        describe: what `run` runs; asked seldom, and never by a call.
        backend: who made it.
        refused: the other backends that were asked before, with all their reasons.
        save_probabilities: of a forward whose backend can start a backward from probabilities: a function of (inputs, o) that
            writes O and returns `SavedProbabilities`. It returns None, having written nothing, if these inputs need `run`. The
            backward's planner and its `run` then take `SavedProbabilities` for outputs. None for all other forwards.
        writes_into: of a backward, whether its planner was given `into` and took it.
        kernels: what `run` launches, of a backend that can compile the kernels of several plans together.
        compile_together: of a forward of such a backend: compile in other processes what the plans of a call need, while their
            caller goes on. It takes a function that makes the plans, and calls it only if it compiles so.
    """

    run: Callable[..., Any]
    describe: Callable[[], Description]
    backend: str = ""
    refused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    save_probabilities: Callable[..., Any] | None = None
    writes_into: bool = False
    kernels: tuple[Any, ...] = ()
    compile_together: Callable[[Callable[[], Sequence[Plan]]], None] | None = None


class Needed(NamedTuple):
    """A kernel that a plan launches, compiled or not.

    Args:
        name: of its function, or of its variant.
        key: tells it from all other kernels of its backend.
        path: the file or folder in which it is kept once it is compiled; None if nothing is kept.
        bytes: its size on disk; 0 if it is not there, so that a launch compiles it.
        task: compiles it for later processes, and returns its size on disk after that.
    """

    name: str
    key: str
    path: pathlib.Path | None
    bytes: int
    task: Task


class Backend(Protocol):
    """The names of every backend module. One that compiles kernels has a second module, see `COMPILERS`."""

    NAME: str
    """The name that users pass as `backend=`."""

    def availability(self) -> str | None:
        """None when it can run on this machine, else one line that says why not and what to do."""

    def unsupported(self, problem: Problem, config: Config) -> list[str]:
        """Every reason why it refuses a problem; empty when it takes it."""

    def faster(self, problem: Problem) -> tuple[str, str] | None:
        """The backend that runs a problem in less time, and why; `auto` goes to that one, if it takes the problem."""

    def plan_forward(self, inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
        """The forward of canonical tensors.

        The outputs are contiguous: o in the user's layout, in q's dtype; lse and reference in float32 (float64 for float64).
        """

    def plan_backward(
        self,
        cotangents: Cotangents,
        inputs: Inputs,
        outputs: Outputs | SavedProbabilities,
        *,
        scale: float,
        layout: str,
        needs: tuple[bool, ...],
        deterministic: bool,
        config: Config,
        into: Sequence[Tensor | None] | None,
    ) -> Plan:
        """The backward of canonical tensors: the gradients that `needs` asks for, each in its input's dtype.

        dq, dk, dv and dgate are contiguous in the user's layout, unless the plan `writes_into`: then they lie in memory as the
        meta tensors `into` do, with rows of channels on 16 bytes. `outputs.o` is the gated O:

            delta = sum over c of o dO      dO' = dO * sigmoid(gate)      dgate = dO * o * (1 - sigmoid(gate))
        """
