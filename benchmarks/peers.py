"""What people use today, one small adapter each: the same problem in the layout and the dtypes that each likes best.

An adapter takes the inputs of a case and returns a function of (q, k, v, pair_bias), which carry gradients, and those four
tensors, in its own layout and already laid out so: only what a model would have to do at each call is timed. It raises where
the library is absent or refuses the problem; the benchmark shows the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import evoattn
from evoattn.testing import Inputs

__all__ = ["PEERS", "Prepared"]


class Prepared(NamedTuple):
    """An attention ready to run.

    Args:
        attend: (q, k, v, pair_bias) -> o, in the library's layout.
        tensors: q, k, v and pair_bias (or None) in that layout.
        to_library: how a tensor of the case's layout `[b,n,l,h,d]` becomes one of the library's.
        from_library: the inverse.
    """

    attend: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]
    to_library: Callable[[Tensor], Tensor]
    from_library: Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _evoattn(inputs: Inputs, backend: str) -> Prepared:
    attend = functools.partial(_call_evoattn, mask=inputs.mask, backend=backend)
    return Prepared(attend, (inputs.q, inputs.k, inputs.v, inputs.pair_bias), _same, _same)


def _call_evoattn(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None, *, mask: Tensor | None, backend: str) -> Tensor:
    return evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias, backend=backend)


def _rows_first(inputs: Inputs) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """`[b,n,l,h,d]` <-> contiguous `[b*n,h,l,d]`."""
    b, n = inputs.q.shape[:2]
    return (
        lambda x: x.flatten(0, 1).transpose(1, 2).contiguous(),
        lambda x: x.transpose(1, 2).unflatten(0, (b, n)),
    )


def _heads_inside(inputs: Inputs) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """`[b,n,l,h,d]` <-> contiguous `[b,n,h,l,d]`."""
    return lambda x: x.transpose(2, 3).contiguous(), lambda x: x.transpose(2, 3)


def _key_bias(inputs: Inputs) -> Tensor | None:
    """The mask as an additive bias `[b*n,k]` in q's dtype."""
    if inputs.mask is None:
        return None
    return torch.where(inputs.mask, 0.0, -torch.inf).to(inputs.q.dtype).flatten(0, 1)


def _flex(inputs: Inputs) -> Prepared:
    from torch.nn.attention.flex_attention import flex_attention

    n = inputs.q.shape[1]
    key_bias = _key_bias(inputs)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        pair = None if pair_bias is None else pair_bias[:, 0]

        def score_mod(score: Tensor, row: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if pair is not None:
                score = score + pair[row // n, h, i, j]
            return score if key_bias is None else score + key_bias[row, j]

        return compiled(q, k, v, score_mod=score_mod)  # type: ignore[return-value]

    to_library, from_library = _rows_first(inputs)
    return Prepared(attend, (*map(to_library, (inputs.q, inputs.k, inputs.v)), inputs.pair_bias), to_library, from_library)


def _sdpa(inputs: Inputs) -> Prepared:
    """The biases are summed and expanded at each call, since the pair bias is another one in each block of a model."""
    key_bias = _key_bias(inputs)

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        rows, h, lq, _ = q.shape
        bias = None if key_bias is None else key_bias[:, None, None, :]
        if pair_bias is not None:
            expanded = pair_bias.expand(-1, rows // pair_bias.shape[0], -1, -1, -1).flatten(0, 1)
            bias = expanded if bias is None else bias + expanded
        if bias is not None:
            bias = bias.expand(rows, h, lq, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    to_library, from_library = _rows_first(inputs)
    return Prepared(attend, (*map(to_library, (inputs.q, inputs.k, inputs.v)), inputs.pair_bias), to_library, from_library)


def _cuequivariance(inputs: Inputs) -> Prepared:
    from cuequivariance_ops_torch.triangle_attention import triangle_attention

    b, _, lq, h, _ = inputs.q.shape
    mask = None if inputs.mask is None else inputs.mask[:, :, None, None, :]
    bias = (
        torch.zeros(b, 1, h, lq, inputs.k.shape[2], device=inputs.q.device)
        if inputs.pair_bias is None
        else inputs.pair_bias.float()
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        out: Tensor = triangle_attention(q, k, v, bias if pair_bias is None else pair_bias, mask)
        return out

    to_library, from_library = _heads_inside(inputs)
    pair = None if inputs.pair_bias is None else bias
    return Prepared(attend, (*map(to_library, (inputs.q, inputs.k, inputs.v)), pair), to_library, from_library)


def _trifast(inputs: Inputs) -> Prepared:
    from trifast import triangle_attention

    b, n, lq = inputs.q.shape[:3]
    if inputs.pair_bias is None or n != lq or inputs.k.shape[2] != lq:
        raise ValueError("takes triangles alone: a pair bias and N = L")
    masked = torch.zeros(b, n, lq, dtype=torch.bool, device=inputs.q.device) if inputs.mask is None else ~inputs.mask

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        out: Tensor = triangle_attention(q, k, v, pair_bias, masked)
        return out

    def to_library(x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2, 4).contiguous()

    def from_library(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1, 4)

    tensors = (*map(to_library, (inputs.q, inputs.k, inputs.v)), inputs.pair_bias[:, 0].contiguous())
    return Prepared(attend, tensors, to_library, from_library)


PEERS: dict[str, Callable[[Inputs], Prepared]] = {
    "evoattn": functools.partial(_evoattn, backend="auto"),
    "flex": _flex,
    "cuequivariance": _cuequivariance,
    "trifast": _trifast,
    "sdpa": _sdpa,
}
