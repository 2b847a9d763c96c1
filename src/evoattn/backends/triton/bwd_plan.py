"""What every kernel of a backward call is planned from: sizes, strides and tiles, and the constants that follow from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from evoattn.backends.triton import launch
from evoattn.backends.triton.bwd_preprocess import PAD, GatePass
from evoattn.backends.triton.launch import Layout, Strided
from evoattn.backends.triton.prepare import RowBias
from evoattn.problem import Problem
from evoattn.tuning.heuristics_backward import BackwardTiles, Tiles

__all__ = ["Call", "round_up"]


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

    def row_strides(self) -> tuple[int, int]:
        """Strides of the row bias over b and n, in units of PAD."""
        return (0, 0) if self.rows is None else (self.rows.strides[0] // PAD, self.rows.strides[1] // PAD)

    def stats_sizes(self) -> tuple[int, int]:
        """Padded queries, and what lies between an lse and its delta, in units of PAD."""
        return self.stats.shape[-1] // PAD, self.stats.stride[0] // PAD

    def constants(self, tiles: Tiles, *more: Layout) -> dict[str, Any]:
        """Compile-time constants and launch options of all kernels; `more`: tensors besides, whose offsets may be long."""
        problem = self.problem
        return {
            "D": problem.d,
            "C": problem.c,
            "BLOCK_D": launch.head_block(problem.d),
            "BLOCK_C": launch.head_block(problem.c),
            "BLOCK_Q": tiles.block_q,
            "BLOCK_K": tiles.block_k,
            "STAGES": tiles.num_stages,
            "PAD": PAD,
            "GRAIN": self.layout.grain,
            "HAS_ROW": self.rows is not None,
            "EVEN_Q": problem.lq % tiles.block_q == 0,
            "EVEN_K": problem.lk % tiles.block_k == 0,
            "FOLD": launch.folds(self.scale),
            "PRECISION": launch.split_precision(problem.dtype, max(problem.d, problem.c)),
            "WIDE": self.layout.wide or launch.far_apart(self.stats) or any(layout.wide for layout in more),
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            **({"maxnreg": tiles.max_registers} if tiles.max_registers and not launch.on_amd() else {}),
        }


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not below length."""
    return -(-length // multiple) * multiple
