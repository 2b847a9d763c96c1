"""Pair blocks of clients that `evoattn.nn` can compute: each layer adds its update to z itself.

A block only saves time. If it would miss a hook or an argument, the client's own block runs, with replaced layers.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.core import guards
from evoattn.dispatch.axes import fits
from evoattn.dispatch.distributed import is_distributed
from evoattn.nn.attention import kept
from evoattn.nn.known_calls import UnknownArgument, check_scaled, ignore
from evoattn.nn.project import compute_dtype_of
from evoattn.nn.sharded import local, split_of
from evoattn.nn.submodules import has_hooks

LayerOf = Callable[[nn.Module], nn.Module]
"""Makes the layer of `evoattn.nn` for a client's layer, or raises ValueError."""

_PAIR_LAYERS = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end")
"""The layers of a pair block before its transition, by the names that all clients give them."""

_END = 3
"""The place of the attention around the ending node."""

_PAIRFORMER = "model.layers.pairformer"
"""The module of Boltz' and BoltzGen's blocks, in which they look `get_dropout_mask` up."""


class _PairLayers(nn.Module):
    """The layers of `evoattn.nn` for those of a client's block, and modules of the client's that it calls as they are."""

    def __init__(self, block: Any, layer_of: LayerOf, transition: str, called: tuple[str, ...]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layer_of(getattr(block, name)) for name in _PAIR_LAYERS)
        self.transition: Any = layer_of(getattr(block, transition))
        for name in called:
            setattr(self, name, getattr(block, name))
        self._inner = tuple(x for part in (self.layers, self.transition) for x in part.modules())

    def run(
        self,
        z: Tensor,
        mask: Tensor | None,
        draw: Callable[[Tensor, int], Tensor | None],
        *,
        transition_mask: Tensor | None = None,
        in_place: bool = False,
        end_options: dict[str, bool] | None = None,
    ) -> Tensor:
        """The updated z.

        Args:
            z: `[*, L, L, C]`, or a DTensor of it.
            mask: `[*, L, L]`, or None.
            draw: returns the dropout mask of the update of z by a layer, the first being 0, or None. Called before the layer.
            transition_mask: multiplies the update of the transition.
            in_place: whether z may be overwritten.
            end_options: options of the attention around the ending node.

        Raises:
            UnknownArgument: the mask does not have z's axes. Nothing was computed.
        """
        lead = tuple(z.shape[:-1])
        if mask is not None and (mask.ndim != len(lead) or not fits(tuple(mask.shape), lead)):
            raise UnknownArgument(f"a mask {list(mask.shape)} of a pair representation {list(z.shape)}")
        # A layer may overwrite z if nobody else holds it. The first z is the caller's, who says so. Later ones are made here:
        # only a hook, a user's forward or autograd may keep them.
        is_observed = any(has_hooks(x) or "forward" in x.__dict__ for x in self._inner)
        may_overwrite = not torch.is_grad_enabled() and not is_observed and guards.only_computes()
        in_place = in_place and may_overwrite and torch.promote_types(z.dtype, self.compute_dtype(z)) == z.dtype
        if in_place:
            mask, transition_mask = kept(mask, z), kept(transition_mask, z)
        for which, layer in enumerate(self.layers):
            options = end_options if end_options and which == _END else {}
            z = layer.add_to(z, mask, self._drawn(z, which, draw), in_place=in_place, **options)
            in_place = may_overwrite
        return self.transition.add_to(z, transition_mask, in_place=in_place)  # type: ignore[no-any-return]

    def compute_dtype(self, z: Tensor) -> torch.dtype:
        """The dtype of the updates."""
        return compute_dtype_of(z, *self.layers[_END].mha.inputs)

    @staticmethod
    def _drawn(z: Tensor, which: int, draw: Callable[[Tensor, int], Tensor | None]) -> Tensor | None:
        """The dropout mask of the update. If z is a DTensor, it is that of the first process."""
        if not is_distributed(z):
            return draw(z, which)
        mask, split = draw(local(z).new_empty(1).expand(z.shape), which), split_of(z)
        return mask if mask is None or split is None else split.same(mask)

    def shared(self, z: Tensor, which: int, drop: Callable[[Tensor], Tensor]) -> Tensor:
        """A dropout mask by which all rows drop the same entries. Clients transpose z for the last attention."""
        shared = -2 if which == _END else -3
        sizes = [1 if axis == shared else size for axis, size in enumerate(z.shape, -z.ndim)]
        return drop(z.new_ones(sizes, dtype=self.compute_dtype(z)))


def _call_openfold_block(
    layers: _PairLayers,
    block: Any,
    z: Tensor,
    pair_mask: Tensor,
    *,
    inplace_safe: bool = False,
    _mask_trans: bool = True,
    _attn_chunk_size: int | None = None,
    end_options: dict[str, bool] | None = None,
    **switches: Any,
) -> Tensor:
    """`end_options` is no argument of the client: the options of the attention around the ending node."""
    ignore(switches)
    dropout = block.ps_dropout_row_layer
    if dropout.training and (inplace_safe or list(dropout.batch_dim) != [-3]):
        raise UnknownArgument("dropout in place, or another one than along rows")

    def draw(z: Tensor, which: int) -> Tensor | None:
        return layers.shared(z, which, dropout.dropout) if dropout.training else None

    mask = pair_mask if _mask_trans else None
    return layers.run(z, pair_mask, draw, transition_mask=mask, in_place=inplace_safe, end_options=end_options)


def _call_boltz_pairs(
    layers: _PairLayers,
    block: Any,
    z: Tensor,
    pair_mask: Tensor,
    chunk_size_tri_attn: int | None = None,
    package: str = "boltz",
    **switches: Any,
) -> Tensor:
    """`package` is no argument of the client. Boltz draws dropout masks in inference too, which moves the random numbers of the
    diffusion.
    """
    ignore(switches)
    drop = sys.modules[f"{package}.{_PAIRFORMER}"].get_dropout_mask
    first = z.dtype
    z = z.to(torch.promote_types(first, torch.float32))  # as Boltz' z becomes by its dropout mask, also in inference

    def draw(z: Tensor, which: int) -> Tensor | None:
        columns = which == _END
        rows = (z[:, :1, :, :1] if columns else z[:, :, :1, :1]).to(z.dtype if which else first)
        if block.training and block.dropout:
            return drop(block.dropout, rows, True, columnwise=columns)  # type: ignore[no-any-return]
        torch.rand(rows.shape, dtype=torch.float32 if package == "boltz" else rows.dtype, device=z.device)
        return None

    return layers.run(z, pair_mask, draw)


def _call_boltz_block(
    layers: Any, block: Any, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, **switches: Any
) -> tuple[Tensor, Tensor]:
    z = _call_boltz_pairs(layers, block, z, pair_mask, **switches)
    with torch.autocast("cuda", enabled=False):
        s, float_z, mask = (x if x.dtype == torch.float64 else x.float() for x in (s, z, mask))
        normed = layers.pre_norm_s(s)
        s = s + layers.attention(s=normed, z=float_z, mask=mask, k_in=normed)
        s = s + layers.transition_s(s)
        return layers.s_post_norm(s), z


def _call_protenix_block(
    layers: Any,
    block: Any,
    s: Tensor | None,
    z: Tensor,
    pair_mask: Tensor | None,
    *,
    triangle_attention: str = "torch",
    inplace_safe: bool = False,
    **switches: Any,
) -> tuple[Tensor | None, Tensor]:
    """Protenix drops nothing if it may overwrite z."""
    ignore(switches)
    check_scaled(z, triangle_attention)
    rate = block.p_drop if block.training and not inplace_safe else 0.0
    if rate and sys.modules["protenix.model.modules.fused_ops"].TRITON_FUSED_OPS_AVAILABLE:
        raise UnknownArgument("FUSED_DROPOUT_RESIDUAL, for which Protenix draws other random numbers")

    def draw(z: Tensor, which: int) -> Tensor | None:
        return layers.shared(z, which, lambda ones: F.dropout(ones, rate)) if rate else None

    z = layers.run(z, pair_mask, draw, in_place=inplace_safe)
    return _single_of_protenix(layers, block, s, z), z


def _single_of_protenix(layers: Any, block: Any, s: Tensor | None, z: Tensor, **more: Any) -> Tensor | None:
    if block.c_s > 0:
        s = s + layers.attention_pair_bias(a=s, s=None, z=z, **more)
        s = s + layers.single_transition(s)
    return s


def _call_opendde_block(
    layers: Any,
    block: Any,
    s: Tensor | None,
    z: Tensor,
    pair_mask: Tensor | None,
    *,
    inplace_safe: bool = False,
    extra_attn_bias: Tensor | None = None,
    **switches: Any,
) -> tuple[Tensor | None, Tensor]:
    """OpenDDE drops nothing."""
    ignore(switches)
    if os.environ.get("OPENDDE_FOLDCP_MODE", "single") != "single":
        raise UnknownArgument("a pair representation that OpenDDE splits over processes")
    z = layers.run(z, pair_mask, lambda *_: None, in_place=inplace_safe)
    return _single_of_protenix(layers, block, s, z, extra_attn_bias=extra_attn_bias), z


def _call_esmfold_block(
    layers: Any, block: Any, sequence_state: Tensor, pairwise_state: Tensor, mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """ESMFold ignores arguments that it does not know. Its dropouts are applied in turn along rows and along columns."""
    s, z, lead = sequence_state, pairwise_state, tuple(sequence_state.shape[:2])
    if s.ndim != 3 or tuple(z.shape[:-1]) != (*lead, lead[1]) or not (mask is None or tuple(mask.shape) == lead):
        raise UnknownArgument("shapes that ESMFold refuses")
    drops = (block.row_drop, block.col_drop)

    def draw(z: Tensor, which: int) -> Tensor | None:
        drop = drops[which % 2]
        if not drop.dropout.training or not drop.dropout.p:
            return None
        sizes = [1 if axis in drop.batch_dim else size for axis, size in enumerate(z.shape)]
        return drop.dropout(z.new_ones(sizes, dtype=layers.compute_dtype(z)))  # type: ignore[no-any-return]

    update, _maps = layers.seq_attention(layers.layernorm_1(s), mask=mask, bias=layers.pair_to_sequence(z))
    s = layers.mlp_seq(s + layers.drop(update))
    z = z + layers.sequence_to_pair(s)
    pairs = None if mask is None else mask.unsqueeze(2) * mask.unsqueeze(1)
    return s, layers.run(z, pairs, draw, in_place=True)


class KnownBlock(NamedTuple):
    """A class of blocks of a client.

    Args:
        call: computes the block by `_PairLayers`. It takes these, the client's block, and its arguments by name.
        transition: the client's name of the transition.
        transposes: whether the client passes a transposed z to the attention around the ending node.
        single: modules of the single track, which are called as they are.
    """

    call: Callable[..., Any]
    transition: str
    transposes: bool = False
    single: tuple[str, ...] = ()

    def layer(self, block: Any, layer_of: LayerOf) -> _PairLayers:
        """Make the layers of `evoattn.nn` for a client's block."""
        has_single = getattr(block, "c_s", 1) > 0  # Protenix' block may have no single track
        layers = _PairLayers(block, layer_of, self.transition, self.single if has_single else ())
        if self.transposes:
            layers.layers[_END].starting = False
        return layers


_BOLTZ_SINGLE = ("pre_norm_s", "attention", "transition_s", "s_post_norm")
_PROTENIX_SINGLE = ("attention_pair_bias", "single_transition")
_ESMFOLD_SINGLE = ("layernorm_1", "pair_to_sequence", "seq_attention", "drop", "mlp_seq", "sequence_to_pair")
_call_openfold3_block = functools.partial(_call_openfold_block, end_options={"transpose_bias": True})
_call_boltzgen_block = functools.partial(_call_boltz_block, package="boltzgen")
_call_boltzgen_pairs = functools.partial(_call_boltz_pairs, package="boltzgen")

BLOCKS: dict[str, KnownBlock] = {
    "openfold.model.evoformer.PairStack": KnownBlock(_call_openfold_block, "pair_transition", True),
    "openfold3.core.model.latent.base_blocks.PairBlock": KnownBlock(_call_openfold3_block, "pair_transition", True),
    f"boltz.{_PAIRFORMER}.PairformerLayer": KnownBlock(_call_boltz_block, "transition_z", single=_BOLTZ_SINGLE),
    f"boltz.{_PAIRFORMER}.PairformerNoSeqLayer": KnownBlock(_call_boltz_pairs, "transition_z"),
    f"boltzgen.{_PAIRFORMER}.PairformerLayer": KnownBlock(_call_boltzgen_block, "transition_z", single=_BOLTZ_SINGLE),
    f"boltzgen.{_PAIRFORMER}.PairformerNoSeqLayer": KnownBlock(_call_boltzgen_pairs, "transition_z"),
    "protenix.model.modules.pairformer.PairformerBlock": KnownBlock(
        _call_protenix_block, "pair_transition", True, _PROTENIX_SINGLE
    ),
    "opendde.model.modules.pairformer.PairformerBlock": KnownBlock(
        _call_opendde_block, "pair_transition", True, _PROTENIX_SINGLE
    ),
    "transformers.models.esm.modeling_esmfold.EsmFoldTriangularSelfAttentionBlock": KnownBlock(
        _call_esmfold_block, "mlp_pair", single=_ESMFOLD_SINGLE
    ),
}
"""By the full name of a client's class."""
