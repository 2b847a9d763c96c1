"""The forward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.backends.hopper.head_groups import HeadGroups, for_each_group
from evoattn.backends.hopper.kernels.forward import Forward
from evoattn.backends.hopper.kernels.gate import GateProduct
from evoattn.backends.hopper.kernels.pair_bias import PairBiasTiles
from evoattn.backends.hopper.launch import note_copy, plan_launch, types
from evoattn.backends.hopper.memory import (
    Workspace,
    addresses,
    copied,
    floats,
    loadable,
    plan_key_bias,
    plan_pair_bias,
    split_scale,
)
from evoattn.backends.hopper.tiles import CHAIN, FORWARD_QUERIES, HALVES, KEYS, MMA_M, padded
from evoattn.core import devices, layouts


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None, pair_bias: Tensor | None,
    *, scale: float, layout: str,
) -> Callable[..., None]:  # fmt: skip
    """Plan the forward: a function of (q, k, v, mask, mask_bias, pair_bias, o, lse, reference) that writes the last three."""
    b, n, h, lq, d = q.shape
    lk, device = k.shape[3], q.device
    factor, unit = split_scale(scale)
    key_bias = mask is not None or mask_bias is not None or lk % KEYS != 0
    float32_pair = pair_bias is not None and pair_bias.dtype == torch.float32
    resident = (pair_bias is None or padded(d) < 64) and lk <= CHAIN * KEYS and not float32_pair
    exact = pair_bias is None or float32_pair or d == 8 or _is_exact(1.0 / unit, q.dtype)
    options = {"pair": pair_bias is not None, "key_bias": key_bias, "exact": exact, "resident": resident}
    variant = Forward(types[q.dtype], d, **options, float32_pair=float32_pair)

    workspace = Workspace(device)
    tile = functools.partial(_plan_tiles, q=q, unit=unit) if float32_pair else None
    pair = plan_pair_bias(pair_bias, q, lk, workspace, bounded=False, tile=tile)
    terms = plan_key_bias(mask, mask_bias, q, lk, workspace, always=key_bias, unrounded=pair_bias is not None)

    panels, processors = -(-lq // FORWARD_QUERIES), devices.processors(device)
    groups = HeadGroups.of(q, None if resident else pair_bias, panels * n, processors)
    panels *= groups.b * groups.h  # of a group
    blocks = min(processors, panels * n)
    interleave = min(max(round(blocks / panels), 1), n)
    (q, copy_q), (k, copy_k), (v, copy_v) = loadable(q, factor, "q"), loadable(k, name="k"), loadable(v, name="v")
    copies = [(i, copy) for i, copy in enumerate((copy_q, copy_k, copy_v)) if copy is not None]
    o, lse = layouts.empty((b, n, h, lq, d), layout, q.new_empty(0, device="meta")), floats(b, n, h, lq)
    raw_pair = None if pair_bias is None else pair_bias.expand(-1, -1, lq, lk)
    read = pair.tiles if float32_pair else pair.pair
    key_terms = (terms.terms, terms.ends, terms.key_bias)
    tensors = (q, k, v, *map(terms.by_b, key_terms), raw_pair, read, o, lse, lse, pair.references)
    axes = (2, 2, 2, None, None, None, 1, 1, 2, 2, 2, 1)  # of their heads
    first = list(map(groups.cut, tensors, axes))
    kernel = plan_launch(variant, device, *first[:3], *key_terms, *first[6:], *terms.strides, unit, interleave, blocks)
    offsets = groups.offsets(tensors, axes)

    def run(*tensors: Any) -> None:
        if copies:
            tensors = copied(tensors, copies)
        q, k, v, mask, mask_bias, raw_pair, o, lse, reference = addresses(tensors)
        start = 0
        if workspace.bytes:
            memory = workspace.make()
            start = memory.data_ptr()
        read, references, tiles = pair.make(start, raw_pair)
        # The forward starts while `KeyBias` runs, and only its producers wait. Its consumers read a resident pair bias, so that
        # comes before.
        keys = terms.make(start, mask, mask_bias)[:3]
        read = tiles if float32_pair else read
        for_each_group(kernel, (q, k, v, *keys, raw_pair, read, o, lse, reference, references), offsets)

    return run


def _plan_tiles(pair: Tensor, *, q: Tensor, unit: float) -> tuple[Tensor, Any]:
    """Plan the tiles of a float32 pair bias [b|1,h|1,q,k], as accumulators hold it: their layout, and the launch to fill it."""
    note_copy("pair_bias: in float32, laid out anew once a forward, to be streamed")
    panels, blocks = -(-pair.shape[2] // FORWARD_QUERIES), -(-pair.shape[3] // KEYS)
    tiled = floats(*pair.shape[:2], HALVES * panels, blocks, MMA_M * KEYS)
    if q.shape[-1] == 8:  # 1 / scale is rounded there
        unit = 1.0 / torch.tensor(1.0 / unit, dtype=torch.float32).to(q.dtype).item()
    return tiled, plan_launch(PairBiasTiles(types[torch.float32], float32=True), q.device, pair.transpose(2, 3), tiled, unit)


def _is_exact(x: float, dtype: torch.dtype) -> bool:
    return math.isfinite(x) and torch.tensor(x, dtype=torch.float64).to(dtype).item() == x


def plan_product(gate: Tensor, layout: str) -> Callable[[Tensor, Tensor], None]:
    """Plan the product of O with sigmoid(gate): a function of (o, gate), for an o in the memory layout `layout`."""
    like, copy = loadable(gate, name="gate")
    o = layouts.empty(gate.shape, layout, gate, "meta")
    kernel = plan_launch(GateProduct(types[gate.dtype], gate.shape[-1]), gate.device, o, like)

    def run(o: Tensor, gate: Tensor) -> None:
        kernel(o.data_ptr(), (gate if copy is None else copy(gate)).data_ptr())

    return run
