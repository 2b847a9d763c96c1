"""Calls that tests plan for the Hopper backend, and launch without its kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from evoattn.backends import Cotangents, Inputs, Outputs, Plan, hopper
from evoattn.backends.hopper import backward_plan, forward_plan
from evoattn.clients.graphs.recorder import scout
from evoattn.core.config import Config
from evoattn.core.problem import Needs, describe


def skip_refused(inputs: Inputs, needs: tuple[bool, ...]) -> None:
    """Skip the test of a call that the backend refuses."""
    problem = dataclasses.replace(describe(inputs, needs=Needs(*needs)), device="cuda", capability=(9, 0))
    if reasons := hopper.unsupported(problem, Config()):
        pytest.skip("; ".join(reasons))


def random_outputs(inputs: Inputs) -> Outputs:
    """Outputs of a forward, as a backward reads them."""
    q = inputs.q
    return Outputs(torch.randn(q.shape, dtype=q.dtype), torch.randn(q.shape[:-1]), torch.zeros(q.shape[:-1]))


def launch_forward(inputs: Inputs, outputs: Outputs, layout: str) -> None:
    """Plan a forward and run it."""
    planned(lambda: forward_plan.plan_forward(inputs, scale=0.2, layout=layout)).run(inputs, outputs)


def planned(plan: Callable[[], Plan]) -> Plan:
    """The plan that a function makes, as it does also while a call is recorded: it reads no tensor."""
    plans: list[Plan] = []
    scout(lambda: plans.append(plan()), torch.device("cpu"))
    return plans[0]


def launch_backward(
    inputs: Inputs,
    needs: tuple[bool, ...],
    *,
    cotangents: Cotangents | None = None,
    outputs: Outputs | None = None,
    gradients: tuple[Tensor | None, ...] | None = None,
    **options: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Plan a backward and run it. Return the gradients of mask_bias and pair_bias.

    The default tensors are random. The default options are a scale of 0.2, sums in memory, and the layout "bnlhd".
    """
    skip_refused(inputs, needs)
    outputs = random_outputs(inputs) if outputs is None else outputs
    cotangents = Cotangents(torch.randn_like(outputs.o)) if cotangents is None else cotangents
    if gradients is None:
        made = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in zip(inputs.qkv, needs, strict=False)]
        gradients = (*made, None)
    options = {"scale": 0.2, "layout": "bnlhd", "deterministic": False, **options}
    plan = planned(lambda: backward_plan.plan_backward(cotangents, inputs, outputs, needs=needs, **options))
    result: tuple[Tensor | None, Tensor | None] = plan.run(cotangents, inputs, outputs, gradients)
    return result
