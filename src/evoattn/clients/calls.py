"""Replacements that several clients share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evoattn.canonical import narrow_expanded
from evoattn.clients.site import Count
from evoattn.compat import cuequivariance
from evoattn.compat.openfold import attention

__all__ = ["additive", "kernel", "low_memory", "multiplication", "queries_first"]

Function = Callable[..., Any]


def additive(original: Function, count: Count) -> Function:
    """`_attention(query, key, value, biases)`, as OpenFold has it: q is scaled, heads come before queries."""

    def _attention(query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor]) -> Tensor:
        count.one()
        return attention(query, key, value, biases)

    return _attention


def low_memory(original: Function, count: Count) -> Function:
    """`_lma`, as OpenFold and OpenFold-3 have it."""

    def _lma(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], q_chunk_size: int, kv_chunk_size: int) -> Tensor:
        """Ours holds no scores, whatever the chunks. The caller has expanded the biases: that is taken back."""
        count.one()
        return attention(q, k, v, [narrow_expanded(x) for x in biases])

    return _lma


def queries_first(*, scaled: bool) -> Callable[[Function, Count], Function]:
    """What stands around a kernel there: `(q, k, v, biases) -> [*, Q, H, C]`."""

    def replace(original: Function, count: Count) -> Function:
        def attend(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], scale: float | None = None) -> Tensor:
            """`scale`, where it is given, is that of the channels."""
            count.one()
            added = [_additive_mask(x) for x in biases]
            return attention(q, k, v, added, scaled=scaled).transpose(-2, -3)

        return attend

    return replace


def _additive_mask(bias: Tensor) -> Tensor:
    """A bool mask, True is attended, as the others are."""
    return torch.where(bias, 0.0, -1e9) if bias.dtype == torch.bool else bias


def kernel(original: Function, count: Count) -> Function:
    """A call of cuEquivariance's `triangle_attention`. Boltz gives the bias by name, and calls it `tri_bias`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> Tensor:
        count.one()
        if "tri_bias" in named:
            named["bias"] = named.pop("tri_bias")
        o: Tensor = cuequivariance.triangle_attention(q, k, v, *arguments, **named)
        return o

    return attend


def multiplication(original: Function, count: Count) -> Function:
    """cuEquivariance's triangle multiplication in plain torch, for clients that want it with the attention.

    A function of its own, since a replacement takes the name of the original.
    """

    def update(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return cuequivariance.triangle_multiplicative_update(x, *arguments, **named)

    return update
