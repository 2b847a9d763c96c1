"""The gate in the backward: one pass multiplies the cotangent of O by the sigmoid, and makes the gradient of the gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.backends.triton.bwd_plan import round_up
from evoattn.backends.triton.bwd_preprocess import PAD, GatePass, plan_statistics
from evoattn.backends.triton.launch import contiguous, empty, strided
from evoattn.backends.triton.overlap import overlap
from evoattn.core import layouts
from evoattn.core.inputs import Cotangents, Inputs, Outputs

__all__ = ["gate_pass", "only_gate"]


def gate_pass(
    cotangents: Cotangents, inputs: Inputs, outputs: Outputs, layout: str, *, needs_do: bool, needs_dgate: bool
) -> GatePass | None:
    """What the statistics' launch does with the gate; None without one, and where o has no cotangent: then all of it is 0."""
    if inputs.gate is None or cotangents.do is None:
        return None
    made = strided(layouts.empty(outputs.o.shape, layout, outputs.o, "meta"))
    return GatePass(strided(inputs.gate), strided(cotangents.do), made, made, needs_do, needs_dgate)


def only_gate(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, layout: str) -> Callable[..., tuple[None, None]]:
    """What computes the gradient of the gate where no other is wanted: the statistics' launch alone."""
    gate = gate_pass(cotangents, inputs, outputs, layout, needs_do=False, needs_dgate=True)
    o, device = strided(outputs.o), inputs.q.device
    stats = contiguous((2, *o.shape[:3], round_up(o.shape[3], PAD)), torch.float32)
    statistics = plan_statistics(stats, o, o, None, gate)
    overlap(device, (statistics, ()))

    def run(
        cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: tuple[Tensor | None, ...]
    ) -> tuple[None, None]:
        do, gate, dgate = cotangents.do, inputs.gate, gradients[3]
        (o, lse, _), unread = outputs, empty(stats, device)
        if do is not None and gate is not None and dgate is not None:
            lse = lse.contiguous()
            statistics(o, do, lse, lse, lse, unread, unread, gate, o, dgate)
        return None, None

    return run
