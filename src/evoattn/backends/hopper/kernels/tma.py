"""Copies between tensors and shared memory by the copy engine (TMA)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from evoattn.backends.hopper.kernels.ring import Ring

__all__ = ["Tma", "TmaTiles", "bulk_load", "load_tma", "store_tma"]


class Tma(NamedTuple):
    """A copy that is set up by the host: the copy atom, and the tensor as the copy engine addresses it."""

    atom: Any
    tensor: Any


def load_tma(x: Any, layout: Any, tile: tuple[int, ...], axes: tuple[int, ...] = (3, 4, 2, 1, 0)) -> Tma:
    """Set up loads of tiles [l,d] of a tensor [b,n,h,l,d] into shared memory, whose `layout` has several tiles."""
    return _tma(cpasync.CopyBulkTensorTileG2SOp(), x, layout, tile, axes)


def store_tma(x: Any, layout: Any, tile: tuple[int, ...]) -> Tma:
    """Set up stores of tiles [l,d] from shared memory to a tensor [b,n,h,l,d]."""
    return _tma(cpasync.CopyBulkTensorTileS2GOp(), x, layout, tile, (3, 4, 2, 1, 0))


def _tma(operation: Any, x: Any, layout: Any, tile: tuple[int, ...], axes: tuple[int, ...]) -> Tma:
    view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(axes)))
    return Tma(*cpasync.make_tiled_tma_atom(operation, view, cute.slice_(layout, (None, None, 0)), tile))


@dataclasses.dataclass(frozen=True)
class TmaTiles:
    """The tiles of a tensor, by number, h, n and b, and those in shared memory, by number.

    Args:
        atom: copies one.
        gX, sX: the tiles in global memory and in shared memory.
    """

    atom: Any
    gX: Any
    sX: Any

    @classmethod
    def of(cls, tma: Tma, tile: tuple[int, ...], shared: Any, axes: tuple[Any, ...] = (None, 0, None, None, None)) -> TmaTiles:
        """The tiles of a copy that the host has set up; `axes`: None for those that tiles are numbered along."""
        gX = cute.group_modes(cute.local_tile(tma.tensor, tile, axes), 0, 2)
        sX, gX = cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), gX)
        return cls(tma.atom, gX, sX)

    def load(self, at: tuple[Any, ...], to: Any, ring: Ring, stage: Any) -> None:
        """Load the tile at `at` into tile `to` of shared memory, for a stage of a ring, by a whole warp."""
        source = (None, *at)
        cute.copy(self.atom, self.gX[source], self.sX[None, to], tma_bar_ptr=ring.barrier(stage))

    def store(self, tile: Any, to: tuple[Any, ...]) -> None:
        """Store a tile of shared memory, by a whole warp."""
        target = (None, *to)
        cute.copy(self.atom, self.sX[None, tile], self.gX[target])


def bulk_load(source: Any, target: Any, ring: Ring, stage: Any) -> None:
    """Load a contiguous tensor into shared memory, for a stage of a ring, by one thread."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), target.element_type)
    whole, part = (cute.group_modes(x, 0, cute.rank(x)) for x in (source, target))
    cute.copy(atom, whole, part, mbar_ptr=ring.barrier(stage))
