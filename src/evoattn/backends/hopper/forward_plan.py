"""The forward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike."""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import GATED_AFTER, Plan
from evoattn.backends.hopper.head_groups import HeadGroups, for_each_group
from evoattn.backends.hopper.kernels.forward import Forward
from evoattn.backends.hopper.kernels.gate import GateProduct
from evoattn.backends.hopper.kernels.pair_bias import PairBiasTiles
from evoattn.backends.hopper.launch import types
from evoattn.backends.hopper.memory import (
    addresses,
    apply_copies,
    floats,
    plan_key_bias,
    plan_load,
    plan_pair_bias,
    split_scale,
)
from evoattn.backends.hopper.planner import Planner
from evoattn.backends.hopper.tiles import CHAIN, FORWARD_QUERIES, HALVES, KEYS, MMA_M, pad_channels
from evoattn.core import devices, layouts
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs, Outputs
from evoattn.core.numerics import rounded

_CONFIG = Config(block_q=FORWARD_QUERIES, block_k=KEYS)
"""The tiles, which are the same for every problem."""


class ForwardTensors(
    namedtuple("ForwardTensors", "mQ mK mV mTerms mEnds mKeyBias mRawPair mPair mO mLSE mReference mPairReference")
):
    """All that the launches of a group of heads read and write, as `Forward.arguments` has it: as layouts, or as addresses."""


_HEAD_AXES = ForwardTensors(
    mQ=2, mK=2, mV=2, mTerms=None, mEnds=None, mKeyBias=None, mRawPair=1, mPair=1, mO=2, mLSE=2, mReference=2, mPairReference=1
)
"""The axis of the heads of each tensor, if it has one."""


def plan_forward(inputs: Inputs, *, scale: float, layout: str) -> Plan:
    """Plan the forward of canonical tensors with these strides."""
    planner = Planner(inputs.q.device)
    attend = _plan_attention(planner, inputs, scale, layout)
    if inputs.gate is None:
        return planner.make_plan(attend, config=_CONFIG)
    multiply = _plan_gate(planner, inputs.gate, layout)

    def run(inputs: Inputs, outputs: Outputs) -> None:
        attend(inputs, outputs)
        multiply(outputs.o, inputs.gate)

    return planner.make_plan(run, config=_CONFIG, gate=GATED_AFTER)


def _plan_attention(planner: Planner, inputs: Inputs, scale: float, layout: str) -> Callable[[Inputs, Outputs], None]:
    """Plan all but the gate: a function of (inputs, outputs)."""
    (q, k, v), pair_bias = inputs.qkv, inputs.pair_bias
    b, n, h, lq, d = q.shape
    lk, device = k.shape[3], q.device
    factor, unit = split_scale(scale)
    key_bias = inputs.mask is not None or inputs.mask_bias is not None or lk % KEYS != 0
    float32_pair = pair_bias is not None and pair_bias.dtype == torch.float32
    resident = (pair_bias is None or pad_channels(d) < 64) and lk <= CHAIN * KEYS and not float32_pair
    exact = pair_bias is None or float32_pair or d == 8 or _is_exact(1.0 / unit, q.dtype)
    options = {"pair": pair_bias is not None, "key_bias": key_bias, "exact": exact, "resident": resident}
    variant = Forward(types[q.dtype], d, **options, float32_pair=float32_pair)

    tile = functools.partial(_plan_tiles, planner, q=q, unit=unit) if float32_pair else None
    pair = plan_pair_bias(planner, inputs, bounded=False, plan_tiles=tile)
    terms = plan_key_bias(planner, inputs, -(-lk // KEYS) * KEYS, unrounded=pair_bias is not None)

    panels, processors = -(-lq // FORWARD_QUERIES), devices.processors(device)
    groups = HeadGroups.of(q, None if resident else pair_bias, panels * n, processors)
    panels *= groups.b * groups.h  # of a group
    blocks = min(processors, panels * n)
    interleave = min(max(round(blocks / panels), 1), n)
    q, copy_q = plan_load(planner, q, factor, name="q")
    k, copy_k = plan_load(planner, k, name="k")
    v, copy_v = plan_load(planner, v, name="v")
    copies = [(i, copy) for i, copy in enumerate((copy_q, copy_k, copy_v)) if copy is not None]
    lse = floats(b, n, h, lq)
    tensors = ForwardTensors(
        mQ=q,
        mK=k,
        mV=v,
        mTerms=terms.by_b(terms.terms),
        mEnds=terms.by_b(terms.ends),
        mKeyBias=terms.by_b(terms.key_bias),
        mRawPair=None if pair_bias is None else pair_bias.expand(-1, -1, lq, lk),
        mPair=pair.tiles if float32_pair else pair.pair,
        mO=layouts.empty((b, n, h, lq, d), layout, q.new_empty(0, device="meta")),
        mLSE=lse,
        mReference=lse,
        mPairReference=pair.references,
    )
    first = ForwardTensors(*map(groups.cut, tensors, _HEAD_AXES))
    first = first._replace(mTerms=terms.terms, mEnds=terms.ends, mKeyBias=terms.key_bias)
    numbers = {"scale": unit, "interleave": interleave, "blocks": blocks}
    kernel = planner.plan_launch(variant, first._asdict(), **terms.strides, **numbers)
    offsets, workspace = groups.offsets(tensors, _HEAD_AXES), planner.workspace

    def run(inputs: Inputs, outputs: Outputs) -> None:
        qkv = apply_copies(inputs.qkv, copies) if copies else inputs.qkv
        q, k, v, mask, mask_bias, raw_pair, *written = addresses((*qkv, *inputs[3:6], *outputs))
        memory = workspace.make() if workspace.bytes else None
        start = 0 if memory is None else memory.data_ptr()
        read, references, tiles = pair.make(start, raw_pair)
        # The forward starts while `KeyBias` runs, and only its producers wait. Its consumers read a resident pair bias, so that
        # comes before.
        key_terms, ends, key_bias, _, _ = terms.make(start, mask, mask_bias)
        read = tiles if float32_pair else read
        for_each_group(kernel, (q, k, v, key_terms, ends, key_bias, raw_pair, read, *written, references), offsets)

    return run


def _plan_tiles(planner: Planner, pair: Tensor, *, q: Tensor, unit: float) -> tuple[Tensor, Any]:
    """Plan the tiles of a float32 pair bias [b|1,h|1,q,k], as accumulators hold it: their layout, and the launch to fill it."""
    planner.copies.append("pair_bias: in float32, laid out anew once a forward, to be streamed")
    panels, blocks = -(-pair.shape[2] // FORWARD_QUERIES), -(-pair.shape[3] // KEYS)
    tiled = floats(*pair.shape[:2], HALVES * panels, blocks, MMA_M * KEYS)
    if q.shape[-1] == 8:  # 1 / scale is rounded there
        unit = 1.0 / rounded(1.0 / unit, q.dtype)
    kernel = PairBiasTiles(types[torch.float32], float32=True)
    return tiled, planner.plan_launch(kernel, {"mPair": pair.transpose(2, 3), "mTiles": tiled}, scale=unit)


def _is_exact(x: float, dtype: torch.dtype) -> bool:
    return math.isfinite(x) and rounded(x, dtype) == x


def _plan_gate(planner: Planner, gate: Tensor, layout: str) -> Callable[[Tensor, Any], None]:
    """Plan the product of O with sigmoid(gate): a function of (o, gate), for an o in the memory layout `layout`."""
    like, copy = plan_load(planner, gate, name="gate")
    o = layouts.empty(gate.shape, layout, gate, "meta")
    kernel = planner.plan_launch(GateProduct(types[gate.dtype], gate.shape[-1]), {"mO": o, "mGate": like})

    def run(o: Tensor, gate: Tensor) -> None:
        kernel(o.data_ptr(), (gate if copy is None else copy(gate)).data_ptr())

    return run
