"""The gate, the output product and the residual of a layer in Triton.

A program owns some rows of z `[R, C]`, which are the positions (b, i, j) in order. It holds the whole weight `[C, D]`. o and g
have strides of their own: around the ending node the attention returns o with i and j exchanged.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from evoattn.core.sizes import power_of_two
from evoattn.kit import cards
from evoattn.kit.arguments import Affine, Pointer, kernel
from evoattn.kit.launch import launch_kernel
from evoattn.kit.primitives import sigmoid
from evoattn.kit.rows import load_vector, load_weight

_ROWS, _WARPS = 64, 4
"""Rows of a program, and its warps."""

_GRAIN = 8
"""Numbers of 16 bits that are loaded at once."""

Squares = namedtuple("Squares", "rows i j")
"""Rows in all, and the sizes of the axes i and j."""

Steps = namedtuple("Steps", "b i j")
"""Strides in units of the grain."""

Variant = namedtuple("Variant", "C D BLOCK_R BLOCK_C BLOCK_D GRAIN HAS_BIAS FAST")
"""Constants. C and D are channels of z and of o. FAST: see `sigmoid`."""


@triton.jit
def _load(p, steps, b, i, j, m_rd, o_d, GRAIN: tl.constexpr):
    """Load positions (b, i, j) of a tensor `[b,i,j,d]` as a tile [r,d] in float32."""
    o_r = (b * steps.b + i * steps.i + j * steps.j) * GRAIN
    return tl.load(p + o_r[:, None] + o_d[None, :], mask=m_rd, other=0.0).to(tl.float32)


@kernel
def add_kernel(
    z: Pointer, o: Pointer, g: Pointer, out: Pointer, linear: Affine, squares: Squares, o_steps: Steps, g_steps: Steps,
    V: Variant,
) -> None:  # fmt: skip
    """out = z + (o sigmoid(g)) W^T + b. Each program writes its rows after all of its reads: `out` may be z."""
    start = tl.program_id(0).to(tl.int64) * V.BLOCK_R
    o_r, o_c, o_d = tl.arange(0, V.BLOCK_R), tl.arange(0, V.BLOCK_C), tl.arange(0, V.BLOCK_D)
    m_r = start + o_r < squares.rows
    row = start + o_r
    i, j = (row // squares.j) % squares.i, row % squares.j
    b = row // squares.j // squares.i
    m_rd, m_rc = m_r[:, None] & (o_d < V.D)[None, :], m_r[:, None] & (o_c < V.C)[None, :]
    b_g = _load(g, g_steps, b, i, j, m_rd, o_d, V.GRAIN)
    b_o = _load(o, o_steps, b, i, j, m_rd, o_d, V.GRAIN)
    b_u = (b_o * sigmoid(b_g, V.FAST)).to(o.dtype.element_ty)
    # u W^T
    b_w = load_weight(linear.w, o_c, o_d, V.C, V.D).to(o.dtype.element_ty)
    b_y = tl.dot(b_u, tl.trans(b_w))
    if V.HAS_BIAS:
        b_y += load_vector(linear.b, o_c, V.C)[None, :]
    p_rc = o_r[:, None] * V.C + o_c[None, :]
    b_y += tl.load(z + start * V.C + p_rc, mask=m_rc, other=0.0).to(tl.float32)
    tl.store(out + start * V.C + p_rc, b_y.to(out.dtype.element_ty), mask=m_rc)


def add(z: Tensor, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write z + (o sigmoid(g)) W^T + b into `out`; shapes as for `evoattn.nn.gated.add_gated`."""
    i, j, channels = z.shape[-3:]
    o, g = (x.reshape(-1, i, j, x.shape[-1]) for x in (o, g))
    o, g = (x if x.stride(-1) == 1 else x.contiguous() for x in (o, g))
    strides = [x.stride()[:3] for x in (o, g)]
    grain = _GRAIN if all(step % _GRAIN == 0 for each in strides for step in each) else 1
    o_steps, g_steps = (Steps(*(step // grain for step in each)) for each in strides)
    hidden = o.shape[-1]
    variant = Variant(
        *(channels, hidden, _ROWS, power_of_two(channels), power_of_two(hidden), grain),
        *(bias is not None, cards.capability(z.device) is not None),
    )
    rows = z.numel() // channels
    tensors = (z, o, g, out, weight.detach(), weight.detach() if bias is None else bias.detach())
    squares = Squares(rows, i, j)
    launch_kernel(
        add_kernel, -(-rows // _ROWS), tensors, squares=squares, o_steps=o_steps, g_steps=g_steps, V=variant, num_warps=_WARPS
    )
