"""Pair blocks of clients that `evoattn.nn` can compute: each layer adds its update to z itself.

A block is a convenience for speed alone. Where ours would miss something, the client's own block runs, with layers by ours.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.core import guards
from evoattn.dispatch.axes import fits
from evoattn.dispatch.distributed import is_distributed
from evoattn.nn.known_calls import UnknownArgument, check_scaled, ignore
from evoattn.nn.project import compute_dtype_of
from evoattn.nn.sharded import local, split_of
from evoattn.nn.submodules import has_hooks

__all__ = ["BLOCKS"]

Of = Callable[[nn.Module], nn.Module]
"""Makes the layer of `evoattn.nn` of a client's layer, or raises ValueError."""

_PAIR_LAYERS = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end")
"""The layers of a pair block before its transition, by the names that all clients give them."""

_END = 3
"""The place of the attention around the ending node."""


class _PairLayers(nn.Module):
    """Ours of the layers of a client's block, and modules of the client's that it calls as they are."""

    def __init__(self, theirs: Any, of: Of, transition: str, called: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(of(getattr(theirs, name)) for name in _PAIR_LAYERS)
        self.transition: Any = of(getattr(theirs, transition))
        for name in called:
            setattr(self, name, getattr(theirs, name))
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
        seen = any(has_hooks(x) or "forward" in x.__dict__ for x in self._inner)  # somebody may keep what a module gets
        free = not torch.is_grad_enabled() and not seen and guards.only_computes()  # then a z of our own may be overwritten
        in_place = in_place and free and torch.promote_types(z.dtype, self.compute_dtype(z)) == z.dtype
        for which, layer in enumerate(self.layers):
            options = end_options if end_options and which == _END else {}
            z = layer.add_to(z, mask, self._drawn(z, which, draw), in_place=in_place, **options)
            in_place = free
        return self.transition.add_to(z, transition_mask, in_place=in_place)  # type: ignore[no-any-return]

    def compute_dtype(self, z: Tensor) -> torch.dtype:
        """The dtype of the updates."""
        return compute_dtype_of(z, *self.layers[_END].mha.inputs)

    @staticmethod
    def _drawn(z: Tensor, which: int, draw: Callable[[Tensor, int], Tensor | None]) -> Tensor | None:
        """The dropout mask of the whole update. If z is a DTensor, it is that of the first process."""
        if not is_distributed(z):
            return draw(z, which)
        mask, split = draw(local(z).new_empty(1).expand(z.shape), which), split_of(z)
        return mask if mask is None or split is None else split.same(mask)

    def shared(self, z: Tensor, which: int, drop: Callable[[Tensor], Tensor]) -> Tensor:
        """A dropout mask by which all rows drop the same entries. Clients transpose z for the last attention."""
        shared = -2 if which == _END else -3
        sizes = [1 if axis == shared else size for axis, size in enumerate(z.shape, -z.ndim)]
        return drop(z.new_ones(sizes, dtype=self.compute_dtype(z)))


def _transposing_block(theirs: Any, of: Of, called: tuple[str, ...] = ()) -> _PairLayers:
    """Ours of a block that passes a transposed z to the attention around the ending node."""
    ours = _PairLayers(theirs, of, "pair_transition", called)
    ours.layers[_END].starting = False
    return ours


def _call_openfold_block(
    ours: _PairLayers,
    theirs: Any,
    z: Tensor,
    pair_mask: Tensor,
    *,
    inplace_safe: bool = False,
    _mask_trans: bool = True,
    _attn_chunk_size: int | None = None,
    end_options: dict[str, bool] | None = None,
    **switches: Any,
) -> Tensor:
    """`end_options` is no argument of theirs: the options of the attention around the ending node."""
    ignore(switches)
    dropout = theirs.ps_dropout_row_layer
    if dropout.training and (inplace_safe or list(dropout.batch_dim) != [-3]):
        raise UnknownArgument("dropout in place, or another one than along rows")

    def draw(z: Tensor, which: int) -> Tensor | None:
        return ours.shared(z, which, dropout.dropout) if dropout.training else None

    mask = pair_mask if _mask_trans else None
    return ours.run(z, pair_mask, draw, transition_mask=mask, in_place=inplace_safe, end_options=end_options)


_BOLTZ_MODULES = ("pre_norm_s", "attention", "transition_s", "s_post_norm")


_boltz_block = functools.partial(_PairLayers, transition="transition_z", called=_BOLTZ_MODULES)
_boltz_pairs = functools.partial(_PairLayers, transition="transition_z")


def _call_boltz_pairs(
    ours: _PairLayers,
    theirs: Any,
    z: Tensor,
    pair_mask: Tensor,
    chunk_size_tri_attn: int | None = None,
    package: str = "boltz",
    **switches: Any,
) -> Tensor:
    """`package` is no argument of theirs. Boltz draws dropout masks in inference too, which moves the random numbers of the
    diffusion.
    """
    ignore(switches)
    drop = importlib.import_module(f"{package}.model.layers.dropout").get_dropout_mask
    first = z.dtype
    z = z.to(torch.promote_types(first, torch.float32))  # as theirs becomes by its dropout mask, also in inference

    def draw(z: Tensor, which: int) -> Tensor | None:
        columns = which == _END
        rows = (z[:, :1, :, :1] if columns else z[:, :, :1, :1]).to(z.dtype if which else first)
        if theirs.training and theirs.dropout:
            return drop(theirs.dropout, rows, True, columnwise=columns)  # type: ignore[no-any-return]
        torch.rand(rows.shape, dtype=torch.float32 if package == "boltz" else rows.dtype, device=z.device)
        return None

    return ours.run(z, pair_mask, draw)


def _call_boltz_block(
    ours: Any, theirs: Any, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, **switches: Any
) -> tuple[Tensor, Tensor]:
    z = _call_boltz_pairs(ours, theirs, z, pair_mask, **switches)
    with torch.autocast("cuda", enabled=False):
        s, wide_z, mask = (x if x.dtype == torch.float64 else x.float() for x in (s, z, mask))
        normed = ours.pre_norm_s(s)
        s = s + ours.attention(s=normed, z=wide_z, mask=mask, k_in=normed)
        s = s + ours.transition_s(s)
        return ours.s_post_norm(s), z


def _protenix_block(theirs: Any, of: Of) -> nn.Module:
    return _transposing_block(theirs, of, ("attention_pair_bias", "single_transition") if theirs.c_s > 0 else ())


def _call_protenix_block(
    ours: Any,
    theirs: Any,
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
    rate = theirs.p_drop if theirs.training and not inplace_safe else 0.0
    if rate and importlib.import_module("protenix.model.modules.fused_ops").TRITON_FUSED_OPS_AVAILABLE:
        raise UnknownArgument("FUSED_DROPOUT_RESIDUAL, for which Protenix draws other random numbers")

    def draw(z: Tensor, which: int) -> Tensor | None:
        return ours.shared(z, which, lambda ones: F.dropout(ones, rate)) if rate else None

    z = ours.run(z, pair_mask, draw, in_place=inplace_safe)
    return _single_of_protenix(ours, theirs, s, z), z


def _single_of_protenix(ours: Any, theirs: Any, s: Tensor | None, z: Tensor, **more: Any) -> Tensor | None:
    if theirs.c_s > 0:
        s = s + ours.attention_pair_bias(a=s, s=None, z=z, **more)
        s = s + ours.single_transition(s)
    return s


def _call_opendde_block(
    ours: Any,
    theirs: Any,
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
    z = ours.run(z, pair_mask, lambda *_: None, in_place=inplace_safe)
    return _single_of_protenix(ours, theirs, s, z, extra_attn_bias=extra_attn_bias), z


_ESMFOLD_MODULES = ("layernorm_1", "pair_to_sequence", "seq_attention", "drop", "mlp_seq", "sequence_to_pair")


_esmfold_block = functools.partial(_PairLayers, transition="mlp_pair", called=_ESMFOLD_MODULES)


def _call_esmfold_block(
    ours: Any, theirs: Any, sequence_state: Tensor, pairwise_state: Tensor, mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """ESMFold ignores arguments that it does not know. Its dropouts are applied in turn along rows and along columns."""
    s, z, lead = sequence_state, pairwise_state, tuple(sequence_state.shape[:2])
    if s.ndim != 3 or tuple(z.shape[:-1]) != (*lead, lead[1]) or not (mask is None or tuple(mask.shape) == lead):
        raise UnknownArgument("shapes that ESMFold refuses")
    drops = (theirs.row_drop, theirs.col_drop)

    def draw(z: Tensor, which: int) -> Tensor | None:
        drop = drops[which % 2]
        if not drop.dropout.training or not drop.dropout.p:
            return None
        sizes = [1 if axis in drop.batch_dim else size for axis, size in enumerate(z.shape)]
        return drop.dropout(z.new_ones(sizes, dtype=ours.compute_dtype(z)))  # type: ignore[no-any-return]

    update, _maps = ours.seq_attention(ours.layernorm_1(s), mask=mask, bias=ours.pair_to_sequence(z))
    s = ours.mlp_seq(s + ours.drop(update))
    z = z + ours.sequence_to_pair(s)
    pairs = None if mask is None else mask.unsqueeze(2) * mask.unsqueeze(1)
    return s, ours.run(z, pairs, draw, in_place=True)


Make = Callable[[Any, Of], nn.Module]

_PAIRFORMER = "model.layers.pairformer"

BLOCKS: dict[str, tuple[Make, Callable[..., Any]]] = {
    "openfold.model.evoformer.PairStack": (_transposing_block, _call_openfold_block),
    "openfold3.core.model.latent.base_blocks.PairBlock": (
        _transposing_block,
        functools.partial(_call_openfold_block, end_options={"transpose_bias": True}),
    ),
    f"boltz.{_PAIRFORMER}.PairformerLayer": (_boltz_block, _call_boltz_block),
    f"boltz.{_PAIRFORMER}.PairformerNoSeqLayer": (_boltz_pairs, _call_boltz_pairs),
    f"boltzgen.{_PAIRFORMER}.PairformerLayer": (_boltz_block, functools.partial(_call_boltz_block, package="boltzgen")),
    f"boltzgen.{_PAIRFORMER}.PairformerNoSeqLayer": (_boltz_pairs, functools.partial(_call_boltz_pairs, package="boltzgen")),
    "protenix.model.modules.pairformer.PairformerBlock": (_protenix_block, _call_protenix_block),
    "opendde.model.modules.pairformer.PairformerBlock": (_protenix_block, _call_opendde_block),
    "transformers.models.esm.modeling_esmfold.EsmFoldTriangularSelfAttentionBlock": (_esmfold_block, _call_esmfold_block),
}
"""By the full name of a client's class: what makes ours of it, and what computes the block by ours with its arguments."""
