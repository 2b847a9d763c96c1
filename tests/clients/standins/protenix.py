"""Stand-ins for Protenix' pair block and its layers."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evoattn.nn as evoattn_nn
from tests.clients.standins import CHANNELS, register
from tests.clients.standins.multiplications import Split

CALLS: list[str] = []
"""Own forwards of stand-ins that ran."""

UNSCALED = ("cuequivariance", "deepspeed")


class Attention(evoattn_nn.TriangleAttention):
    """Stands for the triangle attention. A factor of 3 stands for q that is not scaled, for few residues and some kernels."""

    def __init__(self, starting: bool = True) -> None:
        super().__init__(CHANNELS, 4, 2, starting)
        self.c_hidden = 4

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        triangle_attention: str = "torch",
        inplace_safe: bool = False,
    ) -> Tensor:
        CALLS.append("attention")
        factor = 3 if x.shape[-2] <= 16 and triangle_attention in UNSCALED else 1
        return factor * super().forward(x, mask)


class Multiplied(Split):
    """Stands for the triangle multiplication, whose update may be added in place."""

    def forward(  # type: ignore[override]
        self,
        z: Tensor,
        mask: Tensor | None = None,
        inplace_safe: bool = False,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = 256,
        triangle_multiplicative: str = "torch",
    ) -> Tensor:
        CALLS.append("multiplication")
        output = super().forward(z, mask)
        return z.add_(output) if inplace_safe and _add_with_inplace else output


class Wide(nn.Module):
    """Stands for the transition."""

    def __init__(self) -> None:
        super().__init__()
        self.layernorm1 = nn.LayerNorm(CHANNELS)
        self.linear_no_bias_a, self.linear_no_bias_b = (nn.Linear(CHANNELS, 20, bias=False) for _ in range(2))
        self.linear_no_bias = nn.Linear(20, CHANNELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append("transition")
        y = self.layernorm1(x)
        return self.linear_no_bias(F.silu(self.linear_no_bias_a(y)) * self.linear_no_bias_b(y))  # type: ignore[no-any-return]


class Track(nn.Module):
    """Stands for the attention of the single track."""

    def forward(self, a: Tensor, s: None, z: Tensor) -> Tensor:
        return torch.softmax(z.sum(-1), -1) @ a


def dropout_add_rowwise(residual: Tensor, x: Tensor, p_drop: float, training: bool) -> Tensor:
    if not training or p_drop == 0.0:
        return residual + x
    return residual + x * F.dropout(
        x.new_ones([1 if axis == x.ndim - 3 else size for axis, size in enumerate(x.shape)]), p_drop
    )


class Block(nn.Module):
    """Stands for the pairformer's block, with or without the single track."""

    def __init__(self, c_s: int) -> None:
        super().__init__()
        self.tri_mul_out, self.tri_mul_in = Multiplied(True), Multiplied(False)
        self.tri_att_start, self.tri_att_end = Attention(), Attention()
        self.pair_transition, self.p_drop, self.c_s = Wide(), 0.4, c_s
        if c_s:
            self.attention_pair_bias, self.single_transition = Track(), nn.Linear(c_s, c_s)

    def forward(
        self,
        s: Tensor | None,
        z: Tensor,
        pair_mask: Tensor | None,
        triangle_multiplicative: str = "torch",
        triangle_attention: str = "torch",
        inplace_safe: bool = False,
        chunk_size: int | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        turned = None if pair_mask is None else pair_mask.transpose(-1, -2)
        how: dict[str, Any] = {"inplace_safe": inplace_safe, "triangle_attention": triangle_attention, "chunk_size": chunk_size}
        drops = self.training and not inplace_safe
        for layer in (self.tri_mul_out, self.tri_mul_in):
            output = layer(z, pair_mask, inplace_safe, inplace_safe, triangle_multiplicative=triangle_multiplicative)
            z = output if inplace_safe else dropout_add_rowwise(z, output, self.p_drop, drops)
        z = dropout_add_rowwise(z, self.tri_att_start(z, pair_mask, **how), self.p_drop, drops)
        z = z.transpose(-2, -3).contiguous()
        z = dropout_add_rowwise(z, self.tri_att_end(z, turned, **how), self.p_drop, drops)
        z = z.transpose(-2, -3).contiguous()
        z = z + self.pair_transition(z)
        if self.c_s > 0:
            s = s + self.attention_pair_bias(a=s, s=None, z=z)
            s = s + self.single_transition(s)
        return s, z


class Heads(nn.Module):
    """Stands for the attention of the single track, samples and atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_hidden, self.num_heads = 6, 3, 2
        self.linear_q = nn.Linear(6, 6)
        self.linear_k, self.linear_v, self.linear_g, self.linear_o = (nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v, g = (to(x).unflatten(-1, (2, 3)) for to in (self.linear_q, self.linear_k, self.linear_v, self.linear_g))
        weights = (torch.einsum("...ihc,...jhc->...hij", q, k) / 3**0.5 + bias.movedim(-1, -3)).softmax(-1)
        o = torch.einsum("...hij,...jhc->...ihc", weights, v)
        return self.linear_o((o * g.sigmoid()).flatten(-2))  # type: ignore[no-any-return]


class PairBias(nn.Module):
    """Stands for the attention with pair bias, of the single track unless it has a condition s."""

    def __init__(self, has_s: bool = False) -> None:
        super().__init__()
        self.has_s, self.cross_attention_mode = has_s, False
        self.layernorm_a, self.attention = nn.LayerNorm(6), Heads()
        self.layernorm_z, self.linear_nobias_z = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 2, bias=False)

    def forward(
        self,
        a: Tensor,
        s: Tensor | None,
        z: Tensor,
        n_queries: int | None = None,
        n_keys: int | None = None,
        inplace_safe: bool = False,
        chunk_size: int | None = None,
        enable_efficient_fusion: bool = False,
        extra_attn_bias: Tensor | None = None,
    ) -> Tensor:
        CALLS.append("pair bias")
        bias = self.linear_nobias_z(self.layernorm_z(z))
        return self.attention(self.layernorm_a(a), bias if extra_attn_bias is None else bias + extra_attn_bias[..., None])  # type: ignore[no-any-return]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take these classes for Protenix'."""
    names: dict[type[nn.Module], str] = {
        Attention: "triangular.triangular.TriangleAttention",
        Multiplied: "triangular.triangular.TriangleMultiplicativeUpdate",
        Wide: "modules.primitives.Transition",
        PairBias: "modules.transformer.AttentionPairBias",
        Block: "modules.pairformer.PairformerBlock",
    }
    register(monkeypatch, {kind: f"protenix.model.{name}" for kind, name in names.items()})


def stand_in_unfused(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Take a module for Protenix' that says whether a kernel draws the dropout masks: none does."""
    module = types.ModuleType("protenix.model.modules.fused_ops")
    module.TRITON_FUSED_OPS_AVAILABLE = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module
