"""ESMFold in transformers: triangle attention and the attention of the sequence, both inline in a `forward`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from evoattn.clients import graphs
from evoattn.clients.arguments import UnknownArgument, ignore
from evoattn.clients.blocks import KnownBlock
from evoattn.clients.calls import FEW_ON_CPU, is_small_on_cpu, projected
from evoattn.clients.known import MULTIPLICATION, WIDEST, KnownLayer, features, transition, triangle
from evoattn.clients.layers import FEW, sites
from evoattn.clients.site import Client, PassedOn, Site, replacement
from evoattn.compat.openfold import attention
from evoattn.nn.attention import add_residual
from evoattn.nn.project import linear
from evoattn.nn.submodules import has_hooks
from evoattn.nn.transition import Transition

_MODULE = "transformers.models.esm.modeling_esmfold"


@replacement
def _triangle(
    self: Any, q_x: Tensor, kv_x: Tensor, biases: list[Tensor] | None = None, *args: Any, **kwargs: Any
) -> Tensor | PassedOn:
    if args or kwargs.get("use_flash"):
        return PassedOn("use_flash, or options by position")
    if is_small_on_cpu(q_x, q_x.shape[:-1].numel() * kv_x.shape[-2] * self.no_heads):
        return PassedOn(FEW_ON_CPU)
    return projected(self, q_x, kv_x, biases)


@replacement
def _sequence(
    self: Any, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, indices: Any = None
) -> tuple[Tensor, None] | PassedOn:
    """The maps of the attention, which the original returns second, are None: nobody in the model reads them."""
    if is_small_on_cpu(x, x.shape[:-1].numel() * x.shape[-2] * self.num_heads):
        return PassedOn(FEW_ON_CPU)
    q, k, v = linear(x, self.proj).view(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3).chunk(3, dim=-1)
    biases = [None if bias is None else bias.permute(0, 3, 1, 2)]
    if mask is not None:
        nothing = torch.zeros((), dtype=q.dtype, device=q.device)
        biases.append(torch.where(mask[:, None, None] == 0, -torch.inf, nothing))
    # Not "mean": masked with -inf, the original's answer for a sequence without a residue is NaN.
    o = attention(self.rescale_factor * q, k, v, biases, empty_rows="native")
    y = o.transpose(1, 2).flatten(2)
    if self.gated:
        y = linear(x, self.g_proj).sigmoid() * y
    return linear(y, self.o_proj), None


class _ResidueMlp(Transition):
    """ESMFold's transition, whose update gets a dropout `drop`."""

    drop: nn.Module

    def add_to(self, x: Tensor, mask: Tensor | None, *, in_place: bool) -> Tensor:
        drop = self.drop
        if type(drop) is not nn.Dropout or has_hooks(drop) or (drop.training and drop.p > 0):
            return add_residual(x, drop(self(x, mask)), residual=True, in_place=in_place)
        return super().add_to(x, mask, in_place=in_place)


def _residue_mlp(layer: Any, x: Tensor, **switches: Any) -> Tensor:
    """Call the layer with ESMFold's arguments. It adds its update."""
    ignore(switches)
    return layer.add_to(x, None, in_place=False)  # type: ignore[no-any-return]


def _sequence_mlp(layer: Any, x: Tensor) -> Tensor:
    """The transition of the sequence. If it is too wide for the kernels of one, its products are those of other layers."""
    is_known = f"{type(layer).__module__}:{type(layer).__qualname__}" == f"{_MODULE}:EsmFoldResidueMLP"
    mlp = layer.mlp if is_known and "forward" not in vars(layer) else None
    if type(mlp) is not nn.Sequential or len(mlp) != 5 or has_hooks(layer) or has_hooks(mlp):
        return layer(x)  # type: ignore[no-any-return]
    if features(mlp, "in_features") <= WIDEST:
        return layer(x)  # type: ignore[no-any-return]
    norm, first, activation, last, drop = cast(Any, mlp)
    return x + drop(linear(activation(linear(norm(x), first)), last))  # type: ignore[no-any-return]


def _call_block(
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
    s = _sequence_mlp(layers.mlp_seq, s + layers.drop(update))
    z = z + layers.sequence_to_pair(s)
    pairs = None if mask is None else mask.unsqueeze(2) * mask.unsqueeze(1)
    return s, layers.run(z, pairs, draw, in_place=True)


_SINGLE = ("layernorm_1", "pair_to_sequence", "seq_attention", "drop", "mlp_seq", "sequence_to_pair")

_KNOWN: dict[str, KnownLayer | KnownBlock] = {
    f"{_MODULE}.EsmFoldTriangleAttention": triangle(),
    f"{_MODULE}.EsmFoldTriangleMultiplicativeUpdate": MULTIPLICATION,
    f"{_MODULE}.EsmFoldResidueMLP": transition(
        "layer_norm=mlp.0 linear_1=mlp.1 linear_2=mlp.3 drop=mlp.4", "mlp.2", _residue_mlp, _ResidueMlp
    ),
    f"{_MODULE}.EsmFoldTriangularSelfAttentionBlock": KnownBlock(_call_block, "mlp_pair", single=_SINGLE),
}

CLIENTS = {
    "esmfold": Client(
        "esmfold",
        "transformers",
        (
            Site(_MODULE, "EsmFoldAttention.forward", _triangle),
            Site(_MODULE, "EsmFoldSelfAttention.forward", _sequence),
            Site(_MODULE, "EsmFoldAttention._prep_qkv"),
            Site(_MODULE, "EsmFoldAttention._wrap_up"),
            Site(_MODULE, "EsmFoldTriangleAttention.forward"),
            Site(_MODULE, "EsmFoldTriangularSelfAttentionBlock.forward"),
        ),
        layers=sites(_KNOWN, least_trained=FEW),
        steps=graphs.blocks(f"{_MODULE}:EsmFoldTriangularSelfAttentionBlock"),
        known=_KNOWN,
    )
}
