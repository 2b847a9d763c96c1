"""Triangle attention around the starting and the ending node."""

from __future__ import annotations

from torch import Tensor, nn

from evoattn.compat.empty_rows import EmptyRows
from evoattn.nn.attention import Attention, attend, check_input, check_mask, check_settings, heads, update
from evoattn.nn.project import project

__all__ = ["TriangleAttention"]


class TriangleAttention(nn.Module):
    """Edge (i, j) attends to the edges (i, k) that share its start, or to the edges (k, j) that share its end.

    Parameters have OpenFold's names: `layer_norm`, `linear` (the pair bias), `mha.linear_q`, `_k`, `_v`, `_g`, `_o`. The ending
    node works on strided views: the pair representation is never copied in the other order.

    Args:
        c_in: channels of the pair representation.
        c_hidden: channels of a head.
        no_heads: heads H.
        starting: around the starting node, else around the ending node.
        inf: what the scores of a masked key lose.
        dropout: probability, in training; all rows i drop the same entries, around the ending node all columns j.
        residual: whether the layer returns z + update, else the update alone.
        gate_bias, out_bias: whether `linear_g` and `linear_o` have biases: yes in OpenFold, no in OpenFold-3 and Boltz.
        empty_rows: what rows have that are masked at every key: "mean", the mean of v, as in OpenFold; or "native", 0 before
            the output product, which saves passes over memory where a mask is given.

    Raises:
        ValueError: `dropout` or `empty_rows` is not one of these.

    Example:
        >>> import torch
        >>> from evoattn.nn import TriangleAttention
        >>> layer = TriangleAttention(c_in=16, c_hidden=8, no_heads=4, starting=False)
        >>> layer(torch.randn(1, 12, 12, 16), torch.ones(1, 12, 12)).shape
        torch.Size([1, 12, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithms 13 and 14; Abramson et al. 2024, algorithms 14 and 15.
    """

    def __init__(
        self,
        c_in: int,
        c_hidden: int,
        no_heads: int,
        starting: bool = True,
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
        self.c_in, self.no_heads, self.starting, self.inf = c_in, no_heads, starting, inf
        self.dropout, self.residual, self.empty_rows = dropout, residual, empty_rows
        self.layer_norm = nn.LayerNorm(c_in)
        self.linear = nn.Linear(c_in, no_heads, bias=False)
        self.mha = Attention(c_in, c_in, c_hidden, no_heads, gate_bias=gate_bias, out_bias=out_bias)

    def forward(self, z: Tensor, mask: Tensor | None = None, *, transpose_bias: bool = False) -> Tensor:
        """The update of z, or z with its update.

        Args:
            z: the pair representation, `[*, I, J, c_in]`. One that is transposed in memory is read as it lies.
            mask: `[*, I, J]`, 1 or True where an edge is there; None: all are.
            transpose_bias: whether queries and keys change places in the pair bias, as OpenFold-3 has it around the ending
                node, where it hands the layer a transposed z.

        Returns:
            `[*, I, J, c_in]`, in the compute dtype; with the residual, as torch promotes z and that.

        Raises:
            TypeError, ValueError: z or mask do not fit.
        """
        check_input("z", z, 3, self.c_in)
        check_mask("mask", mask, tuple(z.shape[:-1]))
        turned = not z.is_contiguous() and z.transpose(-2, -3).is_contiguous()
        x = z.transpose(-2, -3) if turned else z  # as it lies in memory
        mha = self.mha
        q, k, v, g, bias = project(x, self.layer_norm, (*mha.inputs, self.linear))
        across = turned == self.starting  # the attention's rows are columns of x
        if across:
            q, k, v, bias = (y.transpose(-2, -3) for y in (q, k, v, bias))
        if mask is not None and not self.starting:
            mask = mask.transpose(-1, -2)
        pair_bias = bias.movedim(-1, -3).unsqueeze(-4)  # [*,1,h,q,k]
        if transpose_bias:
            pair_bias = pair_bias.transpose(-1, -2)
        q, k, v = (heads(y, self.no_heads) for y in (q, k, v))
        o = attend(q, k, v, mask, pair_bias, inf=self.inf, empty_rows=self.empty_rows).flatten(-2)
        made = mha.end(o.transpose(-2, -3) if across else o, g)
        made = made.transpose(-2, -3) if turned else made
        shared = -3 if self.starting else -2
        return update(z, made, residual=self.residual, dropout=self.dropout, shared=shared, training=self.training)
