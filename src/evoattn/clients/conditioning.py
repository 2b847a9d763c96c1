"""The pair biases of all layers of Boltz-2's and BoltzGen's denoisers, made before a diffusion by one norm and one product.

Each layer norms the same pairs and projects them to its heads. Under autocast a layer keeps two copies of the pairs for its
backward: 7 of 9 GiB of what the conditioning of 640 tokens keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.clients.site import Count
from evoattn.core.own_code import torchs
from evoattn.nn.submodules import has_hooks, has_own_call, is_linear, is_norm

_SEQUENTIAL = torchs(nn.Sequential, "forward")


def joined(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A `DiffusionConditioning.forward`. The original computes if somebody has to see a module called, or has changed one."""

    def forward(self: Any, s_trunk: Tensor, z_trunk: Tensor, relative_position_encoding: Tensor, feats: Any) -> Any:
        lists = [list(x) for x in (self.atom_enc_proj_z, self.atom_dec_proj_z, self.token_trans_proj_z)]
        if torch.compiler.is_compiling() or not all(map(_can_join, lists)):
            return original(self, s_trunk, z_trunk, relative_position_encoding, feats)
        z = self.pairwise_conditioner(z_trunk, relative_position_encoding)
        q, c, p, to_keys = self.atom_encoder(feats=feats, s_trunk=s_trunk, z=z)
        return q, c, to_keys, *(_projected(layers, x) for layers, x in zip(lists, (p, p, z), strict=True))

    return forward


def _can_join(layers: list[Any]) -> bool:
    """Return whether layers are all an affine norm and a projection without a bias, of the same sizes, and nothing else."""
    if not layers or not all(map(_is_plain, layers)):
        return False
    return len({(norm.normalized_shape, norm.eps, linear.weight.shape, linear.weight.dtype) for norm, linear in layers}) == 1


def _is_plain(layer: Any) -> bool:
    if type(layer) is not nn.Sequential or nn.Sequential.forward is not _SEQUENTIAL or len(layer) != 2:
        return False
    if has_hooks(layer) or has_own_call(layer) or not is_norm(layer[0]) or not is_linear(layer[1]):
        return False
    return layer[0].weight is not None and layer[0].bias is not None and layer[1].bias is None


def _projected(layers: list[Any], x: Tensor) -> Tensor:
    """`torch.cat([layer(x) for layer in layers], -1)`: the scales of the norms go into the weights, their shifts become a bias.

    x is `[*, C]`, the result `[*, H]` with the heads of all layers.
    """
    norms, linears = zip(*layers, strict=True)
    normed = F.layer_norm(x, norms[0].normalized_shape, eps=norms[0].eps)
    weight = torch.cat([linear.weight for linear in linears])
    wide, repeats = torch.promote_types(weight.dtype, torch.float32), linears[0].out_features
    scale, shift = (torch.stack([getattr(norm, name) for norm in norms]).to(wide) for name in ("weight", "bias"))
    bias = (weight * shift.repeat_interleave(repeats, 0)).sum(-1)
    return F.linear(normed, (weight * scale.repeat_interleave(repeats, 0)).to(weight.dtype), bias.to(weight.dtype))
