"""The plan of a backward: what is computed in which order, and the memory between the kernels.

statistics              delta, and lse in log2 units; with a gate, dO * sigmoid(gate) and the gradient of the gate
dq_kernel               dQ, and the pair-bias gradient (by addition in memory, or stored if nothing is to be summed)
dkdv_kernel             dK, dV, and the mask-bias gradient
pair_gradient_kernel    the pair-bias gradient in a fixed order, if results must be bit-equal from run to run
total_kernel            its shares added up

Few queries and few keys without a pair bias go to `kernels.few` instead: one kernel makes all gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from evoattn.backends import GATED_BACKWARD, Description, Plan
from evoattn.backends.triton.backward_call import BackwardCall, describe_call, gate_pass, round_up
from evoattn.backends.triton.backward_launches import MaskGradient, plan_dkdv, plan_dq, plan_mask_gradient, writes_statistics
from evoattn.backends.triton.kernels.backward import PAD
from evoattn.backends.triton.kernels.few import plan_backward_few
from evoattn.backends.triton.kernels.statistics import plan_statistics
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


@dataclasses.dataclass(frozen=True)
class BackwardLaunches:
    """The launches of a call. Call it with the tensors, and with dq, dk, dv and dgate to write (None if not wanted).

    It returns the gradients of mask_bias and of pair_bias, in their canonical shapes, None if not wanted.

    Args:
        call: sizes, strides and tiles.
        tuned: whether the tiles are a result of `evoattn tune`.
        pair: the pair bias and its gradient.
        mask: the gradient of mask_bias, if it is wanted.
        statistics, dq, dkdv: the launches, None for one that no gradient needs.
        distant_dq, distant_dkdv: the same kernels for distant queries only, if there is a pair bias.
        gathers: whether lse and reference have gaps or another order in memory, as hooks on saved tensors may give them back.
    """

    call: BackwardCall
    tuned: bool
    pair: PairBias
    mask: MaskGradient | None
    statistics: Launch | None
    dq: Launch | None
    dkdv: Launch | None
    distant_dq: Launch | None
    distant_dkdv: Launch | None
    gathers: bool

    def describe(self) -> Description:
        """See `evoattn.backends`."""
        tiles = self.call.tiles
        kernels = (
            ("dq", self.dq, tiles.dq),
            ("dkdv", self.dkdv, tiles.dkdv),
            ("dpair_bias", self.pair.in_order, tiles.pair),
        )
        return Description(
            kernels={name: tile.as_dict() for name, launch, tile in kernels if launch is not None},
            copies=self.pair.copies(),
            gate=None if self.call.gate is None else GATED_BACKWARD,
            tuned="backward" if self.tuned else None,
        )

    def __call__(
        self, cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients
    ) -> tuple[Tensor | None, Tensor | None]:
        (do, dlse), (q, k, v, mask, mask_bias, pair_bias, gate) = cotangents, inputs
        (o, lse, reference), (dq, dk, dv, dgate), call, in_order = outputs, gradients, self.call, self.pair.in_order
        # What torch clears comes before our kernels and what it sums after them, so that they are neighbours in the stream.
        if do is None and dgate is not None:
            dgate.zero_()
        do = torch.zeros((), dtype=o.dtype, device=call.device) if do is None else do
        mask_sums = None if self.mask is None else self.mask.begin(call)
        pair = self.pair.begin(pair_bias)
        stats = empty(call.stats, call.device)
        if self.gathers:
            lse, reference = lse.contiguous(), reference.contiguous()
        # Absent tensors get any address, which is never read.
        dlse = lse if dlse is None else dlse
        key_bias, runs = (stats, stats) if call.key_bias is None else call.key_bias(mask, mask_bias)
        self.pair.copy(pair_bias, pair)
        by_query, by_key = (q, q) if pair.by_query is None or pair.by_key is None else (pair.by_query, pair.by_key)
        gated = do if call.gate is None or not call.gate.needs_do else empty(call.gate.written, call.device)
        shared = (q, k, v, gated, stats, stats if pair.distant is None else pair.distant)
        spans = key_bias if in_order is None else in_order.find_spans(key_bias)
        if self.statistics is not None:
            gates = (o if gate is None else gate, gated, o if dgate is None else dgate)
            self.statistics(o, do, lse, reference, dlse, *shared[4:], *gates)
        if self.dq is not None:
            out, sums = q if dq is None else dq, stats if pair.sums is None else pair.sums
            dq_arguments = (*shared, o, lse, reference, dlse, key_bias, runs, by_query, out, sums)
            self.dq(*dq_arguments)
        if self.dkdv is not None:
            outs = (k if dk is None else dk, v if dv is None else dv, stats if mask_sums is None else mask_sums)
            dkdv_arguments = (*shared, key_bias, by_key, *outs)
            self.dkdv(*dkdv_arguments)
        if self.distant_dq is not None:
            self.distant_dq(*dq_arguments)
        if self.distant_dkdv is not None:
            self.distant_dkdv(*dkdv_arguments)
        dpair_bias = self.pair.finish(pair, pair.sums if in_order is None else in_order(shared, key_bias, spans, by_query))
        dmask_bias = None if self.mask is None or mask_sums is None else self.mask.finish(mask_sums)
        return dmask_bias, dpair_bias


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
    device = inputs.q.device
    problem = describe(inputs, needs=needs, deterministic=deterministic)
    problem = dataclasses.replace(problem, capability=cards.capability(device))
    only_gate = not any(needs[:5])
    if problem.scores == 0 or cotangents == (None, None) or (cotangents.do is None and only_gate):
        return Plan(_zeros(inputs, needs), Description)
    few = few_tiles("backward", problem, config)
    if few is not None:
        few_run = plan_backward_few(cotangents, inputs, outputs, few, scale=scale, layout=layout, needs=(*needs[:3], needs[5]))
        gated = None if inputs.gate is None else GATED_BACKWARD
        return Plan(few_run, functools.partial(Description, kernels={"few": dataclasses.asdict(few)}, gate=gated))
    if only_gate:
        run = _gate_gradient(cotangents, inputs, outputs, layout, needs)
        return Plan(run, functools.partial(Description, gate=GATED_BACKWARD))
    tiles = backward_tiles(problem, config, cards.shared_memory_limit(device))
    call = describe_call(problem, tiles, cotangents, inputs, outputs, scale=scale, layout=layout)
    backward = _launches(call, inputs, outputs, tuned_tiles.is_tuned("triton", "backward", problem, config))
    _overlap(backward)
    return Plan(backward, backward.describe)


def _launches(call: BackwardCall, inputs: Inputs, outputs: Outputs, tuned: bool) -> BackwardLaunches:
    """All launches of a call, in no order yet."""
    bias, mask_bias = inputs.pair_bias, inputs.mask_bias
    pair = plan_pair(call, None if bias is None else strided(bias))
    mask = None if mask_bias is None or not call.problem.needs[3] else plan_mask_gradient(call.problem, mask_bias)
    statistics = None
    if not writes_statistics(call, pair):
        statistics = plan_statistics(call.stats, call.o, call.do, call.dlse, call.gate)
    return BackwardLaunches(
        call=call,
        tuned=tuned,
        pair=pair,
        mask=mask,
        statistics=statistics,
        dq=plan_dq(call, pair),
        dkdv=plan_dkdv(call, pair, mask),
        distant_dq=None if bias is None else plan_dq(call, pair, distant_only=True),
        distant_dkdv=None if bias is None else plan_dkdv(call, pair, mask, distant_only=True),
        gathers=not (outputs.lse.is_contiguous() and outputs.reference.is_contiguous()),
    )


def _overlap(backward: BackwardLaunches) -> None:
    """Say in which order a call launches and who loads whose results, so that neighbours overlap."""
    pair, in_order = backward.pair, backward.pair.in_order
    key_bias = None if backward.call.key_bias is None else backward.call.key_bias.launch
    straight, transposed = (None if copy is None else copy[1] for copy in (pair.straight, pair.transposed))
    spans = None if in_order is None or in_order.spans is None else in_order.spans[1]
    shares, total = ((), None) if in_order is None else (in_order.launches, in_order.total)
    prepared = (key_bias, straight, transposed, spans, backward.statistics)
    # If no kernel of their own makes the statistics, dq does.
    with_statistics = prepared if backward.statistics is not None else (*prepared, backward.dq)
    overlap(
        backward.call.device,
        (key_bias, ()),
        (straight, ()),
        (transposed, ()),
        (spans, (key_bias,)),
        (backward.statistics, ()),
        (backward.dq, prepared),
        (backward.dkdv, with_statistics),
        (backward.distant_dq, (backward.dq, backward.dkdv, *with_statistics)),
        (backward.distant_dkdv, (backward.dkdv, *with_statistics)),
        *((share, with_statistics) for share in shares),
        (total, shares),
    )


def _zeros(inputs: Inputs, needs: Needs) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """Plan gradients that are 0, in the shapes of these inputs."""
    biases = zip(inputs[4:6], needs[3:5], strict=True)
    shapes = [None if bias is None or not need else tuple(bias.shape) for bias, need in biases]

    def run(
        cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients
    ) -> tuple[Tensor | None, Tensor | None]:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        biases = zip(inputs[4:6], shapes, strict=True)
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
        do, gate, dgate = cotangents.do, inputs.gate, gradients[3]
        (o, lse, _), unread = outputs, empty(stats, device)
        if do is not None and gate is not None and dgate is not None:
            lse = lse.contiguous()
            statistics(o, do, lse, lse, lse, unread, unread, gate, o, dgate)
        return None, None

    return run
