"""How many warps a tile of the GPU kernels can hold: the one rule that every tile keeps, whoever chose it.

A program owns rows and loops over columns: queries and keys in the forward, in dQ and in the pair-bias gradient, keys and
queries in dK and dV. Each warp takes 16 rows of a product. If there are more warps than that, several share their rows, and
each takes a part of the columns.

The rule, from 64 rows on:

* float32 on Hopper: no warps share rows.
* Elsewhere: warps may share rows if each has 16 columns of its own.

The reason: from 64 rows on, Hopper multiplies by wgmma. Four warps take 64 rows. If warps share rows, the address of the second
factor depends on the warp. ptxas 12.8, which is part of Triton 3.6 and 3.7, then makes wrong code of float32's three TF32
products. It computes some of these addresses from registers that nothing has written. The product reads other shared memory,
or some that does not exist. ptxas 12.9 makes right code of the same PTX.

`tests/helpers/descriptors.py` compares the addresses in PTX with those in machine code. All wrong kernels that it found are
float32 with shared rows. They have 8 columns a warp, or 16 channels of one kind and more of the other. There are such kernels
in the forward, in dQ and in dK, dV. None of bfloat16 was wrong.

Below 64 rows no product has such addresses. Warps without rows or columns of their own repeat the work of others, which is
right.
"""

from __future__ import annotations

from typing import Protocol

import torch

from evoattn.core.sizes import MIN_TILE

__all__ = ["KERNELS", "Tile", "fit", "keeps_rule", "most_warps"]

KERNELS = ("forward", "dq", "dkdv", "pair")
"""The kernels that have tiles."""

_WARPGROUP_ROWS = 64
"""Rows from which a product may go through wgmma."""

_COLUMNS = 16
"""Columns that a warp needs of its own if warps share rows."""

_HOPPER = 9
_MOST_WARPS = 16

Capability = tuple[int, int] | None


class Tile(Protocol):
    """What the rule looks at; `ForwardTiles` and `Tiles` have it."""

    @property
    def block_q(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def num_warps(self) -> int: ...


def most_warps(kernel: str, block_q: int, block_k: int, dtype: torch.dtype, capability: Capability) -> int:
    """The most warps that a tile can hold.

    Args:
        kernel: one of `KERNELS`.
        block_q, block_k: queries and keys of the tile.
        dtype: of q, k and v.
        capability: compute capability of an NVIDIA card; None elsewhere.
    """
    rows, columns = (block_k, block_q) if kernel == "dkdv" else (block_q, block_k)
    if rows < _WARPGROUP_ROWS:
        return _MOST_WARPS
    shares = 1 if _never_shares(dtype, capability) else columns // _COLUMNS
    return min(_MOST_WARPS, rows // MIN_TILE * shares)


def keeps_rule(kernel: str, tile: Tile, dtype: torch.dtype, capability: Capability) -> bool:
    """Whether the tile can hold its warps."""
    return tile.num_warps <= most_warps(kernel, tile.block_q, tile.block_k, dtype, capability)


def fit(kernel: str, tile: Tile, given: dict[str, int], dtype: torch.dtype, capability: Capability) -> dict[str, int]:
    """The fields to change so that a tile keeps the rule; none if it does.

    What the user set stays. Without a number of warps among it there are fewer warps. Otherwise the rows become few enough, or
    the columns many enough. The backend refuses a config that leaves no way.

    Args:
        kernel: one of `KERNELS`.
        tile: as it is now.
        given: what the user set, by name.
        dtype, capability: as in `most_warps`.
    """
    if keeps_rule(kernel, tile, dtype, capability):
        return {}
    rows, columns = ("block_k", "block_q") if kernel == "dkdv" else ("block_q", "block_k")
    if "num_warps" in given and rows not in given:
        return {rows: _WARPGROUP_ROWS // 2}
    if "num_warps" in given and columns not in given and not _never_shares(dtype, capability):
        return {columns: _COLUMNS * MIN_TILE * tile.num_warps // getattr(tile, rows)}
    return {"num_warps": most_warps(kernel, tile.block_q, tile.block_k, dtype, capability)}


def _never_shares(dtype: torch.dtype, capability: Capability) -> bool:
    return dtype == torch.float32 and capability is not None and capability[0] == _HOPPER
