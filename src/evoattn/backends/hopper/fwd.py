"""The forward pass on a Hopper GPU: what a call launches, worked out once for calls that look alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn import layouts
from evoattn.backends.hopper.fwd_kernel import CHAIN, HALVES, KEYS, ROWS, Forward
from evoattn.backends.hopper.launch import plan, types
from evoattn.backends.hopper.memory import loads_wide
from evoattn.backends.hopper.prepare import TERMS, Pairs, Rows, Tiles
from evoattn.backends.hopper.primitives import padded
from evoattn.backends.hopper.turns import Turns, in_turn
from evoattn.backends.hopper.workspace import Workspace

__all__ = ["changed", "contiguous", "fold", "loadable", "pair_plan", "plan_forward", "row_plan"]

_LEAST, _MOST = 2.0**-12, 2.0**12


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
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    turns = Turns.of(q, None if resident else pair_bias, panels * n, processors)
    panels *= turns.b * turns.h
    blocks = min(processors, panels * n)
    deal = min(max(round(blocks / panels), 1), n)

    workspace = Workspace(device)
    terms = row_plan(mask, mask_bias, q, lk, workspace, always=row, deep=pair_bias is not None)
    of_rows = (None, None, 0, 0) if terms is None else (terms.like, terms.ends, terms.row_b, terms.row_n)
    deep = None if terms is None else terms.deep
    at_laid, at_shifts, at_tiled = (0 if x is None else workspace.add(x) for x in (laid, shifts, tiled))
    seen = tiled if wide else laid  # what the kernel reads
    (q, change_q), (k, change_k), (v, change_v) = loadable(q, factor), loadable(k), loadable(v)
    changes = [(i, change) for i, change in enumerate((change_q, change_k, change_v)) if change is not None]
    o = layouts.empty((b, n, h, lq, d), layout, q.new_empty(0, device="meta"))
    lse = torch.empty((b, n, h, lq), device="meta", dtype=torch.float32)
    of_given, bias, of_shifts = (None if x is None else turns.cut(x, 1) for x in (given, seen, shifts))
    of_turn = [turns.cut(x, 2) for x in (q, k, v, o, lse, lse)]
    tensors = (*of_turn[:3], *of_rows[:2], deep, of_given, bias, *of_turn[3:], of_shifts)
    kernel = plan(variant, device, *tensors, *of_rows[2:], unit, deal, blocks)
    by_b = [None if terms is None or x is None else terms.by_b(x) for x in (*of_rows[:2], deep)]
    of_inputs = ((q, 2), (k, 2), (v, 2), *((x, None) for x in by_b))
    further = turns.further(*of_inputs, (given, 1), (seen, 1), (o, 2), (lse, 2), (lse, 2), (shifts, 1))

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
        in_turn(kernel, (q, k, v, *of_keys, given, pair, o, lse, reference, start + at_shifts), further)

    return run


def pair_plan(pair_bias: Tensor, queries: int, keys: int, *, beside: torch.dtype, bounded: bool) -> tuple[Tensor, Tensor, Any]:
    """How a pair bias [b|1,h|1,q|1,k|1] lies once it is measured (`Pairs`), and its shifts; and the launch that makes both.

    Its lines of keys have a multiple of 8, zero past the last key.
    """
    pair = pair_bias.expand(-1, -1, queries, keys)  # one query or key is read along all of them
    laid = pair_bias.new_empty((*pair.shape[:3], -(-keys // 8) * 8), device="meta")
    shifts = torch.empty(pair.shape[:3], dtype=torch.float32, device="meta")
    wide = pair_bias.shape[3] == keys and keys % 8 == 0 and loads_wide(pair_bias)
    width = 16 // pair_bias.element_size() if wide else 1
    kernel = Pairs(types[pair_bias.dtype], width, beside=types[beside], bounded=bounded)
    return laid, shifts, plan(kernel, pair_bias.device, pair, laid, shifts)


def _tile_plan(pair: Tensor, q: Tensor, unit: float) -> tuple[Tensor, Any]:
    """How a float32 pair bias [b|1,h|1,q,k] lies as the forward's accumulators hold it, and the launch that makes it so."""
    panels, blocks = -(-pair.shape[2] // (HALVES * ROWS)), -(-pair.shape[3] // KEYS)
    tiled = torch.empty(*pair.shape[:2], HALVES * panels, blocks, ROWS * KEYS, device="meta", dtype=torch.float32)
    if q.shape[-1] == 8:  # 1 / scale is rounded there
        unit = 1.0 / torch.tensor(1.0 / unit).to(q.dtype).item()
    return tiled, plan(Tiles(types[torch.float32], wide=True), q.device, pair.transpose(2, 3), tiled, unit)


class KeyTerms(NamedTuple):
    """What makes the terms of a key-wise bias, once a call.

    Args:
        make: where a call's workspace starts, mask, mask_bias, and what to clear if it clears anything, as addresses -> those
            of the terms [r, keys * TERMS], of how many keys each row has up to the last that is not masked, int32 [r], of deep
            [r, keys], and of order and starts, as in `bwd_live`.
        like, ends, deep: how the first three lie in memory; deep only if it was asked for.
        row_b, row_n: how far r goes from one b, and one n, to the next.
        order, starts: how these lie in memory, if they were asked for.
    """

    make: Callable[..., tuple[int, int, int, int, int]]
    like: Tensor
    ends: Tensor
    deep: Tensor | None
    row_b: int
    row_n: int
    order: Tensor | None
    starts: Tensor | None

    def by_b(self, x: Tensor) -> Tensor:
        """The terms or the ends, [r,...], as [b|1,n|1,...]."""
        return x.unflatten(0, (-1, self.row_b)) if self.row_b else x[None]


def row_plan(
    mask: Tensor | None,
    mask_bias: Tensor | None,
    q: Tensor,
    lk: int,
    workspace: Workspace,
    *,
    room: int = 0,
    always: bool,
    clears: Tensor | None = None,
    lists: bool = False,
    deep: bool = False,
    bounded: bool = False,
) -> KeyTerms | None:
    """The terms of a key-wise bias for at least `room` keys; None where there is none and `always` is False.

    clears: how float32 memory lies that the same launch clears.
    lists: whether it lists the rows that the mask leaves to each panel of keys.
    deep, bounded: as `Rows` has them.
    """
    if mask is None and mask_bias is None and not always:
        return None
    bias_type = None if mask_bias is None else types[mask_bias.dtype]
    given = [x.shape[:2] for x in (mask, mask_bias) if x is not None]
    of_b = max((shape[0] for shape in given), default=1)
    of_n = max((shape[1] for shape in given), default=1)
    like = torch.empty(of_b * of_n, -(-max(lk, room) // KEYS) * KEYS * TERMS, dtype=q.dtype, device="meta")
    ends = torch.empty(of_b * of_n, dtype=torch.int32, device="meta")
    words = None if clears is None else torch.empty(clears.numel() // 4, 4, device="meta")
    order = starts = whole = None
    at_order = at_starts = at_whole = 0
    if lists:
        b, n = q.shape[:2]
        order = torch.empty(b, 2, n, dtype=torch.int32, device="meta")
        starts = torch.empty(b, -(-lk // KEYS) + 2, dtype=torch.int32, device="meta")
        at_order, at_starts = workspace.add(order), workspace.add(starts)
    if deep:
        whole = torch.empty(of_b * of_n, lk, dtype=torch.float32, device="meta")
        at_whole = workspace.add(whole)
    options = {"clears": clears is not None, "lists": lists, "deep": deep, "bounded": bounded}
    variant = Rows(types[q.dtype], mask=mask is not None, bias=bias_type, **options)
    kernel = plan(variant, q.device, mask, mask_bias, like, ends, whole, words, order, starts, lk, of_n)
    at_terms, at_ends = workspace.add(like), workspace.add(ends)

    def make(start: int, mask: int | None, mask_bias: int | None, cleared: int | None = None) -> tuple[int, int, int, int, int]:
        made = (start + at_terms, start + at_ends, start + at_whole, start + at_order, start + at_starts)
        kernel(mask, mask_bias, *made[:3], cleared, *made[3:])
        return made

    return KeyTerms(make, like, ends, whole, of_n if of_b > 1 else 0, int(of_n > 1), order, starts)


def loadable(x: Tensor, factor: float = 1.0) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """How q, k, v, o or do lies in memory for the kernels, and what makes it so: a copy where it is multiplied by something, or
    its rows do not start on 16 bytes; None where it lies so."""
    if factor == 1.0 and loads_wide(x):
        return x, None
    return contiguous(x, factor)


def contiguous(x: Tensor, factor: float = 1.0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """How a copy of a tensor lies in memory, from a multiple of 16 bytes on, and what makes it."""
    shape, stride = x.shape, x.stride()

    def change(x: Tensor) -> Tensor:
        seen = x.as_strided(shape, stride)
        made = (seen if factor == 1.0 else seen * factor).contiguous()
        return made if made.data_ptr() % 16 == 0 else made.clone()  # a contiguous one is no copy yet

    return torch.empty(shape, dtype=x.dtype, device="meta"), change


def changed(tensors: tuple[Any, ...], changes: Iterable[tuple[int, Callable[[Tensor], Tensor]]]) -> tuple[Any, ...]:
    """A call's tensors, those that the kernels do not take as they lie in memory copied."""
    found = list(tensors)
    for i, change in changes:
        found[i] = change(found[i])
    return tuple(found)


def fold(scale: float, least: float = _LEAST) -> tuple[float, float]:
    """scale = factor * unit: a factor that goes into q, a sign and a power of two or zero, and what the kernels take.

    They want a positive scale, not so far from 1 that a bias divided by it overflows: `least` or more, at most 2.
    """
    if scale == 0:
        return 0.0, 1.0
    size = abs(scale)
    power = 1.0 if least <= size <= _MOST else 2.0 ** (math.frexp(size)[1] - 2)
    return math.copysign(power, scale), size / power


def _exact(x: float, dtype: torch.dtype) -> bool:
    return math.isfinite(x) and torch.tensor(x, dtype=torch.float64).to(dtype).item() == x
