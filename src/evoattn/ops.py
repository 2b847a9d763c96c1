"""The operators `evoattn::forward` and `evoattn::backward`: schemas, fake functions, autograd, autocast, vmap.

The only place that registers anything with torch. The backend is chosen when an operator runs, on real tensors, so that
torch.compile and torch.export see one opaque operator and no guard on what the choice looks at.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from evoattn import layouts
from evoattn.backends import Backend, Passes
from evoattn.canonical import canonicalise
from evoattn.dispatch import select
from evoattn.numerics import accumulate_dtype, float32_products
from evoattn.problem import describe
from evoattn.tuning import Config
from evoattn.validation import check_no_tangent

__all__ = ["Choice", "backward", "choose_backward", "choose_forward", "forget", "forward", "settings"]

_LIB = torch.library.Library("evoattn", "DEF")

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? mask_bias, Tensor? pair_bias"
_OPTIONS = "float? scale, str layout, bool deterministic, str backend, str config"
_LIB.define(f"forward({_INPUTS}, {_OPTIONS}) -> (Tensor o, Tensor lse, Tensor reference)")
_LIB.define(
    f"backward(Tensor? do, Tensor? dlse, {_INPUTS}, Tensor o, Tensor lse, Tensor reference, bool[5] needs, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask_bias, Tensor dpair_bias)"
)

forward = torch.ops.evoattn.forward.default
"""Canonical tensors -> (o, lse, reference); see `evoattn.backends` for the axes and `evoattn.numerics` for the last two.

No gradient flows through `reference`.
"""

backward = torch.ops.evoattn.backward.default
"""The gradients of `forward`; one that `needs` does not ask for is a tensor of no elements."""


@dataclasses.dataclass
class Choice:
    """Who runs one pass of calls that look alike. Empty until the first of them.

    Args:
        backend: the one that takes the problem.
        config: as the backend takes it.
        run: what the backend planned, if it plans.
    """

    backend: Backend | None = None
    config: Config = dataclasses.field(default_factory=Config)
    run: Callable[..., Any] | None = None


@functools.lru_cache(maxsize=4096)
def _kept(*alike: Any) -> Choice:
    """One choice for all calls whose tensors lie in memory alike and whose options are the same."""
    return Choice()


def forget() -> None:
    """Choose and plan anew from the next call on, because something other than a call's arguments has changed."""
    _kept.cache_clear()


def _look(x: Tensor | None) -> tuple[Any, ...] | None:
    """All that a backend may look at in a tensor when it plans."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


def settings(dtype: torch.dtype) -> str:
    """All that a backend may look at in torch's settings when it plans, besides determinism, which is an argument."""
    return float32_products() if dtype == torch.float32 else ""


def choose_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float | None,
    layout: str,
    deterministic: bool,
    backend: str,
    config: str,
) -> Choice:
    """Who runs `forward`; raises ValueError if nobody does."""
    tensors = (q, k, v, mask, mask_bias, pair_bias)
    looks = [_look(x) for x in tensors]
    choice = _kept(*looks, scale, layout, deterministic, backend, config, settings(q.dtype))
    if choice.backend is None:
        choice.config = Config.from_text(config)
        chosen = select(describe(*tensors, deterministic=deterministic), backend, choice.config)
        plan = getattr(chosen, "plan_forward", None)
        if plan is not None:
            choice.run = plan(*tensors, scale=_scale(q, scale), layout=layout, config=choice.config)
        choice.backend = chosen
    return choice


def choose_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    reference: Tensor,
    needs: tuple[bool, ...],
    scale: float | None,
    layout: str,
    deterministic: bool,
    backend: str,
    config: str,
) -> Choice:
    """Who runs `backward`; raises ValueError if nobody does."""
    inputs = (q, k, v, mask, mask_bias, pair_bias)
    tensors = (do, dlse, *inputs, o, lse, reference)
    looks = [_look(x) for x in tensors]
    choice = _kept(*looks, needs, scale, layout, deterministic, backend, config, settings(q.dtype))
    if choice.backend is None:
        choice.config = Config.from_text(config)
        problem = describe(*inputs, needs=needs, deterministic=deterministic)  # type: ignore[arg-type]
        chosen = select(problem, backend, choice.config)
        plan = getattr(chosen, "plan_backward", None)
        if plan is not None:
            wishes: dict[str, Any] = {"needs": needs, "deterministic": deterministic, "config": choice.config}
            choice.run = plan(*tensors, scale=_scale(q, scale), layout=layout, **wishes)
        choice.backend = chosen
    return choice


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is not None and not math.isfinite(scale):  # a number that torch.compile traced as a symbol
        raise ValueError(f"scale must be finite, got {scale}")
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float | None,
    layout: str,
    deterministic: bool,
    backend: str,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (q, k, v, mask, mask_bias, pair_bias)
    choice = choose_forward(*tensors, scale, layout, deterministic, backend, config)
    if choice.run is None:
        return cast(Passes, choice.backend).forward(*tensors, scale=_scale(q, scale), layout=layout, config=choice.config)
    made = _fake_forward(*tensors, scale, layout, deterministic, backend, config)
    choice.run(*tensors, *made)
    return made


def _backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    reference: Tensor,
    needs: list[bool],
    scale: float | None,
    layout: str,
    deterministic: bool,
    backend: str,
    config: str,
) -> tuple[Tensor, ...]:
    tensors = (do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference)
    wanted = tuple(needs)
    choice = choose_backward(*tensors, wanted, scale, layout, deterministic, backend, config)
    gradients: tuple[Tensor | None, ...]
    if choice.run is None:
        gradients = cast(Passes, choice.backend).backward(
            *tensors,
            scale=_scale(q, scale),
            layout=layout,
            needs=wanted,
            deterministic=deterministic,
            config=choice.config,
        )
    else:
        of_qkv = [layouts.empty(x.shape, layout, x) if need else None for x, need in zip((q, k, v), wanted, strict=False)]
        gradients = (*of_qkv, *choice.run(*tensors, *of_qkv))
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float | None,
    layout: str,
    deterministic: bool,
    backend: str,
    config: str,
) -> tuple[Tensor, Tensor, Tensor]:
    o = layouts.empty((*q.shape[:-1], v.shape[-1]), layout, q)
    lse, reference = (q.new_empty(q.shape[:-1], dtype=accumulate_dtype(q.dtype)) for _ in range(2))
    return o, lse, reference


def _fake_backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    reference: Tensor,
    needs: list[bool],
    scale: float | None,
    layout: str,
    deterministic: bool,
    backend: str,
    config: str,
) -> tuple[Tensor, ...]:
    gradients = [
        layouts.empty(x.shape, layout, x) if need else q.new_empty(0) for x, need in zip((q, k, v), needs, strict=False)
    ]
    for bias, need in zip((mask_bias, pair_bias), needs[3:], strict=True):
        gradients.append(bias.new_empty(bias.shape) if need and bias is not None else q.new_empty(0))
    return tuple(gradients)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, mask_bias, pair_bias, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, mask, mask_bias, pair_bias, *output)


def _autograd(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, mask, mask_bias, pair_bias, o, lse, reference = ctx.saved_tensors
    of_q, of_k, of_v, _, of_mask_bias, of_pair_bias, *_ = ctx.needs_input_grad
    needs = [of_q, of_k, of_v, of_mask_bias, of_pair_bias]
    nothing: list[None] = [None] * len(ctx.options)
    if do is None and dlse is None:
        return (None,) * 6 + tuple(nothing)
    check_no_tangent(do, dlse)
    gradients = backward(do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference, needs, *ctx.options)
    dq, dk, dv, dmask_bias, dpair_bias = (g if need else None for g, need in zip(gradients, needs, strict=True))
    return (dq, dk, dv, None, dmask_bias, dpair_bias, *nothing)


def _no_second_derivative(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    raise RuntimeError(
        "evoformer_attention has no second derivative: its backward recomputes scores in tiles and keeps none. "
        "For double backward write the attention densely in torch."
    )


def _vmap_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The mapped axis becomes one more leading axis; a bias that is not mapped is broadcast along it."""
    q, k, v, mask, mask_bias, pair_bias = _mapped(info.batch_size, in_dims, arguments[:6], expanded=3)
    folded = canonicalise(q, k, v, mask, mask_bias, None if pair_bias is None else pair_bias.unsqueeze(2))
    made = forward(folded.q, folded.k, folded.v, folded.mask, folded.mask_bias, folded.pair_bias, *arguments[6:])
    return tuple(folded.restore(x) for x in made), (0, 0, 0)


def _vmap_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """As forward, but with every bias expanded along the mapped axis: each sample has gradients of its own."""
    tensors = _mapped(info.batch_size, in_dims, arguments[:11], expanded=11)
    do, dlse, q, k, v, mask, mask_bias, pair_bias, o, lse, reference = tensors
    needs = arguments[11]
    pair = None if pair_bias is None else pair_bias.unsqueeze(2)
    folded = canonicalise(q, k, v, mask, mask_bias, pair, narrow=False)
    do, dlse, o, lse, reference = (None if x is None else folded.fold(x) for x in (do, dlse, o, lse, reference))
    inputs = (folded.q, folded.k, folded.v, folded.mask, folded.mask_bias, folded.pair_bias)
    gradients = list(backward(do, dlse, *inputs, o, lse, reference, *arguments[11:]))
    for i, x in enumerate((q, k, v, mask_bias, pair)):
        if not needs[i]:
            gradients[i] = gradients[i].expand(info.batch_size, 0)
            continue
        gradient = gradients[i].unsqueeze(1) if i == 4 else gradients[i]
        gradients[i] = folded.restore(gradient).sum_to_size(x.shape)  # type: ignore[union-attr]
    if needs[4]:
        gradients[4] = gradients[4].squeeze(2)
    return tuple(gradients), (0,) * 5


def _mapped(
    size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...], *, expanded: int
) -> tuple[Any, ...]:
    """Each tensor with the mapped axis first, of size 1 where it is not mapped, or expanded for the first few."""
    moved: list[Tensor | None] = []
    for i, (x, axis) in enumerate(zip(tensors, in_dims, strict=False)):
        if x is not None:
            x = x.unsqueeze(0) if axis is None else x.movedim(axis, 0)
            x = x.expand(size, *x.shape[1:]) if i < expanded else x
        moved.append(x)
    return tuple(moved)


def _autocast(device_type: str, key: str) -> None:
    """Under autocast q, k and v take its dtype, as torch's own attention does. Biases keep theirs: every backend reads any
    float dtype, and a mask bias of -1e9 does not fit in float16. A backward has the dtypes of its forward, whatever is on."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return forward(*(x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v)), *rest)

    def uncast_backward(*arguments: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return backward(*arguments)

    _LIB.impl("forward", cast_forward, key)
    _LIB.impl("backward", uncast_backward, key)


_LIB.impl("forward", _forward, "CompositeExplicitAutograd")
_LIB.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("evoattn::forward", _fake_forward, lib=_LIB)
torch.library.register_fake("evoattn::backward", _fake_backward, lib=_LIB)
torch.library.register_autograd("evoattn::forward", _autograd, setup_context=_setup_context, lib=_LIB)
torch.library.register_autograd("evoattn::backward", _no_second_derivative, lib=_LIB)
torch.library.register_vmap("evoattn::forward", _vmap_forward, lib=_LIB)
torch.library.register_vmap("evoattn::backward", _vmap_backward, lib=_LIB)
for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _autocast(_device_type, _key)
