"""OpenFold-3: all attention goes through one module, which looks its functions up at each call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients import af3_transformers, aggregation, denoisers, graphs
from evoattn.clients.arguments import Layer, forwards
from evoattn.clients.blocks import KnownBlock, SplitBlock, call_openfold_block
from evoattn.clients.calls import faster_as_installed, low_memory, offloads, queries_first
from evoattn.clients.known import (
    OUTER_PRODUCT_MEAN,
    KnownLayer,
    averaging,
    layers_of_openfold,
    renamed,
    share,
    transition,
    triangle,
)
from evoattn.clients.layers import sites
from evoattn.clients.site import Client, Count, PassedOn, Site, named, replacement
from evoattn.compat.cuequivariance import triangle_multiplicative_update
from evoattn.compat.openfold import attention
from evoattn.dispatch.axes import with_axes
from evoattn.nn.pair_bias import AttentionPairBias
from evoattn.nn.sharded import like, local

_MODULE = "openfold3.core.model.primitives.attention"
_WINDOWS = "openfold3.core.model.layers.sequence_local_atom_attention"
_ATOMS = "openfold3.core.utils.atomize_utils"
_DIFFUSION = "openfold3.core.model.structure.diffusion_module"
_MULTIPLICATION = "openfold3.core.model.layers.triangular_multiplicative_update"


@replacement
def _additive(
    query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor], use_high_precision: bool = False
) -> Tensor | PassedOn:
    """In the dtype of the query, which the original sets as that of autocast. Sums are float32 with either precision."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    if reason := faster_as_installed(query, query.shape[-2], key.shape[-2], scores):
        return PassedOn(reason)
    with torch.autocast(query.device.type, enabled=False):
        return attention(query, key.to(query.dtype), value.to(query.dtype), biases)


def _never(*_: Any, **__: Any) -> bool:
    """Return whether cuEquivariance would leave a call to torch."""
    return False


def rollout(original: Any, count: Count) -> Any:
    """A rollout after which recordings are dropped, and whose steps do not wait to see that no chain is cyclic."""

    def forward(self: Any, batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        cyclic = batch.get("cyclic_mask")
        if cyclic is not None and not torch.is_grad_enabled() and not cyclic.any():
            batch = {name: x for name, x in batch.items() if name != "cyclic_mask"}
        return original(self, batch, *args, **kwargs)

    return graphs.loop(forward, count)


def _make_pair_bias(client: Any) -> nn.Module:
    """The attention of OpenFold-3's trunk or diffusion transformer."""
    adaptive = hasattr(client, "linear_ada_out")
    c_s = client.c_s if adaptive else None
    layer = AttentionPairBias(client.c_q, client.c_z, client.mha.c_hidden, client.mha.no_heads, c_s, client.inf)
    norms = "layer_norm_a.layer_norm_a layer_norm_a.layer_norm_s layer_norm_a.linear_g layer_norm_a.linear_s linear_ada_out"
    share(layer, client, norms if adaptive else "layer_norm_a layer_norm_z")
    return layer


def _pair_bias(layer: Layer, a: Tensor, z: Tensor, **arguments: Any) -> Tensor:
    """Call the layer with OpenFold-3's arguments, of the trunk or of the diffusion transformer."""
    return forwards("a", "z", "s")(layer, a=a, z=with_axes(z, a.ndim + 1), **arguments)


_PAIR_BIAS = KnownLayer(_make_pair_bias, "linear_z mha.linear_*", _pair_bias)
_RELU = transition(
    "layer_norm linear_1=transition_mlp.layers.0.0 linear_2=transition_mlp.linear_out",
    "transition_mlp.layers.0.1",
    base="Transition",
)
_SWIGLU = transition("layer_norm swiglu.linear_a swiglu.linear_b linear_out", "swiglu.swish", base="Transition")


def from_openfold3(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters in a state dict of OpenFold-3, of one layer or of a whole model, to those of `evoattn.nn`.

    OpenFold-3 calls the pair bias of triangle attention `linear_z`, `evoattn.nn` calls it `linear`. The projections of a ReLU
    transition have other names, and `fuse_projection_weights` joins those of a triangle multiplication. Make
    `TriangleAttention` with `gate_bias=False, out_bias=False`, `TriangleMultiplication` with `bias=False`, and `Transition`
    with its defaults, or with `activation="relu", bias=True`.

    Args:
        state: tensors by OpenFold-3's names, with any prefixes. A layer is renamed if the state has the weights of all its
            modules. Names of other layers are kept.

    Returns:
        The same tensors by the names of `evoattn.nn`. Halves of a joined projection are views.

    Example:
        >>> import torch
        >>> state = {f"mha.linear_{x}.weight": torch.ones(8, 8) for x in "qkvgo"}
        >>> list(from_openfold3({"linear_z.weight": torch.ones(4, 8), "layer_norm.weight": torch.ones(8), **state}))[:2]
        ['linear.weight', 'layer_norm.weight']
    """
    return renamed(state, (triangle("linear_z"), _RELU))


def _split_single(client: Any, attention: Any, s: Any, z: Any, single_mask: Any, _mask_trans: bool = True, **_: Any) -> Any:
    """The updated s of a block whose z is split over processes."""
    part = local(s) + local(attention(s, z, None, single_mask))
    return like(part + client.single_transition(part, mask=local(single_mask) if _mask_trans else None), s)


_LAYERS, _LATENT = "openfold3.core.model.layers", "openfold3.core.model.latent"
_PAIR_BLOCK = f"{_LATENT}.base_blocks.PairBlock"
_call_pairs = functools.partial(call_openfold_block, end_options={"transpose_bias": True})

_KNOWN: dict[str, KnownLayer | KnownBlock] = {
    **layers_of_openfold(_LAYERS, "linear_z"),
    f"{_LAYERS}.outer_product_mean.OuterProductMean": OUTER_PRODUCT_MEAN,
    f"{_LAYERS}.msa.MSAPairWeightedAveraging": averaging(
        "layer_norm_m layer_norm_z linear_z linear_v linear_g linear_o", "c_in c_z c_hidden no_heads inf"
    ),
    f"{_LAYERS}.attention_pair_bias.AttentionPairBias": _PAIR_BIAS,
    f"{_LAYERS}.attention_pair_bias.DiffusionAttentionPairBias": _PAIR_BIAS,
    f"{_LAYERS}.transition.SwiGLUTransition": _SWIGLU,
    f"{_LAYERS}.transition.ReLUTransition": _RELU,
    _PAIR_BLOCK: KnownBlock(_call_pairs, "pair_transition", True),
}

CLIENTS = {
    "openfold3": Client(
        "openfold3",
        "openfold3",
        (
            Site(_MODULE, "_attention", _additive),
            Site(_MODULE, "_lma", low_memory),
            Site(_MODULE, "_triton_evo_attn", queries_first(scaled=False)),
            Site(_MODULE, "_cueq_triangle_attn", queries_first(scaled=False)),
            Site(_MODULE, "_deepspeed_evo_attn", queries_first(scaled=False)),
            Site(_MODULE, "Attention.forward"),
            Site(_MODULE, "GlobalAttention.forward"),
            Site(_MODULE, "attention_chunked_trainable"),
        ),
        values=(
            (_MODULE, "cueq_is_installed", True),
            (_MODULE, "cueq_would_fall_back", _never),
            (_MODULE, "TritonEvoformer", queries_first),  # asked for, and not called
            (_MODULE, "TRITON_AVAILABLE", True),
            (_MULTIPLICATION, "triangle_multiplicative_update", triangle_multiplicative_update),
        ),
        layers=(*sites(_KNOWN), *denoisers.openfold3_sites()),
        steps=(
            Site(_ATOMS, "aggregate_atom_feat_to_tokens", aggregation.means_by_mask, counted=False),
            Site(_ATOMS, "broadcast_token_feat_to_atoms", aggregation.from_tokens, counted=False),
            *named(
                aggregation.counting_atoms,
                f"{_WINDOWS}:NoisyPositionEmbedder",
                f"{_WINDOWS}:AtomAttentionDecoder",
                counted=False,
            ),
            Site(_DIFFUSION, "DiffusionModule.forward", graphs.step),
            Site(_DIFFUSION, "SampleDiffusion.forward", rollout, counted=False),
            *graphs.blocks(
                f"{_LATENT}.pairformer:PairFormerBlock",
                f"{_LATENT}.template_module:TemplatePairStack",
                instead={"inplace_safe": False},
            ),
            *graphs.blocks(f"{_LATENT}.msa_module:MSAModuleBlock", skip=offloads, instead={"inplace_safe": False}),
        ),
        known={**_KNOWN, f"{_LAYERS}.diffusion_transformer.DiffusionTransformer": af3_transformers.OPENFOLD3},
        split={
            _PAIR_BLOCK: SplitBlock(_call_pairs),
            f"{_LATENT}.pairformer.PairFormerBlock": SplitBlock(
                _call_pairs, "pair_stack", "single_mask", "attn_pair_bias", _split_single
            ),
        },
        linears=("openfold3.core.model.primitives.linear.Linear",),
        norms=("openfold3.core.model.primitives.normalization.LayerNorm",),
    )
}
