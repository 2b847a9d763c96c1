"""The public call: validate, bring to canonical axes, run the operator, give back the user's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from evoattn import eager, ops, sharded
from evoattn.canonical import Canonical, canonicalise
from evoattn.dispatch import AUTO_ORDER, BACKENDS, backend_module, objections
from evoattn.layouts import to_canonical, to_user
from evoattn.numerics import natural_lse, row_shift
from evoattn.problem import Problem, describe
from evoattn.tuning import Config, tuned_directions
from evoattn.validation import check_arguments, compute_dtype, key_axes

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

    Sizes: `N` rows (MSA sequences, or the fixed index of a triangle), `H` heads, `Lq` queries, `Lk` keys, `D` query and key
    channels, `C` value channels, `*` any number of batch axes, also none. Any length from 0 up, any strides.

    Args:
        q: queries, `[*, N, Lq, H, D]` ("bnlhd") or `[*, N, H, Lq, D]` ("bnhld"); float16, bfloat16, float32 or float64.
        k: keys, `[*, N, Lk, H, D]` or `[*, N, H, Lk, D]`, of q's dtype. H may be 1: one head shared by all.
        v: values, `[*, N, Lk, H, C]` or `[*, N, H, Lk, C]`, of q's dtype. H may be 1.
        mask: bool, `[*, N, Lk]` or `[*, N, 1, 1, Lk]` or anything that broadcasts to them; True = attend.
        mask_bias: additive, of the same shapes as mask, of any of the dtypes of q.
        pair_bias: additive, of any of the dtypes of q, any shape that broadcasts to `[*, N, H, Lq, Lk]`. Leave an axis along
            which it does not vary at size 1: it is then neither read nor differentiated more than once.
        scale: factor on Q K^T; None is `D ** -0.5`.
        layout: the order of axes in q, k, v and in the output.
        return_lse: also return the logsumexp of the scores. Gradients flow through it.
        backend: "auto", or a name from `backends()`.
        deterministic: whether results, gradients too, must be bit-equal from run to run; None follows
            `torch.are_deterministic_algorithms_enabled()`.
        config: tile sizes, for experiments; None lets the backend choose.

    Tensors may be DTensors, all of them: each process then runs the call of the queries that it holds.

    Returns:
        O in q's dtype and layout with C channels; with `return_lse`, also the LSE, `[*, N, H, Lq]`, float32 (float64 for
        float64). A query whose keys are all masked by `mask` or by -inf has O = 0, LSE = -inf and gradient 0.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: shapes, devices or options do not fit, or the named backend cannot run the problem.

    Example:
        >>> import torch
        >>> from evoattn import evoformer_attention
        >>> q, k, v = (torch.randn(1, 8, 16, 4, 32) for _ in range(3))      # [B, N, L, H, D]
        >>> evoformer_attention(q, k, v, pair_bias=torch.randn(1, 1, 4, 16, 16)).shape
        torch.Size([1, 8, 16, 4, 32])

    Source: Jumper et al. 2021 (supplementary algorithms 7, 13, 14); DeepSpeed4Science's evoformer attention.
    """
    tensors = (q, k, v, mask, mask_bias, pair_bias)
    call = eager.find(tensors, scale, layout, return_lse, deterministic, _deterministic(deterministic), backend, config)
    if call is None or not call.direct:
        check_arguments(q, k, v, mask, mask_bias, pair_bias, scale, layout, backend, return_lse, deterministic, config)
        if sharded.is_sharded(tensors):
            again = _same_call(scale, layout, return_lse, backend, deterministic, config)
            o, *lses = sharded.attend(again, tensors, layout)
            return (o, lses[0]) if return_lse else o
        if _one_query_of_shared_keys(q, k, v, layout):
            again = _same_call(scale, layout, return_lse, backend, deterministic, config)
            o, *lses = again(_swapped(q), k, v, mask, mask_bias, _swapped(pair_bias))
            return (_swapped(o), lses[0].transpose(-1, -2)) if return_lse else _swapped(o)
        c = _canonical(q, k, v, mask, mask_bias, pair_bias, layout)
        settings = "" if config is None else config.to_text()
        options = (None if scale is None else float(scale), layout, _deterministic(deterministic), backend, settings)
        if call is not None:
            call.fill(tensors, c, options)
    if call is not None and call.direct:
        o, lse, reference = call(*tensors)
    else:
        made = ops.forward(c.q, c.k, c.v, c.mask, c.mask_bias, c.pair_bias, *options)
        o, lse, reference = (c.restore(x) for x in made)
        o = to_user(o, layout)
    if not return_lse:
        return o
    lse = natural_lse(lse, reference)
    bias = key_axes(mask_bias, q)
    if bias is not None:
        lse = lse + row_shift(key_axes(mask, q), bias, lse.dtype)[..., None, None]
    return o, lse


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run and why; `print` it.

    Args:
        problem: the call in canonical axes.
        backend: the backend that would run it, or None if every one asked refuses.
        config: the tile config that this backend would use, of the forward where the backward has its own.
        backward_backend: the backend of the backward, if that is another one.
        backward: the tiles of each kernel of the backward that gradients need, where the backend has some of its own.
        refused: for each backend that was asked and does not take it, all its reasons; one may know another to be faster.
        copies: what would be copied because of how the arguments lie in memory, each with the reason.
        tuned: for which directions, "forward", "backward" or "both", `evoattn tune` found the config on this machine.
    """

    problem: Problem
    backend: str | None
    config: Config | None
    refused: dict[str, list[str]]
    copies: list[str]
    backward: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    backward_backend: str | None = None
    tuned: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"problem  {self.problem}", f"backend  {self.backend or 'none takes it'}"]
        if self.config is not None:
            lines.append(f"config   {_settings(self.config.given())}")
        if self.backward_backend is not None:
            lines.append(f"backward by {self.backward_backend}")
        lines += [f"backward {kernel}: {_settings(tiles)}" for kernel, tiles in self.backward.items()]
        lines += [f"tuned    {direction}: found by evoattn tune on this machine" for direction in self.tuned]
        lines += [f"copied   {what}" for what in self.copies]
        lines += [f"refused  {name}: {reason}" for name, reasons in self.refused.items() for reason in reasons]
        return "\n".join(lines)


def _settings(values: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    mask_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "bnlhd",
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    config: Config | None = None,
) -> Explanation:
    """Which backend and tile config `evoformer_attention` would run with these arguments, and why each other one refused.

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
    check_arguments(q, k, v, mask, mask_bias, pair_bias, scale, layout, backend, return_lse, deterministic, config)
    if sharded.is_sharded((q, k, v, mask, mask_bias, pair_bias)):
        q, k, v, mask, mask_bias, pair_bias = sharded.outlines((q, k, v, mask, mask_bias, pair_bias), layout)
    if _one_query_of_shared_keys(q, k, v, layout):
        q, pair_bias = _swapped(q), _swapped(pair_bias)
    canonical = _canonical(q, k, v, mask, mask_bias, pair_bias, layout)
    dtype = compute_dtype(q)
    problem = dataclasses.replace(
        describe(
            canonical.q,
            canonical.k,
            canonical.v,
            canonical.mask,
            canonical.mask_bias,
            canonical.pair_bias,
            needs=tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (q, k, v, mask_bias, pair_bias)),  # type: ignore[arg-type]
            deterministic=_deterministic(deterministic),
        ),
        dtype=dtype,
    )
    settings = config or Config()
    asked = AUTO_ORDER if backend == "auto" else (backend,)
    alone = dataclasses.replace(problem, needs=(False,) * 5)
    reasons = objections(asked, alone, settings)
    chosen = next((name for name in asked if not reasons[name]), None)
    with_gradients = objections(asked, problem, settings) if any(problem.needs) else reasons
    chosen_backward = next((name for name in asked if not with_gradients[name]), None)
    refused = {name: [*dict.fromkeys((*reasons[name], *with_gradients[name]))] for name in asked}  # chosen one by one
    copies = [
        f"{name}: its leading axes cannot be merged as a view"
        for name, x in (("q", q), ("k", k), ("v", v))
        if x.numel() and _copied(x, getattr(canonical, name))
    ]
    backward: dict[str, dict[str, int]] = {}
    for name, asks in ((chosen, alone), (chosen_backward, problem)):
        if name is not None:
            copies += backend_module(name).copies(asks, canonical.q, canonical.k, canonical.v, canonical.pair_bias)
    if chosen_backward is not None:
        resolve_backward = getattr(backend_module(chosen_backward), "resolve_backward", None)
        backward = resolve_backward(problem, settings) if resolve_backward is not None else {}
    return Explanation(
        problem=problem,
        backend=chosen,
        config=None if chosen is None else backend_module(chosen).resolve(problem, settings),
        refused={name: why for name, why in refused.items() if why},
        copies=list(dict.fromkeys(copies)),
        backward=backward,
        backward_backend=chosen_backward if chosen_backward != chosen else None,
        tuned=() if settings != Config() else tuned_directions(chosen, chosen_backward, problem),
    )


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
    statuses = []
    for name in BACKENDS:
        reason = backend_module(name).availability()
        statuses.append(BackendStatus(name, reason is None, reason or ""))
    return statuses


def _canonical(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    layout: str,
) -> Canonical:
    return canonicalise(
        to_canonical(q, layout),
        to_canonical(k, layout),
        to_canonical(v, layout),
        key_axes(mask, q),
        key_axes(mask_bias, q),
        pair_bias,
    )


def _same_call(
    scale: float | None, layout: str, return_lse: bool, backend: str, deterministic: bool | None, config: Config | None
) -> Callable[..., tuple[Tensor, ...]]:
    """A call of other tensors, with the same options: a function of the six that gives (o,) or (o, lse)."""

    def again(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        named: dict[str, Any] = dict(zip(("q", "k", "v", "mask", "mask_bias", "pair_bias"), tensors, strict=True))
        same: dict[str, Any] = {"layout": layout, "return_lse": return_lse, "backend": backend}
        made: Any = evoformer_attention(**named, **same, scale=scale, deterministic=deterministic, config=config)
        return made if return_lse else (made,)

    return again


def _one_query_of_shared_keys(q: Tensor, k: Tensor, v: Tensor, layout: str) -> bool:
    """Whether a single query has several heads and all of them the same keys and values, as in global attention.

    That is as many queries of one head, for which every backend reads and differentiates the keys once.
    """
    heads, length = (-2, -3) if layout == "bnlhd" else (-3, -2)
    return q.shape[length] == 1 and q.shape[heads] > 1 and k.shape[heads] == v.shape[heads] == 1


@overload
def _swapped(x: Tensor) -> Tensor: ...
@overload
def _swapped(x: Tensor | None) -> Tensor | None: ...
def _swapped(x: Tensor | None) -> Tensor | None:
    """Heads and queries of q, o or a pair bias in each other's place; one with fewer axes varies along neither."""
    return x if x is None or x.ndim < 3 else x.transpose(-2, -3)


def _copied(x: Tensor, canonical: Tensor) -> bool:
    """Whether canonical axes took a copy; unknown, and so False, inside vmap, where a tensor has no memory of its own."""
    try:
        return x.data_ptr() != canonical.data_ptr()
    except RuntimeError:
        return False


def _deterministic(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
