"""The peers of evoattn, one small adapter each. Each gets the same problem in the layout and dtypes that suit it best.

An adapter takes the inputs of a case and returns a function of (q, k, v, pair_bias) and those four tensors, in its own layout
and already laid out so: only what a model would have to do at each call is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import evoattn
from evoattn.bench.contender import Contender, Prepared, RefusesError
from evoattn.core.config import Config
from evoattn.testing import CaseInputs

Layout = Callable[[Tensor], Tensor]
"""A change of a tensor's layout."""


def backend_peer(backend: str, config: Config | None = None) -> Contender:
    """evoattn itself, by the name of a backend or "auto"."""
    name, title = ("evoattn", "evoattn") if backend == "auto" else (f"evoattn/{backend}", f"evoattn, {backend}")
    prepare = functools.partial(_evoattn, backend=backend, config=config)
    return Contender(name, title, prepare, score_copies=10 if backend == "reference" else 0)


def _evoattn(inputs: CaseInputs, backend: str, config: Config | None) -> Prepared:
    q, k, v, mask, pair_bias = inputs.q, inputs.k, inputs.v, inputs.mask, inputs.pair_bias
    if config is None:
        refused = evoattn.explain(q, k, v, mask=mask, pair_bias=pair_bias, backend=backend)
        if refused.backend is None:
            raise RefusesError("; ".join(reason for reasons in refused.refused.values() for reason in reasons))

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        return evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias, backend=backend, config=config)

    return Prepared(attend, (q, k, v, pair_bias))


def _rows_first(inputs: CaseInputs) -> tuple[Layout, Layout]:
    """`[b,n,l,h,d]` <-> contiguous `[b*n,h,l,d]`."""
    b, n = inputs.q.shape[:2]
    return lambda x: x.flatten(0, 1).transpose(1, 2).contiguous(), lambda x: x.transpose(1, 2).unflatten(0, (b, n))


def _prepared(
    inputs: CaseInputs, compute: Callable[..., Tensor], layouts: tuple[Layout, Layout], pair_bias: Tensor | None
) -> Prepared:
    """A computation of q, k and v in a library's layout, and of this pair bias."""
    return Prepared(compute, (*map(layouts[0], (inputs.q, inputs.k, inputs.v)), pair_bias), *layouts)


def _heads_inside(x: Tensor) -> Tensor:
    """`[b,n,l,h,d]` -> contiguous `[b,n,h,l,d]`."""
    return x.transpose(2, 3).contiguous()


def _heads_outside(x: Tensor) -> Tensor:
    """`[b,n,h,l,d]` <-> `[b,n,l,h,d]`, as a view."""
    return x.transpose(2, 3)


def _all_heads(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values `[...,h|1,l,d]` with as many heads as q `[...,h,l,d]`, as a view."""
    return x if x.shape[-3] == like.shape[-3] else x.expand(*x.shape[:-3], like.shape[-3], *x.shape[-2:])


def _key_bias(inputs: CaseInputs, *, finite: bool = False) -> Tensor | None:
    """The mask as an additive bias `[b,n,1,1,k]` in q's dtype. As models add it, it is `finite`: kernels subtract a maximum."""
    masked = -torch.inf if not finite else -6e4 if inputs.q.dtype == torch.float16 else -1e9
    return None if inputs.mask is None else torch.where(inputs.mask, 0.0, masked).to(inputs.q.dtype)[:, :, None, None]


def _heads_of_query(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values `[b,n,k,h|1,d]` with as many heads as q `[b,n,q,h,d]`, contiguous if there was one."""
    return x if x.shape[3] == q.shape[3] else x.expand(-1, -1, -1, q.shape[3], -1).contiguous()


def refuse(reasons: list[tuple[bool, str]]) -> None:
    """Raise RefusesError with every reason that holds."""
    holding = [reason for holds, reason in reasons if holds]
    if holding:
        raise RefusesError("; ".join(holding))


_compile = functools.partial(torch.compile, dynamic=False)


def dense(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    """Attention of `[b,n,h,l,d]` as models write it: all scores in memory, and additions in place."""
    s = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))  # [b,n,h,q,k]
    for bias in (key_bias, pair_bias):
        if bias is not None:
            s += bias
    return torch.matmul(torch.softmax(s, -1).to(v.dtype), v)


def _dense(inputs: CaseInputs, compiled: bool) -> Prepared:
    key_bias = _key_bias(inputs)

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        return dense(q, k, v, key_bias, pair_bias)

    return _prepared(inputs, _compile(attend) if compiled else attend, (_heads_inside, _heads_outside), inputs.pair_bias)


def _flex(inputs: CaseInputs) -> Prepared:
    from torch.nn.attention.flex_attention import flex_attention

    n = inputs.q.shape[1]
    mask_bias = _key_bias(inputs)
    key_bias = None if mask_bias is None else mask_bias[:, :, 0, 0].flatten(0, 1)
    compiled = _compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        pair = None if pair_bias is None else pair_bias[:, 0]

        def score_mod(score: Tensor, batch: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if pair is not None:
                score = score + pair[batch // n, h, i, j]
            return score if key_bias is None else score + key_bias[batch, j]

        out: Tensor = compiled(q, _all_heads(k, q), _all_heads(v, q), score_mod=score_mod)
        return out

    return _prepared(inputs, attend, _rows_first(inputs), inputs.pair_bias)


def _sdpa(inputs: CaseInputs) -> Prepared:
    """The biases are summed and expanded at each call, since the pair bias is another one in each block of a model."""
    mask_bias = _key_bias(inputs)
    key_bias = None if mask_bias is None else mask_bias.flatten(0, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        rows, h, lq, _ = q.shape
        bias = key_bias
        if pair_bias is not None:
            expanded = pair_bias.expand(-1, rows // pair_bias.shape[0], -1, -1, -1).flatten(0, 1)
            bias = expanded if bias is None else bias + expanded
        if bias is not None:
            bias = bias.expand(rows, h, lq, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, _all_heads(k, q), _all_heads(v, q), attn_mask=bias)

    return _prepared(inputs, attend, _rows_first(inputs), inputs.pair_bias)


def _cuequivariance(inputs: CaseInputs) -> Prepared:
    from cuequivariance_ops_torch.triangle_attention import triangle_attention

    b, _, lq, h, _ = inputs.q.shape
    mask = None if inputs.mask is None else inputs.mask[:, :, None, None, :]
    bias = (
        torch.zeros(b, 1, h, lq, inputs.k.shape[2], dtype=torch.float32, device=inputs.q.device)
        if inputs.pair_bias is None
        else inputs.pair_bias.float()
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Any:
        k, v = (_all_heads(x, q).contiguous() for x in (k, v))
        return triangle_attention(q, k, v, bias if pair_bias is None else pair_bias, mask)

    return _prepared(inputs, attend, (_heads_inside, _heads_outside), None if inputs.pair_bias is None else bias)


def _trifast(inputs: CaseInputs) -> Prepared:
    from trifast import triangle_attention

    b, n, lq = inputs.q.shape[:3]
    if inputs.pair_bias is None or n != lq or inputs.k.shape[2] != lq:
        raise RefusesError("takes triangles alone: a pair bias and N = L")
    masked = torch.zeros(b, n, lq, dtype=torch.bool, device=inputs.q.device) if inputs.mask is None else ~inputs.mask

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Any:
        return triangle_attention(q, k, v, pair_bias, masked)

    layouts = (lambda x: x.permute(0, 3, 1, 2, 4).contiguous(), lambda x: x.permute(0, 2, 3, 1, 4))
    return _prepared(inputs, attend, layouts, inputs.pair_bias[:, 0].contiguous())


def _deepspeed(inputs: CaseInputs) -> Prepared:
    from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

    lq, d = inputs.q.shape[2], inputs.q.shape[-1]
    reasons = [
        (inputs.q.dtype not in (torch.float16, torch.bfloat16), "takes float16 and bfloat16 alone"),
        (inputs.k.shape[2] != lq, "takes as many keys as queries"),
        (lq <= 16, "takes more than 16 queries"),
        (d > 64, "takes at most 64 channels a head"),
    ]
    refuse(reasons)
    key_bias = _key_bias(inputs, finite=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Any:
        k, v = (_heads_of_query(x, q) for x in (k, v))
        return DS4Sci_EvoformerAttention(q, k, v, [key_bias, pair_bias])

    return Prepared(attend, (inputs.q, inputs.k, inputs.v, inputs.pair_bias))


def _openfold3(inputs: CaseInputs) -> Prepared:
    """OpenFold-3's kernel as its attention calls it: without a pair bias it takes zeros and a flag that skips them."""
    from openfold3.core.kernels.triton.evoformer import TritonEvoformer

    if TritonEvoformer is None:
        raise ModuleNotFoundError("OpenFold-3's kernel needs Triton", name="triton")
    b, n, lq, h, _ = inputs.q.shape
    refuse([(inputs.k.shape[2] != lq, "takes as many keys as queries")])
    mask_bias = _key_bias(inputs, finite=True)
    key_bias = inputs.q.new_zeros(b, n, 1, 1, lq) if mask_bias is None else mask_bias
    zeros = inputs.q.new_zeros(b, 1, h, lq, lq) if inputs.pair_bias is None else None

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Any:
        k, v = (_heads_of_query(x, q) for x in (k, v))
        return TritonEvoformer(q, k, v, key_bias, zeros if pair_bias is None else pair_bias, pair_bias is not None)

    return Prepared(attend, (inputs.q, inputs.k, inputs.v, inputs.pair_bias))


def _turbopairformer(inputs: CaseInputs) -> Prepared:
    """Its kernels take `[b,n,h,l,d]` and write `[b,n,l,h,d]`, so that is how q, k, v and dO lie in memory."""
    from turbopairformer import is_triangle_attention_supported, turbo_attention

    mask_bias = _key_bias(inputs)
    key_bias = None if mask_bias is None else mask_bias.float()
    q, k, v = map(_heads_inside, (inputs.q, inputs.k, inputs.v))
    supported, reason = is_triangle_attention_supported(q, k, v, key_bias, inputs.pair_bias)
    refuse([(not supported, reason)])

    def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> Tensor:
        return turbo_attention(q, k, v, res_mask=key_bias, pair_bias=pair_bias).transpose(2, 3)  # type: ignore[no-any-return]

    return Prepared(attend, (q, k, v, inputs.pair_bias), _heads_outside, _heads_outside)


PEERS: dict[str, Contender] = {
    peer.name: peer
    for peer in (
        Contender("flex", "FlexAttention, compiled", _flex, compiles=True),
        Contender("cuequivariance", "cuEquivariance", _cuequivariance),
        Contender("trifast", "TriFast", _trifast),
        Contender("deepspeed", "DeepSpeed", _deepspeed),
        Contender("turbopairformer", "TurboPairFormer", _turbopairformer),  # after DeepSpeed: it sets TORCH_CUDA_ARCH_LIST
        Contender("openfold3", "OpenFold-3, Triton", _openfold3),
        Contender("sdpa", "SDPA, bias expanded", _sdpa, score_copies=3),
        Contender("dense", "dense torch", functools.partial(_dense, compiled=False), score_copies=4),
        Contender("dense_compiled", "dense torch, compiled", functools.partial(_dense, compiled=True), 4, compiles=True),
    )
}
"""In the order in which they run."""
