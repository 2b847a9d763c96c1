"""A kernel that takes exponentials and does nothing else: its speed is the ceiling of every softmax on the card."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024
"""Eight numbers a thread of four warps: independent chains, so that the unit and not its latency is measured."""


@triton.jit
def exp2_kernel(p_out, rounds, SIZE: tl.constexpr):
    """One program owns SIZE numbers in registers, loops over `rounds` of x = 2^-x, and writes them once."""
    o_x = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    b_x = o_x.to(tl.float32) * 1e-9  # [x]
    for _ in range(rounds):
        b_x = tl.exp2(-b_x)
    tl.store(p_out + o_x, b_x)
