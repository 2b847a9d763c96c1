"""Layer norm in Triton: one kernel for each pass, which reads each row once.

Sums over rows have a fixed order, without atomics.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from evoattn.core.devices import processors
from evoattn.core.sizes import power_of_two
from evoattn.kit.arguments import Affine, Number, Pointer, Specialised, kernel
from evoattn.kit.launch import launch_kernel
from evoattn.kit.rows import load_vector, normalise_tile, normalise_tile_backward

_TILE_ELEMENTS = 4096
"""Elements of a forward tile, 32 for each thread."""

_TILE_ELEMENTS_BACKWARD = 2048
"""Elements of a backward tile: four tiles of float32 are held at a time."""

_PROGRAMS_PER_PROCESSOR = 4
"""Backward programs for each processor. Each sums its share of the rows."""


class Rows(NamedTuple):
    """Rows `[r,c]` with stride 1 along channels."""

    p: Pointer
    r: Specialised


class Saved(NamedTuple):
    """The mean of each row, and 1 / its standard deviation."""

    mean: Pointer
    rstd: Pointer


Variant = namedtuple(
    "Variant", "C BLOCK_R BLOCK_C HAS_WEIGHT HAS_BIAS NEEDS_X NEEDS_SUMS", defaults=[False, False, False, False]
)
"""Constants of both kernels: what is there, and which gradients are wanted."""


@kernel
def norm_kernel(x: Rows, norm: Affine, out: Pointer, saved: Saved, rows: Specialised, eps: Number, V: Variant) -> None:
    """One program owns BLOCK_R rows. It reads them once, and writes them once with their mean and 1 / standard deviation."""
    o_r = tl.program_id(0).to(tl.int64) * V.BLOCK_R + tl.arange(0, V.BLOCK_R)
    o_c = tl.arange(0, V.BLOCK_C)
    m_r, m_c = o_r < rows, o_c < V.C
    m_rc = m_r[:, None] & m_c[None, :]
    b_x = tl.load(x.p + o_r[:, None] * x.r + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)  # [r,c]
    b_x, b_mean, b_rstd = normalise_tile(b_x, m_rc, eps, V.C, 1)  # [r,c], [r], [r]
    if V.HAS_WEIGHT:
        b_x = b_x * load_vector(norm.w, o_c, V.C)[None, :]
    if V.HAS_BIAS:
        b_x = b_x + load_vector(norm.b, o_c, V.C)[None, :]
    tl.store(out + o_r[:, None] * V.C + o_c[None, :], b_x.to(out.dtype.element_ty), mask=m_rc)
    tl.store(saved.mean + o_r, b_mean, mask=m_r)
    tl.store(saved.rstd + o_r, b_rstd, mask=m_r)


@kernel
def norm_backward_kernel(
    dy: Pointer, x: Rows, weight: Pointer, saved: Saved, dx: Pointer, sums: Pointer, rows: Specialised, V: Variant
) -> None:
    """Each of G programs owns every G-th tile of BLOCK_R rows. It loops over these tiles and reads each row of dy and x once.
    It writes each row of dx once, and at its end its sums over rows of dy * normed and of dy.
    """
    o_c = tl.arange(0, V.BLOCK_C)
    m_c = o_c < V.C
    b_w = tl.full((V.BLOCK_C,), 1.0, tl.float32)
    if V.HAS_WEIGHT:
        b_w = load_vector(weight, o_c, V.C)
    b_dweight = tl.zeros((V.BLOCK_R, V.BLOCK_C), tl.float32)  # [r,c]
    b_dbias = tl.zeros((V.BLOCK_R, V.BLOCK_C), tl.float32)  # [r,c]
    for tile in range(tl.program_id(0), tl.cdiv(rows, V.BLOCK_R), tl.num_programs(0)):
        o_r = tl.cast(tile, tl.int64) * V.BLOCK_R + tl.arange(0, V.BLOCK_R)
        m_r = o_r < rows
        m_rc = m_r[:, None] & m_c[None, :]
        b_dy = tl.load(dy + o_r[:, None] * V.C + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)  # [r,c]
        b_x = tl.load(x.p + o_r[:, None] * x.r + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)  # [r,c]
        b_rstd = tl.load(saved.rstd + o_r, mask=m_r, other=0.0)  # [r]
        b_x = tl.where(m_rc, (b_x - tl.load(saved.mean + o_r, mask=m_r, other=0.0)[:, None]) * b_rstd[:, None], 0.0)
        if V.NEEDS_SUMS:
            b_dweight += b_dy * b_x
            b_dbias += b_dy
        if V.NEEDS_X:
            b_dx = normalise_tile_backward(b_dy * b_w[None, :], b_x, V.C, 1)
            b_dx = (b_dx * b_rstd[:, None]).to(dx.dtype.element_ty)
            tl.store(dx + o_r[:, None] * V.C + o_c[None, :], b_dx, mask=m_rc)
    if V.NEEDS_SUMS:
        p_sums = sums + tl.program_id(0) * 2 * V.C + o_c
        tl.store(p_sums, tl.sum(b_dweight, 0), mask=m_c)
        tl.store(p_sums + V.C, tl.sum(b_dbias, 0), mask=m_c)


def _variant(channels: int, elements: int, **flags: bool) -> Variant:
    """Constants of a kernel whose tile has whole rows, and as many elements as that allows."""
    block_c = power_of_two(channels, 1)
    return Variant(channels, max(1, elements // block_c), block_c, **flags)


def normalise(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`evoattn.nn.project.normalise` for rows of 16 or 32 bits that fit in the registers of one program."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, channels = rows.shape
    out = torch.empty((count, channels), dtype=dtype, device=rows.device)
    mean, rstd = (torch.empty((count, 1), dtype=torch.float32, device=rows.device) for _ in range(2))
    variant = _variant(channels, _TILE_ELEMENTS, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None)
    tensors = (rows, *(rows if x is None else x for x in (weight, bias)), out, mean, rstd)
    x = Rows(None, rows.stride(0))
    launch_kernel(norm_kernel, -(-count // variant.BLOCK_R), tensors, x=x, rows=count, eps=eps, V=variant)
    return out, mean, rstd


def normalise_backward(
    d_normed: Tensor,
    rows: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`evoattn.nn.project.normalise_backward` for the rows that `normalise` takes."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    d_normed = d_normed.contiguous()
    count, channels = rows.shape
    needs_x, needs_weight, needs_bias = needs
    summed = needs_weight or needs_bias
    variant = _variant(channels, _TILE_ELEMENTS_BACKWARD, HAS_WEIGHT=weight is not None, NEEDS_X=needs_x, NEEDS_SUMS=summed)
    programs = min(-(-count // variant.BLOCK_R), _PROGRAMS_PER_PROCESSOR * processors(rows.device))
    dx = torch.empty((count, channels), dtype=rows.dtype, device=rows.device) if needs_x else None
    sums = torch.empty((programs, 2, channels), dtype=torch.float32, device=rows.device) if summed else None
    tensors = (d_normed, rows, rows if weight is None else weight, mean, rstd, *(rows if x is None else x for x in (dx, sums)))
    launch_kernel(norm_backward_kernel, programs, tensors, x=Rows(None, rows.stride(0)), rows=count, V=variant)
    if sums is None:
        return dx, None, None
    dweight, dbias = sums.sum(0).unbind()
    return (
        dx,
        dweight.to(weight.dtype) if needs_weight and weight is not None else None,
        dbias.to(bias.dtype) if needs_bias and bias is not None else None,
    )
