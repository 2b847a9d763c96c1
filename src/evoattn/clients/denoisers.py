"""The denoisers of Protenix, OpenDDE and OpenFold-3 in a sampling: what does not change from step to step is computed once.

All compute the pair representation, that of atoms, and the condition of atoms in each step. A replacement returns the same
tensors in each step, so that the transformers find the pair biases that they made of them (`af3_transformers`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.clients import diffusion, graphs
from evoattn.clients.af3_transformers import Denoiser, denoiser_now, latest
from evoattn.clients.site import Count, Site
from evoattn.nn.submodules import has_hooks_inside

MODE, ALONE = "OPENDDE_FOLDCP_MODE", "single"
"""The variable by which OpenDDE splits pair representations over processes, and its value if it does not."""


def may_share(module: nn.Module) -> bool:
    """Return whether steps may share what a module computes: in a sampling on a GPU, if nobody sees that it is called."""
    if not diffusion.may_have_kernels(module) or torch.is_grad_enabled() or module.training:
        return False
    return not has_hooks_inside(module)


def denoised(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Protenix' denoiser, or OpenDDE's in one process, whose steps share one pair representation.

    The client would normalise it before the blocks in each step (`enable_efficient_fusion`). Here that is left to the first
    call of the transformer.
    """

    def f_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        conditioning = self.diffusion_conditioning
        known = not args and all(isinstance(kwargs.get(name), Tensor) for name in ("s_trunk", "s_inputs"))
        known = known and kwargs.get("use_conditioning", True) and os.environ.get(MODE, ALONE) == ALONE
        if not known or not may_share(conditioning):
            return original(self, *args, **kwargs)
        pairs, single = kwargs.get("pair_z"), kwargs["s_trunk"]
        if pairs is None:
            trunk, relp = kwargs["z_trunk"], kwargs["input_feature_dict"]["relp"]
            owners = [x for x in (trunk, relp, *conditioning.parameters()) if isinstance(x, Tensor)]
            pairs = latest("pairs", conditioning, owners, lambda: conditioning.prepare_cache(relp, trunk, False))
        one_condition = single.ndim == 2 and kwargs["s_inputs"].ndim == 2 and graphs.in_loop()
        fused = kwargs.get("enable_efficient_fusion", False)
        call = kwargs | {"pair_z": pairs, "enable_efficient_fusion": False}
        token = denoiser_now.set(Denoiser(single, pairs, one_condition, self.normalize if fused else None))
        try:
            return original(self, **call)
        finally:
            denoiser_now.reset(token)

    return f_forward


def shared_condition(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Protenix' condition `[1, L, C]` of samples that have the same, and the pair representation itself, not a copy."""

    def forward(self: Any, t_hat_noise_level: Tensor, *args: Any, **kwargs: Any) -> Any:
        denoiser = denoiser_now.get()
        if denoiser is None or kwargs.get("pair_z") is not denoiser.pairs:
            return original(self, t_hat_noise_level, *args, **kwargs)
        level = t_hat_noise_level[:1] if denoiser.one_condition else t_hat_noise_level
        return original(self, level, *args, **kwargs | {"inplace_safe": False})

    return forward


def transformer_of_protenix(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The transformer. What the client's own computes of tokens gets a pair representation as the client would pass it."""

    @functools.wraps(original)
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        denoiser = denoiser_now.get()
        z = kwargs.get("z")
        if denoiser is None or denoiser.normalize is None or z is None or kwargs.get("n_queries"):
            return original(self, *args, **kwargs)
        normed = denoiser.normalize(z).movedim(-1, -3).contiguous()
        return original(self, *args, **kwargs | {"z": normed, "enable_efficient_fusion": True})

    return diffusion.transformer(own, count)


def atoms_of_protenix(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """Protenix' encoder of atoms, whose steps share the condition and the pair representation of atoms."""

    def forward(self: Any, atom_to_token_idx: Tensor, *args: Any, **kwargs: Any) -> Any:
        denoiser, noisy, s = denoiser_now.get(), kwargs.get("r_l"), kwargs.get("s")
        if denoiser is None or noisy is None or s is None or not may_share(self):
            return original(self, atom_to_token_idx, *args, **kwargs)
        given = (atom_to_token_idx, *args, kwargs.get("p_lm"), kwargs.get("c_l"))
        features = [x for x in given if isinstance(x, Tensor)]
        owners = (denoiser.trunk, denoiser.pairs, *features, *self.parameters())
        c_l, p_lm = latest("atoms", self, owners, lambda: original(self, atom_to_token_idx, *args, **kwargs)[2:], len(features))
        q_l = self.atom_transformer(c_l + self.linear_no_bias_r(noisy), c_l, p_lm, chunk_size=kwargs.get("chunk_size"))
        means = sys.modules[original.__module__].aggregate_atom_to_token  # type: ignore[attr-defined]
        atoms = F.relu(self.linear_no_bias_q(q_l))
        a = means(x_atom=atoms, atom_to_token_idx=atom_to_token_idx, n_token=s.size(-2), reduce="mean")
        return a, q_l, c_l, p_lm

    return forward


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
        if not use_conditioning or not may_share(self):
            return original(self, *call)  # type: ignore[no-any-return]
        pairs = latest("pairs", self, _read(batch, self, zij_trunk), lambda: original(self, *call)[1])
        single = self.linear_s(self.layer_norm_s(torch.cat([si_trunk, si_input], dim=-1)))
        noise = self.fourier_emb((0.25 * torch.log(t / self.sigma_data)).unsqueeze(-1))
        single = single + self.linear_n(self.layer_norm_n(noise)).unsqueeze(-2)
        for layer in self.transition_s:
            single = single + layer(single, mask=batch["token_mask"])
        return single, pairs

    return forward


def atoms(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The first half of OpenFold-3's encoder of atoms. Only the noisy positions are new in each step."""

    def get_atom_reps(
        self: Any, batch: dict[str, Any], rl: Tensor | None, si_trunk: Tensor | None, zij_trunk: Tensor | None
    ) -> tuple[Tensor, ...]:
        if rl is None or si_trunk is None or zij_trunk is None or not may_share(self):
            return original(self, batch, rl, si_trunk, zij_trunk)  # type: ignore[no-any-return]
        owners = _read(batch, self, si_trunk, zij_trunk)
        cl, plm = latest("atoms", self, owners, lambda: original(self, batch, rl, si_trunk, zij_trunk)[1:])
        return cl + self.noisy_position_embedder.linear_r(rl), cl, plm

    return get_atom_reps


def _read(batch: dict[str, Any], module: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """The tensors that a module of OpenFold-3 reads: these, all features, and its parameters."""
    return [*tensors, *(x for x in batch.values() if isinstance(x, Tensor)), *module.parameters()]


def checked(module: str, *names: str) -> tuple[Site, ...]:
    """Functions that are taken for granted."""
    return tuple(Site(module, name, counted=False) for name in names)


def protenix_sites(package: str) -> tuple[Site, ...]:
    """The transformer and what its steps share, in Protenix or OpenDDE."""
    modules = f"{package}.model.modules"
    return (
        Site(f"{modules}.transformer", "DiffusionTransformer.forward", transformer_of_protenix, kind=diffusion.KIND),
        Site(f"{modules}.diffusion", "DiffusionModule.f_forward", denoised, counted=False),
        Site(f"{modules}.diffusion", "DiffusionConditioning.forward", shared_condition, counted=False),
        Site(f"{modules}.transformer", "AtomAttentionEncoder.forward", atoms_of_protenix, counted=False),
        *checked(f"{modules}.diffusion", "DiffusionConditioning.prepare_cache"),
        *checked(
            f"{modules}.transformer",
            "DiffusionTransformerBlock.forward",
            "AttentionPairBias.standard_multihead_attention",
            "AttentionPairBias.local_multihead_attention",
            "ConditionedTransitionBlock.forward",
        ),
        *checked(f"{modules}.primitives", "AdaptiveLayerNorm.forward", "Attention._prep_qkv", "Attention._wrap_up"),
        *checked(f"{modules}.primitives", "rearrange_to_dense_trunk", "rearrange_qk_to_dense_trunk"),
    )


def openfold3_sites() -> tuple[Site, ...]:
    """The transformer and what its steps share, in OpenFold-3."""
    layers = "openfold3.core.model.layers"
    return (
        Site(f"{layers}.diffusion_transformer", "DiffusionTransformer.forward", diffusion.transformer, kind=diffusion.KIND),
        Site(f"{layers}.diffusion_conditioning", "DiffusionConditioning.forward", conditioned, counted=False),
        Site(f"{layers}.sequence_local_atom_attention", "AtomAttentionEncoder.get_atom_reps", atoms, counted=False),
        *checked(f"{layers}.diffusion_transformer", "DiffusionTransformerBlock.forward"),
        *checked(
            f"{layers}.diffusion_conditioning",
            "DiffusionConditioning._embed_trunk_inputs",
            "DiffusionConditioning._forward",
            "DiffusionConditioning._chunk_forward",
        ),
        *checked(
            f"{layers}.attention_pair_bias",
            "DiffusionAttentionPairBias._prep_bias",
            "CrossAttentionPairBias.forward",
            "CrossAttentionPairBias._prep_block_inputs",
        ),
        *checked("openfold3.core.utils.atom_attention_block_utils", "convert_single_rep_to_blocks", "get_pair_atom_block_mask"),
        *checked(f"{layers}.transition", "ConditionedTransitionBlock._transition", "ConditionedTransitionBlock.forward"),
        *checked("openfold3.core.model.primitives.normalization", "AdaLN.forward"),
        *checked("openfold3.core.model.primitives.activations", "SwiGLU.forward"),
    )
