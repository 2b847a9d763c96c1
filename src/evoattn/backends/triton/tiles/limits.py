"""The tiles of the kernels, and the rule for the warps that a tile can hold, which every tile keeps, whoever chose it.

A program owns rows and loops over columns: queries and keys in the forward, in dQ and in the pair-bias gradient, keys and
queries in dK and dV. Each warp takes 16 rows of a product. If there are more warps than that, several share their rows, and
each takes a part of the columns. The rule, from 64 rows on:

* float32 on Hopper: no warps share rows.
* Elsewhere: warps may share rows if each has 16 columns of its own.

The reason is a fault of ptxas 12.8, which docs/architecture.md describes: if warps share rows, a product by wgmma reads shared
memory at an address that depends on the warp, and may come from registers that nothing has written. Below 64 rows no product
has such addresses. Warps without rows or columns of their own then repeat the work of others, which is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import torch

from evoattn.core.sizes import MIN_TILE

KERNELS = ("forward", "dq", "dkdv", "pair")
"""The kernels that have tiles."""

_WARPGROUP_ROWS = 64
"""Rows from which a product may go through wgmma."""

_COLUMNS = 16
"""Columns that a warp needs of its own if warps share rows."""

_HOPPER = 9
_MOST_WARPS = 16

Capability = tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile of one kernel; every field is set.

    Args:
        block_q, block_k, num_warps, num_stages: as in Config.
        rows: rows n of one program (of the dQ kernel; 1 elsewhere).
        max_registers: most registers a thread on NVIDIA cards, so that one more program fits; 0: as the compiler likes.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    rows: int = 1
    max_registers: int = 0

    def as_dict(self) -> dict[str, int]:
        """The fields by name, without the last two if they have their defaults."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value != {"rows": 1, "max_registers": 0}.get(name)}

    def warps(self, block_q: int, least: int = 1) -> int:
        """Warps for a tile of block_q queries, which is smaller than self.block_q if a few queries are left over."""
        if block_q >= self.block_q:
            return self.num_warps
        return min(self.num_warps, max(least, block_q // MIN_TILE))


def shrink(tiles: Tiles, fixed: Collection[str], fits: Callable[[Tiles], bool]) -> Tiles:
    """The largest tiles that fit, or the smallest ones: fewer stages, then one row, then fewer keys, then fewer queries.

    Fields in `fixed`, which the user set, stay.
    """
    while not fits(tiles):
        if tiles.num_stages > 1 and "num_stages" not in fixed:
            tiles = dataclasses.replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.rows > 1:
            tiles = dataclasses.replace(tiles, rows=1)
        elif tiles.block_k > MIN_TILE and "block_k" not in fixed:
            tiles = dataclasses.replace(tiles, block_k=tiles.block_k // 2)
        elif tiles.block_q > MIN_TILE and "block_q" not in fixed:
            tiles = dataclasses.replace(tiles, block_q=tiles.block_q // 2)
        else:
            break
    return tiles


def most_warps(kernel: str, block_q: int, block_k: int, dtype: torch.dtype, capability: Capability) -> int:
    """The most warps that a tile of one of `KERNELS` can hold. `capability` is None but for NVIDIA cards."""
    rows, columns = (block_k, block_q) if kernel == "dkdv" else (block_q, block_k)
    if rows < _WARPGROUP_ROWS:
        return _MOST_WARPS
    shares = 1 if _never_shares(dtype, capability) else columns // _COLUMNS
    return min(_MOST_WARPS, rows // MIN_TILE * shares)


def keeps_rule(kernel: str, tile: Tiles, dtype: torch.dtype, capability: Capability) -> bool:
    """Return whether the tile can hold its warps."""
    return tile.num_warps <= most_warps(kernel, tile.block_q, tile.block_k, dtype, capability)


def fit(kernel: str, tile: Tiles, fixed: Collection[str], dtype: torch.dtype, capability: Capability) -> dict[str, int]:
    """The fields to change so that a tile of one of `KERNELS` keeps the rule; none if it does.

    Fields in `fixed`, which the user set, stay. Without a number of warps among them there are fewer warps. Otherwise the rows
    become few enough, or the columns many enough. The backend refuses a config that leaves no way.
    """
    if keeps_rule(kernel, tile, dtype, capability):
        return {}
    rows, columns = ("block_k", "block_q") if kernel == "dkdv" else ("block_q", "block_k")
    if "num_warps" in fixed and rows not in fixed:
        return {rows: _WARPGROUP_ROWS // 2}
    if "num_warps" in fixed and columns not in fixed and not _never_shares(dtype, capability):
        return {columns: _COLUMNS * MIN_TILE * tile.num_warps // getattr(tile, rows)}
    return {"num_warps": most_warps(kernel, tile.block_q, tile.block_k, dtype, capability)}


def _never_shares(dtype: torch.dtype, capability: Capability) -> bool:
    return dtype == torch.float32 and capability is not None and capability[0] == _HOPPER
