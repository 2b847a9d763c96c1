"""How the tensors of a call lie in memory for the kernels, and the launches that lay them out so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends.hopper.host.launch import note_copy, plan, types
from evoattn.backends.hopper.host.memory import loads_wide
from evoattn.backends.hopper.host.workspace import Workspace
from evoattn.backends.hopper.kernels.key_bias import TERMS, Rows
from evoattn.backends.hopper.kernels.pair_bias import Pairs
from evoattn.backends.hopper.kernels.tile_sizes import KEYS

__all__ = ["KeyTerms", "changed", "contiguous", "fold", "loadable", "pair_plan", "row_plan"]

_LEAST, _MOST = 2.0**-12, 2.0**12


def pair_plan(pair_bias: Tensor, queries: int, keys: int, *, beside: torch.dtype, bounded: bool) -> tuple[Tensor, Tensor, Any]:
    """How a pair bias [b|1,h|1,q|1,k|1] lies once it is measured (`Pairs`), and its shifts; and the launch that makes both.

    Its lines of keys have a multiple of 8, zero past the last key.
    """
    note_copy("pair_bias: laid out anew once a pass, measured from the largest of each query")
    pair = pair_bias.expand(-1, -1, queries, keys)  # one query or key is read along all of them
    laid = pair_bias.new_empty((*pair.shape[:3], -(-keys // 8) * 8), device="meta")
    shifts = torch.empty(pair.shape[:3], dtype=torch.float32, device="meta")
    wide = pair_bias.shape[3] == keys and keys % 8 == 0 and loads_wide(pair_bias)
    width = 16 // pair_bias.element_size() if wide else 1
    kernel = Pairs(types[pair_bias.dtype], width, beside=types[beside], bounded=bounded)
    return laid, shifts, plan(kernel, pair_bias.device, pair, laid, shifts)


class KeyTerms(NamedTuple):
    """What makes the terms of a key-wise bias, once a call.

    Args:
        make: where a call's workspace starts, mask, mask_bias, and what to clear if it clears anything, as addresses -> those
            of the terms [r, keys * TERMS], of how many keys each row has up to the last that is not masked, int32 [r], of deep
            [r, keys], and of order and starts, as in `live_rows`.
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
    words = None if clears is None else torch.empty(clears.numel() // 4, 4, dtype=torch.float32, device="meta")
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


def loadable(x: Tensor, factor: float = 1.0, name: str = "") -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """How q, k, v, o or do lies in memory for the kernels, and what makes it so: a copy where it is multiplied by something, or
    its rows do not start on 16 bytes; None where it lies so. `name`: by which the plan tells that it is copied."""
    if factor == 1.0 and loads_wide(x):
        return x, None
    why = "so that each row of channels starts on 16 bytes and is in memory once for each head"
    if factor != 1.0:
        why = f"multiplied by {factor:g}, since the kernels take no scale that is negative or far from 1"
    if name:
        note_copy(f"{name}: copied once a pass, {why}")
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
