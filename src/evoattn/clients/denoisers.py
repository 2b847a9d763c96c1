"""The denoisers of Protenix and OpenFold-3 in a sampling: what their steps share is computed once, also all pair biases.

Both compute the pair representation, its norm and the pair biases of all blocks in each step. The tensor that a denoiser's
steps share is looked for by its identity (`core.keeping`), so replacements return the same one in each step.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evoattn.clients import diffusion, graphs
from evoattn.clients.arguments import UnknownArgument, ignore
from evoattn.clients.known import KnownLayer, features, share
from evoattn.clients.site import Count, Site
from evoattn.core.devices import uncast
from evoattn.core.keeping import made_once
from evoattn.dispatch.axes import with_axes
from evoattn.nn import diffusion_steps
from evoattn.nn.diffusion import DiffusionTransformer
from evoattn.nn.project import layer_norm
from evoattn.nn.submodules import has_hooks

_ADALN = "layer_norm_a layer_norm_s linear_g linear_s"
_PROTENIX_ADALN = "layer_norm_a=layernorm_a layer_norm_s=layernorm_s linear_g=linear_s linear_s=linear_nobias_s"
_PROTENIX_BLOCK = (
    "attention_pair_bias.mha.linear_*=attention_pair_bias.attention.linear_* "
    "attention_pair_bias.layer_norm_z=attention_pair_bias.layernorm_z "
    "attention_pair_bias.linear_z=attention_pair_bias.linear_nobias_z "
    "attention_pair_bias.linear_ada_out=attention_pair_bias.linear_a_last "
    "conditioned_transition.swiglu.linear_a=conditioned_transition_block.linear_nobias_a1 "
    "conditioned_transition.swiglu.linear_b=conditioned_transition_block.linear_nobias_a2 "
    "conditioned_transition.linear_out=conditioned_transition_block.linear_nobias_b "
    "conditioned_transition.linear_g=conditioned_transition_block.linear_s"
)
_OPENFOLD3_BLOCK = (
    "attention_pair_bias.mha.linear_* attention_pair_bias.linear_z attention_pair_bias.linear_ada_out "
    "conditioned_transition.swiglu.linear_a conditioned_transition.swiglu.linear_b "
    "conditioned_transition.linear_out conditioned_transition.linear_g"
)


def _make_protenix(client: Any) -> nn.Module | None:
    """The transformer of tokens. That of atoms is left to Protenix: it normalises the keys of a window twice."""
    first = client.blocks[0].attention_pair_bias
    if first.cross_attention_mode:
        return None
    if not all(_is_plain_protenix(block) for block in client.blocks):
        raise TypeError  # said as "has other modules"
    mha = first.attention
    condition = features(first.linear_a_last, "in_features")
    c_z = features(first.linear_nobias_z, "in_features")
    made = DiffusionTransformer(mha.c_q, condition, c_z, mha.c_hidden, mha.num_heads, len(client.blocks))
    made.layer_norm_z = None
    for block, own in zip(made.blocks, client.blocks, strict=True):
        block.attention_pair_bias.layer_norm_z = None
        share(block, own, _PROTENIX_BLOCK)
        share(block.attention_pair_bias.layer_norm_a, own.attention_pair_bias.layernorm_a, _PROTENIX_ADALN)
        share(block.conditioned_transition.layer_norm, own.conditioned_transition_block.adaln, _PROTENIX_ADALN)
    return made


def _is_plain_protenix(block: Any) -> bool:
    attention = block.attention_pair_bias
    return attention.has_s and not attention.cross_attention_mode and type(block.drop_path) is nn.Identity


def _make_openfold3(client: Any) -> nn.Module | None:
    """The transformer of tokens. That of atoms is left to OpenFold-3: its keys have a norm of their own."""
    if client.blocks[0].use_cross_attention:
        return None
    first = client.blocks[0].attention_pair_bias
    mha = first.mha
    made = DiffusionTransformer(first.c_q, first.c_s, first.c_z, mha.c_hidden, mha.no_heads, len(client.blocks), inf=first.inf)
    share(made, client, "layer_norm_z")
    for block, own in zip(made.blocks, client.blocks, strict=True):
        if own.use_cross_attention or own.attention_pair_bias.inf != first.inf:
            raise TypeError  # said as "has other modules"
        share(block, own, _OPENFOLD3_BLOCK)
        share(block.attention_pair_bias.layer_norm_a, own.attention_pair_bias.layer_norm_a, _ADALN)
        share(block.conditioned_transition.layer_norm, own.conditioned_transition.layer_norm, _ADALN)
    return made


def _call_protenix(
    transformer: Any,
    a: Tensor,
    s: Tensor,
    z: Tensor,
    *,
    n_queries: int | None = None,
    n_keys: int | None = None,
    enable_efficient_fusion: bool = False,
    **switches: Any,
) -> Tensor:
    """Every token is attended."""
    ignore(switches)
    if n_queries or n_keys or enable_efficient_fusion:
        raise UnknownArgument("windows, or a pair representation that is normalised already")
    return _run(transformer, a, s, z)


def _call_openfold3(
    transformer: Any, a: Tensor, s: Tensor, z: Tensor, mask: Tensor | None = None, _mask_trans: bool = True, **switches: Any
) -> Tensor:
    ignore(switches)
    if mask is not None and diffusion.attends_to_all(mask):
        mask = None
    return _run(transformer, a, s, z, mask, mask if _mask_trans else None)


def _run(
    transformer: Any, a: Tensor, s: Tensor, z: Tensor, mask: Tensor | None = None, transition_mask: Tensor | None = None
) -> Tensor:
    """Compute a call of tokens: a `[*, L, c_a]`, s `[*, L, c_s]`, z `[*, L, L, c_z]`, masks `[*, L]`, with * broadcast."""
    with _as_float32(a):
        fused = diffusion.prepared(transformer, a, s, mask)
        if z.dtype != a.dtype:
            raise UnknownArgument("a pair representation of a diffusion transformer that is not in float32")
        biases = _pair_biases(transformer, with_axes(z, a.ndim + 1))
        s = with_axes(s, a.ndim)
        mask, transition_mask = (None if x is None else with_axes(x, a.ndim - 1) for x in (mask, transition_mask))
        return diffusion_steps.run(fused, a, s, biases, mask, None, transition_mask)


def _as_float32(a: Tensor) -> contextlib.AbstractContextManager[None]:
    """No autocast, if the one that is on casts to float32, as OpenFold-3's does. All tensors here have that dtype."""
    kind = a.device.type
    if kind == "cuda" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float32:
        return uncast(a.device)
    return contextlib.nullcontext()


def _pair_biases(transformer: Any, z: Tensor) -> list[Tensor]:
    """The pair bias `[*, H, L, L]` of each block, in the layout of kernels, once in a sampling for one z."""
    modules = [transformer.layer_norm_z]
    modules += [x for block in transformer.blocks for x in vars(block.attention_pair_bias)["_modules"].values()]

    def make() -> list[Tensor]:
        normed = z if transformer.layer_norm_z is None else layer_norm(z, transformer.layer_norm_z, z.dtype)
        return [
            diffusion.heads_first(block.attention_pair_bias.pair_bias(normed).movedim(-3, -1)) for block in transformer.blocks
        ]

    weights = [y for x in modules if x is not None for y in x.parameters()]
    return made_once("pair biases", (transformer, _identity(z), *weights), make)


class _Denoiser(NamedTuple):
    """Facts of a call of Protenix' denoiser.

    Args:
        pairs: the pair representation of all its steps.
        one_condition: whether all samples have one noise level: the client's own loop gives them one.
        normalize: the norm that the client would apply to `pairs` first. None: each block has a norm of its own.
    """

    pairs: Tensor
    one_condition: bool
    normalize: nn.Module | None


_denoiser: contextvars.ContextVar[_Denoiser | None] = contextvars.ContextVar("denoiser", default=None)


def _identity(z: Tensor) -> Tensor:
    """The tensor that stands for z in all steps: z itself, or the pair representation of which it is a view."""
    denoiser = _denoiser.get()
    if denoiser is None:
        return z
    pairs = denoiser.pairs
    same = z.data_ptr() == pairs.data_ptr() and z.numel() == pairs.numel() and z.dtype == pairs.dtype
    return pairs if same and z.is_contiguous() and pairs.is_contiguous() else z


def _may_share(module: nn.Module) -> bool:
    """Return whether steps may share what a module computes: in a sampling on a GPU, if nobody sees that it is called."""
    if not diffusion.may_have_kernels(module) or torch.is_grad_enabled() or module.training:
        return False
    return not any(map(has_hooks, module.modules()))


def denoised(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Protenix' denoiser, whose steps share one pair representation.

    The client would normalise it before the blocks in each step (`enable_efficient_fusion`). Here that is left to the first
    call of the transformer.
    """

    def f_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        conditioning = self.diffusion_conditioning
        known = not args and all(isinstance(kwargs.get(name), Tensor) for name in ("s_trunk", "s_inputs"))
        if not known or not kwargs.get("use_conditioning", True) or not _may_share(conditioning):
            return original(self, *args, **kwargs)
        trunk, pairs, relp = kwargs.get("z_trunk"), kwargs.get("pair_z"), kwargs["input_feature_dict"]["relp"]
        if pairs is None:
            owners = (conditioning, trunk, relp, *conditioning.parameters())
            pairs = made_once("conditioned pairs", owners, lambda: conditioning.prepare_cache(relp, trunk, False))
        one_structure = kwargs["s_trunk"].ndim == 2 and kwargs["s_inputs"].ndim == 2
        fused = kwargs.get("enable_efficient_fusion", False)
        call = kwargs | {"pair_z": pairs, "enable_efficient_fusion": False}
        token = _denoiser.set(_Denoiser(pairs, one_structure and graphs.in_loop(), self.normalize if fused else None))
        try:
            return original(self, **call)
        finally:
            _denoiser.reset(token)

    return f_forward


def shared_condition(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Protenix' condition `[1, L, C]` of samples that have the same, and the pair representation itself, not a copy."""

    def forward(self: Any, t_hat_noise_level: Tensor, *args: Any, **kwargs: Any) -> Any:
        denoiser = _denoiser.get()
        if denoiser is None or kwargs.get("pair_z") is not denoiser.pairs:
            return original(self, t_hat_noise_level, *args, **kwargs)
        level = t_hat_noise_level[:1] if denoiser.one_condition else t_hat_noise_level
        return original(self, level, *args, **kwargs | {"inplace_safe": False})

    return forward


def transformer_of_protenix(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The transformer. What the client's own computes of tokens gets a pair representation as the client would pass it."""

    @functools.wraps(original)
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        denoiser = _denoiser.get()
        z = kwargs.get("z")
        if denoiser is None or denoiser.normalize is None or z is None or kwargs.get("n_queries"):
            return original(self, *args, **kwargs)
        normed = denoiser.normalize(z).movedim(-1, -3).contiguous()
        return original(self, *args, **kwargs | {"z": normed, "enable_efficient_fusion": True})

    return diffusion.transformer(own, count)


def conditioned(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """OpenFold-3's conditioning, whose steps share one pair representation. Only the single one depends on the noise level."""

    def forward(
        self: Any,
        batch: dict[str, Any],
        t: Tensor,
        si_input: Tensor,
        si_trunk: Tensor,
        zij_trunk: Tensor,
        use_conditioning: bool,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        call = (batch, t, si_input, si_trunk, zij_trunk, use_conditioning, chunk_size)
        if not use_conditioning or not _may_share(self):
            return original(self, *call)  # type: ignore[no-any-return]
        features = [x for x in batch.values() if isinstance(x, Tensor)]
        owners = (self, zij_trunk, *features, *self.parameters())
        pairs = made_once("conditioned pairs", owners, lambda: original(self, *call)[1])
        single = self.linear_s(self.layer_norm_s(torch.cat([si_trunk, si_input], dim=-1)))
        noise = self.fourier_emb((0.25 * torch.log(t / self.sigma_data)).unsqueeze(-1))
        single = single + self.linear_n(self.layer_norm_n(noise)).unsqueeze(-2)
        for layer in self.transition_s:
            single = single + layer(single, mask=batch["token_mask"])
        return single, pairs

    return forward


PROTENIX = KnownLayer(_make_protenix, "", _call_protenix, kind=diffusion.KIND, in_sampling=True)
OPENFOLD3 = KnownLayer(_make_openfold3, "", _call_openfold3, kind=diffusion.KIND, in_sampling=True)


def _checked(module: str, *names: str) -> tuple[Site, ...]:
    """Functions that are taken for granted."""
    return tuple(Site(module, name, counted=False) for name in names)


def protenix_sites(package: str) -> tuple[Site, ...]:
    """The transformer and what its steps share, in Protenix."""
    modules = f"{package}.model.modules"
    return (
        Site(f"{modules}.transformer", "DiffusionTransformer.forward", transformer_of_protenix, kind=diffusion.KIND),
        Site(f"{modules}.diffusion", "DiffusionModule.f_forward", denoised, counted=False),
        Site(f"{modules}.diffusion", "DiffusionConditioning.forward", shared_condition, counted=False),
        *_checked(f"{modules}.diffusion", "DiffusionConditioning.prepare_cache"),
        *_checked(
            f"{modules}.transformer",
            "DiffusionTransformerBlock.forward",
            "AttentionPairBias.standard_multihead_attention",
            "ConditionedTransitionBlock.forward",
        ),
        *_checked(f"{modules}.primitives", "AdaptiveLayerNorm.forward", "Attention._prep_qkv", "Attention._wrap_up"),
    )


def openfold3_sites() -> tuple[Site, ...]:
    """The transformer and what its steps share, in OpenFold-3."""
    layers = "openfold3.core.model.layers"
    return (
        Site(f"{layers}.diffusion_transformer", "DiffusionTransformer.forward", diffusion.transformer, kind=diffusion.KIND),
        Site(f"{layers}.diffusion_conditioning", "DiffusionConditioning.forward", conditioned, counted=False),
        *_checked(f"{layers}.diffusion_transformer", "DiffusionTransformerBlock.forward"),
        *_checked(
            f"{layers}.diffusion_conditioning",
            "DiffusionConditioning._embed_trunk_inputs",
            "DiffusionConditioning._forward",
            "DiffusionConditioning._chunk_forward",
        ),
        *_checked(f"{layers}.attention_pair_bias", "DiffusionAttentionPairBias._prep_bias"),
        *_checked(f"{layers}.transition", "ConditionedTransitionBlock._transition", "ConditionedTransitionBlock.forward"),
        *_checked("openfold3.core.model.primitives.normalization", "AdaLN.forward"),
        *_checked("openfold3.core.model.primitives.activations", "SwiGLU.forward"),
    )
