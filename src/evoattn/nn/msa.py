"""Attention in a multiple sequence alignment: along rows with a pair bias, along columns, and global along columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evoattn.dispatch.checks import check_mask, check_tensors
from evoattn.empty_rows.means import EmptyRows
from evoattn.nn.attention import (
    Attention,
    add_residual,
    attend,
    check_input,
    check_settings,
    check_shares,
    dropout_mask,
    heads,
    inputs_of,
)
from evoattn.nn.initial import Layer
from evoattn.nn.project import compute_dtype_of, layer_norm, linear, project
from evoattn.nn.submodules import may_skip


class MSAAttention(Layer):
    """Attention along rows or columns of an alignment: the module that OpenFold builds both of them from.

    Options are as in `TriangleAttention`; dropout is shared by all sequences. Without `c_z` there is no pair bias.
    """

    def __init__(
        self,
        c_in: int,
        c_hidden: int,
        no_heads: int,
        c_z: int | None = None,
        inf: float = 1e9,
        *,
        dropout: float = 0.0,
        residual: bool = False,
        gate_bias: bool = True,
        out_bias: bool = True,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__()
        check_settings(dropout, empty_rows)
        self.c_in, self.c_z, self.no_heads, self.inf = c_in, c_z, no_heads, inf
        self.dropout, self.residual, self.empty_rows = dropout, residual, empty_rows
        self.layer_norm_m = nn.LayerNorm(c_in)
        self.layer_norm_z = None if c_z is None else nn.LayerNorm(c_z)
        self.linear_z = None if c_z is None else nn.Linear(c_z, no_heads, bias=False)
        self.mha = Attention(c_in, c_in, c_hidden, no_heads, gate_bias=gate_bias, out_bias=out_bias)

    def forward(self, m: Tensor, z: Tensor | None = None, mask: Tensor | None = None, *, columns: bool = False) -> Tensor:
        """Compute the update of m `[*, S, L, c_in]`, with z `[*, L, L, c_z]` and a mask `[*, S, L]`, along rows or columns."""
        check_input("m", m, 3, self.c_in)
        check_mask("mask", mask, tuple(m.shape[:-1]))
        pair_bias = self._pair_bias(m, z)
        if columns:
            mask = None if mask is None else mask.transpose(-1, -2)
        update = self._update(m, mask, pair_bias, columns=columns)
        dropout_factor = dropout_mask(update, self.dropout, -3) if self.dropout and self.training else None
        return add_residual(m, update, dropout_factor, residual=self.residual)

    def _update(self, m: Tensor, mask: Tensor | None, pair_bias: Tensor | None, *, columns: bool) -> Tensor:
        """The update of m. The mask's rows are those of the attention."""
        mha = self.mha
        settings: dict[str, Any] = {"inf": self.inf, "empty_rows": self.empty_rows}
        if not may_skip(mha, Attention):
            y = layer_norm(m, self.layer_norm_m, compute_dtype_of(m, *inputs_of(mha)))
            rows = y.transpose(-2, -3) if columns else y
            update: Tensor = mha(rows, rows, mask, pair_bias, no_heads=self.no_heads, **settings)
            return update.transpose(-2, -3) if columns else update
        q, k, v, g = project(m, self.layer_norm_m, mha.inputs)
        if columns:
            q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
        q, k, v = (heads(x, self.no_heads) for x in (q, k, v))
        o = attend(q, k, v, mask, pair_bias, None if columns else heads(g, self.no_heads), **settings).flatten(-2)
        return mha.output(o.transpose(-2, -3), g) if columns else mha.output(o, None)

    def _pair_bias(self, m: Tensor, z: Tensor | None) -> Tensor | None:
        """The pair bias `[*, 1, H, L, L]`, a view of the projection of z."""
        if self.linear_z is None or self.c_z is None:
            if z is not None:
                check_tensors(z=z)
                raise ValueError(f"z must be None, got shape {list(z.shape)}: this attention was made without a pair bias")
            return None
        if z is None:
            raise ValueError("z must be given, got None: this attention was made with a pair bias")
        check_input("z", z, 3, self.c_z)
        check_shares("z", z, tuple(m.shape[:-3]), m.shape[-2], m.shape[-2])
        (bias,) = project(z, self.layer_norm_z, (self.linear_z,))
        return bias.movedim(-1, -3).unsqueeze(-4)


class MSARowAttentionWithPairBias(MSAAttention):
    """Row attention of an alignment: residues of a sequence attend to each other, with a pair bias that all sequences share.

    Parameters have OpenFold's names: `layer_norm_m`, `layer_norm_z`, `linear_z`, `mha.linear_q`, `_k`, `_v`, `_g`, `_o`.

    Args:
        c_m: channels of the alignment.
        c_z: channels of the pair representation.
        c_hidden: channels of a head.
        no_heads: heads H.
        inf, dropout, residual, gate_bias, out_bias, empty_rows: as in `TriangleAttention`; all sequences drop the same entries.

    Example:
        >>> import torch
        >>> from evoattn.nn import MSARowAttentionWithPairBias
        >>> layer = MSARowAttentionWithPairBias(c_m=16, c_z=8, c_hidden=8, no_heads=4)
        >>> layer(torch.randn(1, 5, 12, 16), torch.randn(1, 12, 12, 8), torch.ones(1, 5, 12)).shape
        torch.Size([1, 5, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithm 7.
    """

    def __init__(
        self,
        c_m: int,
        c_z: int,
        c_hidden: int,
        no_heads: int,
        inf: float = 1e9,
        *,
        dropout: float = 0.0,
        residual: bool = False,
        gate_bias: bool = True,
        out_bias: bool = True,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__(
            c_m, c_hidden, no_heads, c_z, inf,
            dropout=dropout, residual=residual, gate_bias=gate_bias, out_bias=out_bias, empty_rows=empty_rows,
        )  # fmt: skip

    def forward(self, m: Tensor, z: Tensor | None = None, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Compute the update of m, or m + update with `residual=True`.

        Args:
            m: the alignment, `[*, S, L, c_m]`.
            z: the pair representation, `[*, L, L, c_z]`.
            mask: `[*, S, L]`, 1 or True for a residue that is attended. None: all are.

        Returns:
            `[*, S, L, c_m]` in the compute dtype, or with the residual in the dtype to which torch promotes m and the update.

        Raises:
            TypeError, ValueError: m, z or mask has a wrong type or shape.
        """
        return super().forward(m, z, mask)


class MSAColumnAttention(Layer):
    """Column attention of an alignment: residues of a column attend to each other, over all sequences.

    The columns are strided views, so the alignment is never transposed in memory.

    Parameters have OpenFold's names, below `_msa_att`: `layer_norm_m`, `mha.linear_q`, `_k`, `_v`, `_g`, `_o`.

    Args:
        c_m: channels of the alignment.
        c_hidden: channels of a head.
        no_heads: heads H.
        inf, residual, gate_bias, out_bias, empty_rows: as in `TriangleAttention`.

    Example:
        >>> import torch
        >>> from evoattn.nn import MSAColumnAttention
        >>> MSAColumnAttention(c_m=16, c_hidden=8, no_heads=4)(torch.randn(1, 5, 12, 16)).shape
        torch.Size([1, 5, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithm 8.
    """

    def __init__(
        self,
        c_m: int,
        c_hidden: int,
        no_heads: int,
        inf: float = 1e9,
        *,
        residual: bool = False,
        gate_bias: bool = True,
        out_bias: bool = True,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__()
        self._msa_att = MSAAttention(
            c_m, c_hidden, no_heads, inf=inf, residual=residual, gate_bias=gate_bias, out_bias=out_bias, empty_rows=empty_rows
        )

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the update of m, or m + update with `residual=True`.

        Args:
            m: the alignment, `[*, S, L, c_m]`.
            mask: `[*, S, L]`, 1 or True for a residue that is attended. None: all are.

        Returns:
            `[*, S, L, c_m]` in the compute dtype, or with the residual in the dtype to which torch promotes m and the update.

        Raises:
            TypeError, ValueError: m or mask has a wrong type or shape.
        """
        return self._msa_att(m, mask=mask, columns=True)  # type: ignore[no-any-return]


class GlobalAttention(Attention):
    """The projections of a global attention, whose heads share one head of keys and values."""

    def forward(  # type: ignore[override]
        self, m: Tensor, mask: Tensor | None, *, no_heads: int, inf: float, eps: float, empty_rows: EmptyRows
    ) -> Tensor:
        """Compute the update of a normalised alignment m `[*, S, L, c_in]` with a mask `[*, S, L]`."""
        k, v, g = project(m, None, self.inputs[1:])
        q = heads(linear(_mean(m, mask, eps), self.linear_q), no_heads).unsqueeze(-2)  # [*,l,h,1,d]: heads as queries
        k, v = (x.transpose(-2, -3).unsqueeze(-2) for x in (k, v))  # [*,l,s,1,d]
        columns = None if mask is None else mask.transpose(-1, -2)
        o = attend(q, k, v, columns, None, None, inf=inf, empty_rows=empty_rows).flatten(-3)
        return self.output(o.unsqueeze(-3), g)  # one for all sequences


def _mean(normed: Tensor, mask: Tensor | None, eps: float) -> Tensor:
    """The mean of each column's residues, `[*, L, c_in]`, summed in float32 or wider."""
    sum_dtype = torch.promote_types(normed.dtype, torch.float32)
    if mask is None:
        return (normed.sum(-3, dtype=sum_dtype) / (normed.shape[-3] + eps)).to(normed.dtype)
    weights = mask.to(sum_dtype).expand(normed.shape[:-1]).unsqueeze(-1)  # one mask for all sequences counts for each
    return ((normed * weights).sum(-3) / (weights.sum(-3) + eps)).to(normed.dtype)


class MSAColumnGlobalAttention(Layer):
    """Global column attention: each column and head has one query, made from the mean of the column's residues.

    All heads share one head of keys and values.

    Parameters have OpenFold's names: `layer_norm_m`, `global_attention.linear_q`, `_k`, `_v`, `_g`, `_o`.

    Args:
        c_in: channels of the alignment.
        c_hidden: channels of a head.
        no_heads: heads H.
        inf: is subtracted from the scores of a masked residue.
        eps: is added to the number of residues by which their sum is divided.
        residual, gate_bias, out_bias, empty_rows: as in `TriangleAttention`.

    Example:
        >>> import torch
        >>> from evoattn.nn import MSAColumnGlobalAttention
        >>> MSAColumnGlobalAttention(c_in=16, c_hidden=8, no_heads=4)(torch.randn(1, 5, 12, 16)).shape
        torch.Size([1, 5, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithm 19.
    """

    def __init__(
        self,
        c_in: int,
        c_hidden: int,
        no_heads: int,
        inf: float = 1e9,
        eps: float = 1e-10,
        *,
        residual: bool = False,
        gate_bias: bool = True,
        out_bias: bool = True,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__()
        check_settings(0.0, empty_rows)
        self.c_in, self.no_heads, self.inf, self.eps = c_in, no_heads, inf, eps
        self.residual, self.empty_rows = residual, empty_rows
        self.layer_norm_m = nn.LayerNorm(c_in)
        self.global_attention = GlobalAttention(
            c_in, c_in, c_hidden, no_heads, gate_bias=gate_bias, out_bias=out_bias, shared=True
        )

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the update of m, or m + update with `residual=True`.

        Args:
            m: the alignment, `[*, S, L, c_in]`.
            mask: `[*, S, L]`, 1 or True for a residue that is attended. None: all are.

        Returns:
            `[*, S, L, c_in]` in the compute dtype, or with the residual in the dtype to which torch promotes m and the update.

        Raises:
            TypeError, ValueError: m or mask has a wrong type or shape.
        """
        check_input("m", m, 3, self.c_in)
        check_mask("mask", mask, tuple(m.shape[:-1]))
        attention = self.global_attention
        normed = layer_norm(m, self.layer_norm_m, compute_dtype_of(m, *inputs_of(attention)))
        settings = {"no_heads": self.no_heads, "inf": self.inf, "eps": self.eps, "empty_rows": self.empty_rows}
        return add_residual(m, attention(normed, mask, **settings), residual=self.residual)
