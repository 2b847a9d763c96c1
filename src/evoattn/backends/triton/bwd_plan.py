"""What every kernel of a backward call is planned from: sizes, strides and tiles, and the constants that follow from them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from evoattn.backends.triton import launch
from evoattn.backends.triton.arguments import Constant, RowView, View
from evoattn.backends.triton.bwd_preprocess import PAD, GatePass, Stats
from evoattn.backends.triton.launch import Layout, Strided
from evoattn.backends.triton.prepare import RowBias
from evoattn.backends.triton.tiles.backward import BackwardTiles, Tiles
from evoattn.core.problem import Problem

__all__ = ["Call", "Tile", "round_up"]


class Tile(NamedTuple):
    """Constants of all kernels.

    D and C are channels of keys and values, BLOCK_D and BLOCK_C the powers of two that hold them. EVEN_Q, EVEN_K: no tile
    reaches past the end. FOLD: see `primitives.scores`. WIDE: offsets are 64 bits long.
    """

    D: Constant
    C: Constant
    BLOCK_D: Constant
    BLOCK_C: Constant
    BLOCK_Q: Constant
    BLOCK_K: Constant
    STAGES: Constant
    PAD: Constant
    GRAIN: Constant
    HAS_ROW: Constant
    EVEN_Q: Constant
    EVEN_K: Constant
    FOLD: Constant
    PRECISION: Constant
    WIDE: Constant


@dataclasses.dataclass(frozen=True)
class Call:
    """One backward call before its tensors. `layout` is that of q, k, v, do and o.

    With a gate, `do` is do * sigmoid(gate), which the statistics' launch writes.
    """

    problem: Problem
    tiles: BackwardTiles
    device: torch.device
    layout: Layout
    o: Strided
    do: Strided
    dlse: Strided | None
    stats: Strided
    rows: RowBias | None
    scale: float
    heads_inside: bool
    gate: GatePass | None

    def views(self) -> dict[str, View]:
        """Of q, k, v and dO."""
        strides = self.layout.strides
        return {name: View(None, *strides[5 * i : 5 * i + 5]) for i, name in enumerate(("q", "k", "v", "dO"))}

    def row_view(self) -> RowView:
        """The row bias, with strides in units of PAD."""
        return RowView(None, *((0, 0) if self.rows is None else (step // PAD for step in self.rows.strides[:2])))

    def stats_view(self) -> Stats:
        """The statistics."""
        return Stats(None, None, self.stats.shape[-1] // PAD, self.stats.stride[0] // PAD)

    def tile(self, tiles: Tiles, *more: Layout) -> Tile:
        """The constants that all kernels have; `more`: tensors besides, whose offsets may be long."""
        problem = self.problem
        return Tile(
            D=problem.d,
            C=problem.c,
            BLOCK_D=launch.head_block(problem.d),
            BLOCK_C=launch.head_block(problem.c),
            BLOCK_Q=tiles.block_q,
            BLOCK_K=tiles.block_k,
            STAGES=tiles.num_stages,
            PAD=PAD,
            GRAIN=self.layout.grain,
            HAS_ROW=self.rows is not None,
            EVEN_Q=problem.lq % tiles.block_q == 0,
            EVEN_K=problem.lk % tiles.block_k == 0,
            FOLD=launch.folds(self.scale),
            PRECISION=launch.split_precision(problem.dtype, max(problem.d, problem.c)),
            WIDE=self.layout.wide or launch.far_apart(self.stats) or any(layout.wide for layout in more),
        )

    def options(self, tiles: Tiles) -> dict[str, int]:
        """Triton's options of all kernels."""
        limit = {"maxnreg": tiles.max_registers} if tiles.max_registers and not launch.on_amd() else {}
        return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **limit}


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not below length."""
    return -(-length // multiple) * multiple
