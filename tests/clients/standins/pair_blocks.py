"""Stand-ins for the pair blocks of OpenFold-3 and Boltz, and for their layers."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evoattn.nn as evoattn_nn
from tests.clients.standins import CHANNELS, register
from tests.clients.standins.multiplications import In, Out, Split

CALLS: list[str] = []
"""Own forwards of clients' layers that ran."""


class Attention(evoattn_nn.TriangleAttention):
    """Stands for OpenFold-3's and Boltz'."""

    def __init__(self, starting: bool = True) -> None:
        super().__init__(CHANNELS, 4, 2, starting)
        self.c_hidden = 4

    @property
    def linear_z(self) -> nn.Module:
        """OpenFold-3's name of `linear`."""
        return self.linear

    def forward(self, x: Tensor, mask: Any = None, transpose_bias: bool = False, **_: Any) -> Tensor:  # type: ignore[override]
        CALLS.append("attention")
        return super().forward(x, mask, transpose_bias=transpose_bias)


class Multiplied(Split):
    """Stands for OpenFold-3's triangle multiplication, which is OpenFold's."""

    def forward(self, z: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        CALLS.append("multiplication")
        return super().forward(z, mask)


class Wide(evoattn_nn.Transition):
    """Stands for a transition of OpenFold-3."""

    def __init__(self) -> None:
        super().__init__(CHANNELS, 2)
        self.swiglu.swish = nn.SiLU()

    def forward(self, x: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        CALLS.append("transition")
        return super().forward(x, mask)


class Rowwise(nn.Module):
    """Stands for OpenFold-3's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.batch_dim = nn.Dropout(0.4), [-3]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * self.dropout(x.new_ones([1 if axis in self.batch_dim else n for axis, n in enumerate(x.shape, -x.ndim)]))  # type: ignore[no-any-return]


class Pairs(nn.Module):
    """Stands for OpenFold-3's pair block."""

    def __init__(self) -> None:
        super().__init__()
        self.tri_mul_out, self.tri_mul_in = Multiplied(True), Multiplied(False)
        self.tri_att_start, self.tri_att_end = Attention(), Attention()
        self.pair_transition, self.ps_dropout_row_layer = Wide(), Rowwise()

    def forward(
        self,
        z: Tensor,
        pair_mask: Tensor,
        inplace_safe: bool = False,
        _mask_trans: bool = True,
        _attn_chunk_size: Any = None,
        window: Any = None,
    ) -> Tensor:
        drop = self.ps_dropout_row_layer
        z = z + drop(self.tri_mul_out(z, pair_mask))
        z = z + drop(self.tri_mul_in(z, pair_mask))
        z = z + drop(self.tri_att_start(z, pair_mask))
        z = z.transpose(-2, -3)
        z = z + drop(self.tri_att_end(z, pair_mask.transpose(-1, -2), transpose_bias=True))
        z = z.transpose(-2, -3)
        return z + self.pair_transition(z, pair_mask if _mask_trans else None)  # type: ignore[no-any-return]


def get_dropout_mask(dropout: float, z: Tensor, training: bool, columnwise: bool = False) -> Tensor:
    """Stands for Boltz'."""
    dropout = dropout * training
    v = z[:, 0:1, :, 0:1] if columnwise else z[:, :, 0:1, 0:1]
    kept: Tensor = torch.rand(v.shape, dtype=torch.float32, device=v.device) >= dropout
    return kept * 1.0 / (1.0 - dropout)


class Layer(nn.Module):
    """Stands for Boltz' layer of the trunk, with its single track."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.4
        self.tri_mul_out, self.tri_mul_in = Out(), In()
        self.tri_att_start, self.tri_att_end = Attention(), Attention(starting=False)
        self.transition_z, self.transition_s = Wide(), nn.Linear(6, 6)
        self.pre_norm_s, self.s_post_norm = nn.LayerNorm(6), nn.Identity()
        self.attention = Track()

    def forward(
        self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, chunk_size_tri_attn: Any = None, use_kernels: bool = False
    ) -> tuple[Tensor, Tensor]:
        for update, columns in (
            (self.tri_mul_out, False), (self.tri_mul_in, False), (self.tri_att_start, False), (self.tri_att_end, True),
        ):  # fmt: skip
            dropout = get_dropout_mask(self.dropout, z, self.training, columnwise=columns)
            z = z + dropout * update(z, mask=pair_mask)
        z = z + self.transition_z(z)
        normed = self.pre_norm_s(s.float())
        s = s.float() + self.attention(s=normed, z=z.float(), mask=mask.float(), k_in=normed)
        return self.s_post_norm(s + self.transition_s(s)), z


class Track(nn.Module):
    """Stands for Boltz' attention of the single track."""

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor) -> Tensor:
        return torch.softmax(z.sum(-1), -1) @ (k_in * mask[..., None])


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take these classes for OpenFold-3's and Boltz'."""
    openfold3, boltz = "openfold3.core.model", "boltz.model.layers"
    names: dict[type[nn.Module], str] = {
        Attention: f"{openfold3}.layers.triangular_attention.TriangleAttention",
        Multiplied: f"{openfold3}.layers.triangular_multiplicative_update.TriangleMultiplicativeUpdate",
        Wide: f"{openfold3}.layers.transition.SwiGLUTransition",
        Out: f"{boltz}.triangular_mult.TriangleMultiplicationOutgoing",
        In: f"{boltz}.triangular_mult.TriangleMultiplicationIncoming",
        Pairs: f"{openfold3}.latent.base_blocks.PairBlock",
        Layer: f"{boltz}.pairformer.PairformerLayer",
    }
    register(monkeypatch, names)
    module = types.ModuleType(f"{boltz}.pairformer")
    module.get_dropout_mask = get_dropout_mask  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
