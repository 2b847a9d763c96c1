"""Layers between an alignment and a pair representation: outer product mean, pair-weighted averaging."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evoattn.core.devices import uncast
from evoattn.core.numerics import accumulate_dtype
from evoattn.dispatch.checks import check_mask
from evoattn.nn.attention import add_residual, check_input, check_shares, heads
from evoattn.nn.initial import Layer, start
from evoattn.nn.project import compute_dtype_of, layer_norm, linear, project
from evoattn.nn.submodules import is_linear
from evoattn.pair.averaging import pair_weighted_averaging
from evoattn.pair.outer_product import all_sums, outer_product_mean


class OuterProductMean(Layer):
    """Update a pair representation from an alignment: for columns i, j the mean over its sequences of the outer product.

    No tensor of all products is made, in neither pass. Parameters have OpenFold's names: `layer_norm`, `linear_1` (of i),
    `linear_2` (of j) and `linear_out`.

    Args:
        c_m: channels of the alignment.
        c_z: channels of the pair representation.
        c_hidden: channels C of each half. `linear_out` has C^2 input channels, those of `linear_1` first.
        eps: is added to the number of sequences by which the sum, projected and with its bias, is divided.
        at_least_one: True: the sum is divided by the number of sequences, or by 1 if there is none, and then projected, as in
            Boltz. `eps` is not used.

    Example:
        >>> import torch
        >>> from evoattn.nn import OuterProductMean
        >>> layer = OuterProductMean(c_m=16, c_z=8, c_hidden=4)
        >>> layer(torch.randn(1, 5, 12, 16), torch.ones(1, 5, 12)).shape
        torch.Size([1, 12, 12, 8])

    Source: Jumper et al. 2021, supplementary algorithm 10; Abramson et al. 2024, algorithm 9.
    """

    def __init__(self, c_m: int, c_z: int, c_hidden: int, eps: float = 1e-3, *, at_least_one: bool = False) -> None:
        super().__init__()
        self.c_m, self.c_z, self.c_hidden, self.eps, self.at_least_one = c_m, c_z, c_hidden, eps, at_least_one
        self.layer_norm = nn.LayerNorm(c_m)
        self.linear_1, self.linear_2 = (nn.Linear(c_m, c_hidden) for _ in range(2))
        self.linear_out = nn.Linear(c_hidden**2, c_z)
        for projection in (self.linear_1, self.linear_2):
            start(projection, "lecun")
        start(self.linear_out, "zeros")

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the update of the pair representation.

        Args:
            m: the alignment, `[*, S, L, c_m]`.
            mask: `[*, S, L]`, 1 or True for a residue that counts. None: all do. A float mask is a factor.

        Returns:
            `[*, L, L, c_z]` in the compute dtype.

        Raises:
            TypeError, ValueError: m or mask has a wrong type or shape.
        """
        check_input("m", m, 3, self.c_m)
        check_mask("mask", mask, tuple(m.shape[:-1]))
        a, b = project(m, self.layer_norm, (self.linear_1, self.linear_2))
        if mask is not None:
            factor = mask.unsqueeze(-1).to(a.dtype)
            a, b = a * factor, b * factor
        counts = self._counts(m, mask)
        last = self.linear_out
        if not is_linear(last) or counts.requires_grad:
            return self._by_calls(a, b, counts)
        return outer_product_mean(a, b, last.weight, last.bias, counts=counts, divides_bias=not self.at_least_one)

    def _counts(self, m: Tensor, mask: Tensor | None) -> Tensor:
        """The numbers `[*, L, L]` by which sums are divided, in float32 or wider."""
        dtype, (*lead, sequences, length, _) = accumulate_dtype(m.dtype), m.shape
        if mask is None:
            counts = torch.full((), sequences, dtype=dtype, device=m.device).expand(*lead, length, length)
        else:
            factor = mask.to(dtype).expand(m.shape[:-1])
            with uncast(m.device):
                counts = factor.mT @ factor
        return counts.clamp(min=1) if self.at_least_one else counts + self.eps

    def _by_calls(self, a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        """The update, with `linear_out` called."""
        with uncast(a.device):
            o = all_sums(a, b)
        counts = counts.unsqueeze(-1)
        if self.at_least_one:
            return linear((o / counts).to(a.dtype), self.linear_out)
        return linear(o.to(a.dtype), self.linear_out) / counts.to(a.dtype)


class MSAPairWeightedAveraging(Layer):
    """Update each sequence of an alignment by means of its own residues, whose weights come from the pair representation.

    v and the gate of all sequences are never in memory at once, in neither pass. Parameters have OpenFold-3's names:
    `layer_norm_m`, `layer_norm_z`, `linear_z` (the weights), `linear_v`, `linear_g` (the gate) and `linear_o`.

    Args:
        c_m: channels of the alignment.
        c_z: channels of the pair representation.
        c_hidden: channels of a head.
        no_heads: heads H.
        inf: is subtracted from the score of a masked pair.
        residual: whether the layer returns m + update. Else it returns the update alone.

    Example:
        >>> import torch
        >>> from evoattn.nn import MSAPairWeightedAveraging
        >>> layer = MSAPairWeightedAveraging(c_m=16, c_z=8, c_hidden=4, no_heads=2)
        >>> layer(torch.randn(1, 5, 12, 16), torch.randn(1, 12, 12, 8)).shape
        torch.Size([1, 5, 12, 16])

    Source: Abramson et al. 2024, algorithm 10.
    """

    def __init__(self, c_m: int, c_z: int, c_hidden: int, no_heads: int, inf: float = 1e9, *, residual: bool = False) -> None:
        super().__init__()
        self.c_m, self.c_z, self.no_heads, self.inf, self.residual = c_m, c_z, no_heads, inf, residual
        width = c_hidden * no_heads
        self.layer_norm_m, self.layer_norm_z = nn.LayerNorm(c_m), nn.LayerNorm(c_z)
        self.linear_z = nn.Linear(c_z, no_heads, bias=False)
        self.linear_v, self.linear_g = (nn.Linear(c_m, width, bias=False) for _ in range(2))
        self.linear_o = nn.Linear(width, c_m, bias=False)
        for projection in (self.linear_z, self.linear_v):
            start(projection, "lecun")
        for projection in (self.linear_g, self.linear_o):
            start(projection, "zeros")

    def forward(self, m: Tensor, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the update of m, or m + update with `residual=True`.

        Args:
            m: the alignment, `[*, S, L, c_m]`.
            z: the pair representation, `[*, L, L, c_z]`.
            mask: `[*, L, L]`, 1 or True for a pair that counts. None: all do.

        Returns:
            `[*, S, L, c_m]` in the compute dtype, or with the residual in the dtype to which torch promotes m and the update.

        Raises:
            TypeError, ValueError: m, z or mask has a wrong type or shape.
        """
        check_input("m", m, 3, self.c_m)
        check_input("z", z, 3, self.c_z)
        check_shares("z", z, tuple(m.shape[:-3]), m.shape[-2], m.shape[-2])
        check_mask("mask", mask, tuple(z.shape[:-1]))
        dtype = compute_dtype_of(m, self.linear_v)
        p = self._weights(z, mask).to(dtype)
        update = self._update(layer_norm(m, self.layer_norm_m, dtype), p.expand(*m.shape[:-3], *p.shape[-3:]))
        return add_residual(m, update, None, residual=self.residual)

    def _update(self, y: Tensor, p: Tensor) -> Tensor:
        """The update of an alignment with the norm y, by weights p `[*, H, L, L]`."""
        projections = (self.linear_v, self.linear_g, self.linear_o)
        plain = [is_linear(module) and module.bias is None for module in projections]  # not a generator, for Dynamo
        if all(plain):
            v_weight, g_weight, out_weight = (module.weight for module in projections)
            return pair_weighted_averaging(y, p, v_weight=v_weight, g_weight=g_weight, out_weight=out_weight)
        v, g = project(y, None, projections[:2])
        o = (p.unsqueeze(-4) @ heads(v, self.no_heads).transpose(-2, -3)).transpose(-2, -3).flatten(-2)
        return linear(g.sigmoid() * o, self.linear_o)

    def _weights(self, z: Tensor, mask: Tensor | None) -> Tensor:
        """The softmax over j, `[*, H, L, L]`, in float32 or wider.

        In float32 `inf` takes digits of the scores of a row that is masked everywhere, as in clients. Float64 keeps all.
        """
        (scores,) = project(z, self.layer_norm_z, (self.linear_z,))
        scores = scores.movedim(-1, -3).to(accumulate_dtype(scores.dtype))
        if mask is None:
            return scores.softmax(-1)
        mask = mask.unsqueeze(-3)
        if scores.dtype != torch.float64:
            return (scores + (mask.to(scores.dtype) - 1) * self.inf).softmax(-1)
        counts = mask.bool()
        return scores.masked_fill(~counts & counts.any(-1, keepdim=True), -torch.inf).softmax(-1)
