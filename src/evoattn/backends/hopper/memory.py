"""The layouts in which the kernels take the tensors of a call, and the launches and copies that make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends.hopper.kernels.key_bias import TERMS, KeyBias
from evoattn.backends.hopper.kernels.pair_bias import PairBias
from evoattn.backends.hopper.launch import types
from evoattn.backends.hopper.planner import Planner
from evoattn.backends.hopper.tiles import KEYS
from evoattn.core.inputs import Inputs

_LEAST_PLAIN_SCALE, _MOST_PLAIN_SCALE = 2.0**-12, 2.0**12
"""Positive scales between these reach the kernels as they are; of others a power of two goes into q."""


def floats(*shape: int) -> Tensor:
    """The layout of a contiguous float32 tensor."""
    return torch.empty(shape, dtype=torch.float32, device="meta")


def addresses(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """The addresses of tensors; None stays None."""
    return [None if x is None else x.data_ptr() for x in tensors]


class PairMemory(NamedTuple):
    """The launches that lay out a pair bias for the kernels, once a pass, and the layouts of what they write.

    Args:
        make: a function of the addresses of a call's workspace and of the pair bias. It returns those of the three others.
        pair: [b|1,h|1,q,k], measured from the references. Lines of keys have a multiple of 8, zero past the last key.
        references: float32 [b|1,h|1,q].
        tiles: the same as tiles that stream, if they were asked for.
    """

    make: Callable[[int, int | None], tuple[int | None, ...]]
    pair: Tensor | None = None
    references: Tensor | None = None
    tiles: Tensor | None = None


PlanTiles = Callable[[Tensor], tuple[Tensor, Any]]
"""A function of the layout of a pair bias. It returns the layout of tiles that stream, and the launch that fills them."""


def plan_pair_bias(planner: Planner, inputs: Inputs, *, bounded: bool, plan_tiles: PlanTiles | None) -> PairMemory:
    """Plan what the kernels read of a pair bias [b|1,h|1,q|1,k|1], if there is one; `bounded`: as `PairBias` has it."""
    q, pair_bias, keys = inputs.q, inputs.pair_bias, inputs.k.shape[3]
    if pair_bias is None:
        return PairMemory(lambda start, pair: (None, None, None))
    planner.copies.append("pair_bias: laid out anew once a pass, measured from the largest of each query")
    pair = pair_bias.expand(-1, -1, q.shape[3], keys)  # one query or key is read along all of them
    out = pair_bias.new_empty((*pair.shape[:3], -(-keys // 8) * 8), device="meta")
    references = floats(*pair.shape[:3])
    aligned = pair_bias.shape[3] == keys and keys % 8 == 0 and is_aligned(pair_bias)
    width = 16 // pair_bias.element_size() if aligned else 1
    kernel = PairBias(types[pair_bias.dtype], width, q_dtype=types[q.dtype], bounded=bounded)
    subtract = planner.plan_launch(kernel, {"mPair": pair, "mOut": out, "mReference": references})
    tiles, fill_tiles = (None, None) if plan_tiles is None else plan_tiles(out[..., :keys])
    at_tiles, at_pair, at_references = map(planner.workspace.add, (tiles, out, references))

    def make(start: int, pair: int | None) -> tuple[int, int, int]:
        subtract(pair, start + at_pair, start + at_references)
        if fill_tiles is not None:
            fill_tiles(start + at_pair, start + at_tiles)
        return start + at_pair, start + at_references, start + at_tiles

    return PairMemory(make, out, references, tiles)


class KeyTerms(NamedTuple):
    """The launch that makes the terms of a key bias, once a pass, and the layouts of what it writes; None if it does not.

    Args:
        make: a function of the addresses of a call's workspace, mask, mask_bias, and what to clear if it clears anything. It
            returns the addresses of terms, ends, key_bias, order and starts.
        terms: [r, keys * TERMS].
        ends: the number of keys of each row up to the last that is not masked, int32 [r].
        key_bias: [r, keys], if it was asked for.
        order, starts: as in `lib.live_rows`, if they were asked for.
        strides: how far r goes from one b, and one n, to the next, as kernels take them.
    """

    make: Callable[..., tuple[int | None, ...]]
    terms: Tensor | None = None
    ends: Tensor | None = None
    key_bias: Tensor | None = None
    order: Tensor | None = None
    starts: Tensor | None = None
    strides: Mapping[str, int] = MappingProxyType({"stride_b": 0, "stride_n": 0})

    def by_b(self, x: Tensor | None) -> Tensor | None:
        """The terms, ends or key_bias, [r,...], as [b|1,n|1,...]."""
        if x is None:
            return None
        rows = self.strides["stride_b"]
        return x.unflatten(0, (-1, rows)) if rows else x[None]


def plan_key_bias(
    planner: Planner,
    inputs: Inputs,
    room: int,
    *,
    clears: Tensor | None = None,
    lists: bool = False,
    unrounded: bool = False,
    bounded: bool = False,
) -> KeyTerms:
    """Plan the terms of a key bias for the `room` keys that a kernel reads; nothing if no key needs one.

    clears: the layout of float32 memory that the same launch clears.
    lists: whether it lists the rows that the mask leaves to each panel of keys.
    unrounded, bounded: as `KeyBias` has them.
    """
    q, mask, mask_bias, lk = inputs.q, inputs.mask, inputs.mask_bias, inputs.k.shape[3]
    if mask is None and mask_bias is None and lk == room:
        return KeyTerms(lambda *_: (None,) * 5)
    bias_type = None if mask_bias is None else types[mask_bias.dtype]
    batches, rows = (max((x.shape[axis] for x in (mask, mask_bias) if x is not None), default=1) for axis in (0, 1))
    terms = torch.empty(batches * rows, -(-room // KEYS) * KEYS * TERMS, dtype=q.dtype, device="meta")
    ends = torch.empty(batches * rows, dtype=torch.int32, device="meta")
    cleared = None if clears is None else floats(clears.numel() // 4, 4)
    order = starts = None
    if lists:
        b, n = q.shape[:2]
        order = torch.empty(b, 2, n, dtype=torch.int32, device="meta")
        starts = torch.empty(b, -(-lk // KEYS) + 2, dtype=torch.int32, device="meta")
    key_bias = floats(batches * rows, lk) if unrounded else None
    options = {"clears": clears is not None, "lists": lists, "unrounded": unrounded, "bounded": bounded}
    variant = KeyBias(types[q.dtype], mask=mask is not None, bias=bias_type, **options)
    written = {"mTerms": terms, "mEnds": ends, "mKeyBias": key_bias, "mOrder": order, "mStarts": starts}
    tensors = {"mMask": mask, "mBias": mask_bias, **written, "mCleared": cleared}
    kernel = planner.plan_launch(variant, tensors, keys=lk, n=rows)
    at_order, at_starts, at_key_bias, at_terms, at_ends = map(planner.workspace.add, (order, starts, key_bias, terms, ends))

    def make(start: int, mask: int | None, mask_bias: int | None, cleared: int | None = None) -> tuple[int, ...]:
        written = (start + at_terms, start + at_ends, start + at_key_bias, start + at_order, start + at_starts)
        kernel(mask, mask_bias, *written, cleared)
        return written

    strides = {"stride_b": rows if batches > 1 else 0, "stride_n": int(rows > 1)}
    return KeyTerms(make, terms, ends, key_bias, order, starts, strides)


def is_aligned(x: Tensor) -> bool:
    """True if every line of channels or keys is contiguous and starts on 16 bytes; False if an axis is broadcast."""
    steps = x.stride()
    return x.data_ptr() % 16 == 0 and steps[-1] == 1 and all(step % 8 == 0 and step > 0 for step in steps[:-1])


Copy = Callable[[Tensor], Tensor]
"""A function that copies a tensor of a planned shape."""


def plan_load(planner: Planner, x: Tensor, factor: float = 1.0, name: str = "") -> tuple[Tensor, Copy | None]:
    """Plan how the kernels load q, k, v, o, do or the gate: its layout for them, and the copy that makes it, or None.

    A tensor is copied if a factor multiplies it, or its lines do not start on 16 bytes. The planner notes a copy of this name.
    """
    if factor == 1.0 and is_aligned(x):
        return x, None
    why = "so that each row of channels starts on 16 bytes and is in memory once for each head"
    if factor != 1.0:
        why = f"multiplied by {factor:g}, since the kernels take no scale that is negative or far from 1"
    if name:
        planner.copies.append(f"{name}: copied once a pass, {why}")
    return plan_copy(x, factor)


def plan_copy(x: Tensor, factor: float = 1.0) -> tuple[Tensor, Copy]:
    """Plan a contiguous copy of a tensor, from a multiple of 16 bytes on: its layout, and what makes it."""
    shape, stride = x.shape, x.stride()

    def copy(x: Tensor) -> Tensor:
        view = x.as_strided(shape, stride)
        out = (view if factor == 1.0 else view * factor).contiguous()
        return out if out.data_ptr() % 16 == 0 else out.clone()  # a contiguous one is no copy yet

    return torch.empty(shape, dtype=x.dtype, device="meta"), copy


def apply_copies(tensors: tuple[Any, ...], copies: Iterable[tuple[int, Copy]]) -> tuple[Any, ...]:
    """Return tensors with copies of those whose layout the kernels cannot read, which `copies` have by place."""
    result = list(tensors)
    for i, copy in copies:
        result[i] = copy(result[i])
    return tuple(result)


def split_scale(scale: float, least: float = _LEAST_PLAIN_SCALE) -> tuple[float, float]:
    """scale = factor * unit: a factor that goes into q, a sign and a power of two or zero, and what the kernels take.

    They want a positive scale, not so far from 1 that a bias divided by it overflows: `least` or more, at most 2.
    """
    if scale == 0:
        return 0.0, 1.0
    size = abs(scale)
    power = 1.0 if least <= size <= _MOST_PLAIN_SCALE else 2.0 ** (math.frexp(size)[1] - 2)
    return math.copysign(power, scale), size / power
