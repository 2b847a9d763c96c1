"""The backward of a call with a gate: the gate's pass, then the backward of a call without one on what that has made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.hopper.backward.gate.kernel import GatePass
from evoattn.backends.hopper.backward.plan import plan_backward
from evoattn.backends.hopper.host.launch import plan, types
from evoattn.backends.hopper.host.prepare import changed, loadable
from evoattn.core import layouts
from evoattn.core.inputs import Cotangents, Inputs, Outputs

__all__ = ["plan_gated_backward"]

Gradients = tuple[Tensor | None, ...]


def plan_gated_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, ...],
    deterministic: bool,
    into: Sequence[Tensor | None] | None = None,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """A function of cotangents, inputs, outputs and (dq, dk, dv, dgate); see `evoattn.backends`.

    If o has no cotangent, the gate has no part in it, and its gradient is 0.
    """
    options: dict[str, Any] = {"scale": scale, "layout": layout, "needs": needs, "deterministic": deterministic, "into": into}
    of_gate = None if into is None else into[3]
    gated, delta, before = cotangents.do, cotangents.dlse, None
    if cotangents.do is not None:
        wishes: dict[str, Any] = {"passes": any(needs[:5]), "gradient": needs[5], "of_gate": of_gate}
        before = _plan_pass(cotangents, inputs, outputs, layout, **wishes)
        gated = layouts.empty(outputs.o.shape, layout, outputs.o, "meta")
        delta = torch.empty(outputs.lse.shape, dtype=torch.float32, device="meta")
    after = None
    if any(needs[:5]):
        o = outputs.o if gated is None else gated
        after = plan_backward(gated, delta, *inputs[:6], o, *outputs[1:], **options, gated=before is not None)

    def run(
        cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients
    ) -> tuple[Tensor | None, Tensor | None]:
        *of_qkv, dgate = gradients
        do, dlse = cotangents
        o = outputs.o
        if before is not None:
            do, dlse = before(cotangents, inputs.gate, o, dgate)
            o = do
        elif dgate is not None:
            dgate.zero_()
        return (None, None) if after is None else after(do, dlse, *inputs[:6], o, *outputs[1:], *of_qkv)

    return run


def _plan_pass(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    layout: str,
    *,
    passes: bool,
    gradient: bool,
    of_gate: Tensor | None,
) -> Callable[..., tuple[Any, Any]]:
    """Plan the gate's pass: a function of (cotangents, gate, o, dgate) that returns the cotangents for the other kernels.

    of_gate: how dgate lies in memory; None: as `layout` says.
    """
    device, dlse = inputs.q.device, cotangents.dlse  # outputs may be planned on the device "meta"
    given = ((outputs.o, ""), (cotangents.do, ""), (inputs.gate, "gate"))
    found = [loadable(x, name=name) for x, name in given if x is not None]
    changes = [(i, change) for i, (_, change) in enumerate(found) if change is not None]
    made = layouts.empty(outputs.o.shape, layout, outputs.o, "meta")
    of_delta = torch.empty(outputs.lse.shape, dtype=torch.float32, device="meta")
    kernel = GatePass(
        types[outputs.o.dtype], made.shape[-1], dlse=dlse is not None and passes, passes=passes, gradient=gradient
    )
    start = plan(kernel, device, *(x for x, _ in found), dlse, made, of_delta, made if of_gate is None else of_gate)

    def run(cotangents: Cotangents, gate: Tensor, o: Tensor, dgate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        gated = delta = None
        if passes:
            gated = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=device)
            delta = torch.empty(of_delta.shape, dtype=of_delta.dtype, device=device)
        tensors = changed((o, cotangents.do, gate), changes)
        start(*(None if x is None else x.data_ptr() for x in (*tensors, cotangents.dlse, gated, delta, dgate)))
        return gated, delta

    return run
