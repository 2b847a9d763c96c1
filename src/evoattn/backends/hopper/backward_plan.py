"""The backward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike.

`QueryGradients` runs first, and leaves for `KeyGradients` the two statistics of each query that it finds on the way; if no
gradient of q or the pair bias is wanted, `Statistics` computes them. Without a pair bias `FusedGradients` may do all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.hopper.backward_launches import MOST_IN_32_BITS, Facts, GroupLaunch, Tensors, plan_launches
from evoattn.backends.hopper.head_groups import for_each_group
from evoattn.backends.hopper.kernels.gate import GatePass
from evoattn.backends.hopper.kernels.key_bias import CLEARED
from evoattn.backends.hopper.kernels.pair_bias import PairBiasTiles
from evoattn.backends.hopper.launch import note_copy, plan_launch, types
from evoattn.backends.hopper.memory import (
    KeyTerms,
    PairMemory,
    Workspace,
    addresses,
    contiguous,
    copied,
    floats,
    loadable,
    plan_key_bias,
    plan_pair_bias,
)
from evoattn.backends.hopper.tiles import MMA_M, SLICE
from evoattn.core import layouts
from evoattn.core.inputs import Cotangents, Inputs, Outputs

_HEAD_AXES = Tensors(*(2,) * 11, *(1,) * 4, *(None,) * 4)
"""The axis of the heads of each tensor, if it has one."""


def plan_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None,
    pair_bias: Tensor | None, o: Tensor, lse: Tensor, reference: Tensor,
    *, scale: float, layout: str, needs: tuple[bool, ...], deterministic: bool, gated: bool = False,
    into: Sequence[Tensor | None] | None = None,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """Plan the backward. Return a function of (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference, dq, dk, dv).

    See `evoattn.backends`. `gated`: do and dlse are what `GatePass` has made of them, and o is not read. `into`: the layouts of
    dq, dk and dv, in place of `layout`.
    """
    facts = Facts(q, k, mask, pair_bias, scale=scale, needs=needs, deterministic=deterministic, gated=gated)
    b, n, h, lq, lk = facts.sizes
    workspace = Workspace(facts.device)
    terms, cleared_by_torch = _key_terms(facts, q, mask, mask_bias, workspace)
    inputs, copies = _inputs(facts, do, dlse, q, k, v, o, lse)
    outputs: Sequence[Any] = [layouts.empty(x.shape, layout, x.new_empty(0, device="meta")) for x in (q, k, v)]
    if into is not None:
        outputs = into[:3]
    at_stats = 0 if facts.fused else workspace.add(facts.stats)
    tile = functools.partial(_plan_tiles, facts) if facts.streams else None
    pair = plan_pair_bias(pair_bias, q, lk, workspace, bounded=True, tile=tile)
    at_parts = workspace.add(facts.parts) if facts.partial else 0
    # those of dq, dk and dv that a kernel writes and nobody wants
    written = (facts.fused or facts.has_query_kernel, *[facts.fused or facts.has_key_kernel] * 2)
    at_unwanted = [workspace.add(x) if w and not need else 0 for x, need, w in zip(outputs, needs, written, strict=False)]

    # The layouts of all that the launches see. An absent tensor gets another address, which is never read.
    absent = torch.empty_strided((1, 1, lq, lk), (0, 0, 0, 1), dtype=torch.float32, device="meta")
    pair_like = absent if pair.pair is None else pair.pair[..., :lk]
    sums, dpair = (absent, absent) if facts.gradient is None else (facts.gradient.sums, facts.gradient.layout)
    # d(mask bias): each head leaves its part of it, in float32; heads and axes of size 1 are summed at last
    dmask_parts = floats(b, n, h, lk)
    dmask = floats(1, 1, lk) if mask_bias is None else torch.empty_like(mask_bias, device="meta")
    by_b = map(terms.by_b, (terms.terms, terms.ends))
    tensors = (*inputs, *outputs, dmask_parts, pair_like, pair.tiles, sums, dpair, *by_b, terms.order, terms.starts)
    first = Tensors(*map(facts.groups.cut, tensors, _HEAD_AXES))
    first = first._replace(key_terms=floats(1, 8) if terms.terms is None else terms.terms, ends=terms.ends)
    launches = plan_launches(facts, first, terms.strides, key_bias=terms.terms is not None, dlse=dlse is not None)
    offsets = facts.groups.offsets(tensors, _HEAD_AXES)
    return _Backward(
        facts, workspace, copies, terms, cleared_by_torch, pair, dmask_parts, dmask, launches, offsets, at_stats, at_parts,
        at_unwanted,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A planned backward: a function of its tensors that returns d(mask bias) and d(pair bias).

    Args:
        copies: of tensors whose layout the kernels cannot read, by place among the arguments.
        cleared_by_torch: whether torch clears the sums of d(pair bias).
        dmask_parts, dmask: the layouts of d(mask bias) of each head, and of their sum.
        offsets: for each group of heads, how many bytes further its part of each of `Tensors` lies.
        at_stats, at_parts, at_unwanted: places in the workspace of statistics, parts of d(pair bias), and dq, dk and dv.
    """

    facts: Facts
    workspace: Workspace
    copies: list[tuple[int, Callable[[Tensor], Tensor]]]
    terms: KeyTerms
    cleared_by_torch: bool
    pair: PairMemory
    dmask_parts: Tensor
    dmask: Tensor
    launches: list[GroupLaunch]
    offsets: tuple[tuple[int, ...], ...]
    at_stats: int
    at_parts: int
    at_unwanted: list[int]

    def __call__(self, *tensors: Any) -> tuple[Tensor | None, Tensor | None]:
        facts, gradient, device = self.facts, self.facts.gradient, self.facts.device
        if tensors[0] is None:
            tensors = (torch.zeros_like(tensors[8]), *tensors[1:])
        if self.copies:
            tensors = copied(tensors, self.copies)
        memory = self.workspace.make()
        start = memory.data_ptr()
        do, dlse, q, k, v, mask, mask_bias, raw_pair, o, lse, _, *wanted = addresses(tensors)
        outputs = [start + at if x is None else x for x, at in zip(wanted, self.at_unwanted, strict=True)]
        sums = None if gradient is None else torch.empty_like(gradient.sums, device=device)
        dmask = torch.empty_like(self.dmask_parts, device=device) if facts.needs[3] else None
        dpair = torch.empty_like(gradient.layout, device=device) if gradient is not None and gradient.rounds else None
        to_mask, to_sums, to_pair = addresses((dmask, sums, dpair))
        if self.cleared_by_torch:
            sums.zero_()  # type: ignore[union-attr]
        pair, _, tiles = self.pair.make(start, raw_pair)
        # From here each kernel starts while the one before runs, so all memory is allocated by now. The first kernel waits for
        # the terms where it reads them, and the second for the statistics. The second reads order and starts at once: the first
        # lets it start only after it has waited for them itself.
        key_terms, ends, _, *lists = self.terms.make(start, mask, mask_bias, to_sums)
        inputs = (q, k, v, o, do, lse, lse if dlse is None else dlse)
        absent = (k if pair is None else pair, tiles, to_sums, to_pair, k if key_terms is None else key_terms)

        # The first kernel of a group waits for the last of the group before, which never says that another may start. So both
        # may use the same statistics and parts.
        def launch_group(*group: Any) -> None:
            for launch in self.launches:
                launch(Tensors(*group), start + self.at_stats, start + self.at_parts)

        for_each_group(launch_group, (*inputs, *outputs, to_mask, *absent, ends, *lists), self.offsets)
        if facts.factor != 1.0 and tensors[11] is not None:
            tensors[11].mul_(facts.factor)
        if dmask is not None:
            dmask = dmask.sum(2).sum_to_size(self.dmask.shape).to(self.dmask.dtype)
        if gradient is not None and dpair is None:
            dpair = gradient.finish(sums)  # type: ignore[arg-type]
        return dmask, dpair


def _plan_tiles(facts: Facts, pair: Tensor) -> tuple[Tensor, Any]:
    """Plan the tiles of a pair bias [b|1,h|1,q,k] that streams: their layout, and the launch to fill it."""
    note_copy("pair_bias: laid out anew once a backward, to be streamed")
    float32 = facts.key["float32_tiles"]
    dtype = torch.float32 if float32 else pair.dtype
    tiles = torch.empty(*pair.shape[:2], facts.key_panels, facts.panels, MMA_M * MMA_M, dtype=dtype, device="meta")
    return tiles, plan_launch(PairBiasTiles(facts.bias, float32=float32), facts.device, pair, tiles, facts.unit)


def _key_terms(
    facts: Facts, q: Tensor, mask: Tensor | None, mask_bias: Tensor | None, workspace: Workspace
) -> tuple[KeyTerms, bool]:
    """The terms of the key bias; and whether torch clears what blocks add to, since their launch does not."""
    (b, n, _, _, lk), added = facts.sizes, facts.added
    keys = facts.key_panels * MMA_M
    if facts.query:
        keys = math.prod(facts.query[name] for name in ("groups", "slices", "cluster")) * SLICE
    clears = None if added is None or max(added.numel(), 4 * CLEARED * b * n) > MOST_IN_32_BITS else added
    bounded = facts.pair and mask_bias is not None
    options: dict[str, Any] = {"clears": clears, "lists": facts.skips, "bounded": bounded}
    terms = plan_key_bias(mask, mask_bias, q, lk, workspace, room=keys, always=lk != keys, **options)
    return terms, added is not None and (terms.terms is None or clears is None)


def _inputs(
    facts: Facts, do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[tuple[Tensor, ...], list[tuple[int, Callable[[Tensor], Tensor]]]]:
    """Layouts of q, k, v, o, do, lse and dlse for the kernels; and the copies that this takes, by place among the arguments."""
    copies: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    loaded: list[Tensor] = []
    for i, name, x in ((0, "", o if do is None else do), (2, "q", q), (3, "k", k), (4, "v", v), (8, "", o)):
        like, copy = loadable(x, facts.factor if name == "q" else 1.0, name)
        loaded.append(like)
        if copy is not None:
            copies.append((i, copy))
    dlse_like = lse
    if dlse is not None:
        dlse_like, copy = contiguous(dlse)
        copies.append((1, copy))
    do, *others = loaded
    return (*others, do, lse, dlse_like), copies


def plan_gated_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    layout: str,
    needs: tuple[bool, ...],
    into: Sequence[Tensor | None] | None = None,
    **options: Any,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """The gate's pass, then the backward of a call without a gate on what that has made.

    A function of cotangents, inputs, outputs and (dq, dk, dv, dgate); see `evoattn.backends`. If o has no cotangent, the gate
    has no part in it, and its gradient is 0.
    """
    gated, delta, gate_pass = cotangents.do, cotangents.dlse, None
    if gated is not None:
        gate_pass = _plan_gate_pass(cotangents, inputs, outputs, layout, needs, None if into is None else into[3])
        gated, delta = layouts.empty(outputs.o.shape, layout, outputs.o, "meta"), floats(*outputs.lse.shape)
    after = None
    if any(needs[:5]):
        o = outputs.o if gated is None else gated
        options |= {"layout": layout, "needs": needs, "into": into, "gated": gate_pass is not None}
        after = plan_backward(gated, delta, *inputs[:6], o, *outputs[1:], **options)

    def run(
        cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        *qkv_gradients, dgate = gradients
        do, dlse = cotangents
        o = outputs.o
        if gate_pass is not None:
            do, dlse = gate_pass(cotangents, inputs.gate, o, dgate)
            o = do
        elif dgate is not None:
            dgate.zero_()
        return (None, None) if after is None else after(do, dlse, *inputs[:6], o, *outputs[1:], *qkv_gradients)

    return run


def _plan_gate_pass(
    cotangents: Cotangents, inputs: Inputs, outputs: Outputs, layout: str, needs: tuple[bool, ...], dgate: Tensor | None
) -> Callable[..., tuple[Any, Any]]:
    """Plan the gate's pass: a function of (cotangents, gate, o, dgate) that returns the cotangents for the other kernels.

    dgate: its layout; None: as `layout` says.
    """
    device, dlse, passes = inputs.q.device, cotangents.dlse, any(needs[:5])  # outputs may be planned on the device "meta"
    tensors = ((outputs.o, ""), (cotangents.do, ""), (inputs.gate, "gate"))
    loads = [loadable(x, name=name) for x, name in tensors if x is not None]
    copies = [(i, copy) for i, (_, copy) in enumerate(loads) if copy is not None]
    gated_like = layouts.empty(outputs.o.shape, layout, outputs.o, "meta")
    delta_like = floats(*outputs.lse.shape)
    options = {"dlse": dlse is not None and passes, "passes": passes, "gradient": needs[5]}
    kernel = GatePass(types[outputs.o.dtype], gated_like.shape[-1], **options)
    dgate = gated_like if dgate is None else dgate
    launch = plan_launch(kernel, device, *(x for x, _ in loads), dlse, gated_like, delta_like, dgate)

    def run(cotangents: Cotangents, gate: Tensor, o: Tensor, dgate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        gated, delta = (torch.empty_like(x, device=device) if passes else None for x in (gated_like, delta_like))
        tensors = copied((o, cotangents.do, gate), copies)
        launch(*addresses((*tensors, cotangents.dlse, gated, delta, dgate)))
        return gated, delta

    return run
