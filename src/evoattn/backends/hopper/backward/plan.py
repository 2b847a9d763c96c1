"""The backward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike.

`dq` runs first, and leaves for `dkdv` the two statistics of each query that it finds on the way; where no gradient of q
or the pair bias is wanted, `statistics` finds them. Without a pair bias `fused` may do all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.hopper.backward.facts import Facts
from evoattn.backends.hopper.backward.pair_gradient import MOST_IN_32_BITS
from evoattn.backends.hopper.backward.stages import Rows, Seen, between, stages_of
from evoattn.backends.hopper.host.head_groups import for_each_group
from evoattn.backends.hopper.host.launch import note_copy, plan, types
from evoattn.backends.hopper.host.prepare import KeyTerms, changed, contiguous, loadable, pair_plan, row_plan
from evoattn.backends.hopper.host.workspace import Workspace
from evoattn.backends.hopper.kernels.key_bias import CLEARED
from evoattn.backends.hopper.kernels.pair_bias import Tiles
from evoattn.backends.hopper.kernels.tile_sizes import ROWS, SLICE
from evoattn.core import layouts

__all__ = ["plan_backward"]

_meta = functools.partial(torch.empty, device="meta", dtype=torch.float32)


def plan_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None,
    pair_bias: Tensor | None, o: Tensor, lse: Tensor, reference: Tensor,
    *, scale: float, layout: str, needs: tuple[bool, ...], deterministic: bool, gated: bool = False,
    into: Sequence[Tensor | None] | None = None,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """A function of (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference, dq, dk, dv).

    See `evoattn.backends`. `gated`: do and dlse are what `gate.GatePass` has made of them, and o is not read. `into` says how
    dq, dk and dv lie in memory, in place of `layout`.
    """
    wishes: dict[str, Any] = {"needs": needs, "deterministic": deterministic, "gated": gated}
    facts = Facts.of(q, k, mask, pair_bias, scale=scale, **wishes)
    (b, n, h, lq, lk), gradient, device = facts.sizes, facts.gradient, facts.device
    of_mask = needs[3]
    workspace = Workspace(device)
    terms, cleared_by_torch = _key_terms(facts, q, mask, mask_bias, workspace)
    inputs, changes = _inputs(facts, do, dlse, q, k, v, o, lse)

    # How all that the stages see lies in memory. For a tensor that is not there they get another address, and do not read it.
    nowhere = torch.empty_strided((1, 1, lq, lk), (0, 0, 0, 1), dtype=torch.float32, device="meta")
    even = shifts = pairs = tiles = None
    pair = nowhere
    if pair_bias is not None:
        even, shifts, pairs = pair_plan(pair_bias, lq, lk, beside=q.dtype, bounded=True)
        pair = even[..., :lk]
    made = (layouts.empty(x.shape, layout, x.new_empty(0, device="meta")) for x in (q, k, v))
    outputs: list[Any] = list(made if into is None else into[:3])
    tile_type = torch.float32 if facts.key["wide"] else q.dtype
    tiled = torch.empty(*pair.shape[:2], facts.key_panels, facts.panels, ROWS * ROWS, dtype=tile_type, device="meta")
    sums, wanted = (nowhere, nowhere) if gradient is None else (gradient.sums, gradient.wanted)
    # d(mask bias): each head leaves its part of it, in float32; heads and axes of size 1 are summed at last
    of_heads = _meta(b, n, h, lk)
    of_bias = _meta(1, 1, lk) if mask_bias is None else torch.empty_like(mask_bias, device="meta")
    of_rows = (*inputs, *outputs, of_heads)
    of_pairs = (pair, tiled, sums, wanted)

    # What the first group sees, and how many bytes further the others find the same
    together = facts.together
    row, ends, order, starts = _meta(1, 8), None, None, None
    if terms is not None:
        row, ends, order, starts = terms.like, terms.ends, terms.order, terms.starts
    by_b = (None, None) if terms is None else (terms.by_b(terms.like), terms.by_b(terms.ends))
    further = together.further(
        *((x, 2) for x in of_rows), *((x, 1) for x in of_pairs), *((x, None) for x in (*by_b, order, starts))
    )
    seen = Seen(
        *(together.cut(x, 2) for x in of_rows),
        *(together.cut(x, 1) for x in of_pairs),
        *(row, ends, *(None if x is None else x[: together.b] for x in (order, starts))),
    )
    if facts.second and not facts.fused and facts.key["ring"]:
        note_copy("pair_bias: laid out anew once a backward, to be streamed")
        tiles = plan(Tiles(types[pair_bias.dtype], wide=facts.key["wide"]), device, pair, tiled, facts.unit)  # type: ignore[union-attr]
    rows = Rows(False, 0, 0) if terms is None else Rows(True, terms.row_b, terms.row_n)
    stats, parts = between(facts)
    stages = stages_of(facts, seen, rows, stats, parts, dlse=dlse is not None, tiles=tiles is not None)

    at_stats = 0 if facts.fused else workspace.add(stats)
    at_tiles = workspace.add(tiled) if tiles else 0
    at_pair, at_shifts = (0 if x is None else workspace.add(x) for x in (even, shifts))
    at_parts = workspace.add(parts) if facts.partial else 0
    unwanted = _room_for_unwanted(facts, outputs, workspace)

    def run(*tensors: Any) -> tuple[Tensor | None, Tensor | None]:
        if tensors[0] is None:
            tensors = (torch.zeros_like(tensors[8]), *tensors[1:])
        if changes:
            tensors = changed(tensors, changes)
        room = workspace.make()
        start = room.data_ptr()
        do, dlse, q, k, v, mask, mask_bias, pair, o, lse, _, *wanted = [None if x is None else x.data_ptr() for x in tensors]
        dq, dk, dv = [start + at if x is None else x for x, at in zip(wanted, unwanted, strict=True)]
        dlse = lse if dlse is None else dlse
        if pairs is not None:
            given, pair = pair, start + at_pair
            pairs(given, pair, start + at_shifts)
        pair = k if pair is None else pair
        sums = None if gradient is None else new(gradient.sums)
        to_sums = None if sums is None else sums.data_ptr()
        dmask = new(of_heads) if of_mask else None
        to_mask = None if dmask is None else dmask.data_ptr()
        dpair = new(gradient.wanted) if gradient is not None and gradient.rounds else None
        to_pair = None if dpair is None else dpair.data_ptr()
        if cleared_by_torch:
            sums.zero_()  # type: ignore[union-attr]
        if tiles is not None:
            tiles(pair, start + at_tiles)
        # From here each kernel starts while the one before it runs: memory for all that they write is made by now. The first
        # waits for the terms where it reads them, the second for the first where it reads its statistics. Order and starts it
        # reads at once: the first lets it start only when it has waited for them.
        made = (k, *(None,) * 4) if terms is None else terms.make(start, mask, mask_bias, to_sums)
        of_keys = (*made[:2], *made[3:])  # without `deep`
        places = (q, k, v, o, do, lse, dlse, dq, dk, dv, to_mask, pair, start + at_tiles, to_sums, to_pair, *of_keys)

        def launch(*places: Any) -> None:
            """The stages of a group. The next group's first waits for this one's last, which never says that another may
            start. So both may use the same statistics and parts."""
            group = Seen(*places)
            for stage in stages:
                stage(group, start + at_stats, start + at_parts)

        for_each_group(launch, places, further)
        if facts.first and facts.factor != 1.0 and tensors[11] is not None:
            tensors[11].mul_(facts.factor)
        if dmask is not None:
            dmask = dmask.sum(2).sum_to_size(of_bias.shape).to(of_bias.dtype)
        if gradient is not None and dpair is None:
            dpair = gradient.finish(sums)  # type: ignore[arg-type]
        return dmask, dpair

    def new(how: Tensor) -> Tensor:
        return torch.empty_strided(how.shape, how.stride(), dtype=how.dtype, device=device)

    return run


def _key_terms(
    facts: Facts, q: Tensor, mask: Tensor | None, mask_bias: Tensor | None, workspace: Workspace
) -> tuple[KeyTerms | None, bool]:
    """The terms of the key-wise bias; and whether torch clears what blocks add to, since their launch does not."""
    (b, n, _, _, lk), added, chosen = facts.sizes, facts.added, facts.query
    keys = facts.key_panels * ROWS
    if chosen:
        keys = math.prod(chosen[name] for name in ("groups", "slices", "cluster")) * SLICE
    clears = None if added is None or max(added.numel(), 4 * CLEARED * b * n) > MOST_IN_32_BITS else added
    bounded = facts.pair and mask_bias is not None
    options: dict[str, Any] = {"clears": clears, "lists": facts.skips, "bounded": bounded}
    terms = row_plan(mask, mask_bias, q, lk, workspace, room=keys, always=lk != keys, **options)
    return terms, added is not None and (terms is None or clears is None)


def _inputs(
    facts: Facts, do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[tuple[Tensor, ...], list[tuple[int, Callable[[Tensor], Tensor]]]]:
    """Layouts of q, k, v, o, do, lse and dlse for the kernels; and the copies that this takes, by place among the arguments."""
    changes: list[tuple[int, Callable[[Tensor], Tensor]]] = []
    found: dict[str, Tensor] = {}
    for i, name, x in ((0, "do", do), (2, "q", q), (3, "k", k), (4, "v", v), (8, "o", o)):
        told = name if name in ("q", "k", "v") else ""
        found[name], change = loadable(o if x is None else x, facts.factor if name == "q" else 1.0, told)
        if change is not None:
            changes.append((i, change))
    of_dlse = lse
    if dlse is not None:
        of_dlse, change = contiguous(dlse)
        changes.append((1, change))
    return (*(found[name] for name in ("q", "k", "v", "o", "do")), lse, of_dlse), changes


def _room_for_unwanted(facts: Facts, outputs: list[Tensor], workspace: Workspace) -> list[int]:
    """Places in the workspace for those of dq, dk and dv that a kernel makes and nobody wants."""
    made = (True,) * 3 if facts.fused else (facts.first, facts.second, facts.second)
    which = zip(outputs, facts.needs, made, strict=False)
    return [workspace.add(x) if makes and not need else 0 for x, need, makes in which]
