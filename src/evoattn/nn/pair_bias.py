"""AlphaFold 3's attention with pair bias: the single track, and the diffusion transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.dispatch.axes import fits
from evoattn.dispatch.checks import check_mask, check_tensors
from evoattn.dispatch.distributed import Split, is_distributed
from evoattn.empty_rows.means import EmptyRows
from evoattn.nn.attention import Attention, add_residual, attend, check_input, check_settings, check_shares, heads, inputs_of
from evoattn.nn.initial import Layer
from evoattn.nn.project import compute_dtype_of, layer_norm, linear, project
from evoattn.nn.sharded import check_alike, like, local, part_of, queries_of, split_of, with_full_parameters
from evoattn.nn.submodules import is_norm, may_skip


class AdaLN(Layer):
    """Adaptive layer norm of a under a condition s: norm(a) * sigmoid(linear_g(s')) + linear_s(s'), where s' = norm(s).

    Source: Abramson et al. 2024, algorithm 26. Parameters have OpenFold-3's names.
    """

    def __init__(self, c_a: int, c_s: int) -> None:
        super().__init__()
        self.layer_norm_a = nn.LayerNorm(c_a, elementwise_affine=False)
        self.layer_norm_s = nn.LayerNorm(c_s, bias=False)
        self.linear_g = nn.Linear(c_s, c_a)
        self.linear_s = nn.Linear(c_s, c_a, bias=False)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        """Normalise a `[*, c_a]` under the condition s `[*, c_s]`."""
        g, shift = project(s, self.layer_norm_s, (self.linear_g, self.linear_s))
        norm = self.layer_norm_a
        if is_norm(norm) and norm.weight is None:
            normed = F.layer_norm(a, a.shape[-1:], eps=norm.eps).to(g.dtype)
        else:
            normed = layer_norm(a, norm, g.dtype)
        return torch.addcmul(shift, normed, torch.sigmoid(g))

    own_forward = forward


class AttentionPairBias(Layer):
    """Attention along residues with a bias from the pair representation, which all samples of a structure share.

    Parameters have OpenFold-3's names: `layer_norm_a`, `layer_norm_z`, `linear_z`, `mha.linear_q`, `_k`, `_v`, `_g`, `_o`, and
    with a condition `layer_norm_a.layer_norm_s`, `.linear_g`, `.linear_s` and `linear_ada_out`.

    Args:
        c_a: channels of a.
        c_z: channels of the pair representation.
        c_hidden: channels of a head.
        no_heads: heads H.
        c_s: channels of the condition s of a diffusion transformer. s scales and shifts the norm of a and gates the update, and
            z is not normalised. None: the single track of the trunk, which has no condition and normalises z.
        inf: is subtracted from the scores of a masked key.
        norm: whether the layer normalises a. Boltz's layers without `norm_s` take an a that is normalised already.
        q_bias, gate_bias, out_bias: whether these products add a bias.
        residual, empty_rows: as in `TriangleAttention`.

    Attributes:
        layer_norm_k: the adaptive norm of the keys of a layer with a condition, as OpenFold-3's atoms have one. None:
            `layer_norm_a` normalises them too.
        norms_keys_twice: whether `layer_norm_k` takes what `layer_norm_a` returns, as Protenix' does, and not a.

    Raises:
        ValueError: `empty_rows` is neither "mean" nor "native", or `c_s` is given with `norm=False`.

    Example:
        >>> import torch
        >>> from evoattn.nn import AttentionPairBias
        >>> layer = AttentionPairBias(c_a=16, c_z=8, c_hidden=8, no_heads=4, c_s=12)
        >>> a, z, s = torch.randn(1, 5, 10, 16), torch.randn(1, 1, 10, 10, 8), torch.randn(1, 5, 10, 12)  # 5 samples
        >>> layer(a, z, s).shape
        torch.Size([1, 5, 10, 16])

    Source: Abramson et al. 2024, algorithm 24.
    """

    def __init__(
        self,
        c_a: int,
        c_z: int,
        c_hidden: int,
        no_heads: int,
        c_s: int | None = None,
        inf: float = 1e9,
        *,
        norm: bool = True,
        residual: bool = False,
        q_bias: bool = True,
        gate_bias: bool = False,
        out_bias: bool = False,
        empty_rows: EmptyRows = "mean",
    ) -> None:
        super().__init__()
        check_settings(0.0, empty_rows)
        if c_s is not None and not norm:
            raise ValueError(f"norm must be True with a condition c_s={c_s}, which acts on the norm")
        self.c_a, self.c_z, self.c_s, self.no_heads, self.inf = c_a, c_z, c_s, no_heads, inf
        self.residual, self.empty_rows = residual, empty_rows
        self.layer_norm_a: nn.Module | None = None
        if norm:
            self.layer_norm_a = nn.LayerNorm(c_a) if c_s is None else AdaLN(c_a, c_s)
        self.layer_norm_k: nn.Module | None = None
        self.norms_keys_twice = False
        self.layer_norm_z = nn.LayerNorm(c_z) if c_s is None else None
        self.linear_z: nn.Linear | None = nn.Linear(c_z, no_heads, bias=False)
        self.linear_ada_out = None if c_s is None else nn.Linear(c_s, c_a)
        self.mha = Attention(c_a, c_a, c_hidden, no_heads, q_bias=q_bias, gate_bias=gate_bias, out_bias=out_bias)

    def forward(
        self,
        a: Tensor,
        z: Tensor | None,
        s: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        pair_bias: Tensor | None = None,
        to_keys: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Compute the update of a, or a + update with `residual=True`.

        Args:
            a: `[*, Q, c_a]`. A DTensor if z is one.
            z: the pair representation, `[*, Q, K, c_z]`. An axis along which samples share it has size 1, and is never
                expanded. A DTensor may be split by rows or by columns. None if `pair_bias` is given.
            s: the condition, `[*, Q, c_s]`, if the layer takes one. A DTensor if z is one.
            mask: `[*, K]`, 1 or True for a key that is attended. None: all are. A DTensor if z is one.
            keys: the tensor that keys and values are projected from, `[*, K, c_a]`, which the layer normalises as it does a.
                None: a.
            pair_bias: what `self.pair_bias(z)` returned, for calls that share z, such as the steps of a diffusion.
            to_keys: picks the keys `[*, K, c_a]` of each window of the normalised a, for a layer with a condition. None: a.

        DTensors come without `keys`, `pair_bias` and `to_keys`. The result is split along Q as z is along its rows or columns.

        Returns:
            `[*, Q, c_a]` in the compute dtype, or with the residual in the dtype to which torch promotes a and the update.

        Raises:
            TypeError, ValueError: a tensor has a wrong type or shape, or arguments exclude each other.
        """
        self._check(a, z, s, mask, keys, pair_bias, to_keys)
        if any(is_distributed(x) for x in (a, z, s, mask)):
            return self._distributed(a, z, s, mask)
        return self._attend(a, self.pair_bias(z) if z is not None else pair_bias, s, mask, keys, to_keys)

    own_forward = forward

    def _distributed(self, a: Tensor, z: Tensor | None, s: Tensor | None, mask: Tensor | None) -> Tensor:
        """The output of DTensors: each process has the queries that its rows of z belong to, or as many if z has columns."""
        if self.layer_norm_k is not None:
            raise ValueError("layer_norm_k must be None with DTensors")
        for name, x in (("a", a), ("s", s), ("mask", mask)):
            check_alike(name, x, "z", z)
        if z is None:
            raise ValueError("z must be given with DTensors, got None: pair_bias takes plain tensors alone")
        check_alike("z", z, "a", a)
        split, placements = split_of(z), queries_of(z)
        part, condition = part_of(a, placements), None if s is None else part_of(s, placements)
        mask_part = None if mask is None else part_of(mask, queries_of(z, split=False))

        def run() -> Tensor:
            bias = self.pair_bias(local(z))
            if split is not None and split.axis == -2:
                bias = split.turned(bias.movedim(-3, -1)).movedim(-1, -3)
            return self._attend(part, bias, condition, mask_part, split=split)

        return like(with_full_parameters(self, z, run), a, placements)

    def _attend(
        self,
        a: Tensor,
        pair_bias: Tensor | None,
        s: Tensor | None,
        mask: Tensor | None,
        keys: Tensor | None = None,
        to_keys: Callable[[Tensor], Tensor] | None = None,
        split: Split | None = None,
    ) -> Tensor:
        """The output. If a process holds only the queries of a `split`, it gathers all others as keys."""
        if a.ndim == 2:  # an attention has rows
            pair_bias, s, mask, keys = (None if x is None else x[None] for x in (pair_bias, s, mask, keys))
            picked = None if to_keys is None else lambda x: to_keys(x[0])[None]
            return self._attend(a[None], pair_bias, s, mask, keys, picked, split)[0]
        norm = self.layer_norm_a
        x = a
        if norm is not None and s is not None:
            x, norm = norm(a, s), None
        if self.layer_norm_k is not None:
            keys = self.layer_norm_k(x if self.norms_keys_twice else a, s)
        if split is not None:
            keys = split.gather(x, -2)
        if to_keys is not None:
            keys = to_keys(x if keys is None else keys)
        mha = self.mha
        settings: dict[str, Any] = {"inf": self.inf, "empty_rows": self.empty_rows}
        if may_skip(mha, Attention):
            q, k, *others = self._projections(x, norm, keys)
            q, k, v, gate = (heads(y, self.no_heads) for y in (*mha.normed(q, k), *others))
            update = mha.output(attend(q, k, v, mask, pair_bias, gate, **settings).flatten(-2), None)
        else:
            dtype = compute_dtype_of(x, *inputs_of(mha))
            inputs = [y.to(dtype) if norm is None else layer_norm(y, norm, dtype) for y in (x, keys) if y is not None]
            update = mha(inputs[0], inputs[-1], mask, pair_bias, no_heads=self.no_heads, **settings)
        if self.linear_ada_out is not None and s is not None:
            update = torch.sigmoid(linear(s.to(update.dtype), self.linear_ada_out)) * update
        return add_residual(a, update, residual=self.residual)

    def _projections(self, a: Tensor, norm: nn.Module | None, keys: Tensor | None) -> list[Tensor]:
        """q, k, v and the gate of a, which `norm` normalises unless it is None, and so it does the keys."""
        if keys is None:
            return project(a, norm, self.mha.inputs)
        linear_q, linear_k, linear_v, linear_g = self.mha.inputs
        q, g = project(a, norm, (linear_q, linear_g))
        return [q, *project(keys, norm, (linear_k, linear_v)), g]

    def pair_bias(self, z: Tensor) -> Tensor:
        """Compute the pair bias `[*, H, Q, K]` of z `[*, Q, K, c_z]`. It is a view of the projection of z."""
        check_input("z", z, 3, self.c_z)
        if self.linear_z is not None:
            (z,) = project(z, self.layer_norm_z, (self.linear_z,))
        return z.movedim(-1, -3)

    def _check(
        self,
        a: Tensor,
        z: Tensor | None,
        s: Tensor | None,
        mask: Tensor | None,
        keys: Tensor | None,
        pair_bias: Tensor | None,
        to_keys: Callable[[Tensor], Tensor] | None,
    ) -> None:
        check_input("a", a, 2, self.c_a, distributed=True)
        if keys is not None:
            check_input("keys", keys, 2, self.c_a)
            if self.c_s is not None:
                raise ValueError(f"keys must be None in a layer with a condition, c_s={self.c_s}, got shape {list(keys.shape)}")
            if keys.shape[:-2] != a.shape[:-2]:
                raise ValueError(f"keys must have the leading axes of a, {list(a.shape)}, got shape {list(keys.shape)}")
        if to_keys is not None and (self.c_s is None or is_distributed(z)):
            raise ValueError("to_keys must be None in a layer without a condition, and with DTensors")
        length = None if to_keys is not None else (a if keys is None else keys).shape[-2]
        length = check_pairs(z, pair_bias, a, self.c_z, self.no_heads, length, distributed=True)
        check_mask("mask", mask, (*a.shape[:-2], length))
        if (s is None) != (self.c_s is None):
            wanted = "None" if self.c_s is None else "given"
            raise ValueError(f"s must be {wanted}: the layer was made with c_s={self.c_s}")
        if s is not None and self.c_s is not None:
            check_input("s", s, 2, self.c_s, distributed=True)
            if not fits(tuple(s.shape[:-1]), tuple(a.shape[:-1])):
                raise ValueError(f"s must broadcast to {[*a.shape[:-1], self.c_s]}, got shape {list(s.shape)}")


def check_pairs(
    z: Tensor | None,
    pair_bias: Any,
    a: Tensor,
    c_z: int,
    no_heads: int,
    keys: int | None,
    *,
    blocks: tuple[int, ...] = (),
    distributed: bool = False,
) -> int:
    """Raise TypeError or ValueError unless z or pair_bias is given, for the queries of a. Return how many keys it has.

    Args:
        z, pair_bias, a: as a layer takes them. In front of pair_bias there is an axis of `blocks`, if it is not empty.
        c_z, no_heads: of the layer.
        keys: how many there have to be. None: any number.
        distributed: whether z may be a DTensor.
    """
    if (z is None) == (pair_bias is None):
        raise ValueError(f"give z or pair_bias, got {'neither' if z is None else 'both'}")
    lead, queries = tuple(a.shape[:-2]), a.shape[-2]
    if z is not None:
        check_input("z", z, 3, c_z, distributed=distributed)
        keys = z.shape[-2] if keys is None else keys
        check_shares("z", z, lead, queries, keys)
        return keys
    check_tensors(pair_bias=pair_bias)
    given = tuple(pair_bias.shape)
    if keys is None:
        keys = given[-1] if given else 1  # a shape without axes is refused below
    shape = (*blocks, *lead, no_heads, queries, keys)
    if len(given) != len(shape) or given[: len(blocks)] != blocks or not fits(given, shape):
        raise ValueError(f"pair_bias must broadcast to {list(shape)} and have as many axes, got shape {list(given)}")
    return keys
