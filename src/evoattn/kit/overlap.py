"""Programmatic dependent launch: on NVIDIA cards from Hopper on, a kernel of a call starts while the one before it still runs.

The hardware has two instructions for it (`griddepcontrol` in PTX). One lets the next kernel start: its programs start, as room
permits, when every program of this one has let it start or has ended. The other waits until the kernel before is complete and
its stores are visible. The kernels keep two rules:

1. Every program waits before its first store. So if a kernel is complete, all kernels before it are complete, and no store
   meets a load or a store of an earlier one: not in the caller's tensors, in memory that torch gave out twice, or in sums that
   were cleared.
2. A program waits before it loads what an earlier kernel of the call writes, unless that one is complete when this one starts.
   Then it lets the next kernel start. `overlap` derives from the list of launches, each with those whose results it loads,
   which of them wait so early:

| launch | loads the results of | waits before its first | complete when it starts |
|---|---|---|---|
| key bias | | store | |
| tiles of the forward | key bias | load | |
| queries that are left over | key bias | store | key bias, for which the tiles before it waited |

No processor has old copies of such results: nobody loads them before they are complete. The inputs of the call may be loaded
at once. The first kernel of a call is launched the usual way, behind all that is in the stream: the caller's work, and what
torch copies and clears for this call. Other work between two of these kernels only costs their overlap.

A kernel that waits before its first load can follow any other (`early`, `follows`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from evoattn.kit import cards
from evoattn.kit.launch import Launch

OVERLAPS = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
"""True if this Triton has the two instructions; 3.3, which goes with torch 2.7, has not."""

_FIRST_CAPABILITY = (9, 0)

_NEVER, _TO_LOAD, _TO_STORE = 0, 1, 2

_LOAD = tl.constexpr(_TO_LOAD)
_STORE = tl.constexpr(_TO_STORE)


@triton.jit
def _unknown():
    """Stand for an instruction that this Triton does not have. No kernel calls it: WAIT is 0 there."""
    tl.static_assert(False)


_wait = tl.extra.cuda.gdc_wait if OVERLAPS else _unknown
_launch_dependents = tl.extra.cuda.gdc_launch_dependents if OVERLAPS else _unknown


@triton.jit
def wait_to_load(WAIT: tl.constexpr):
    """Call this once in a kernel, before the first load of what another kernel of the call writes."""
    if WAIT == _LOAD:
        _wait()
    if WAIT:
        _launch_dependents()


@triton.jit
def wait_to_store(WAIT: tl.constexpr):
    """Call this once in a kernel, in every program, after `wait_to_load` and before the first store."""
    if WAIT == _STORE:
        _wait()


def early(device: torch.device) -> int:
    """WAIT of a kernel that may follow any other, and calls `wait_to_load` first. 0 where launches do not overlap."""
    return _TO_LOAD if _able(device) else _NEVER


def follows(device: torch.device) -> dict[str, Any]:
    """Options of the launch of such a kernel, which may start before the one before it is complete."""
    return {"launch_pdl": True} if _able(device) else {}


def _able(device: torch.device) -> bool:
    return OVERLAPS and (cards.capability(device) or (0, 0)) >= _FIRST_CAPABILITY


def overlap(device: torch.device, *chain: tuple[Launch, tuple[Launch, ...]]) -> None:
    """Let the launches of a call overlap if `device` can; otherwise, set that they do not.

    `chain` has the launches in the order of the stream, each with those whose results it loads.
    """
    overlaps = _able(device)
    place: dict[Launch, int] = {}
    complete = 0  # how many of them are when the next one starts
    for one, loads in chain:
        early = any(place[other] >= complete for other in loads)
        wait = _TO_LOAD if early else _TO_STORE
        one.constants["WAIT"] = wait if overlaps else _NEVER
        if overlaps and place:
            one.constants["launch_pdl"] = True
        if early:
            complete = len(place)
        place[one] = len(place)
