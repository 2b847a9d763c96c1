"""The pair block, and the block of AlphaFold 3's trunk, which has the single track beside it."""

from __future__ import annotations

import functools

from torch import Tensor

from evoattn.dispatch.checks import check_tensors, check_tensors_or_none
from evoattn.empty_rows.means import EmptyRows
from evoattn.nn.attention import check_overwritten, kept
from evoattn.nn.initial import Layer
from evoattn.nn.multiplication import TriangleMultiplication
from evoattn.nn.pair_bias import AttentionPairBias
from evoattn.nn.transition import Transition
from evoattn.nn.triangle import TriangleAttention


class PairBlock(Layer):
    """Update the pair representation: two triangle multiplications, two triangle attentions and a transition, with residuals.

    Layers and parameters have OpenFold-3's names: `tri_mul_out`, `tri_mul_in`, `tri_att_start`, `tri_att_end` and
    `pair_transition`. Each layer may be exchanged for another module that takes (z, mask), the transition for one that takes z,
    and returns z + update.

    Args:
        c_z: channels of the pair representation.
        c_hidden_mul: channels of the halves that the triangle multiplications multiply.
        c_hidden_att: channels of a head of the attentions.
        no_heads: heads H of the attentions.
        transition_n: the transition has transition_n * c_z hidden channels.
        inf: is subtracted from the scores of a masked key.
        dropout: probability in training, for all but the transition.
        activation: of the transition, as in `Transition`.
        bias: whether products add biases: in OpenFold 1 they do, in AlphaFold 3's family not.
        empty_rows: as in `TriangleAttention`.

    Raises:
        ValueError: `dropout` is not in [0, 1), or another option is not known.

    Example:
        >>> import torch
        >>> from evoattn.nn import PairBlock
        >>> block = PairBlock(c_z=16, c_hidden_mul=16, c_hidden_att=8, no_heads=2)
        >>> block(torch.randn(1, 12, 12, 16), torch.ones(1, 12, 12)).shape
        torch.Size([1, 12, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithm 6, lines 6 to 10; Abramson et al. 2024, algorithm 17, lines 2 to 6.
    """

    def __init__(
        self,
        c_z: int = 128,
        c_hidden_mul: int = 128,
        c_hidden_att: int = 32,
        no_heads: int = 4,
        transition_n: int = 4,
        inf: float = 1e9,
        *,
        dropout: float = 0.25,
        activation: str = "swiglu",
        bias: bool = False,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__()
        multiplication = functools.partial(TriangleMultiplication, c_z, c_hidden_mul, dropout=dropout, residual=True, bias=bias)
        attention = functools.partial(
            TriangleAttention, c_z, c_hidden_att, no_heads, inf=inf,
            dropout=dropout, residual=True, gate_bias=bias, out_bias=bias, empty_rows=empty_rows,
        )  # fmt: skip
        self.tri_mul_out, self.tri_mul_in = multiplication(outgoing=True), multiplication(outgoing=False)
        self.tri_att_start, self.tri_att_end = attention(starting=True), attention(starting=False)
        self.pair_transition = Transition(c_z, transition_n, activation=activation, bias=bias, residual=True)

    def forward(self, z: Tensor, mask: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """Compute the updated z.

        Args:
            z: the pair representation, `[*, L, L, c_z]`. A DTensor may be split by rows or by columns.
            mask: `[*, L, L]`, 1 or True for an edge that counts. None: all do. A DTensor if z is one.
            in_place: whether the result is written into z, in inference. It saves the memory of one z. A mask that shares
                memory with z is copied first. Not for DTensors.

        Returns:
            `[*, L, L, c_z]` in the dtype to which torch promotes z and the updates.

        Raises:
            TypeError, ValueError: z or mask has a wrong type or shape, or z cannot be overwritten.
        """
        options = {}  # a layer may be any module that takes (z, mask)
        if in_place:
            self._check_in_place(z)
            mask = kept(mask, z)
            options = {"in_place": True}
        for layer in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start, self.tri_att_end):
            z = layer(z, mask, **options)
        z = self.pair_transition(z, **options)
        return z

    def _check_in_place(self, z: Tensor) -> None:
        """Raise TypeError or ValueError before any work if a layer could not write into z."""
        check_tensors(z=z)
        for name, layer in self.named_children():
            if not isinstance(layer, (TriangleMultiplication, TriangleAttention, Transition)) or not layer.residual:
                kind, residual = type(layer).__name__, getattr(layer, "residual", None)
                found = f"a {kind} with residual={residual}"
                raise ValueError(f"in_place=True needs layers of evoattn.nn with residual=True, but {name} is {found}")
        check_overwritten(self, "z", z)


class PairformerBlock(Layer):
    """A block of AlphaFold 3's trunk: the pair block, then the attention with pair bias and the transition of the single track.

    Layers and parameters have OpenFold-3's names: `pair_stack`, `attn_pair_bias` and `single_transition`.

    Args:
        c_s: channels of the single representation.
        c_z: channels of the pair representation.
        c_hidden_pair_bias: channels of a head of the single track's attention.
        no_heads_pair_bias: heads of the single track's attention.
        c_hidden_mul, c_hidden_att, no_heads, transition_n, inf, dropout, empty_rows: as in `PairBlock`. Both tracks have the
            same `transition_n`, `inf` and `empty_rows`.

    Raises:
        ValueError: as `PairBlock`.

    Example:
        >>> import torch
        >>> from evoattn.nn import PairformerBlock
        >>> block = PairformerBlock(24, 16, 6, 4, c_hidden_mul=16, c_hidden_att=8, no_heads=2)
        >>> s, z = block(torch.randn(1, 12, 24), torch.randn(1, 12, 12, 16))
        >>> s.shape, z.shape
        (torch.Size([1, 12, 24]), torch.Size([1, 12, 12, 16]))

    Source: Abramson et al. 2024, algorithm 17.
    """

    def __init__(
        self,
        c_s: int = 384,
        c_z: int = 128,
        c_hidden_pair_bias: int = 24,
        no_heads_pair_bias: int = 16,
        c_hidden_mul: int = 128,
        c_hidden_att: int = 32,
        no_heads: int = 4,
        transition_n: int = 4,
        inf: float = 1e9,
        *,
        dropout: float = 0.25,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__()
        self.pair_stack = PairBlock(
            c_z, c_hidden_mul, c_hidden_att, no_heads, transition_n, inf, dropout=dropout, empty_rows=empty_rows
        )
        self.attn_pair_bias = AttentionPairBias(
            c_s, c_z, c_hidden_pair_bias, no_heads_pair_bias, inf=inf, residual=True, empty_rows=empty_rows
        )
        self.single_transition = Transition(c_s, transition_n, residual=True)

    def forward(
        self, s: Tensor, z: Tensor, mask: Tensor | None = None, pair_mask: Tensor | None = None, *, in_place: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the updated s and z.

        Args:
            s: the single representation, `[*, L, c_s]`. A DTensor if z is one.
            z: the pair representation, `[*, L, L, c_z]`. A DTensor may be split by rows or by columns.
            mask: `[*, L]`, 1 or True for a residue that is attended. None: all are. A DTensor if z is one.
            pair_mask: `[*, L, L]`, 1 or True for an edge that counts. None: all do. A DTensor if z is one.
            in_place: whether the new z is written into z, in inference. Other arguments that share memory with z are copied
                first. Not for DTensors.

        Returns:
            s `[*, L, c_s]` and z `[*, L, L, c_z]`, each in the dtype to which torch promotes it and its updates. If z is a
            DTensor, s is split along L as z is along its rows or columns.

        Raises:
            TypeError, ValueError: an argument has a wrong type or shape, or z cannot be overwritten.
        """
        check_tensors(s=s, z=z)
        check_tensors_or_none(mask=mask, pair_mask=pair_mask)
        if in_place:
            s, mask = kept(s, z), kept(mask, z)
        z = self.pair_stack(z, pair_mask, in_place=in_place)
        s = self.attn_pair_bias(s, z, mask=mask)
        s = self.single_transition(s)
        return s, z
