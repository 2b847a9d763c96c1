"""Pair blocks of clients that `evoattn.nn` can compute: each layer adds its update to z itself.

A block only saves time. If it would miss a hook or an argument, the client's own block runs, with replaced layers. The file of
each client describes its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evoattn.clients.arguments import UnknownArgument, ignore
from evoattn.core import attempts, guards
from evoattn.dispatch.axes import fits
from evoattn.dispatch.distributed import is_distributed
from evoattn.nn.attention import kept
from evoattn.nn.project import compute_dtype_of
from evoattn.nn.sharded import local, split_of
from evoattn.nn.submodules import has_hooks

LayerOf = Callable[[nn.Module], nn.Module]
"""Makes the layer of `evoattn.nn` for a client's layer, or raises ValueError."""

_PAIR_LAYERS = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end")
"""The layers of a pair block before its transition, by the names that all clients give them."""

END = 3
"""The place of the attention around the ending node."""


class KnownBlock(NamedTuple):
    """A class of blocks of a client.

    Args:
        call: computes the block by `PairLayers`. It takes these, the client's block, and its arguments by name.
        transition: the client's name of the transition.
        transposes: whether the client passes a transposed z to the attention around the ending node.
        single: modules of the single track, which are called as they are.
    """

    call: Callable[..., Any]
    transition: str
    transposes: bool = False
    single: tuple[str, ...] = ()

    def layer(self, block: Any, layer_of: LayerOf) -> PairLayers:
        has_single = getattr(block, "c_s", 1) > 0  # Protenix' block may have no single track
        layers = PairLayers(block, layer_of, self.transition, self.single if has_single else ())
        if self.transposes:
            layers.layers[END].starting = False
        return layers


class SplitBlock(NamedTuple):
    """A class of blocks whose pair representation can be split over processes, and its single track.

    Args:
        update_z: the `call` of a `KnownBlock` that updates z.
        pair_stack: the name of the module that has the layers of z. "": the block itself.
        mask: the argument that is the mask of s.
        attention: the name of the attention of s, if the block updates s.
        update_s: computes the updated s. It takes the client's block, the layer of `evoattn.nn` for the attention, and the
            arguments by name, with the updated z.
    """

    update_z: Callable[..., Tensor]
    pair_stack: str = ""
    mask: str = ""
    attention: str = ""
    update_s: Callable[..., Any] | None = None


class PairLayers(nn.Module):
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
            NotCompiled: the call is an attempt that was given up. z is as it was.
        """
        lead = tuple(z.shape[:-1])
        if mask is not None and (mask.ndim != len(lead) or not fits(tuple(mask.shape), lead)):
            raise UnknownArgument(f"a mask {list(mask.shape)} of a pair representation {list(z.shape)}")
        # A layer may overwrite z if nobody else holds it. The first z is the caller's, who says so. Later ones are made here:
        # only a hook, a user's forward or autograd may keep them.
        is_observed = any(has_hooks(x) or "forward" in x.__dict__ for x in self._inner)
        may_overwrite = not torch.is_grad_enabled() and not is_observed and guards.only_computes()
        in_place = in_place and may_overwrite and torch.promote_types(z.dtype, self.compute_dtype(z)) == z.dtype
        in_place = in_place and not attempts.may_be_given_up()  # an attempt may be given up after its first layer
        if in_place:
            mask, transition_mask = kept(mask, z), kept(transition_mask, z)
        for which, layer in enumerate(self.layers):
            options = end_options if end_options and which == END else {}
            z = layer.add_to(z, mask, self._drawn(z, which, draw), in_place=in_place, **options)
            in_place = may_overwrite
        z = self.transition.add_to(z, transition_mask, in_place=in_place)
        attempts.check()  # before modules of the caller's that follow get what has no values
        return z

    def compute_dtype(self, z: Tensor) -> torch.dtype:
        return compute_dtype_of(z, *self.layers[END].mha.inputs)

    @staticmethod
    def _drawn(z: Tensor, which: int, draw: Callable[[Tensor, int], Tensor | None]) -> Tensor | None:
        """The dropout mask of the update. If z is a DTensor, it is that of the first process."""
        if not is_distributed(z):
            return draw(z, which)
        mask, split = draw(local(z).new_empty(1).expand(z.shape), which), split_of(z)
        return mask if mask is None or split is None else split.same(mask)

    def shared(self, z: Tensor, which: int, drop: Callable[[Tensor], Tensor]) -> Tensor:
        """A dropout mask by which all rows drop the same entries. Clients transpose z for the last attention."""
        shared = -2 if which == END else -3
        sizes = [1 if axis == shared else size for axis, size in enumerate(z.shape, -z.ndim)]
        return drop(z.new_ones(sizes, dtype=self.compute_dtype(z)))


def call_openfold_block(
    layers: PairLayers,
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
    """The pair block of OpenFold 2 and OpenFold-3.

    `end_options` is no argument of the client: the options of the attention around the ending node.
    """
    ignore(switches)
    dropout = block.ps_dropout_row_layer
    if dropout.training and (inplace_safe or list(dropout.batch_dim) != [-3]):
        raise UnknownArgument("dropout in place, or another one than along rows")

    def draw(z: Tensor, which: int) -> Tensor | None:
        return layers.shared(z, which, dropout.dropout) if dropout.training else None

    mask = pair_mask if _mask_trans else None
    return layers.run(z, pair_mask, draw, transition_mask=mask, in_place=inplace_safe, end_options=end_options)
