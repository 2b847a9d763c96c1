"""The backward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike.

`QueryGradients` runs first, and leaves for `KeyGradients` the two statistics of each query that it finds on the way; if no
gradient of q or the pair bias is wanted, `Statistics` computes them. Without a pair bias `FusedGradients` may do all of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends import GATED_BACKWARD, Plan
from evoattn.backends.hopper import memory
from evoattn.backends.hopper.backward_launches import (
    MOST_IN_32_BITS,
    BackwardChoices,
    BackwardTensors,
    Launch,
    choose_kernels,
    plan_launches,
)
from evoattn.backends.hopper.head_groups import for_each_group
from evoattn.backends.hopper.kernels.gate import GatePass
from evoattn.backends.hopper.kernels.key_bias import CLEARED_VECTORS
from evoattn.backends.hopper.kernels.pair_bias import PairBiasTiles
from evoattn.backends.hopper.launch import types
from evoattn.backends.hopper.planner import Planner, Workspace
from evoattn.backends.hopper.tiles import MMA_M
from evoattn.core import layouts
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.problem import Needs, describe

Gradients = tuple[Tensor | None, ...]
"""dq, dk, dv and dgate; None for one that is not wanted."""

Run = Callable[[Cotangents, Inputs, Outputs, Gradients], tuple[Tensor | None, Tensor | None]]
"""A function that writes the gradients, and returns d(mask bias) and d(pair bias); None for one that is not wanted."""

_HEAD_AXES = BackwardTensors(
    mdO=2, mQ=2, mK=2, mV=2, mO=2, mLSE=2, mdLSE=2, mdQ=2, mdK=2, mdV=2, mdMask=2, mPair=1, mTiles=1, mSums=1, mdPair=1,
    mTerms=None, mEnds=None, mOrder=None, mStarts=None, mStats=None, mParts=None,
)  # fmt: skip
"""The axis of the heads of each tensor, if it has one. Groups of heads share those that have none."""


class _Pass(NamedTuple):
    """The arguments of a backend's `plan_backward`; see `evoattn.backends`."""

    cotangents: Cotangents
    inputs: Inputs
    outputs: Outputs
    scale: float
    layout: str
    needs: Needs
    deterministic: bool
    into: Sequence[Tensor | None] | None = None
    gated: bool = False  # whether the cotangents are what `GatePass` has made, and o is not read


def plan_backward(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, *, needs: tuple[bool, ...], **options: Any) -> Plan:
    """Plan the gradients that `needs` asks for, of canonical tensors with these strides; `options` are those of a backend."""
    planner, work = Planner(inputs.q.device), _Pass(cotangents, inputs, outputs, needs=Needs(*needs), **options)
    run = _plan_gradients(planner, work) if inputs.gate is None else _plan_gated_gradients(planner, work)
    gate = GATED_BACKWARD if inputs.gate is not None and cotangents.do is not None else None
    return planner.make_plan(run, gate=gate, writes_into=work.into is not None)


def _plan_gradients(planner: Planner, work: _Pass) -> Run:
    """Plan all gradients but that of the gate."""
    inputs, needs, q = work.inputs, work.needs, work.inputs.q
    problem = describe(inputs, needs=needs, deterministic=work.deterministic)
    dlse = work.cotangents.dlse is not None
    choices = choose_kernels(problem, inputs, scale=work.scale, dlse=dlse, gated=work.gated)
    workspace, gradient = planner.workspace, choices.gradient
    terms, cleared_by_torch = _plan_key_terms(planner, choices, inputs)
    reads, copies = _plan_reads(planner, choices, work)
    writes: Sequence[Any] = [layouts.empty(x.shape, work.layout, q.new_empty(0, device="meta")) for x in inputs.qkv]
    if work.into is not None:
        writes = work.into[:3]
    at_stats = 0 if choices.fused else workspace.add(choices.stats)
    tile = functools.partial(_plan_tiles, planner, choices) if choices.streams else None
    pair = memory.plan_pair_bias(planner, inputs, bounded=True, plan_tiles=tile)
    at_parts = workspace.add(choices.parts)
    by_queries, by_keys = (choices.fused is not None or x is not None for x in (choices.query, choices.key))
    # those of dq, dk and dv that a kernel writes and nobody wants
    written = zip(writes, needs, (by_queries, by_keys, by_keys), strict=False)
    at_unwanted = [workspace.add(x) if is_written and not need else 0 for x, need, is_written in written]

    # The layouts of all that the launches see. An absent tensor gets another address, which is never read.
    absent = torch.empty_strided((1, 1, problem.lq, problem.lk), (0, 0, 0, 1), dtype=torch.float32, device="meta")
    # Without sums of d(pair bias), any layout with four columns compiles the same code, and nothing is written.
    sums, dpair = (absent[..., :4], absent) if gradient is None else (gradient.sums, gradient.layout)
    # d(mask bias): each head leaves its part of it, in float32; heads and axes of size 1 are summed at last
    dmask_parts = memory.floats(problem.b, problem.n, problem.h, problem.lk)
    dmask = memory.floats(1, 1, problem.lk) if inputs.mask_bias is None else torch.empty_like(inputs.mask_bias, device="meta")
    tensors = BackwardTensors(
        **reads,
        mdQ=writes[0],
        mdK=writes[1],
        mdV=writes[2],
        mdMask=dmask_parts,
        mPair=absent if pair.pair is None else pair.pair[..., : problem.lk],
        mTiles=pair.tiles,
        mSums=sums,
        mdPair=dpair,
        mTerms=terms.by_b(terms.terms),
        mEnds=terms.by_b(terms.ends),
        mOrder=terms.order,
        mStarts=terms.starts,
        mStats=None,
        mParts=None,
    )
    first = BackwardTensors(*map(choices.groups.cut, tensors, _HEAD_AXES))
    key_terms = memory.floats(1, 8) if terms.terms is None else terms.terms
    first = first._replace(mTerms=key_terms, mEnds=terms.ends, mStats=choices.stats, mParts=choices.parts)
    launches = plan_launches(planner, choices, first, terms)
    offsets = choices.groups.offsets(tensors, _HEAD_AXES)
    return _BackwardLaunches(
        choices, workspace, copies, terms, cleared_by_torch, pair, dmask_parts, dmask, launches, offsets, at_stats, at_parts,
        at_unwanted,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _BackwardLaunches:
    """The launches of a call. Call it with the tensors, and with dq, dk, dv and dgate to write (None if not wanted).

    It returns d(mask bias) and d(pair bias), and leaves dgate alone.

    Args:
        copies: of tensors whose layout the kernels cannot read, by place among do, q, k, v, o, lse and dlse.
        cleared_by_torch: whether torch clears the sums of d(pair bias).
        dmask_parts, dmask: the layouts of d(mask bias) of each head, and of their sum.
        offsets: for each group of heads, how many bytes further its part of each of `BackwardTensors` lies.
        at_stats, at_parts, at_unwanted: places in the workspace of statistics, parts of d(pair bias), and dq, dk and dv.
    """

    choices: BackwardChoices
    workspace: Workspace
    copies: list[tuple[int, memory.Copy]]
    terms: memory.KeyTerms
    cleared_by_torch: bool
    pair: memory.PairMemory
    dmask_parts: Tensor
    dmask: Tensor
    launches: list[Launch]
    offsets: tuple[tuple[int, ...], ...]
    at_stats: int
    at_parts: int
    at_unwanted: list[int]

    def __call__(
        self, cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients
    ) -> tuple[Tensor | None, Tensor | None]:
        choices, gradient, device = self.choices, self.choices.gradient, self.choices.device
        (do, dlse), (o, lse, _), dq = cotangents, outputs, gradients[0]
        reads = (torch.zeros_like(o) if do is None else do, *inputs.qkv, o, lse, lse if dlse is None else dlse)
        if self.copies:
            reads = memory.apply_copies(reads, self.copies)
        work = self.workspace.make()
        start = work.data_ptr()
        of_reads, (mask, mask_bias, raw_pair) = memory.addresses(reads), memory.addresses(inputs[3:6])
        writes = [
            start + at if x is None else x for x, at in zip(memory.addresses(gradients[:3]), self.at_unwanted, strict=True)
        ]
        sums = None if gradient is None else torch.empty_like(gradient.sums, device=device)
        dmask = torch.empty_like(self.dmask_parts, device=device) if choices.problem.needs.mask_bias else None
        dpair = torch.empty_like(gradient.layout, device=device) if gradient is not None and gradient.rounds else None
        to_mask, to_sums, to_pair = memory.addresses((dmask, sums, dpair))
        if self.cleared_by_torch:
            sums.zero_()  # type: ignore[union-attr]
        pair, _, tiles = self.pair.make(start, raw_pair)
        # From here each kernel starts while the one before runs, so all memory is allocated by now. The first kernel waits for
        # the terms where it reads them, and the second for the statistics. The second reads order and starts at once: the first
        # lets it start only after it has waited for them itself.
        key_terms, ends, _, *lists = self.terms.make(start, mask, mask_bias, to_sums)
        k, at_lse = of_reads[2], of_reads[5]
        of_pair = (k if pair is None else pair, tiles, at_lse if to_sums is None else to_sums, to_pair)
        of_keys = (k if key_terms is None else key_terms, ends, *lists)

        # The first kernel of a group waits for the last of the group before, which never says that another may start. So both
        # may use the same statistics and parts.
        def launch_group(*group: int | None) -> None:
            for launch in self.launches:
                launch(*group)

        # in the order of `BackwardTensors`
        own = (start + self.at_stats, start + self.at_parts)
        for_each_group(launch_group, (*of_reads, *writes, to_mask, *of_pair, *of_keys, *own), self.offsets)
        if choices.factor != 1.0 and dq is not None:
            dq.mul_(choices.factor)
        if dmask is not None:
            dmask = dmask.sum(2).sum_to_size(self.dmask.shape).to(self.dmask.dtype)
        if gradient is not None and dpair is None:
            dpair = gradient.finish(sums)  # type: ignore[arg-type]
        return dmask, dpair


def _plan_tiles(planner: Planner, choices: BackwardChoices, pair: Tensor) -> tuple[Tensor, Any]:
    """Plan the tiles of a pair bias [b|1,h|1,q,k] that streams: their layout, and the launch to fill it."""
    planner.copies.append("pair_bias: laid out anew once a backward, to be streamed")
    float32 = choices.key is not None and choices.key.float32_tiles
    dtype = torch.float32 if float32 else pair.dtype
    tiles = torch.empty(*pair.shape[:2], choices.key_panels, choices.panels, MMA_M * MMA_M, dtype=dtype, device="meta")
    kernel = PairBiasTiles(choices.bias, float32=float32)
    return tiles, planner.plan_launch(kernel, {"mPair": pair, "mTiles": tiles}, scale=choices.unit)


def _plan_key_terms(planner: Planner, choices: BackwardChoices, inputs: Inputs) -> tuple[memory.KeyTerms, bool]:
    """Plan the terms of the key bias; and whether torch clears what blocks add to, since their launch does not."""
    problem, added = choices.problem, choices.added
    keys = choices.key_panels * MMA_M if choices.query is None else choices.query.keys
    vectors = CLEARED_VECTORS * problem.b * problem.n
    clears = None if added is None or max(added.numel(), 4 * vectors) > MOST_IN_32_BITS else added
    bounded = choices.bias is not None and inputs.mask_bias is not None
    terms = memory.plan_key_bias(planner, inputs, keys, clears=clears, lists=choices.skips, bounded=bounded)
    return terms, added is not None and (terms.terms is None or clears is None)


def _plan_reads(
    planner: Planner, choices: BackwardChoices, work: _Pass
) -> tuple[dict[str, Tensor], list[tuple[int, memory.Copy]]]:
    """Plan what the kernels read: the layouts of do, q, k, v, o, lse and dlse, and the copies that this takes, by place."""
    (do, dlse), (q, k, v), (o, lse, _) = work.cotangents, work.inputs.qkv, work.outputs
    loads: dict[str, tuple[Tensor, memory.Copy | None]] = {
        "mdO": memory.plan_load(planner, o if do is None else do),
        "mQ": memory.plan_load(planner, q, choices.factor, "q"),
        "mK": memory.plan_load(planner, k, name="k"),
        "mV": memory.plan_load(planner, v, name="v"),
        "mO": memory.plan_load(planner, o),
        "mLSE": (lse, None),
        "mdLSE": (lse, None) if dlse is None else memory.plan_copy(dlse),
    }
    copies = [(place, copy) for place, (_, copy) in enumerate(loads.values()) if copy is not None]
    return {name: x for name, (x, _) in loads.items()}, copies


def _plan_gated_gradients(planner: Planner, work: _Pass) -> Run:
    """Plan the gate's pass, then the backward of a call without a gate on what that has made.

    If o has no cotangent, the gate has no part in it, and its gradient is 0.
    """
    needs, gate_pass, after = work.needs, None, None
    of_others = needs.q or needs.k or needs.v or needs.mask_bias or needs.pair_bias
    if work.cotangents.do is not None:
        gate_pass, made = _plan_gate_pass(planner, work, passes=of_others)
        work = work._replace(cotangents=made, outputs=work.outputs._replace(o=made.do), gated=True)
    if of_others:
        after = _plan_gradients(planner, work)

    def run(
        cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: Gradients
    ) -> tuple[Tensor | None, Tensor | None]:
        dgate = gradients[3]
        if gate_pass is not None:
            cotangents = gate_pass(cotangents, inputs.gate, outputs.o, dgate)
            outputs = outputs if cotangents.do is None else outputs._replace(o=cotangents.do)
        elif dgate is not None:
            dgate.zero_()
        return (None, None) if after is None else after(cotangents, inputs, outputs, gradients)

    return run


def _plan_gate_pass(planner: Planner, work: _Pass, *, passes: bool) -> tuple[Callable[..., Cotangents], Any]:
    """Plan the gate's pass: a function of (cotangents, gate, o, dgate) that returns the cotangents for the other kernels.

    Returns the layouts of these cotangents besides. `passes`: as `GatePass` has it.
    """
    device, dlse, o = work.inputs.q.device, work.cotangents.dlse, work.outputs.o  # which may be planned on the device "meta"
    tensors = ((o, ""), (work.cotangents.do, ""), (work.inputs.gate, "gate"))
    loads = [memory.plan_load(planner, x, name=name) for x, name in tensors if x is not None]
    copies = [(i, copy) for i, (_, copy) in enumerate(loads) if copy is not None]
    gated_like, delta_like = layouts.empty(o.shape, work.layout, o, "meta"), memory.floats(*work.outputs.lse.shape)
    options = {"dlse": dlse is not None and passes, "passes": passes, "gradient": work.needs.gate}
    kernel = GatePass(types[o.dtype], gated_like.shape[-1], **options)
    dgate = None if work.into is None else work.into[3]
    dgate = gated_like if dgate is None else dgate
    read = dict(zip(("mO", "mdO", "mGate"), (x for x, _ in loads), strict=True))
    written = {"mGated": gated_like, "mDelta": delta_like, "mdGate": dgate}
    launch = planner.plan_launch(kernel, {**read, "mdLSE": dlse, **written})

    def run(cotangents: Cotangents, gate: Tensor, o: Tensor, dgate: Tensor | None) -> Cotangents:
        gated, delta = (torch.empty_like(x, device=device) if passes else None for x in (gated_like, delta_like))
        tensors = memory.apply_copies((o, cotangents.do, gate), copies)
        launch(*memory.addresses((*tensors, cotangents.dlse, gated, delta, dgate)))
        return Cotangents(gated, delta)

    return run, Cotangents(gated_like, delta_like)
