"""The plan of a backward: its launches in the order of the stream, and the memory between them.

Few queries and few keys without a pair bias go to `few_plan` instead: one kernel makes all gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.backends import GATED_BACKWARD, Description, Plan
from evoattn.backends.triton.backward_call import BackwardCall, describe_call, gate_pass, round_up
from evoattn.backends.triton.backward_launches import (
    MaskGradient,
    plan_dkdv,
    plan_dq,
    plan_mask_gradient,
    plan_statistics,
    writes_statistics,
)
from evoattn.backends.triton.few_plan import plan_backward_few
from evoattn.backends.triton.kernels.backward import PAD
from evoattn.backends.triton.kernels.dkdv import dkdv_kernel
from evoattn.backends.triton.kernels.dq import dq_kernel
from evoattn.backends.triton.kernels.pair_gradient import pair_gradient_kernel
from evoattn.backends.triton.pair_plan import PairBias, plan_pair
from evoattn.backends.triton.tiles.backward import backward_tiles
from evoattn.backends.triton.tiles.few import few_tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.problem import Needs, describe
from evoattn.kit import cards
from evoattn.kit.launch import Launch
from evoattn.kit.overlap import overlap
from evoattn.kit.strides import contiguous, empty, strided

Gradients = tuple[Tensor | None, ...]
"""dq, dk, dv and dgate; None for one that is not wanted."""

BiasGradients = tuple[Tensor | None, Tensor | None]
"""dmask_bias and dpair_bias in their canonical shapes; None for one that is not wanted."""


class Step(NamedTuple):
    """One launch of a backward.

    Args:
        launch: of a kernel.
        take: returns its tensors, in the kernel's order, of all by name.
        loads: the launches before it whose results it loads.
    """

    launch: Launch
    take: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
    loads: tuple[Launch, ...]


def plan_steps(call: BackwardCall, pair: PairBias, mask: MaskGradient | None) -> tuple[Step, ...]:
    """Plan all launches of a backward, in the order of the stream.

    | launch | writes |
    |---|---|
    | key bias, copies of the pair bias, spans | what later kernels load in place of the caller's masks and pair bias |
    | statistics | delta, and lse in log2 units; with a gate, dO * sigmoid(gate) and the gradient of the gate |
    | dq | dQ, and the pair-bias gradient, unless that has a fixed order of summation |
    | dkdv | dK, dV, and the mask-bias gradient |
    | dq, dkdv with DISTANT_ONLY | the same of distant queries (`backward.store_statistics`), if there is a pair bias |
    | pair gradient, total | the pair-bias gradient in a fixed order: shares of it, and their sum |
    """
    steps: list[Step] = []

    def add(launch: Launch | None, tensors: str, loads: Iterable[Launch] = ()) -> tuple[Launch, ...]:
        """Add a launch of tensors with these names, unless it is absent."""
        if launch is None:
            return ()
        steps.append(Step(launch, operator.itemgetter(*tensors.split()), tuple(loads)))
        return (launch,)

    bias, in_order, common = pair.bias, pair.in_order, "q k v gated stats distant"
    key_bias = () if call.key_bias is None else add(call.key_bias.launch, "mask mask_bias key_bias runs")
    if pair.straight is not None:
        add(pair.straight.launch, "pair_bias by_query")
    if pair.transposed is not None:
        add(pair.transposed.launch, "pair_bias by_key")
    if in_order is not None and in_order.spans is not None:
        add(in_order.spans.launch, "key_bias spans", key_bias)
    dq_writes_statistics = writes_statistics(call, pair)
    if not dq_writes_statistics:
        statistics = plan_statistics(call.stats, call.o, call.do, call.dlse, call.gate)
        add(statistics, "o do lse reference dlse stats distant gate gated dgate")
    prepared = [step.launch for step in steps]
    of_dq = f"{common} o lse reference dlse key_bias runs by_query dq pair_sums"
    dq = add(plan_dq(call, pair), of_dq, prepared)
    ready = [*prepared, *dq] if dq_writes_statistics else prepared
    of_dkdv = f"{common} key_bias by_key dk dv dmask"
    dkdv = add(plan_dkdv(call, pair, mask), of_dkdv, ready)
    if bias is not None:
        add(plan_dq(call, pair, distant_only=True), of_dq, (*dq, *dkdv, *ready))
        add(plan_dkdv(call, pair, mask, distant_only=True), of_dkdv, (*dkdv, *ready))
    if in_order is not None:
        for launch in in_order.launches:
            add(launch, f"{common} key_bias spans by_query shares", ready)
        add(in_order.total, "shares dpair_bias", in_order.launches)
    return tuple(steps)


@dataclasses.dataclass(frozen=True)
class BackwardLaunches:
    """The launches of a call. Call it with the tensors, and with dq, dk, dv and dgate to write (None if not wanted).

    Args:
        call: sizes, strides and tiles.
        pair: the pair bias and its gradient.
        mask: the gradient of mask_bias, if it is wanted.
        steps: the launches.
        gathers: whether lse and reference have gaps or another order in memory, as hooks on saved tensors may give them back.
    """

    call: BackwardCall
    pair: PairBias
    mask: MaskGradient | None
    steps: tuple[Step, ...]
    gathers: bool

    def __call__(self, cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> BiasGradients:
        # What torch clears comes before our kernels and what it sums after them, so that they are neighbours in the stream.
        tensors = self._tensors(cotangents, inputs, outputs, gradients)
        for step in self.steps:
            step.launch(*step.take(tensors))
        dpair_bias = self.pair.finish(tensors)
        return None if self.mask is None else self.mask.finish(tensors["dmask"]), dpair_bias

    def _tensors(self, cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> dict[str, Tensor]:
        """All tensors of a run by name: those of the caller, and memory. Absent ones get any address, which is never read."""
        (do, dlse), (o, lse, reference), (dq, dk, dv, dgate), call = cotangents, outputs, gradients, self.call
        if do is None and dgate is not None:
            dgate.zero_()
        do = torch.zeros((), dtype=o.dtype, device=call.device) if do is None else do
        dmask = None if self.mask is None else self.mask.allocate(call)
        pair = self.pair.allocate(inputs.pair_bias)
        if self.gathers:
            lse, reference = lse.contiguous(), reference.contiguous()
        key_bias, runs = (None, None) if call.key_bias is None else call.key_bias.allocate()
        named = {
            **inputs._asdict(),
            **pair,
            "o": o,
            "do": do,
            "lse": lse,
            "reference": reference,
            "dlse": dlse,
            "dq": dq,
            "dk": dk,
            "dv": dv,
            "dgate": dgate,
            "dmask": dmask,
            "stats": empty(call.stats, call.device),
            "key_bias": key_bias,
            "runs": runs,
            "gated": do if call.gate is None or not call.gate.needs_do else empty(call.gate.written, call.device),
        }
        return {name: lse if x is None else x for name, x in named.items()}


def plan_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
    needs: Needs,
    deterministic: bool,
    config: Config,
) -> Plan:
    """Plan the gradients that `needs` asks for, of canonical tensors with these strides."""
    device, needs = inputs.q.device, Needs(*needs)
    problem = describe(inputs, needs=needs, deterministic=deterministic)
    problem = dataclasses.replace(problem, capability=cards.capability(device))
    only_gate = not any(needs._replace(gate=False))
    if problem.scores == 0 or cotangents == (None, None) or (cotangents.do is None and only_gate):
        return Plan(_zeros(inputs, needs), Description)
    few = few_tiles("backward", problem, config)
    if few is not None:
        few_run = plan_backward_few(cotangents, inputs, outputs, few, scale=scale, layout=layout, needs=needs)
        gated = None if inputs.gate is None else GATED_BACKWARD
        return Plan(few_run, functools.partial(Description, kernels={"few": dataclasses.asdict(few)}, gate=gated))
    if only_gate:
        run = _gate_gradient(cotangents, inputs, outputs, layout, needs)
        return Plan(run, functools.partial(Description, gate=GATED_BACKWARD))
    tiles = backward_tiles(problem, config, cards.shared_memory_limit(device))
    call = describe_call(problem, tiles, cotangents, inputs, outputs, scale=scale, layout=layout)
    pair = plan_pair(call, None if inputs.pair_bias is None else strided(inputs.pair_bias))
    mask = None if inputs.mask_bias is None or not needs.mask_bias else plan_mask_gradient(problem, inputs.mask_bias)
    steps = plan_steps(call, pair, mask)
    overlap(device, *((step.launch, step.loads) for step in steps))
    gathers = not (outputs.lse.is_contiguous() and outputs.reference.is_contiguous())
    kernels = (("dq", dq_kernel, tiles.dq), ("dkdv", dkdv_kernel, tiles.dkdv), ("dpair_bias", pair_gradient_kernel, tiles.pair))
    description = functools.partial(
        Description,
        kernels={name: tile.as_dict() for name, kernel, tile in kernels if any(x.launch.kernel is kernel for x in steps)},
        copies=pair.copies(),
        gate=None if call.gate is None else GATED_BACKWARD,
        tuned="backward" if tuned_tiles.is_tuned("triton", "backward", problem, config) else None,
    )
    return Plan(BackwardLaunches(call, pair, mask, steps, gathers), description)


def _zeros(inputs: Inputs, needs: Needs) -> Callable[..., BiasGradients]:
    """Plan gradients that are 0, in the shapes of these inputs."""
    wanted = ((inputs.mask_bias, needs.mask_bias), (inputs.pair_bias, needs.pair_bias))
    shapes = [None if bias is None or not need else tuple(bias.shape) for bias, need in wanted]

    def run(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> BiasGradients:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        biases = zip((inputs.mask_bias, inputs.pair_bias), shapes, strict=True)
        dmask_bias, dpair_bias = (None if x is None or shape is None else x.new_zeros(shape) for x, shape in biases)
        return dmask_bias, dpair_bias

    return run


def _gate_gradient(
    cotangents: Cotangents, inputs: Inputs, outputs: Outputs, layout: str, needs: Needs
) -> Callable[..., tuple[None, None]]:
    """Plan the gradient of the gate if no other is wanted: only the statistics kernel runs."""
    gate = gate_pass(cotangents, inputs, outputs, layout, needs)
    o, device = strided(outputs.o), inputs.q.device
    stats = contiguous((2, *o.shape[:3], round_up(o.shape[3], PAD)), torch.float32)
    statistics = plan_statistics(stats, o, o, None, gate)
    overlap(device, (statistics, ()))

    def run(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients) -> tuple[None, None]:
        do, gate, (*_, dgate) = cotangents.do, inputs.gate, gradients
        (o, lse, _), unread = outputs, empty(stats, device)
        if do is not None and gate is not None and dgate is not None:
            lse = lse.contiguous()
            statistics(o, do, lse, lse, lse, unread, unread, gate, o, dgate)
        return None, None

    return run
