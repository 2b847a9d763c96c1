"""The forward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn import layouts
from evoattn.backends.hopper.fwd_kernel import CHAIN, HALVES, KEYS, ROWS, Forward
from evoattn.backends.hopper.launch import compiled, types
from evoattn.backends.hopper.prepare import TERMS, Pairs, Rows
from evoattn.backends.hopper.primitives import padded

__all__ = ["fold", "loads_wide", "plan_forward", "row_plan"]

_SCALES = (2.0**-12, 2.0**12)


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_bias: Tensor | None, pair_bias: Tensor | None,
    *, scale: float, layout: str,
) -> Callable[..., None]:  # fmt: skip
    """A function of (q, k, v, mask, mask_bias, pair_bias, o, lse) that writes o and lse."""
    b, n, h, lq, d = q.shape
    lk = k.shape[3]
    dtype = types[q.dtype]
    factor, unit = fold(scale)
    row = mask is not None or mask_bias is not None or lk % KEYS != 0
    resident = (pair_bias is None or padded(d) < 64) and lk <= CHAIN * KEYS
    pair = None if pair_bias is None else pair_bias.expand(-1, -1, lq, lk)  # one query or key is read along all of them
    wide = pair_bias is not None and pair_bias.shape[3] == lk and lk % 8 == 0 and loads_wide(pair_bias)
    laid = pair is not None and (not resident or pair.stride(3) != 1)
    exact = pair is None or _exact(1.0 / unit, q.dtype)
    variant = Forward(dtype, d, pair=pair is not None, row=row, exact=exact, resident=resident, aligned=laid or wide)
    kernel = compiled(variant)

    terms = row_plan(mask, mask_bias, q, lk, always=row)
    pairs = compiled(Pairs(dtype, 8 if wide else 1)) if laid else None
    pair_shape = () if pair is None else (*pair.shape[:3], -(-lk // 8) * 8)

    panels = -(-lq // (HALVES * ROWS))
    blocks = min(torch.cuda.get_device_properties(q.device).multi_processor_count, b * n * h * panels)
    deal = min(max(round(blocks / (b * h * panels)), 1), n)
    numbers = (unit, deal, blocks)

    copied = [i for i, x in enumerate((q, k, v)) if not loads_wide(x)]
    views: list[Any] = [None if x is None else (x.shape, x.stride()) for x in (q, k, v, mask, mask_bias, pair)]
    out = layouts.empty(q.shape, layout, q.new_empty(0, device="meta"))
    device = q.device

    def run(*tensors: Any) -> None:
        seen: list[Any] = [x if x is None else x.as_strided(*view) for x, view in zip(tensors, views, strict=False)]
        if factor != 1.0:
            seen[0] = seen[0] * factor
        for i in copied:
            seen[i] = seen[i].contiguous()
        q, k, v, mask, mask_bias, pair_bias = seen
        o, lse = tensors[6].as_strided(out.shape, out.stride()), tensors[7].view(b, n, h, lq)
        if pairs is not None:
            given, pair_bias = pair_bias, torch.empty(pair_shape, dtype=q.dtype, device=device)
            pairs(given, pair_bias)
        # The kernel starts while this runs, and only its producers wait for it: a pair bias for shared memory has to be there.
        row, ends, row_b, row_n = terms(mask, mask_bias) if terms is not None else (None, None, 0, 0)
        kernel(q, k, v, row, ends, pair_bias, o, lse, row_b, row_n, *numbers)

    return run


def row_plan(
    mask: Tensor | None, mask_bias: Tensor | None, q: Tensor, lk: int, *, room: int = 0, always: bool
) -> Callable[[Tensor | None, Tensor | None], tuple[Tensor, Tensor, int, int]] | None:
    """What makes the terms of a key-wise bias for at least `room` keys, or None where there is none and `always` is False.

    It takes mask and mask_bias and returns the terms [r, keys * TERMS], each row's number of keys up to the last that is not
    masked, int32 [r], and how far r goes from one b, and one n, to the next.
    """
    if mask is None and mask_bias is None and not always:
        return None
    bias_type = None if mask_bias is None else types[mask_bias.dtype]
    kernel = compiled(Rows(types[q.dtype], mask=mask is not None, bias=bias_type))
    given = [x.shape[:2] for x in (mask, mask_bias) if x is not None]
    of_b = max((shape[0] for shape in given), default=1)
    of_n = max((shape[1] for shape in given), default=1)
    shape = (of_b * of_n, -(-max(lk, room) // KEYS) * KEYS * TERMS)
    dtype, device = q.dtype, q.device

    def terms(mask: Tensor | None, mask_bias: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
        made, ends = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:1], dtype=torch.int32, device=device)
        kernel(None if mask is None else mask.view(torch.uint8), mask_bias, made, ends, lk, of_n)
        return made, ends, of_n if of_b > 1 else 0, int(of_n > 1)

    return terms


def fold(scale: float) -> tuple[float, float]:
    """scale = factor * unit: a factor that goes into q, a sign and a power of two or zero, and what the kernels take.

    They want a positive scale, not so far from 1 that a bias divided by it overflows.
    """
    if scale == 0:
        return 0.0, 1.0
    size = abs(scale)
    power = 1.0 if _SCALES[0] <= size <= _SCALES[1] else 2.0 ** math.frexp(size)[1]
    return math.copysign(power, scale), size / power


def loads_wide(x: Tensor) -> bool:
    """Whether every row of channels or keys starts on 16 bytes, with stride 1 inside; a broadcast axis does not."""
    steps = x.stride()
    return x.data_ptr() % 16 == 0 and steps[-1] == 1 and all(step % 8 == 0 and step > 0 for step in steps[:-1])


def _exact(x: float, dtype: torch.dtype) -> bool:
    return math.isfinite(x) and torch.tensor(x, dtype=torch.float64).to(dtype).item() == x
