"""Triangle attention around the starting and the ending node."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from evoattn.dispatch.distributed import Split
from evoattn.empty_rows.means import EmptyRows
from evoattn.nn import gated
from evoattn.nn.attention import Attention, attend, check_settings, heads, inputs_of
from evoattn.nn.pair_layer import Epilogue, PairLayer
from evoattn.nn.project import compute_dtype_of, layer_norm, linear, project
from evoattn.nn.submodules import may_skip


class TriangleAttention(PairLayer):
    """Triangle attention around the starting or the ending node.

    Edge (i, j) attends to the edges (i, k) that share its start, or to the edges (k, j) that share its end.

    Parameters have OpenFold's names: `layer_norm`, `linear` (the pair bias), `mha.linear_q`, `_k`, `_v`, `_g`, `_o`. The ending
    node works on strided views, so the pair representation is never transposed in memory.

    Args:
        c_in: channels of the pair representation.
        c_hidden: channels of a head.
        no_heads: heads H.
        starting: True: around the starting node. False: around the ending node.
        inf: is subtracted from the scores of a masked key.
        dropout: probability in training. All rows i drop the same entries; around the ending node all columns j do.
        residual: whether the layer returns z + update. Else it returns the update alone.
        gate_bias, out_bias: whether `linear_g` and `linear_o` have biases: yes in OpenFold, no in OpenFold-3 and Boltz.
        empty_rows: the attention output of a row that is masked at every key. "mean": the mean of v, as in OpenFold. "native":
            0, which saves a few launches in a call with a mask.

    Raises:
        ValueError: `dropout` is not in [0, 1), or `empty_rows` is neither "mean" nor "native".

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
        super().__init__(dropout, residual)
        check_settings(dropout, empty_rows)
        self.c_in, self.no_heads, self.starting, self.inf = c_in, no_heads, starting, inf
        self.empty_rows = empty_rows
        self.layer_norm = nn.LayerNorm(c_in)
        self.linear = nn.Linear(c_in, no_heads, bias=False)
        self.mha = Attention(c_in, c_in, c_hidden, no_heads, gate_bias=gate_bias, out_bias=out_bias)

    def forward(self, z: Tensor, mask: Tensor | None = None, *, transpose_bias: bool = False, in_place: bool = False) -> Tensor:
        """Compute the update of z, or z + update with `residual=True`.

        Args:
            z: the pair representation, `[*, L, L, c_in]`. A transposed view is not copied. A DTensor may be split by rows or by
                columns.
            mask: `[*, L, L]`, 1 or True for an edge that is attended. None: all are. A DTensor if z is one.
            transpose_bias: whether to exchange queries and keys in the pair bias. OpenFold-3 needs this around the ending node,
                since it passes a transposed z.
            in_place: whether z + update is written into z, in inference. Not for DTensors.

        Returns:
            `[*, L, L, c_in]` in the compute dtype, or with the residual in the dtype to which torch promotes z and the update.

        Raises:
            TypeError, ValueError: z or mask has a wrong type or shape, or z cannot be overwritten.
        """
        self._check(z, mask, self.c_in, in_place)
        return self._compute(z, mask, Epilogue(None, self.residual, in_place), transpose_bias=transpose_bias)

    @property
    def _inputs(self) -> tuple[nn.Module, ...]:
        return inputs_of(self.mha)

    @property
    def _shared(self) -> int:
        """The axis of z that holds the rows of the attention: -3 around the starting node, else -2."""
        return -3 if self.starting else -2

    def _run(
        self, z: Tensor, mask: Tensor | None, split: Split | None, epilogue: Epilogue, *, transpose_bias: bool = False
    ) -> Tensor:
        """The output of a process that holds all of z, or the rows or columns of a `split`.

        The rows of the attention are rows of z around the starting node, and columns of z around the ending node. A process
        computes whole rows of the attention. If z is split along the other axis, one all-to-all exchanges rows and columns
        before the attention, and another one after it. It exchanges the normalised z, which is the narrower tensor. Every row
        needs the pair bias of all queries, so both nodes gather it. It has H channels.
        """
        if split is None and epilogue.residual and epilogue.dropout_mask is None and not (self.dropout and self.training):
            return self._update(z, mask, transpose_bias=transpose_bias, add_to=epilogue)
        if split is None or split.axis == self._shared:
            update = self._update(z, mask, None if split is None else split.gather, transpose_bias=transpose_bias)
        else:
            other = Split(split.group, self._shared, split.length)
            mask = None if mask is None else split.turned(mask.unsqueeze(-1)).squeeze(-1)
            normed = layer_norm(z, self.layer_norm, compute_dtype_of(z, *self._inputs, self.linear))
            update = self._update(split.turned(normed), mask, other.gather, normed=True, transpose_bias=transpose_bias)
            update = other.turned(update)
        return self._add(z, update, split, epilogue)

    def _update(
        self,
        z: Tensor,
        mask: Tensor | None,
        gather: Callable[[Tensor], Tensor] | None = None,
        *,
        transpose_bias: bool = False,
        normed: bool = False,
        add_to: Epilogue | None = None,
    ) -> Tensor:
        """Compute the update of z, or z + update if it is `add_to` an epilogue, which has a residual and no dropout.

        If this process holds only some rows of z, `gather` makes the pair bias `[*, L, K, H]` of all rows from that of its own.
        normed: whether z is normalised already.
        """
        if not self.starting and mask is not None:
            mask = mask.transpose(-1, -2)
        if not may_skip(self.mha, Attention):
            update = self._by_calls(z, mask, gather, transpose_bias=transpose_bias, normed=normed)
            return update if add_to is None else self._add(z, update, None, add_to)
        transposed = not z.is_contiguous() and z.transpose(-2, -3).is_contiguous()
        x = z.transpose(-2, -3) if transposed else z  # as it lies in memory
        mha = self.mha
        q, k, v, g, bias = project(x, None if normed else self.layer_norm, (*mha.inputs, self.linear))
        # across: the attention's rows are columns of x.
        #   z in memory   starting   across
        #   as it is      True       False
        #   as it is      False      True
        #   transposed    True       True
        #   transposed    False      False
        across = transposed == self.starting
        if across:
            q, k, v, bias = (y.transpose(-2, -3) for y in (q, k, v, bias))
        pair_bias = _pair_bias(bias, gather, transpose=transpose_bias)
        q, k, v = (heads(y, self.no_heads) for y in (q, k, v))
        fuses = add_to is not None and gated.takes(x, g, mha.linear_o, (q, k, v, bias, mask))
        gate = None if across or fuses else heads(g, self.no_heads)
        o = attend(q, k, v, mask, pair_bias, gate, inf=self.inf, empty_rows=self.empty_rows).flatten(-2)
        o = o.transpose(-2, -3) if across else o
        if add_to is not None and fuses:
            result = gated.add_gated(x, o, g, mha.linear_o, in_place=add_to.in_place)
            if add_to.in_place:
                return z
            return result.transpose(-2, -3) if transposed else result
        update = mha.output(o, g if across else None)
        update = update.transpose(-2, -3) if transposed else update
        return update if add_to is None else self._add(z, update, None, add_to)

    def _by_calls(
        self, z: Tensor, mask: Tensor | None, gather: Callable[[Tensor], Tensor] | None, *, transpose_bias: bool, normed: bool
    ) -> Tensor:
        """The update, with the attention called as a module. The mask's rows are those of the attention."""
        y = z if normed else layer_norm(z, self.layer_norm, compute_dtype_of(z, *self._inputs, self.linear))
        rows = y if self.starting else y.transpose(-2, -3)
        pair_bias = _pair_bias(linear(rows, self.linear), gather, transpose=transpose_bias)
        settings = {"no_heads": self.no_heads, "inf": self.inf, "empty_rows": self.empty_rows}
        update: Tensor = self.mha(rows, rows, mask, pair_bias, **settings)
        return update if self.starting else update.transpose(-2, -3)


def _pair_bias(bias: Tensor, gather: Callable[[Tensor], Tensor] | None, *, transpose: bool) -> Tensor:
    """The pair bias `[*, 1, H, Q, K]`, a view, of its projection `[*, Q, K, H]`, which `gather` completes."""
    bias = bias if gather is None else gather(bias)
    bias = bias.movedim(-1, -3).unsqueeze(-4)
    return bias.transpose(-1, -2) if transpose else bias
