"""Replacements that several clients share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from evoattn.clients.site import PassedOn, Replace, is_repeated, replacement
from evoattn.compat import cuequivariance
from evoattn.compat.openfold import attention
from evoattn.dispatch.axes import narrow_expanded
from evoattn.dispatch.checks import compute_dtype
from evoattn.dispatch.distributed import is_distributed

_SHORT, _FEW_SCORES = 288, 100_000_000
"""An attention of fewer queries and keys, and with fewer scores in all, is left to the client, unless a CUDA graph replays it.

A block of Boltz-2 of 256 residues took, on an H200, 4.9 ms as installed and 7.2 ms with the attention of its layers replaced.
A training step took 14.7 and 21.7 ms, and 1,712 and 1,462 MiB. Nothing between 256 and 1,024 residues was measured.
"""

_FEW_IN_INFERENCE, _FEW_IN_TRAINING = 1 << 24, 1 << 22
"""A float32 attention with pair bias that has fewer scores is left to the client too; in training if it is also short.

The 200 steps of a denoiser that is not replayed as a CUDA graph took, as installed and patched, seconds: Boltz-2's on an H200
7.6 and 13.0 at 152 residues, 11.6 and 13.6 at 988, which have 15.6 million scores; Protenix' on an H100 6.3 and 8.6 at 152
residues, 7.8 and 9.1 at 304. A training step of four Boltz-2 blocks took, on an H100, 12.5 and 16.9 ms at 128 residues, 17.1
and 18.5 ms at 256.
"""

LONG = 512
"""Residues up to which the host sets the pace of whatever reads a pair representation. A GPU needs longer for more.

The norm of 640 by 640 pairs took, on an H200, .60 ms by torch's kernel and .11 by evoattn's: its rows are short.
"""

HOST_BOUND = "float32 with few scores, where the client's own attention takes less of the host"

FEW_ON_CPU = "few residues on a CPU, where the client's own code is as fast"


def few_on_cpu(x: Tensor) -> int:
    """The residues below which layers and attentions of x are left to the client on a CPU.

    Processor time as installed and with evoattn, ms on one core of an EPYC (Zen 5), layers of Boltz-2 of 128 channels:

    | residues, dtype | triangle attention | pairformer block | attention with pair bias of tokens |
    |---|---|---|---|
    | 20, bfloat16 | 1.8, 2.0 | 10.5, 12.8 | 2.9, 4.8 |
    | 76, bfloat16 | 20.2, 20.7 | 97, 114 | 5.0, 6.5 |
    | 120, bfloat16 | 62.6, 55.9 | 276, 282 | 7.5, 10.9 |
    | 152, bfloat16 | 174, 101 | 561, 438 | 8.6, 11.9 |
    | 304, bfloat16 | | | 21.4, 32.3 |
    | 152, bfloat16, training | 271, 287 | 1,299, 1,493 | |
    | 220, bfloat16, training | 949, 804 | | |
    | 152, float32 | 179, 207 | 921, 1,065 | |
    | 256, float32 | 887, 923 | | |
    | 304, float32 | 1,361, 1,346 | | |
    """
    if compute_dtype(x).itemsize > 2:
        return 288
    return 192 if torch.is_grad_enabled() else 144


def is_small_on_cpu(x: Tensor, scores: int) -> bool:
    """Return whether a client computes an attention of x with so many scores in all as fast, on a CPU.

    A triangle attention of L residues and four heads has 4 L^3 scores.
    """
    return x.is_cpu and scores < 4 * few_on_cpu(x) ** 3 and not is_repeated() and not is_distributed(x)


def has_few_entries_on_cpu(arguments: Iterable[Any]) -> bool:
    """Return whether a client computes a layer or a block of these arguments as fast, on a CPU."""
    tensors = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    if not tensors or not tensors[0].is_cpu or is_repeated() or any(map(is_distributed, tensors)):
        return False
    few = few_on_cpu(tensors[0]) ** 2
    return all(x.shape[:-1].numel() < few for x in tensors)


def faster_as_installed(x: Tensor, queries: int, keys: int, scores: int) -> str:
    """The reason why a client computes an attention with pair bias of x in less time, or "".

    On a GPU no kernel of it is long, so the host sets the pace. scores: of all samples and heads.
    """
    if is_small_on_cpu(x, scores):
        return FEW_ON_CPU
    if is_repeated() or not is_float32_on_gpu([x]):
        return ""
    if not torch.is_grad_enabled():
        return HOST_BOUND if scores < _FEW_IN_INFERENCE else ""
    return HOST_BOUND if max(queries, keys) < _SHORT and scores < _FEW_IN_TRAINING else ""


@replacement
def additive(query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor]) -> Tensor | PassedOn:
    """`_attention(query, key, value, biases)`, as OpenFold has it: q is scaled, heads come before queries."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    if is_small_on_cpu(query, scores):
        return PassedOn(FEW_ON_CPU)
    may_be_small = query.is_cuda and not is_repeated() and max(query.shape[-2], key.shape[-2]) < _SHORT
    if may_be_small and scores < _FEW_SCORES:
        return PassedOn(f"fewer than {_SHORT} residues, where the client's own attention takes less of the host")
    return attention(query, key, value, biases)


def projected(module: Any, q_x: Tensor, kv_x: Tensor, biases: list[Tensor] | None) -> Tensor:
    """The whole of `Attention.forward`, as OpenFold and ESMFold have it: projections, attention, gate and output."""
    q, k, v = module._prep_qkv(q_x, kv_x)
    return module._wrap_up(attention(q, k, v, biases or []).transpose(-2, -3), q_x)  # type: ignore[no-any-return]


@replacement
def low_memory(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], q_chunk_size: int, kv_chunk_size: int) -> Tensor:
    """`_lma`, as OpenFold and OpenFold-3 have it.

    No scores are held, whatever the chunks. The caller has expanded the biases, which is undone here.
    """
    return attention(q, k, v, [narrow_expanded(x) for x in biases])


def queries_first(*, scaled: bool) -> Replace:
    """A client's wrapper of a kernel: `(q, k, v, biases) -> [*, Q, H, C]`."""

    @replacement
    def attend(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], scale: float | None = None) -> Tensor:
        """`scale`, where it is given, is that of the channels."""
        added = [additive_mask(x) for x in biases]
        return attention(q, k, v, added, scaled=scaled).transpose(-2, -3)

    return attend


def additive_mask(bias: Tensor) -> Tensor:
    """The additive form of a bool mask, whose True is attended. Other masks stay as they are."""
    if bias.dtype != torch.bool:
        return bias
    return torch.zeros_like(bias, dtype=torch.float32).masked_fill(~bias, -1e9)


@replacement
def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    tri_bias: Tensor | None = None,
) -> Tensor:
    """A call of cuEquivariance's `triangle_attention`, with the gradients of the client's path without a kernel.

    cuEquivariance replaces the scores of masked keys, so a query without a key passes no gradient on to q, k and the bias. The
    clients' own paths add -1e9 to them, and so does this: a switch changes neither answers nor gradients.

    `scale` is that of the channels. Boltz calls the bias `tri_bias`. The result has five axes, as cuEquivariance's.
    """
    o = attention(q, k, v, [None if mask is None else additive_mask(mask), bias, tri_bias], scaled=False)
    return o if o.ndim > 4 else o[None]


multiplication = replacement(cuequivariance.triangle_multiplicative_update)
"""cuEquivariance's triangle multiplication by `evoattn.pair`, for clients that want it with the attention."""


def residues(arguments: Iterable[Any], axes: int = 4) -> int | None:
    """The residues of the first pair representation `[*, L, L, C]` on a GPU, of so many axes or more, or None."""
    pairs = (x for x in arguments if isinstance(x, Tensor) and x.is_cuda and x.ndim >= axes and x.shape[-2] == x.shape[-3])
    return next((x.shape[-2] for x in pairs), None)


def offloads(*_: Any, _offload_inference: bool = False, **__: Any) -> str:
    """The reason not to record a block of OpenFold 2 or OpenFold-3, or ""."""
    return "MSA and pairs take turns on the GPU" if _offload_inference else ""


def is_float32_on_gpu(arguments: Iterable[Any]) -> bool:
    """Return whether the first floating-point tensor lies on a GPU, has more than 16 bits, and is not cast to fewer."""
    first = next((x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()), None)
    if first is None or not first.is_cuda or first.element_size() < 4:
        return False
    if first.dtype == torch.float64 or not torch.is_autocast_enabled("cuda"):
        return True
    return torch.get_autocast_dtype("cuda").itemsize == 4  # OpenFold-3 casts to float32 too
