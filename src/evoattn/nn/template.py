"""Template pointwise attention: each pair of residues attends to the same pair in every template."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evoattn.dispatch.checks import check_mask
from evoattn.empty_rows.means import EmptyRows
from evoattn.nn.attention import Attention, add_residual, attend, check_input, check_settings, heads
from evoattn.nn.initial import Layer
from evoattn.nn.project import project
from evoattn.nn.submodules import may_skip


class TemplatePointwiseAttention(Layer):
    """Template attention: pair (i, j) attends to pair (i, j) of every template. There is no norm, gate or pair bias.

    Parameters have OpenFold's names: `mha.linear_q`, `_k`, `_v`, `_o`. Keys and values are
    strided views, so templates are never transposed in memory.

    Args:
        c_t: channels of a template.
        c_z: channels of the pair representation.
        c_hidden: channels of a head.
        no_heads: heads H.
        inf: is subtracted from the score of a masked template.
        residual, out_bias, empty_rows: as in `TriangleAttention`.

    Example:
        >>> import torch
        >>> from evoattn.nn import TemplatePointwiseAttention
        >>> layer = TemplatePointwiseAttention(c_t=8, c_z=16, c_hidden=8, no_heads=4)
        >>> layer(torch.randn(1, 3, 12, 12, 8), torch.randn(1, 12, 12, 16), torch.ones(1, 3)).shape
        torch.Size([1, 12, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithm 17.
    """

    def __init__(
        self,
        c_t: int,
        c_z: int,
        c_hidden: int,
        no_heads: int,
        inf: float = 1e9,
        *,
        residual: bool = False,
        out_bias: bool = True,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__()
        check_settings(0.0, empty_rows)
        self.c_t, self.c_z, self.no_heads, self.inf = c_t, c_z, no_heads, inf
        self.residual, self.empty_rows = residual, empty_rows
        self.mha = Attention(c_z, c_t, c_hidden, no_heads, gating=False, out_bias=out_bias)

    def forward(self, t: Tensor, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the update of z, or z + update with `residual=True`.

        Args:
            t: the templates, `[*, T, I, J, c_t]`.
            z: the pair representation, `[*, I, J, c_z]`.
            mask: `[*, T]`, 1 or True for a template that is attended. None: all are.

        Returns:
            `[*, I, J, c_z]` in the compute dtype, or with the residual in the dtype to which torch promotes z and the update.

        Raises:
            TypeError, ValueError: t, z or mask has a wrong type or shape.
        """
        check_input("t", t, 4, self.c_t)
        check_input("z", z, 3, self.c_z)
        if (*t.shape[:-4], *t.shape[-3:-1]) != tuple(z.shape[:-1]):
            raise ValueError(f"t must have the axes of z and one of templates, got shapes {list(t.shape)} and {list(z.shape)}")
        check_mask("mask", mask, tuple(t.shape[:-3]))
        mask = None if mask is None else mask[..., None, None, :]
        return add_residual(z, self._update(t, z, mask), residual=self.residual)

    def _update(self, t: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
        """The update of z. The mask is `[*, 1, 1, T]`."""
        mha = self.mha
        settings: dict[str, Any] = {"inf": self.inf, "empty_rows": self.empty_rows}
        if not may_skip(mha, Attention):
            y = mha(z.unsqueeze(-2), t.movedim(-4, -2), mask, no_heads=self.no_heads, **settings)
            return y.squeeze(-2)  # type: ignore[no-any-return]
        (q,) = project(z, None, (mha.linear_q,))
        k, v = (x.movedim(-4, -2) for x in project(t, None, (mha.linear_k, mha.linear_v)))  # [*,i,j,t,hd]
        q, k, v = (heads(x, self.no_heads) for x in (q.unsqueeze(-2), k, v))
        return mha.output(attend(q, k, v, mask, None, None, **settings).flatten(-3), None)
