"""The way to d(pair bias): where its parts are summed, and which kernel rounds the sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MOST_IN_32_BITS", "PairGradient"]

MOST_IN_32_BITS = 2**31 - 1
"""The kernels that clear and round the sums of d(pair bias) count their elements in 32 bits; torch does it for more."""

_ROWS_THAT_HIDE_ROUNDING = 32
"""One warp of a block rounds d(pair bias) while the others go through n rows: it needs the time of a dozen."""


class PairGradient(NamedTuple):
    """The way to d(pair bias): blocks add to sums that were cleared, or leave parts that are summed in a fixed order.

    Args:
        wanted: how d(pair bias) lies in memory.
        sums: how that lies in memory which blocks add to, or which the parts are summed to.
        rounds: whether the kernel of the keys writes it from the sums.
        over: axes that are still to be summed.
        keys: of a line of the sums, which may be up to three longer.
    """

    wanted: Tensor
    sums: Tensor
    rounds: bool
    over: tuple[int, ...]
    keys: int

    @classmethod
    def of(cls, pair_bias: Tensor, sizes: tuple[int, int, int, int, int], deterministic: bool, idle: bool) -> PairGradient:
        """Of a pair bias [b|1,h|1,q|1,k|1] for sizes b, n, h, q, k; `idle`: the kernel of the keys has a warp to spare."""
        b, n, h, lq, lk = sizes
        shape, full = tuple(pair_bias.shape), (b, h, lq, lk)
        over = tuple(axis for axis in range(4) if shape[axis] != full[axis] and (deterministic or axis > 1))
        wanted = torch.empty(shape, dtype=pair_bias.dtype, device="meta")
        if deterministic:
            sums = torch.empty(full, dtype=torch.float32 if over else pair_bias.dtype, device="meta")
        else:
            sums = torch.empty((*shape[:2], lq, -(-lk // 4) * 4), dtype=torch.float32, device="meta")
        rounds = idle and not deterministic and not over and lk % 4 == 0 and n >= _ROWS_THAT_HIDE_ROUNDING
        rounds = rounds and sums.numel() <= MOST_IN_32_BITS and pair_bias.dtype != torch.float32
        return cls(wanted, sums, rounds, over, lk)

    def finish(self, sums: Tensor) -> Tensor:
        """d(pair bias) of the sums, where nobody rounded them."""
        lines = sums if sums.shape[-1] == self.keys else sums[..., : self.keys]
        return (lines.sum(self.over, keepdim=True) if self.over else lines).to(self.wanted.dtype).contiguous()
