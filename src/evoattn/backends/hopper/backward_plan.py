"""The backward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike.

`QueryGradients` runs first, and leaves for `KeyGradients` the two statistics of each query that it finds on the way; if no
gradient of q or the pair bias is wanted, `Statistics` computes them. Without a pair bias `FusedGradients` may do all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.hopper.backward_launches import MOST_IN_32_BITS, Facts, KeyRows, Tensors, plan_launches
from evoattn.backends.hopper.head_groups import for_each_group
from evoattn.backends.hopper.kernels.gate import GatePass
from evoattn.backends.hopper.kernels.key_bias import CLEARED
from evoattn.backends.hopper.kernels.pair_bias import PairBiasTiles
from evoattn.backends.hopper.launch import note_copy, plan, types
from evoattn.backends.hopper.memory import (
    KeyTerms,
    Workspace,
    contiguous,
    copied,
    empty_like,
    floats,
    loadable,
    plan_key_bias,
    plan_pair_bias,
)
from evoattn.backends.hopper.tiles import ROWS, SLICE
from evoattn.core import layouts
from evoattn.core.inputs import Cotangents, Inputs, Outputs


def plan_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None,
    pair_bias: Tensor | None, o: Tensor, lse: Tensor, reference: Tensor,
    *, scale: float, layout: str, needs: tuple[bool, ...], deterministic: bool, gated: bool = False,
    into: Sequence[Tensor | None] | None = None,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """A function of (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference, dq, dk, dv).

    See `evoattn.backends`. `gated`: do and dlse are what `GatePass` has made of them, and o is not read. `into`: the layouts of
    dq, dk and dv, in place of `layout`.
    """
    facts = Facts(q, k, mask, pair_bias, scale=scale, needs=needs, deterministic=deterministic, gated=gated)
    (b, n, h, lq, lk), gradient, device, groups = facts.sizes, facts.gradient, facts.device, facts.groups
    workspace = Workspace(device)
    terms, cleared_by_torch = _key_terms(facts, q, mask, mask_bias, workspace)
    inputs, copies = _inputs(facts, do, dlse, q, k, v, o, lse)

    # The layouts of all that the launches see. An absent tensor gets another address, which is never read.
    absent = torch.empty_strided((1, 1, lq, lk), (0, 0, 0, 1), dtype=torch.float32, device="meta")
    shifted = shifts = shift_pair = fill_tiles = None
    pair = absent
    if pair_bias is not None:
        shifted, shifts, shift_pair = plan_pair_bias(pair_bias, lq, lk, beside=q.dtype, bounded=True)
        pair = shifted[..., :lk]
    outputs: list[Any] = [layouts.empty(x.shape, layout, x.new_empty(0, device="meta")) for x in (q, k, v)]
    if into is not None:
        outputs = list(into[:3])
    tile_type = torch.float32 if facts.key["wide"] else q.dtype
    tiled = torch.empty(*pair.shape[:2], facts.key_panels, facts.panels, ROWS * ROWS, dtype=tile_type, device="meta")
    sums, dpair_like = (absent, absent) if gradient is None else (gradient.sums, gradient.layout)
    # d(mask bias): each head leaves its part of it, in float32; heads and axes of size 1 are summed at last
    dmask_parts = floats(b, n, h, lk)
    dmask_like = floats(1, 1, lk) if mask_bias is None else torch.empty_like(mask_bias, device="meta")

    # What the first group sees, and how many bytes further the others find the same
    rows = KeyRows(False, 0, 0)
    row: tuple[Any, ...] = (floats(1, 8), None)
    by_b: tuple[Any, ...] = (None, None)
    lists: tuple[Tensor | None, ...] = (None, None)
    if terms is not None:
        rows = KeyRows(True, terms.row_b, terms.row_n)
        row, lists = (terms.terms, terms.ends), (terms.order, terms.starts)
        by_b = tuple(map(terms.by_b, row))
    by_head = (*((x, 2) for x in (*inputs, *outputs, dmask_parts)), *((x, 1) for x in (pair, tiled, sums, dpair_like)))
    further = groups.further(*by_head, *((x, None) for x in (*by_b, *lists)))
    heads = [groups.cut(x, axis) for x, axis in by_head]
    first = Tensors(*heads, *row, *(None if x is None else x[: groups.b] for x in lists))
    if facts.streams:
        note_copy("pair_bias: laid out anew once a backward, to be streamed")
        fill_tiles = plan(PairBiasTiles(facts.bias, wide=facts.key["wide"]), device, pair, tiled, facts.unit)
    launches = plan_launches(facts, first, rows, dlse=dlse is not None)

    at_stats = 0 if facts.fused else workspace.add(facts.stats)
    at_tiles = workspace.add(tiled) if fill_tiles else 0
    at_pair, at_shifts = workspace.add(shifted), workspace.add(shifts)
    at_parts = workspace.add(facts.parts) if facts.partial else 0
    # those of dq, dk and dv that a kernel writes and nobody wants
    written = (facts.fused or facts.has_query_kernel, *[facts.fused or facts.has_key_kernel] * 2)
    unwanted = [workspace.add(x) if w and not need else 0 for x, need, w in zip(outputs, needs, written, strict=False)]

    def run(*tensors: Any) -> tuple[Tensor | None, Tensor | None]:
        if tensors[0] is None:
            tensors = (torch.zeros_like(tensors[8]), *tensors[1:])
        if copies:
            tensors = copied(tensors, copies)
        memory = workspace.make()
        start = memory.data_ptr()
        do, dlse, q, k, v, mask, mask_bias, pair, o, lse, _, *wanted = [None if x is None else x.data_ptr() for x in tensors]
        dq, dk, dv = [start + at if x is None else x for x, at in zip(wanted, unwanted, strict=True)]
        dlse = lse if dlse is None else dlse
        if shift_pair is not None:
            raw_pair, pair = pair, start + at_pair
            shift_pair(raw_pair, pair, start + at_shifts)
        pair = k if pair is None else pair
        sums = None if gradient is None else empty_like(gradient.sums, device)
        dmask = empty_like(dmask_parts, device) if needs[3] else None
        dpair = empty_like(gradient.layout, device) if gradient is not None and gradient.rounds else None
        to_sums, to_mask, to_pair = (None if x is None else x.data_ptr() for x in (sums, dmask, dpair))
        if cleared_by_torch:
            sums.zero_()  # type: ignore[union-attr]
        if fill_tiles is not None:
            fill_tiles(pair, start + at_tiles)
        # From here each kernel starts while the one before it runs: memory for all that they write is made by now. The first
        # waits for the terms where it reads them, the second for the first where it reads its statistics. Order and starts it
        # reads at once: the first lets it start only when it has waited for them.
        made = (k, *(None,) * 4) if terms is None else terms.make(start, mask, mask_bias, to_sums)
        keys = (*made[:2], *made[3:])  # without `deep`
        addresses = (q, k, v, o, do, lse, dlse, dq, dk, dv, to_mask, pair, start + at_tiles, to_sums, to_pair, *keys)

        def launch_group(*addresses: Any) -> None:
            # The next group's first kernel waits for this one's last, which never says that another may start. So both may use
            # the same statistics and parts.
            group = Tensors(*addresses)
            for launch in launches:
                launch(group, start + at_stats, start + at_parts)

        for_each_group(launch_group, addresses, further)
        if facts.factor != 1.0 and tensors[11] is not None:
            tensors[11].mul_(facts.factor)
        if dmask is not None:
            dmask = dmask.sum(2).sum_to_size(dmask_like.shape).to(dmask_like.dtype)
        if gradient is not None and dpair is None:
            dpair = gradient.finish(sums)  # type: ignore[arg-type]
        return dmask, dpair

    return run


def _key_terms(
    facts: Facts, q: Tensor, mask: Tensor | None, mask_bias: Tensor | None, workspace: Workspace
) -> tuple[KeyTerms | None, bool]:
    """The terms of the key-wise bias; and whether torch clears what blocks add to, since their launch does not."""
    (b, n, _, _, lk), added = facts.sizes, facts.added
    keys = facts.key_panels * ROWS
    if facts.query:
        keys = math.prod(facts.query[name] for name in ("groups", "slices", "cluster")) * SLICE
    clears = None if added is None or max(added.numel(), 4 * CLEARED * b * n) > MOST_IN_32_BITS else added
    bounded = facts.pair and mask_bias is not None
    options: dict[str, Any] = {"clears": clears, "lists": facts.skips, "bounded": bounded}
    terms = plan_key_bias(mask, mask_bias, q, lk, workspace, room=keys, always=lk != keys, **options)
    return terms, added is not None and (terms is None or clears is None)


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
    launch = plan(kernel, device, *(x for x, _ in loads), dlse, gated_like, delta_like, dgate)

    def run(cotangents: Cotangents, gate: Tensor, o: Tensor, dgate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        gated, delta = (empty_like(x, device) if passes else None for x in (gated_like, delta_like))
        tensors = copied((o, cotangents.do, gate), copies)
        launch(*(None if x is None else x.data_ptr() for x in (*tensors, cotangents.dlse, gated, delta, dgate)))
        return gated, delta

    return run
