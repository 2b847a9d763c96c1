"""Which launches of a call overlap: on NVIDIA cards from Hopper on, each starts while the one before it still runs.

The hardware (programmatic dependent launch, `griddepcontrol` in PTX) has two instructions for it. When every program of a
kernel has *let the next one start*, or has ended, programs of the next kernel take what room there is. A program that *waits*
goes on when the kernel before it is complete and all that it wrote is visible; before, it knows nothing of it. What kernels
do here:

- Every program waits before its first store. So a complete kernel means that all before it are complete, however many of them
  ran at a time, and no store meets a load or a store of an earlier kernel: neither in the caller's tensors, nor in memory
  that torch gave out twice, nor in sums that were cleared.
- It waits before it loads what an earlier kernel of the call makes, unless that one was complete when this one started.
  `overlap` finds out which, from who loads whose results. A kernel that waits so early lets the next one start after that:
  the next one starts when all before its neighbour are complete, and need not wait for those. Queries that are left over read
  the row bias while the main tiles run, dK and dV the statistics while dQ runs. No processor has old copies of what they
  read: nobody loads it before it is complete.
- The inputs of the call it may load at once.

The first kernel of a call is launched the usual way, behind all that is in the stream: the caller's work, and what torch
itself copies and clears for this call, which runs before it for that reason. Something else between two of these kernels
would cost their overlap and nothing more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evoattn.backends.triton import launch
from evoattn.backends.triton.launch import Launch
from evoattn.backends.triton.release import OVERLAPS

__all__ = ["overlap", "wait_to_load", "wait_to_store"]

_FIRST_CAPABILITY = (9, 0)

_NEVER = 0
_TO_LOAD = 1
_TO_STORE = 2

_LOAD = tl.constexpr(_TO_LOAD)
_STORE = tl.constexpr(_TO_STORE)


@triton.jit
def _unknown():
    """Stands for an instruction that this Triton does not have. No kernel comes by: WAIT is 0 there."""
    tl.static_assert(False)


_wait = tl.extra.cuda.gdc_wait if OVERLAPS else _unknown
_launch_dependents = tl.extra.cuda.gdc_launch_dependents if OVERLAPS else _unknown


@triton.jit
def wait_to_load(WAIT: tl.constexpr):
    """Stands once in a kernel, before the first load of what another kernel of the call makes."""
    if WAIT == _LOAD:
        _wait()
    if WAIT:
        _launch_dependents()


@triton.jit
def wait_to_store(WAIT: tl.constexpr):
    """Stands once in a kernel, after `wait_to_load` and before the first store, where every program comes by."""
    if WAIT == _STORE:
        _wait()


def overlap(device: torch.device, *chain: tuple[Launch | None, tuple[Launch | None, ...]]) -> None:
    """Let the launches of a call overlap where `device` can; elsewhere, say that they do not.

    Args:
        device: where they run.
        chain: the launches in the order of the stream, each with those whose results it loads; None for one that is not made.
    """
    able = OVERLAPS and (launch.capability(device) or (0, 0)) >= _FIRST_CAPABILITY
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
