"""OpenFold 1 and 2: one module of functions, a CUDA kernel called in the midst of a `forward`, and the global attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.clients import graphs
from evoattn.clients.arguments import forwards, ignore
from evoattn.clients.blocks import KnownBlock, call_openfold_block
from evoattn.clients.calls import additive, low_memory, offloads, projected, queries_first
from evoattn.clients.known import KnownLayer, layers_of_openfold, transition
from evoattn.clients.layers import sites
from evoattn.clients.site import Client, PassedOn, Site, replacement
from evoattn.compat.openfold import attention
from evoattn.nn.template import TemplatePointwiseAttention

_MODULE = "openfold.model.primitives"


@replacement
def _kernel(
    self: Any,
    q_x: Tensor,
    kv_x: Tensor,
    biases: list[Tensor] | None = None,
    use_memory_efficient_kernel: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Tensor | PassedOn:
    """Only the CUDA kernel is called here. The original calls functions for all else, and those are replaced too."""
    other_switch = any(x is True for x in (*args, *kwargs.values()))  # which with this one is an error
    if not use_memory_efficient_kernel or other_switch:
        return PassedOn()
    return projected(self, q_x, kv_x, biases)


@replacement
def _global(self: Any, m: Tensor, mask: Tensor, use_lma: bool = False) -> Tensor:
    """Each row `[*, N, L, C]` has one query a head, made of the mean of its entries, and one head of keys and values."""
    mean = (m * mask.unsqueeze(-1)).sum(-2) / (mask.sum(-1, keepdim=True) + self.eps)
    q = self.linear_q(mean).unflatten(-1, (self.no_heads, -1)).unsqueeze(-2)  # [*,n,h,1,c]
    k, v = (linear(m).unsqueeze(-3) for linear in (self.linear_k, self.linear_v))  # [*,n,1,l,c]
    off = self.inf * (mask - 1)
    o = attention(q, k, v, [off[..., None, None, :]], scaled=False)
    gate = self.linear_g(m).sigmoid().unflatten(-1, (self.no_heads, -1))  # [*,n,l,h,c]
    return self.linear_o((o.transpose(-2, -3) * gate).flatten(-2))  # type: ignore[no-any-return]


@replacement
def flash(q: Tensor, k: Tensor, v: Tensor, kv_mask: Tensor) -> Tensor:
    """In q's dtype, not in float16. Keys that are masked are left out: a query without a key has output 0."""
    off = torch.zeros_like(kv_mask, dtype=torch.float32).masked_fill(kv_mask == 0, -torch.inf)[..., None, None, :]
    return attention(q, k, v, [off], empty_rows="native").transpose(-2, -3)


def _templates(layer: Any, t: Tensor, z: Tensor, template_mask: Tensor | None = None, **switches: Any) -> Tensor:
    ignore(switches)
    return layer(t, z, template_mask)  # type: ignore[no-any-return]


_MODEL, _RELU = "openfold.model", "layer_norm linear_1 linear_2"

_KNOWN: dict[str, KnownLayer | KnownBlock] = {
    **layers_of_openfold(_MODEL),
    f"{_MODEL}.template.TemplatePointwiseAttention": KnownLayer(
        TemplatePointwiseAttention, "mha.linear_*", _templates, "c_t c_z c_hidden no_heads inf"
    ),
    f"{_MODEL}.pair_transition.PairTransition": transition(_RELU, "relu", forwards("z")),
    f"{_MODEL}.evoformer.MSATransition": transition(_RELU, "relu", forwards("m")),
    f"{_MODEL}.evoformer.PairStack": KnownBlock(call_openfold_block, "pair_transition", True),
}

CLIENTS = {
    "openfold": Client(
        "openfold",
        "openfold",
        (
            Site(_MODULE, "_attention", additive),
            Site(_MODULE, "_lma", low_memory),
            Site(_MODULE, "_deepspeed_evo_attn", queries_first(scaled=False)),
            Site(_MODULE, "_flash_attn", flash),
            Site(_MODULE, "Attention.forward", _kernel),
            Site(_MODULE, "GlobalAttention.forward", _global),
            Site(_MODULE, "Attention._prep_qkv"),
            Site(_MODULE, "Attention._wrap_up"),
            Site(_MODULE, "_attention_chunked_trainable"),
            Site("openfold.utils.kernel.attention_core", "AttentionCoreFunction.forward"),
        ),
        layers=sites(_KNOWN),
        steps=graphs.blocks(
            "openfold.model.evoformer:EvoformerBlock",
            "openfold.model.evoformer:ExtraMSABlock",
            skip=offloads,
            instead={"inplace_safe": False},  # in inference blocks write into their input; recorded ones do not
        ),
        known=_KNOWN,
        linears=(f"{_MODULE}.Linear",),
        norms=(f"{_MODULE}.LayerNorm",),
    )
}
