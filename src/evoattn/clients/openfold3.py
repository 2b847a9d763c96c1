"""OpenFold-3: all attention goes through one module, which looks its functions up at each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.clients import aggregation, graphs
from evoattn.clients.calls import HOST_BOUND, host_sets_pace, low_memory, queries_first
from evoattn.clients.layers import known_sites
from evoattn.clients.site import Client, Count, Site, named
from evoattn.compat.cuequivariance import triangle_multiplicative_update
from evoattn.compat.openfold import attention

_MODULE = "openfold3.core.model.primitives.attention"
_WINDOWS = "openfold3.core.model.layers.sequence_local_atom_attention"
_ATOMS = "openfold3.core.utils.atomize_utils"
_DIFFUSION = "openfold3.core.model.structure.diffusion_module"
_MULTIPLICATION = "openfold3.core.model.layers.triangular_multiplicative_update"


def _additive(original: Any, count: Count) -> Any:
    def _attention(query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor], use_high_precision: bool = False) -> Tensor:
        """In the dtype of the query, which the original sets as that of autocast. Sums are float32 with either precision."""
        if host_sets_pace(query, query.shape[-2], key.shape[-2], query.shape[:-1].numel() * key.shape[-2]):
            count.count_passed_on(HOST_BOUND)
            return original(query, key, value, biases, use_high_precision)  # type: ignore[no-any-return]
        count.count_replaced()
        with torch.autocast(query.device.type, enabled=False):
            return attention(query, key.to(query.dtype), value.to(query.dtype), biases)

    return _attention


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
        layers=known_sites("openfold3"),
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
            *graphs.blocks("openfold3.core.model.latent.pairformer:PairFormerBlock", instead={"inplace_safe": False}),
        ),
    )
}
