"""The public call, and what can be asked about it."""

from __future__ import annotations

import dataclasses
from typing import Literal, overload

from torch import Tensor

from evoattn.backends import BACKENDS
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs
from evoattn.dispatch.calls import attend
from evoattn.dispatch.explain import Explanation, explain_call
from evoattn.dispatch.lookup import Options, backend_module

__all__ = ["BackendStatus", "Explanation", "backends", "evoformer_attention", "explain"]

Layout = Literal["bnlhd", "bnhld"]


@overload
def evoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = ...,
    mask_bias: Tensor | None = ...,
    pair_bias: Tensor | None = ...,
    gate: Tensor | None = ...,
    scale: float | None = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    deterministic: bool | None = ...,
    config: Config | None = ...,
) -> Tensor: ...
@overload
def evoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = ...,
    mask_bias: Tensor | None = ...,
    pair_bias: Tensor | None = ...,
    gate: Tensor | None = ...,
    scale: float | None = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    backend: str = ...,
    deterministic: bool | None = ...,
    config: Config | None = ...,
) -> tuple[Tensor, Tensor]: ...
def evoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    mask_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "bnlhd",
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the last sequence axis of a batch of rows, with biases that are never expanded in memory.

        S[b,n,h,q,k] = scale * sum_d Q[b,n,q,h,d] K[b,n,k,h,d] + mask_bias[b,n,k] + pair_bias[b,h,q,k]
        O[b,n,q,h,c] = sum_k softmax_k(S)[b,n,h,q,k] V[b,n,k,h,c]

    With a gate the result is `O * sigmoid(gate)`. `explain()` says whether the kernel that makes O multiplies it.

    Sizes: `N` rows (MSA sequences, or the fixed index of a triangle), `H` heads, `Lq` queries, `Lk` keys, `D` query and key
    channels, `C` value channels, `*` any number of batch axes, also none. Any length from 0 up, any strides.

    Args:
        q: queries, `[*, N, Lq, H, D]` ("bnlhd") or `[*, N, H, Lq, D]` ("bnhld"); float16, bfloat16, float32 or float64.
        k: keys, `[*, N, Lk, H, D]` or `[*, N, H, Lk, D]`, of q's dtype. H may be 1: one head shared by all.
        v: values, `[*, N, Lk, H, C]` or `[*, N, H, Lk, C]`, of q's dtype. H may be 1.
        mask: bool, `[*, N, Lk]` or `[*, N, 1, 1, Lk]` or anything that broadcasts to them; True = attend.
        mask_bias: additive, of the same shapes as mask, of any of the dtypes of q.
        pair_bias: additive, of any of the dtypes of q, any shape that broadcasts to `[*, N, H, Lq, Lk]`. Leave an axis along
            which it does not vary at size 1: it is then neither read nor differentiated more than once. Axes are aligned at
            the right, as torch does: without its row axis, a bias of B batches is one of N rows if B equals N.
        gate: the gate before its sigmoid, of q's dtype, `[*, N, Lq, H, C]` or `[*, N, H, Lq, C]`. It does not broadcast.
        scale: factor on Q K^T; None is `D ** -0.5`.
        layout: the order of axes in q, k, v, gate and in the output.
        return_lse: also return the logsumexp of the scores. Gradients flow through it.
        backend: "auto", or a name from `backends()`.
        deterministic: whether results, gradients too, must be bit-equal from run to run; None follows
            `torch.are_deterministic_algorithms_enabled()`.
        config: tile sizes, for experiments; None lets the backend choose.

    Tensors may be DTensors, all of them: each process then runs the call of the queries that it holds.

    Returns:
        O, gated if there is a gate, in q's dtype and layout with C channels; with `return_lse`, also the LSE, `[*, N, H, Lq]`,
        float32 (float64 for float64), which does not depend on the gate. A query whose keys are all masked by `mask` or by
        -inf has O = 0, LSE = -inf and gradient 0.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: shapes, devices or options do not fit, or the named backend cannot run the problem.
        NotImplementedError: a tensor has a forward-mode tangent.

    Example:
        >>> import torch
        >>> from evoattn import evoformer_attention
        >>> q, k, v = (torch.randn(1, 8, 16, 4, 32) for _ in range(3))      # [B, N, L, H, D]
        >>> evoformer_attention(q, k, v, pair_bias=torch.randn(1, 1, 4, 16, 16)).shape
        torch.Size([1, 8, 16, 4, 32])

    Source: Jumper et al. 2021 (supplementary algorithms 7, 13, 14, gates included); DeepSpeed4Science's evoformer attention.
    """
    inputs = Inputs(q, k, v, mask, mask_bias, pair_bias, gate)
    made = attend(inputs, Options(scale, layout, deterministic, backend, config, return_lse))
    return (made[0], made[1]) if return_lse else made[0]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    mask_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "bnlhd",
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    config: Config | None = None,
) -> Explanation:
    """Return the backend and tiles that `evoformer_attention` would use, and why each other backend refuses.

    Runs nothing. Takes the arguments of `evoformer_attention` and raises what it raises for bad ones, except that a named
    backend which refuses is reported and not raised.

    Returns:
        An `Explanation`.

    Example:
        >>> import torch
        >>> from evoattn import explain
        >>> q = torch.randn(1, 8, 16, 4, 32)
        >>> explain(q, q, q, backend="tiled").backend
        'tiled'
    """
    inputs = Inputs(q, k, v, mask, mask_bias, pair_bias, gate)
    return explain_call(inputs, Options(scale, layout, deterministic, backend, config, return_lse))


@dataclasses.dataclass(frozen=True)
class BackendStatus:
    """One backend on this machine.

    Args:
        name: what `backend=` takes.
        available: whether it can run here.
        reason: why not; empty when available.
    """

    name: str
    available: bool
    reason: str


def backends() -> list[BackendStatus]:
    """Every backend with whether it can run on this machine and, if not, why and what to do.

    Example:
        >>> from evoattn import backends
        >>> [status.name for status in backends() if status.available][-2:]
        ['tiled', 'reference']
    """
    reasons = {name: backend_module(name).availability() for name in BACKENDS}
    return [BackendStatus(name, reason is None, reason or "") for name, reason in reasons.items()]
