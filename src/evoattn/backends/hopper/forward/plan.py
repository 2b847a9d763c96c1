"""The forward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.hopper.forward.kernel import CHAIN, HALVES, Forward
from evoattn.backends.hopper.host.head_groups import HeadGroups, for_each_group
from evoattn.backends.hopper.host.launch import note_copy, plan, types
from evoattn.backends.hopper.host.prepare import changed, fold, loadable, pair_plan, row_plan
from evoattn.backends.hopper.host.workspace import Workspace
from evoattn.backends.hopper.kernels.pair_bias import Tiles
from evoattn.backends.hopper.kernels.primitives import padded
from evoattn.backends.hopper.kernels.tile_sizes import KEYS, ROWS
from evoattn.core import devices, layouts

__all__ = ["plan_forward"]


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None, pair_bias: Tensor | None,
    *, scale: float, layout: str,
) -> Callable[..., None]:  # fmt: skip
    """A function of (q, k, v, mask, mask_bias, pair_bias, o, lse, reference) that writes the last three."""
    b, n, h, lq, d = q.shape
    lk = k.shape[3]
    dtype, device = types[q.dtype], q.device
    factor, unit = fold(scale)
    row = mask is not None or mask_bias is not None or lk % KEYS != 0
    wide = pair_bias is not None and pair_bias.dtype == torch.float32
    resident = (pair_bias is None or padded(d) < 64) and lk <= CHAIN * KEYS and not wide
    given = laid = shifts = pairs = tiled = tiles = None
    if pair_bias is not None:
        given = pair_bias.expand(-1, -1, lq, lk)
        laid, shifts, pairs = pair_plan(pair_bias, lq, lk, beside=q.dtype, bounded=False)
        if wide:
            tiled, tiles = _tile_plan(laid[..., :lk], q, unit)
    exact = pair_bias is None or wide or d == 8 or _exact(1.0 / unit, q.dtype)
    variant = Forward(dtype, d, pair=pair_bias is not None, row=row, exact=exact, resident=resident, wide=wide)

    panels = -(-lq // (HALVES * ROWS))
    processors = devices.processors(device)
    together = HeadGroups.of(q, None if resident else pair_bias, panels * n, processors)
    panels *= together.b * together.h
    blocks = min(processors, panels * n)
    interleave = min(max(round(blocks / panels), 1), n)

    workspace = Workspace(device)
    terms = row_plan(mask, mask_bias, q, lk, workspace, always=row, deep=pair_bias is not None)
    of_rows = (None, None, 0, 0) if terms is None else (terms.like, terms.ends, terms.row_b, terms.row_n)
    deep = None if terms is None else terms.deep
    at_laid, at_shifts, at_tiled = (0 if x is None else workspace.add(x) for x in (laid, shifts, tiled))
    seen = tiled if wide else laid  # what the kernel reads
    (q, change_q), (k, change_k), (v, change_v) = loadable(q, factor, "q"), loadable(k, name="k"), loadable(v, name="v")
    changes = [(i, change) for i, change in enumerate((change_q, change_k, change_v)) if change is not None]
    o = layouts.empty((b, n, h, lq, d), layout, q.new_empty(0, device="meta"))
    lse = torch.empty((b, n, h, lq), device="meta", dtype=torch.float32)
    of_given, bias, of_shifts = (None if x is None else together.cut(x, 1) for x in (given, seen, shifts))
    of_group = [together.cut(x, 2) for x in (q, k, v, o, lse, lse)]
    tensors = (*of_group[:3], *of_rows[:2], deep, of_given, bias, *of_group[3:], of_shifts)
    kernel = plan(variant, device, *tensors, *of_rows[2:], unit, interleave, blocks)
    by_b = [None if terms is None or x is None else terms.by_b(x) for x in (*of_rows[:2], deep)]
    of_inputs = ((q, 2), (k, 2), (v, 2), *((x, None) for x in by_b))
    further = together.further(*of_inputs, (given, 1), (seen, 1), (o, 2), (lse, 2), (lse, 2), (shifts, 1))

    def run(*tensors: Any) -> None:
        if changes:
            tensors = changed(tensors, changes)
        q, k, v, mask, mask_bias, given, o, lse, reference = [None if x is None else x.data_ptr() for x in tensors]
        start, pair = 0, None
        if workspace.bytes:
            room = workspace.make()
            start = room.data_ptr()
        if pairs is not None:
            pair = start + at_laid
            pairs(given, pair, start + at_shifts)
        if tiles is not None:
            tiles(pair, start + at_tiled)
            pair = start + at_tiled
        # The kernel starts while this runs, and only its producers wait for it: a pair bias for shared memory has to be there.
        of_keys = (None, None, None) if terms is None else terms.make(start, mask, mask_bias)[:3]
        for_each_group(kernel, (q, k, v, *of_keys, given, pair, o, lse, reference, start + at_shifts), further)

    return run


def _tile_plan(pair: Tensor, q: Tensor, unit: float) -> tuple[Tensor, Any]:
    """Plan the tiles of a float32 pair bias [b|1,h|1,q,k], as accumulators hold it: their memory, and the launch to fill it."""
    note_copy("pair_bias: in float32, laid out anew once a forward, to be streamed")
    panels, blocks = -(-pair.shape[2] // (HALVES * ROWS)), -(-pair.shape[3] // KEYS)
    tiled = torch.empty(*pair.shape[:2], HALVES * panels, blocks, ROWS * KEYS, device="meta", dtype=torch.float32)
    if q.shape[-1] == 8:  # 1 / scale is rounded there
        unit = 1.0 / torch.tensor(1.0 / unit, dtype=torch.float32).to(q.dtype).item()
    return tiled, plan(Tiles(types[torch.float32], wide=True), q.device, pair.transpose(2, 3), tiled, unit)


def _exact(x: float, dtype: torch.dtype) -> bool:
    return math.isfinite(x) and torch.tensor(x, dtype=torch.float64).to(dtype).item() == x
