"""lucidrains' alphafold3-pytorch: one function for full attention, one for windows, and triangles that repeat their bias."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from evoattn.clients.site import Client, Count, PassedOn, Site, replacement
from evoattn.compat.cuequivariance import triangle_attention

_MODULE = "alphafold3_pytorch.attention"


def _attend(original: Any, count: Count) -> Any:
    def forward(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        windowed_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        memory_kv: Tensor | None = None,
    ) -> Tensor:
        """`[b, h, i, d]`. A bias or a mask of fewer entries than b is one for consecutive entries of q, the rows of a triangle.

        The original replaces scores where the mask is False, as cuEquivariance does: a query without a key has the mean of v.
        """
        found: Any = PassedOn("" if self.is_local_attn else _option_of_the_original(self, memory_kv) or "")
        if not self.is_local_attn and not found.reason:
            found = count.compute(_full, q, k, v, mask, attn_bias, self.scale)
        if isinstance(found, PassedOn):
            if found.reason:
                count.count_passed_on(found.reason)
            mask, attn_bias = _repeat(mask, q.shape[0], 2), _repeat(attn_bias, q.shape[0], 4)
            return original(self, q, k, v, mask, windowed_mask, attn_bias, memory_kv)  # type: ignore[no-any-return]
        count.count_replaced()
        return found  # type: ignore[no-any-return]

    return forward


def _full(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    """Full attention. Consecutive entries of q share an entry of the bias and of the mask."""
    groups, bias = q.shape[0], q.new_zeros(1) if bias is None else bias
    if bias.ndim == 4:
        groups, bias = bias.shape[0], bias.unsqueeze(1)
    rows = q.shape[0] // groups
    if mask is not None:
        mask = mask.unflatten(0, (groups, rows) if mask.shape[0] == q.shape[0] else (mask.shape[0], 1))[:, :, None, None]
    q, k, v = (x.unflatten(0, (groups, rows)) for x in (q, k, v))
    return triangle_attention(q, k, v, bias, mask, scale).flatten(0, 1)


@replacement
def _windows(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    windowed_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    memory_kv: Tensor | None = None,
) -> Tensor | PassedOn:
    """`[b, h, n, d]` in windows of w; each attends itself and the one before. Windows take the place of rows."""
    reason = _option_of_the_original(self, memory_kv, dropout=False)
    if reason:
        return PassedOn(reason)
    length, size = q.shape[-2], self.window_size
    padding = -length % size
    if mask is None:
        mask = torch.ones(q.shape[0], length, dtype=torch.bool, device=q.device)
    keys = _with_previous(torch.nn.functional.pad(mask, (0, padding)).unflatten(1, (-1, size)), axis=1)  # [b,n,2w]
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, size)).transpose(1, 2) for x in (q, k, v))
    k, v = _with_previous(k, axis=1), _with_previous(v, axis=1)  # [b,n,h,2w,d]
    bias = q.new_zeros(1) if attn_bias is None else _window_bias(attn_bias, size)
    if windowed_mask is not None:
        bias = torch.where(windowed_mask.unsqueeze(2), bias, -torch.inf)
    o = triangle_attention(q, k, v, bias, keys[:, :, None, None], q.shape[-1] ** -0.5)
    if windowed_mask is not None:
        attended = (windowed_mask & keys.unsqueeze(2)).any(-1)[:, :, None, :, None]
        o = torch.where(attended, o, v.mean(-2, keepdim=True).to(o.dtype))
    return o.transpose(1, 2).flatten(2, 3)[..., :length, :]


def _with_previous(x: Tensor, axis: int) -> Tensor:
    """Windows `[b, n, ..., w, d]` or `[b, n, w]`, each behind the one before it; zeros come before the first."""
    before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), axis)
    return torch.cat((before, x), 2 if x.ndim == 3 else -2)


def _window_bias(bias: Tensor, size: int) -> Tensor:
    """A bias `[..., n, n]` or `[b, (h,) n, w, 2w]` -> `[b, n, h|1, w, 2w]`."""
    if bias.shape[-1] == bias.shape[-2]:
        bias = importlib.import_module(_MODULE).full_attn_bias_to_windowed(bias, window_size=size)
    return bias.unsqueeze(2) if bias.ndim == 4 else bias.transpose(1, 2)


def _option_of_the_original(self: Any, memory_kv: Tensor | None, dropout: bool = True) -> str | None:
    """The name of an option in use that only the original has, or None."""
    if self.enable_attn_softclamp:
        return "softclamp"
    if memory_kv is not None:
        return "memory keys and values"
    if dropout and self.training and self.dropout > 0:
        return "dropout of the attention"
    return None


def _repeat(x: Tensor | None, batch: int, axes: int) -> Tensor | None:
    """Repeat a mask or a bias of `axes` axes along its batch, so that it has one entry for each of q."""
    if x is None or x.ndim != axes or x.shape[0] in (1, batch):
        return x
    return x.repeat_interleave(batch // x.shape[0], 0)


@replacement
def _triangle(
    self: Any, pairwise_repr: Tensor, mask: Tensor | None = None, return_values: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`[b, n, n, d]`. The original repeats bias and mask for each row; here `Attend.forward` gets one for all rows.

    It counts the call.
    """
    if self.need_transpose:
        pairwise_repr = pairwise_repr.transpose(1, 2)
    bias = self.to_attn_bias(pairwise_repr)
    rows = pairwise_repr.flatten(0, 1)
    out, values = self.attn(rows, mask=mask, attn_bias=bias, return_values=True, **options)
    out = out.unflatten(0, pairwise_repr.shape[:2])
    out = self.dropout(out.transpose(1, 2) if self.need_transpose else out)
    return (out, values) if return_values else out


CLIENTS = {
    "alphafold3_pytorch": Client(
        "alphafold3_pytorch",
        "alphafold3-pytorch",
        (
            Site(_MODULE, "Attend.forward", _attend),
            Site(_MODULE, "Attend.local_attn", _windows),
            Site("alphafold3_pytorch.alphafold3", "TriangleAttention.forward", _triangle, counted=False),
            Site(_MODULE, "Attention.forward"),
            Site(_MODULE, "full_attn_bias_to_windowed"),
            Site(_MODULE, "full_pairwise_repr_to_windowed"),
        ),
    )
}
