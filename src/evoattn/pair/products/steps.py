"""Launches of products: splitting matrices, multiplying split ones, and their tiles. It needs Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evoattn.core.devices import constant, processors
from evoattn.core.sizes import power_of_two
from evoattn.kit import cards
from evoattn.kit.launch import launch_kernel
from evoattn.kit.norm import Rows
from evoattn.kit.overlap import early, follows
from evoattn.pair.products import kernels

_TILE_ELEMENTS = 4096
"""Elements of a tile of `split_kernel`, 32 for each thread."""


class Halves(NamedTuple):
    """A split matrix: hi and lo `[R, K]` in float16, unit `[R]` in float32. lo is None if hi alone is multiplied."""

    hi: Tensor
    lo: Tensor | None
    unit: Tensor

    @staticmethod
    def empty(rows: int, channels: int, device: torch.device, *, low: bool) -> Halves:
        """Halves without values."""
        hi = torch.empty((2 if low else 1, rows, channels), dtype=torch.float16, device=device)
        return Halves(hi[0], hi[1] if low else None, torch.empty(rows, dtype=torch.float32, device=device))

    @staticmethod
    def inside(x: Tensor) -> Halves:
        """Halves in the place of a float32 matrix `[R, K]`, which is contiguous."""
        hi, lo = x.view(torch.float16).chunk(2, -1)
        return Halves(hi, lo, torch.empty(x.shape[0], dtype=torch.float32, device=x.device))

    def rows(self, first: int, count: int) -> Halves:
        """Some rows, as views."""
        part = slice(first, first + count)
        return Halves(self.hi[part], None if self.lo is None else self.lo[part], self.unit[part])


class ProductTile(NamedTuple):
    """The tile of a product, and `num_warps` and `num_stages` of Triton."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def split(
    x: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    kind: str = "",
    factor: Tensor | None = None,
    eps: float = 1e-5,
    samples: int = 1,
    positions: int = 1,
    low: bool = True,
    out: Halves | None = None,
) -> Halves:
    """Split a matrix, or what is computed of its rows.

    Args:
        x: `[R, K]`, in float32 or bfloat16.
        a, b: `[R, K]` of the same dtypes, or `[R / samples, K]` with kind "adapt".
        kind: "" splits x; "norm" norm(x); "adapt" norm(x) a + b; "gate" x sigmoid(a); "swiglu" silu(x) a, times b if it is
            given.
        factor: `[K]`, which is multiplied in.
        eps: is added to the variance in the norm.
        samples, positions: rows are `[B, samples, positions]`, and samples share a and b of "adapt".
        low: whether lo is computed.
        out: halves that are written, or None.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    a, b, factor = (y if y is None or y.stride(-1) == 1 else y.contiguous() for y in (a, b, factor))
    rows, channels = x.shape
    out = Halves.empty(rows, channels, x.device, low=low) if out is None else out
    block_c = power_of_two(channels)
    block_r = min(max(1, _TILE_ELEMENTS // block_c), power_of_two(max(1, rows // processors(x.device)), 1))
    variant = kernels.SplitVariant(
        channels,
        block_r,
        block_c,
        NORM=kind in ("norm", "adapt"),
        ADAPT=kind == "adapt",
        GATE=kind == "gate",
        SWIGLU=0 if kind != "swiglu" else 2 if b is None else 3,
        FACTOR=factor is not None,
        LOW=low,
        IN_PLACE=out.hi.stride(0) != channels,
        FAST=cards.capability(x.device) is not None,
        WAIT=early(x.device),
    )
    views = [Rows(None, 0 if y is None else y.stride(0)) for y in (x, a, b)]
    tensors = (x, *(x if y is None else y for y in (a, b, factor)), out.hi, out.hi if out.lo is None else out.lo, out.unit)
    launch_kernel(
        kernels.split_kernel,
        -(-rows // block_r),
        tensors,
        x=views[0],
        a=views[1],
        b=views[2],
        rows=rows,
        sharing=kernels.Sharing(positions, samples),
        eps=eps,
        V=variant,
        num_warps=8 if block_r * block_c > _TILE_ELEMENTS else 4,
        **follows(x.device),
    )
    return out


def split_normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, low: bool = True) -> Halves:
    """Split norm(x) weight + bias, for x `[R, K]` and a norm whose weight and bias `[K]` may be None."""
    if bias is None:
        return split(x, kind="norm", factor=weight, eps=eps, low=low)
    weight = constant(1.0, bias.shape, bias.dtype, bias.device) if weight is None else weight
    return split(x, *(y.contiguous().expand(x.shape) for y in (weight, bias)), kind="adapt", eps=eps, low=low)


def split_weights(weights: Sequence[Tensor], *, factors: Sequence[Tensor | None] | None = None, low: bool = True) -> Halves:
    """Split weights `[N, K]` of one K, one below the other. factors: as `split` takes one, for each weight."""
    rows = [w.shape[0] for w in weights]
    out = Halves.empty(sum(rows), weights[0].shape[1], weights[0].device, low=low)
    first = 0
    for i, w in enumerate(weights):
        split(w, factor=None if factors is None else factors[i], low=low, out=out.rows(first, rows[i]))
        first += rows[i]
    return out


def product(
    x: Halves,
    w: Halves,
    bias: Tensor | None = None,
    *,
    opened: bool = False,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    base: Tensor | None = None,
    samples: int = 1,
    positions: int = 1,
    batches: int = 1,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """base + mask * gate * y, where y = x w^T + bias, or its sigmoid.

    Args:
        x, w: `[M, K]` and `[N, K]`.
        bias: `[N]`.
        opened: whether y is the sigmoid, as of a gate.
        gate: `[M / samples, N]`: rows of x are `[B, samples, positions]`, and samples share it.
        mask: `[M]`.
        base: `[M, N]`.
        batches: how many products of matrices `[M / batches, K]` and `[N / batches, K]` there are. x and w are `Halves.inside`
            of float32 matrices, N is N / batches for the result, and there is no other argument.
        out: `[M, N]`, which is written and may be base, or None.
        dtype: of the result without `out`.

    Returns:
        `[M, N]` in `dtype`, or `out`.
    """
    (m, k), n = x.hi.shape, w.hi.shape[0]
    n //= batches
    out = torch.empty((m, n), dtype=dtype, device=x.hi.device) if out is None else out
    low = x.lo is not None and w.lo is not None
    m //= batches
    tile = tile_of(m, n, k, x.hi.device, low=low, batches=batches)
    variant = kernels.ProductVariant(
        tile.m,
        tile.n,
        tile.k,
        EVEN=k % tile.k == 0,
        LOW=low,
        BIAS=bias is not None,
        SIGMOID=opened,
        GATE=gate is not None,
        MASK=mask is not None,
        RESIDUAL=base is not None,
        BATCHED=x.hi.stride(0) != k,
        FAST=cards.capability(out.device) is not None,
        WAIT=early(out.device),
    )
    halves = [part for side in (x, w) for part in (side.hi, side.hi if side.lo is None else side.lo, side.unit)]
    bias, mask = (y if y is None else y.contiguous() for y in (bias, mask))
    others = [x.unit if y is None else y for y in (bias, gate, mask, base)]
    launch_kernel(
        kernels.product_kernel,
        batches * -(-m // tile.m) * -(-n // tile.n),
        (*halves, *others, out),
        gate=Rows(None, 0 if gate is None else gate.stride(0)),
        base=Rows(None, 0 if base is None else base.stride(0)),
        out=Rows(None, out.stride(0)),
        m=m,
        n=n,
        k=k,
        sharing=kernels.Sharing(positions, samples),
        one=1.0,
        V=variant,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **follows(out.device),
    )
    return out


def multiply_squares(ab: Tensor) -> Tensor:
    """t[i,j] = sum over k of a[i,k] b[j,k] for halves a, then b, `[2 D, B, P, P]` in float32. It writes over them."""
    rows = ab.view(-1, ab.shape[-1])
    halves = split(rows, out=Halves.inside(rows))
    count = rows.shape[0] // 2
    t = product(halves.rows(0, count), halves.rows(count, count), batches=count // ab.shape[-1])
    return t.view(-1, *ab.shape[1:])


def packed(weight: Tensor) -> Tensor:
    """A weight `[N, K]` as `kit.halves.load_factor` reads it: halves in the bits of as many numbers, with unit behind them."""
    numbers = weight.numel()
    memory = torch.empty(numbers + weight.shape[0], dtype=torch.float32, device=weight.device)
    hi, lo = memory[:numbers].view(torch.float16).view(2, *weight.shape)
    split(weight, out=Halves(hi, lo, memory[numbers:]))
    return memory[:numbers].view(weight.shape)


class _Choice(NamedTuple):
    """A tile, how many programs of it a processor runs at a time, and its time for each output, relative to the first one's."""

    tile: ProductTile
    resident: int
    slowness: float


_TILES = {
    True: (
        _Choice(ProductTile(64, 128, 32, 4, 4), 2, 1.0),
        _Choice(ProductTile(64, 64, 64, 4, 3), 2, 1.08),
        _Choice(ProductTile(32, 64, 64, 4, 3), 3, 1.5),
        _Choice(ProductTile(16, 64, 64, 4, 3), 3, 1.9),
    ),
    False: (
        _Choice(ProductTile(64, 128, 64, 4, 3), 2, 1.0),
        _Choice(ProductTile(64, 64, 64, 4, 4), 2, 1.1),
        _Choice(ProductTile(32, 32, 128, 4, 3), 2, 2.3),
    ),
}
"""By whether lo is multiplied too: the fastest of 71 and 36 tiles for the products of Boltz-2's denoiser on an H100."""


def tile_of(m: int, n: int, k: int, device: torch.device, *, low: bool, batches: int = 1) -> ProductTile:
    """The tile of products `[M, K] [N, K]^T` that keeps all processors busy for the shortest time."""
    count, memory = processors(device), cards.shared_memory_limit(device)

    def time(choice: _Choice) -> float:
        tile, resident, slowness = choice
        waves = -(-(batches * -(-m // tile.m) * -(-n // tile.n)) // (count * resident))
        return waves * resident * tile.m * tile.n * slowness

    fitting = [x for x in _TILES[low] if (x.tile.m + x.tile.n) * x.tile.k * x.tile.stages * (4 if low else 2) <= memory]
    return min(fitting or _TILES[low][-1:], key=time).tile
