"""Programmatic dependent launch: on NVIDIA cards from Hopper on, a kernel of a call starts while the one before it still runs.

The hardware has two instructions for it (`griddepcontrol` in PTX). When every program of a kernel has *let the next one start*,
or has ended, programs of the next kernel start as room permits. A program that *waits* goes on when the kernel before it is
complete and all its stores are visible. The kernels follow these rules:

- Every program waits before its first store. So a complete kernel means that all kernels before it are complete, however many
  of them ran at a time. No store meets a load or a store of an earlier kernel: neither in the caller's tensors, nor in memory
  that torch gave out twice, nor in sums that were cleared.
- A program waits before it loads what an earlier kernel of the call writes, unless that one was complete when this one started.
  `overlap` derives this from the list of launches, each with those whose results it loads. A kernel that waits so early lets
  the next one start after that: the next one starts when all before its neighbour are complete, and need not wait for those.
  So queries that are left over load the key bias while the main tiles run, and dK and dV load the statistics while dQ runs. No
  processor has old copies of these values: nobody loads them before they are complete.
- A program may load the inputs of the call at once.

The first kernel of a call is launched the usual way, behind all that is in the stream: the caller's work, and what torch
copies and clears for this call, which comes first for that reason. Other work between two of these kernels would only cost
their overlap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evoattn.backends.triton import cards
from evoattn.backends.triton.launch import Launch

OVERLAPS = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
"""Whether this Triton has the two instructions; 3.3, which goes with torch 2.7, has not."""

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


def overlap(device: torch.device, *chain: tuple[Launch | None, tuple[Launch | None, ...]]) -> None:
    """Let the launches of a call overlap if `device` can; otherwise, set that they do not.

    Args:
        device: of the launches.
        chain: the launches in the order of the stream, each with those whose results it loads; None for absent ones.
    """
    able = OVERLAPS and (cards.capability(device) or (0, 0)) >= _FIRST_CAPABILITY
    place: dict[Launch, int] = {}
    complete = 0  # how many of them are when the next one starts
    for one, loads in chain:
        if one is None:
            continue
        early = any(place[other] >= complete for other in loads if other is not None)
        wait = _TO_LOAD if early else _TO_STORE
        one.constants["WAIT"] = wait if able else _NEVER
        if able and place:
            one.constants["launch_pdl"] = True
        if early:
            complete = len(place)
        place[one] = len(place)
