"""Layer norm in Triton: one kernel for each pass, which reads each row once.

Sums over rows have a fixed order, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evoattn.core.devices import processors
from evoattn.core.sizes import power_of_two
from evoattn.kit.launch import Kernel, launch_kernel

_TILE = 4096
"""Elements of a forward tile, 32 for each thread."""

_TILE_BACKWARD = 2048
"""Elements of a backward tile: four tiles of float32 are held at a time."""

_PROGRAMS = 4
"""Backward programs for each processor. Each sums its share of the rows."""


@Kernel
@triton.jit
def norm_kernel(
    x, weight, bias, out, mean, rstd, rows, stride, eps, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_R rows. It reads them once, and writes them once with their mean and 1 / standard deviation."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = tl.arange(0, BLOCK_C)
    m_r, m_c = o_r < rows, o_c < C
    m_rc = m_r[:, None] & m_c[None, :]
    b_x = tl.load(x + o_r[:, None] * stride + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)  # [r,c]
    b_mean = tl.sum(b_x, 1) / C  # [r]
    b_mean += tl.sum(tl.where(m_rc, b_x - b_mean[:, None], 0.0), 1) / C  # what rounding left: 0 for equal channels
    b_x = tl.where(m_rc, b_x - b_mean[:, None], 0.0)
    b_rstd = 1 / tl.sqrt(tl.sum(b_x * b_x, 1) / C + eps)
    b_x = b_x * b_rstd[:, None]
    if HAS_WEIGHT:
        b_x = b_x * tl.load(weight + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        b_x = b_x + tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    tl.store(out + o_r[:, None] * C + o_c[None, :], b_x.to(out.dtype.element_ty), mask=m_rc)
    tl.store(mean + o_r, b_mean, mask=m_r)
    tl.store(rstd + o_r, b_rstd, mask=m_r)


@Kernel
@triton.jit
def norm_backward_kernel(
    dy, x, weight, mean, rstd, dx, sums, rows, stride, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_SUMS: tl.constexpr,
):  # fmt: skip
    """Each of G programs owns every G-th tile of BLOCK_R rows. It loops over these tiles and reads each row of dy and x once.
    It writes each row of dx once, and at its end its sums over rows of dy * normed and of dy.
    """
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_w = tl.full((BLOCK_C,), 1.0, tl.float32)
    if HAS_WEIGHT:
        b_w = tl.load(weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dweight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)  # [r,c]
    b_dbias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)  # [r,c]
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R), tl.num_programs(0)):
        o_r = tl.cast(tile, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        m_r = o_r < rows
        m_rc = m_r[:, None] & m_c[None, :]
        b_dy = tl.load(dy + o_r[:, None] * C + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)  # [r,c]
        b_x = tl.load(x + o_r[:, None] * stride + o_c[None, :], mask=m_rc, other=0.0).to(tl.float32)  # [r,c]
        b_rstd = tl.load(rstd + o_r, mask=m_r, other=0.0)  # [r]
        b_x = tl.where(m_rc, (b_x - tl.load(mean + o_r, mask=m_r, other=0.0)[:, None]) * b_rstd[:, None], 0.0)
        if NEEDS_SUMS:
            b_dweight += b_dy * b_x
            b_dbias += b_dy
        if NEEDS_X:
            b_dy = b_dy * b_w[None, :]
            b_dx = b_dy - (tl.sum(b_dy, 1) / C)[:, None] - b_x * (tl.sum(b_dy * b_x, 1) / C)[:, None]
            b_dx = (b_dx * b_rstd[:, None]).to(dx.dtype.element_ty)
            tl.store(dx + o_r[:, None] * C + o_c[None, :], b_dx, mask=m_rc)
    if NEEDS_SUMS:
        p_sums = sums + tl.program_id(0) * 2 * C + o_c
        tl.store(p_sums, tl.sum(b_dweight, 0), mask=m_c)
        tl.store(p_sums + C, tl.sum(b_dbias, 0), mask=m_c)


def _tile(channels: int, elements: int) -> dict[str, int]:
    """Constants of a kernel whose tile has whole rows, and as many elements as that allows."""
    block_c = power_of_two(channels, 1)
    return {"C": channels, "BLOCK_R": max(1, elements // block_c), "BLOCK_C": block_c}


def normalise(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`evoattn.nn.project.normalise` for rows of 16 or 32 bits that fit in the registers of one program."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, channels = rows.shape
    out = torch.empty((count, channels), dtype=dtype, device=rows.device)
    mean, rstd = (torch.empty((count, 1), dtype=torch.float32, device=rows.device) for _ in range(2))
    tile = _tile(channels, _TILE)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    tensors = (rows, *(rows if x is None else x for x in (weight, bias)), out, mean, rstd)
    launch_kernel(norm_kernel, -(-count // tile["BLOCK_R"]), tensors, count, rows.stride(0), eps, **tile, **flags)
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
    tile = _tile(channels, _TILE_BACKWARD)
    programs = min(-(-count // tile["BLOCK_R"]), _PROGRAMS * processors(rows.device))
    dx = torch.empty((count, channels), dtype=rows.dtype, device=rows.device) if needs[0] else None
    summed = needs[1] or needs[2]
    sums = torch.empty((programs, 2, channels), dtype=torch.float32, device=rows.device) if summed else None
    flags = {"HAS_WEIGHT": weight is not None, "NEEDS_X": needs[0], "NEEDS_SUMS": summed}
    tensors = (d_normed, rows, rows if weight is None else weight, mean, rstd, *(rows if x is None else x for x in (dx, sums)))
    launch_kernel(norm_backward_kernel, programs, tensors, count, rows.stride(0), **tile, **flags)
    if sums is None:
        return dx, None, None
    dweight, dbias = sums.sum(0).unbind()
    return (
        dx,
        dweight.to(weight.dtype) if needs[1] and weight is not None else None,
        dbias.to(bias.dtype) if needs[2] and bias is not None else None,
    )
