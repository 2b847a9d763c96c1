"""The layers in dense torch, as the papers and OpenFold write them, from the parameters of a layer of `evoattn.nn`.

In float64 they are the truth, and in a narrower dtype they show what that dtype loses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Dense", "columns", "global_columns", "pair_biased", "rows", "templates", "triangle"]

Parameters = dict[str, Tensor]


def norm(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p.get(f"{name}.weight"), p.get(f"{name}.bias"))


def project(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def softmax(scores: Tensor, mask_bias: Tensor, swallowed: bool) -> Tensor:
    """Weights of scores under a mask bias; swallowed: rows that are masked at every key weigh alike, as in float32."""
    if swallowed:
        empty = mask_bias.amax(-1, keepdim=True) < -1e8
        change = scores - scores.detach()  # 0, with the gradient of the scores
        return torch.softmax(torch.where(empty, change, scores + torch.where(empty, 0, mask_bias)), -1)
    return torch.softmax(scores + mask_bias, -1)


def attention(
    p: Parameters, name: str, x: Tensor, keys: Tensor, heads: int, mask: Tensor, pair: Tensor | float, swallowed: bool
) -> Tensor:
    """x `[*, Q, C]`, keys `[*, K, C]`, mask `[*, K]`, pair what broadcasts to `[*, H, Q, K]`."""
    q, k, v = (
        project(p, f"{name}.linear_{which}", y).unflatten(-1, (heads, -1)).transpose(-2, -3)
        for which, y in (("q", x), ("k", keys), ("v", keys))
    )
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + pair
    weights = softmax(scores, (1e9 * (mask.to(scores.dtype).to(torch.float64) - 1))[..., None, None, :], swallowed)
    o = (weights.to(v.dtype) @ v).transpose(-2, -3)
    if f"{name}.linear_g.weight" in p:
        o = o * project(p, f"{name}.linear_g", x).sigmoid().unflatten(-1, (heads, -1))
    return project(p, f"{name}.linear_o", o.flatten(-2))


@dataclasses.dataclass(frozen=True)
class Dense:
    """A layer, what it is called with, and the same in dense torch.

    Args:
        name: for the test's name.
        make: makes the layer.
        inputs: shapes of its inputs, which need gradients.
        mask: shape of its mask.
        dense: parameters, inputs, mask and whether masked rows are swallowed -> the output.
        masked: what of the mask is 0 everywhere, for rows without a key.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    mask: tuple[int, ...]
    dense: Callable[..., Tensor]
    masked: tuple[Any, ...] = (0, 0)

    def layer(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The layer with parameters that are far from 0."""
        made, rng = self.make(), torch.Generator().manual_seed(1)
        for name, x in made.named_parameters():
            noise = torch.randn(x.shape, generator=rng, dtype=torch.float64)
            values = 0.3 * noise + name.endswith("weight") if x.ndim == 1 else noise / x.shape[-1] ** 0.5
            x.data = values.to(dtype)
        return made

    def arguments(self, dtype: torch.dtype = torch.float64, empty: bool = True) -> tuple[list[Tensor], Tensor]:
        """Inputs and the mask, which may leave rows without a key."""
        rng = torch.Generator().manual_seed(2)
        inputs = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in self.inputs]
        mask = (torch.rand(self.mask, generator=rng) > 0.3).to(torch.float32)
        mask[..., -1] = 1
        if empty:
            mask[self.masked] = 0
        return inputs, mask

    def reference(self, layer: nn.Module, dtype: torch.dtype, swallowed: bool) -> Callable[..., Tensor]:
        """The same layer in dense torch of a dtype, as a function of the same arguments; its parameters are `parameters`."""
        parameters = {name: x.detach().to(dtype).requires_grad_() for name, x in layer.named_parameters()}

        def run(*inputs: Tensor, mask: Tensor) -> Tensor:
            return self.dense(parameters, *inputs, mask=mask, swallowed=swallowed)

        run.parameters = [x for name, x in parameters.items() if name != "layer_norm_z.bias"]  # type: ignore[attr-defined]
        return run


def triangle(heads: int, starting: bool, transpose_bias: bool = False) -> Callable[..., Tensor]:
    def dense(p: Parameters, z: Tensor, mask: Tensor, swallowed: bool) -> Tensor:
        if not starting:
            z, mask = z.transpose(-2, -3), mask.transpose(-1, -2)
        z = norm(p, "layer_norm", z)
        pair = project(p, "linear", z).movedim(-1, -3).unsqueeze(-4)
        pair = pair.transpose(-1, -2) if transpose_bias else pair
        made = attention(p, "mha", z, z, heads, mask, pair, swallowed)
        return made if starting else made.transpose(-2, -3)

    return dense


def rows(heads: int) -> Callable[..., Tensor]:
    def dense(p: Parameters, m: Tensor, z: Tensor, mask: Tensor, swallowed: bool) -> Tensor:
        pair = project(p, "linear_z", norm(p, "layer_norm_z", z)).movedim(-1, -3).unsqueeze(-4)
        m = norm(p, "layer_norm_m", m)
        return attention(p, "mha", m, m, heads, mask, pair, swallowed)

    return dense


def columns(heads: int) -> Callable[..., Tensor]:
    def dense(p: Parameters, m: Tensor, mask: Tensor, swallowed: bool) -> Tensor:
        m = norm(p, "_msa_att.layer_norm_m", m).transpose(-2, -3)
        made = attention(p, "_msa_att.mha", m, m, heads, mask.transpose(-1, -2), 0.0, swallowed)
        return made.transpose(-2, -3)

    return dense


def global_columns(heads: int) -> Callable[..., Tensor]:
    def dense(p: Parameters, m: Tensor, mask: Tensor, swallowed: bool) -> Tensor:
        name = "global_attention"
        m, mask = norm(p, "layer_norm_m", m).transpose(-2, -3), mask.transpose(-1, -2)
        wide = mask.to(torch.promote_types(m.dtype, torch.float32))  # 1e-10 is 0 in float16
        mean = ((m * wide[..., None]).sum(-2) / (wide.sum(-1, keepdim=True) + 1e-10)).to(m.dtype)
        q = project(p, f"{name}.linear_q", mean).unflatten(-1, (heads, -1))  # [*,l,h,d]
        k, v = (project(p, f"{name}.linear_{which}", m) for which in "kv")  # [*,l,s,d]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        o = softmax(scores, (1e9 * (mask.double() - 1))[..., None, :], swallowed).to(v.dtype) @ v
        gate = project(p, f"{name}.linear_g", m).sigmoid().unflatten(-1, (heads, -1))
        return project(p, f"{name}.linear_o", (o.unsqueeze(-3) * gate).flatten(-2)).transpose(-2, -3)

    return dense


def templates(heads: int) -> Callable[..., Tensor]:
    def dense(p: Parameters, t: Tensor, z: Tensor, mask: Tensor, swallowed: bool) -> Tensor:
        keys, mask = t.movedim(-4, -2), mask[..., None, None, :]
        return attention(p, "mha", z.unsqueeze(-2), keys, heads, mask, 0.0, swallowed).squeeze(-2)

    return dense


def pair_biased(heads: int) -> Callable[..., Tensor]:
    """The single track, or the diffusion transformer where there is a condition."""

    def dense(p: Parameters, a: Tensor, z: Tensor, s: Tensor | None = None, *, mask: Tensor, swallowed: bool) -> Tensor:
        if s is None:
            a, z = norm(p, "layer_norm_a", a), norm(p, "layer_norm_z", z)
        else:
            condition = norm(p, "layer_norm_a.layer_norm_s", s)
            gate = project(p, "layer_norm_a.linear_g", condition).sigmoid()
            a = gate * F.layer_norm(a, a.shape[-1:]) + project(p, "layer_norm_a.linear_s", condition)
        pair = project(p, "linear_z", z).movedim(-1, -3)
        made = attention(p, "mha", a, a, heads, mask, pair, swallowed)
        return made if s is None else project(p, "linear_ada_out", s).sigmoid() * made

    return dense
