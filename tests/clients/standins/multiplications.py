"""Stand-ins for the triangle multiplications of OpenFold and Boltz."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.clients.standins import CHANNELS

HIDDEN = 6


def dense(z: Tensor, mask: Tensor | None, outgoing: bool, norms: Any, halves: Callable[[Tensor], Any], z_and_g: Any) -> Tensor:
    """The definition, entry by entry."""
    y = norms[0](z)
    a, b = (x if mask is None else x * mask[..., None] for x in halves(y))
    t = torch.einsum("...ikd,...jkd->...ijd" if outgoing else "...kid,...kjd->...ijd", a, b)
    replaced: Tensor = z_and_g[0](norms[1](t)) * z_and_g[1](y).sigmoid()
    return replaced


class Base(nn.Module):
    """What OpenFold's have in common."""

    def __init__(self, outgoing: bool) -> None:
        super().__init__()
        self.c_z, self.c_hidden, self._outgoing = CHANNELS, HIDDEN, outgoing
        self.linear_g, self.linear_z = nn.Linear(CHANNELS, CHANNELS), nn.Linear(HIDDEN, CHANNELS)
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(CHANNELS), nn.LayerNorm(HIDDEN)
        self.sigmoid = nn.Sigmoid()

    def forward(
        self,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
        window: Any = None,
    ) -> Tensor:
        norms, outputs = (self.layer_norm_in, self.layer_norm_out), (self.linear_z, self.linear_g)
        return dense(z, mask, self._outgoing, norms, self.halves, outputs)

    def halves(self, y: Tensor) -> Any:
        raise NotImplementedError


class Split(Base):
    """Stands for OpenFold's."""

    def __init__(self, outgoing: bool) -> None:
        super().__init__(outgoing)
        self.linear_a_p, self.linear_a_g = nn.Linear(CHANNELS, HIDDEN), nn.Linear(CHANNELS, HIDDEN)
        self.linear_b_p, self.linear_b_g = nn.Linear(CHANNELS, HIDDEN), nn.Linear(CHANNELS, HIDDEN)

    def halves(self, y: Tensor) -> Any:
        yield self.linear_a_p(y) * self.linear_a_g(y).sigmoid()
        yield self.linear_b_p(y) * self.linear_b_g(y).sigmoid()


class Fused(Base):
    """Stands for the one of AlphaFold-Multimer in OpenFold."""

    def __init__(self, outgoing: bool) -> None:
        super().__init__(outgoing)
        self.linear_ab_p, self.linear_ab_g = nn.Linear(CHANNELS, 2 * HIDDEN), nn.Linear(CHANNELS, 2 * HIDDEN)

    def halves(self, y: Tensor) -> Any:
        return (self.linear_ab_p(y) * self.linear_ab_g(y).sigmoid()).chunk(2, -1)


class Out(nn.Module):
    """Stands for Boltz's, which has no switch for the direction."""

    outgoing = True

    def __init__(self) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.p_in, self.g_in = (nn.Linear(CHANNELS, 2 * CHANNELS, bias=False) for _ in range(2))
        self.p_out, self.g_out = (nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, use_kernels: bool = False) -> Tensor:
        norms, outputs = (self.norm_in, self.norm_out), (self.p_out, self.g_out)
        return dense(x, mask, self.outgoing, norms, self.halves, outputs)

    def halves(self, y: Tensor) -> Any:
        return (self.p_in(y) * self.g_in(y).sigmoid()).chunk(2, -1)


class In(Out):
    outgoing = False
