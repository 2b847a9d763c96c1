"""The diffusion transformer in inference, in float32 or a lower precision: launches of fused kernels, nine for each block.

| launch | result |
|---|---|
| split | AdaLN(a), split |
| product | q, k, v and the gate; three products, after one more split, if keys have a norm of their own |
| attention | o |
| split | o sigmoid(gate), split |
| product | a, with the output product times the gate of the condition added |
| split | AdaLN(a), split |
| product | the factors of the hidden channels |
| split | their product, split |
| product | a, with the output product times the gate of the condition added |

If q and k have norms, each takes two more launches. In parallel blocks the sixth launch is the second.

All that the condition s gives is made for many blocks at once: scales and shifts of AdaLN of norm(s), gates of s. The weights
of that norm are multiplied into those of the products when these are split.

The precision is that of the sampling (`core.keeping`). In "bf16" the products write q, k, v, the gate and the factors of the
hidden channels in bfloat16, and so the attention is one of bfloat16. All else is as in "tf32".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from evoattn.core import guards
from evoattn.core.devices import installed
from evoattn.core.keeping import keeps, made_once, may_keep, precision, states
from evoattn.core.numerics import float32_products, products_in
from evoattn.empty_rows.means import may_be_empty
from evoattn.nn.attention import Attention, attend_masked, heads, mask_arguments
from evoattn.nn.diffusion_weights import Block, Conditions, split
from evoattn.nn.pair_bias import AdaLN, AttentionPairBias
from evoattn.nn.project import normalise
from evoattn.nn.submodules import has_global_hooks, is_linear, is_norm, may_skip
from evoattn.nn.transition import SwiGLU

_CONDITIONS = 1 << 26
"""Numbers of the conditions that are held at a time, 256 MiB. Those of one block are always held."""

_DIGIT = 2048
"""Rows are counted in three digits of this base, which even TF32 holds exactly."""


class Keys:
    """A `to_keys` that is the same in each call: the rows of the keys of all windows, counted from 1. 0: there is none."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        padded = F.pad(x.flatten(0, -2), (0, 0, 1, 0))
        return padded.index_select(0, self.rows).view(*x.shape[:-2], -1, x.shape[-1])


class Prepared:
    """Blocks whose weights are split once in a sampling.

    Attributes:
        is_plain: whether the launches compute what the modules of the blocks define, and nobody has to see one called.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = blocks
        modules = [*([blocks] if isinstance(blocks, nn.Module) else []), *(x for block in blocks for x in block.modules())]
        self._owns = [vars(x) for x in modules]
        self._members = [
            (own[kind], name, x) for own in self._owns for kind in ("_parameters", "_modules") for name, x in own[kind].items()
        ]
        self.parameters = [x for _, _, x in self._members if isinstance(x, nn.Parameter)]
        self._states = states(self.parameters)
        self._is_hooked = self._has_hooks()
        is_float = all(x.dtype == torch.float32 for x in self.parameters)
        self._settings = _settings(blocks) if is_float and all(map(_is_plain, blocks)) else set()
        self.is_plain = len(self._settings) == 1
        self._weights: dict[bool, tuple[list[Block], Conditions]] = {}
        self._biases = WeakTensorKeyDictionary()

    def _has_hooks(self) -> bool:
        """Return whether hooks, or forwards of their own, run with the modules."""
        hooked = (own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own for own in self._owns)
        return has_global_hooks() or any(hooked)

    def holds(self) -> bool:
        """Return whether modules, weights, settings and hooks are as they were."""
        if self._has_hooks() != self._is_hooked or any(members.get(name) is not x for members, name, x in self._members):
            return False
        return states(self.parameters) == self._states and (not self.is_plain or _settings(self.blocks) == self._settings)

    def weights(self, low: bool) -> tuple[list[Block], Conditions]:
        """The split weights. low: whether hi is not enough, as it is for TF32."""
        found = self._weights.get(low)
        if found is None:
            found = split(self.blocks, low)
            if may_keep():
                self._weights[low] = found
        return found

    def bias(self, bias: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """A pair bias as `arrange` makes it: in float32 each time, in bfloat16 once for as long as the pair bias is there."""
        if attention_dtype() == torch.float32:
            return arrange(bias)
        at, made = self._biases.get(bias, (None, None))
        if made is None or at != states([bias]):
            made = arrange(bias)
            if made.dtype != bias.dtype and may_keep():  # a view of the pair bias would keep it
                self._biases[bias] = (states([bias]), made)
        return made  # type: ignore[no-any-return]


def attention_dtype() -> torch.dtype:
    """The dtype of the factors and the pair biases of attentions in the sampling that runs."""
    return torch.bfloat16 if precision() == "bf16" else torch.float32


def aligned(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A pair bias `[*, Q, K]` whose rows of keys start on multiples of 16 bytes, so that kernels load so many at once.

    It is a copy if need be. What has another dtype gets this one.
    """
    unit = 16 // dtype.itemsize
    if bias.dtype == dtype and bias.stride(-1) == 1 and not any(stride % unit for stride in bias.stride()[:-1]):
        return bias
    *lead, keys = bias.shape
    made = torch.empty((*lead, keys + -keys % unit), dtype=dtype, device=bias.device)[..., :keys]
    return made.copy_(bias)


def in_precision(bias: Tensor) -> Tensor:
    """A pair bias as the attention takes it: in float32 as it is, in bfloat16 as a copy with aligned rows."""
    dtype = attention_dtype()
    return bias if dtype == torch.float32 else aligned(bias, dtype)


def prepared(blocks: Sequence[Any], a: Tensor, s: Tensor, *others: Tensor | None) -> Prepared | None:
    """Prepare a call that `run` computes: on a GPU, in float32, inside `sampling`, without gradients. None: another one."""
    if not keeps() or torch.compiler.is_compiling() or not a.is_cuda or not installed("triton"):
        return None
    tensors = [x for x in (a, s, *others) if x is not None]
    if (
        a.ndim < 3
        or {x.dtype for x in (a, s)} != {torch.float32}
        or any(x.device != a.device for x in tensors)
        or not a.numel()
    ):
        return None
    if torch.is_autocast_enabled("cuda") or not guards.only_computes() or not guards.ordinary(tensors):
        return None
    if precision() == "exact" and float32_products() not in ("none", "ieee", "tf32"):
        return None
    found = made_once("diffusion transformer", (blocks,), lambda: Prepared(blocks), Prepared.holds)
    if not found.is_plain:
        return None
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *found.parameters))
    return None if recorded else found


def _settings(blocks: Sequence[Any]) -> set[tuple[Any, ...]]:
    """The settings of the masks and of the norms of the condition, which all blocks have to share."""
    found = set()
    for block in blocks:
        attention = block.attention_pair_bias
        for norm in _norms_of(block):
            found.add((attention.inf, attention.empty_rows, attention.norms_keys_twice, block.parallel, norm.layer_norm_s.eps))
    return found


def _norms_of(block: Any) -> list[Any]:
    """The adaptive norms of a block: of the attention, of the transition, and of the keys if they have one."""
    norms = (block.attention_pair_bias.layer_norm_a, block.conditioned_transition.layer_norm)
    keys = block.attention_pair_bias.layer_norm_k
    return [*norms] if keys is None else [*norms, keys]


def _is_plain(block: Any) -> bool:
    """Return whether nobody has to see that a module inside is called, and the launches compute what the modules define."""
    attention, transition = block.attention_pair_bias, block.conditioned_transition
    containers = [(x, type(x)) for x in (block, transition)]
    containers += [(attention, AttentionPairBias), (attention.mha, Attention)]
    if not attention.residual or transition.residual is block.parallel or attention.mha.linear_g is None:
        return False
    norms = _norms_of(block)
    containers += [(x, AdaLN) for x in norms]
    swiglu = transition._modules.get("swiglu")
    containers += [] if swiglu is None else [(swiglu, SwiGLU)]
    if not all(may_skip(module, kind) for module, kind in containers):
        return False
    linears = (*attention.mha.inputs, attention.mha.linear_o, attention.linear_ada_out, *transition.inner)
    linears += (transition.linear_g, transition.linear_out, *(y for x in norms for y in (x.linear_g, x.linear_s)))
    if not all(is_linear(x) for x in linears):
        return False
    of_heads = [x for x in (attention.mha.layer_norm_q, attention.mha.layer_norm_k) if x is not None]
    if not all(map(is_norm, (*of_heads, *(y for x in norms for y in (x.layer_norm_a, x.layer_norm_s))))):
        return False
    unbiased = (*attention.mha.inputs[1:], *transition.inner, transition.linear_out, *(x.linear_s for x in norms))
    no_bias = all(x.bias is None for x in (*unbiased, *(x.layer_norm_s for x in norms)))
    return no_bias and all(x.layer_norm_a.weight is None and x.layer_norm_a.bias is None for x in norms)


class OfCondition(NamedTuple):
    """All that the condition gives, for each block.

    Args:
        each: for each block the scale, shift and gate of its attention, those of its transition, and the scale and shift of the
            norm of its keys, or None.
        samples: how many samples share them.
    """

    each: Iterable[tuple[tuple[Tensor, ...], ...]]
    samples: int


def kept_condition(prepared: Prepared, a: Tensor, s: Tensor) -> OfCondition | None:
    """Make all that s gives, which `run` takes in its place in several calls. None: it would take more than 256 MiB."""
    low, channels = is_exact(), a.shape[-1]
    s, samples = _shared(s, a.shape[:-2], a.shape[-2])
    if len(prepared.blocks) > _group(channels, s):
        return None
    return OfCondition(list(_each_condition(prepared, s, channels, low)), samples)


def run(
    prepared: Prepared,
    a: Tensor,
    s: Tensor | OfCondition,
    pair_bias: Any,
    mask: Tensor | None,
    to_keys: Callable[[Tensor], Tensor] | None,
    transition_mask: Tensor | None,
) -> Tensor:
    """`DiffusionTransformer.forward` of a call, whose arguments are checked. A pair bias of another dtype is cast each time."""
    from evoattn.pair.products import steps

    low = is_exact()
    dtype, blocks = attention_dtype(), prepared.blocks
    weights, _ = prepared.weights(low)
    lead, positions, channels = a.shape[:-2], a.shape[-2], a.shape[-1]
    if not isinstance(s, OfCondition):
        s, samples = _shared(s, lead, positions)
        s = OfCondition(_each_condition(prepared, s, channels, low), samples)
    sharing: Any = {"samples": s.samples, "positions": positions}
    rows = a.reshape(-1, channels).clone(memory_format=torch.contiguous_format)
    adapt: Any = functools.partial(steps.split, rows, kind="adapt", low=low, **sharing)
    first = blocks[0].attention_pair_bias
    y = rows.new_empty((len(rows) + 1, weights[0].qkvg.hi.shape[0]), dtype=dtype)  # first the row that keys outside get
    picked = None if to_keys is None else rows_of_keys(to_keys, lead, positions, a.device)
    if picked is not None:
        y[0] = 0
    factors = None if transition_mask is None else transition_mask.expand(a.shape[:-1]).reshape(-1).float().contiguous()
    masks = mask_arguments(mask, dtype, inf=first.inf, empty_rows=first.empty_rows)
    inf = first.inf if may_be_empty(first.inf, a.dtype) else 0.0  # whatever the precision, rows are empty as in float32
    for i, (block, w, of_s) in enumerate(zip(blocks, weights, s.each, strict=True)):
        (scale, shift, gate), (next_scale, next_shift, last_gate), *of_keys = of_s
        attention, transition = block.attention_pair_bias, block.conditioned_transition
        eps, next_eps = attention.layer_norm_a.layer_norm_a.eps, transition.layer_norm.layer_norm_a.eps
        x = adapt(scale, shift, eps=eps)
        beside = adapt(next_scale, next_shift, eps=next_eps) if block.parallel else None  # of the rows without the attention
        width = w.out.hi.shape[1]
        if not of_keys:
            steps.product(x, w.qkvg, w.qkvg_bias, out=y[1:])
        else:
            source = _adapted(rows, scale, shift, eps, **sharing) if attention.norms_keys_twice else rows
            eps = attention.layer_norm_k.layer_norm_a.eps
            of_source = steps.split(source, *of_keys[0], kind="adapt", eps=eps, low=low, **sharing)
            _project_apart(w, x, of_source, y[1:])
        _norm_heads(attention.mha, y[1:], width)
        q, gates = y[1:, :width], y[1:, 3 * width :]
        keys = y[1:, width : 3 * width] if picked is None else y[:, width : 3 * width].index_select(0, picked)
        q, k, v = (heads(x.unflatten(0, (*lead, -1)), attention.no_heads) for x in (q, *keys.split(width, -1)))
        bias = pair_bias[i] if dtype == a.dtype else pair_bias[i].to(dtype)
        with products_in(None if low else "tf32"):
            o = attend_masked(q, k, v, masks, bias, None, inf=inf)
        x = steps.split(o.reshape(-1, width), gates, kind="gate", low=low)
        steps.product(x, w.out, w.out_bias, gate=gate, base=rows, out=rows, **sharing)
        x = adapt(next_scale, next_shift, eps=next_eps) if beside is None else beside
        u = steps.product(x, w.hidden, dtype=dtype).split(w.last.hi.shape[1], -1)
        x = steps.split(*u, kind="swiglu", low=low)
        steps.product(x, w.last, gate=last_gate, mask=factors, base=rows, out=rows, **sharing)
    return rows.view(a.shape)


def _norm_heads(mha: Any, y: Tensor, width: int) -> None:
    """Normalise q and k, the first columns of y, in place, if they have norms."""
    for i, norm in enumerate((mha.layer_norm_q, mha.layer_norm_k)):
        if norm is not None:
            part = y[:, i * width : (i + 1) * width]
            part.copy_(normalise(part, norm.weight, norm.bias, norm.eps, y.dtype)[0])


def _adapted(rows: Tensor, scale: Tensor, shift: Tensor, eps: float, samples: int, positions: int) -> Tensor:
    """AdaLN(a) of rows `[B samples positions, C]`, with the scale and the shift `[B positions, C]` of its condition."""
    normed = F.layer_norm(rows, rows.shape[-1:], eps=eps).view(-1, samples, positions, rows.shape[-1])
    scale, shift = (x.unflatten(0, (-1, 1, positions)) for x in (scale, shift))
    return torch.addcmul(shift, normed, scale).view(rows.shape)


def _project_apart(w: Block, x: Any, keys: Any, out: Tensor) -> None:
    """Write q, k, v and the gate: q and the gate of x, keys and values of `keys`."""
    from evoattn.pair.products import steps

    width = w.out.hi.shape[1]
    for y, start, count in ((x, 0, width), (keys, width, 2 * width), (x, 3 * width, width)):
        part = slice(start, start + count)
        bias = None if w.qkvg_bias is None else w.qkvg_bias[part]
        steps.product(y, w.qkvg.rows(start, count), bias, out=out[:, part])


def is_exact() -> bool:
    """Return whether factors need both halves."""
    return precision() == "exact" and float32_products() != "tf32"


def _group(channels: int, s: Tensor) -> int:
    """Return for how many blocks `_CONDITIONS` has room. s: the condition as rows."""
    return max(1, _CONDITIONS // (6 * channels * s.shape[0]))


def _each_condition(prepared: Prepared, s: Tensor, channels: int, low: bool) -> Iterator[tuple[tuple[Tensor, ...], ...]]:
    """The `OfCondition.each` of rows s, made for as many blocks at once as `_group` says."""
    from evoattn.pair.products import steps

    weights, of_condition = prepared.weights(low)
    eps = prepared.blocks[0].attention_pair_bias.layer_norm_a.layer_norm_s.eps
    s_norm, s_whole = steps.split(s, kind="norm", eps=eps, low=low), steps.split(s, low=low)
    group = _group(channels, s)
    for first in range(0, len(weights), group):
        part = weights[first : first + group]
        made = _conditions(of_condition, s_norm, s_whole, first, len(part), channels)
        for w, each in zip(part, made, strict=True):
            if w.keys is None:
                yield each
            else:
                weight, bias, shift = w.keys
                yield (*each, (steps.product(s_norm, weight, bias, opened=True), steps.product(s_norm, shift)))
        del made, each  # their memory is free before the next ones are made


def _shared(s: Tensor, lead: Sequence[int], positions: int) -> tuple[Tensor, int]:
    """The condition as rows, and how many samples share each: those along the last leading axis, if s has size 1 there."""
    samples = lead[-1] if lead and s.shape[-3] == 1 else 1
    wanted = lead if samples == 1 else (*lead[:-1], 1)
    return s.expand(*wanted, positions, -1).reshape(-1, s.shape[-1]).contiguous(), samples


def rows_of_keys(to_keys: Callable[[Tensor], Tensor], lead: Sequence[int], positions: int, device: torch.device) -> Tensor:
    """The row of each key, counted from 1. 0: there is none."""
    if isinstance(to_keys, Keys):
        return to_keys.rows
    shape = (*lead, positions)
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), device=device).view(shape)
    digits = to_keys(torch.stack((numbers % _DIGIT, numbers // _DIGIT % _DIGIT, numbers // _DIGIT**2), -1).float())
    low, middle, high = digits.round().long().unbind(-1)
    return (low + _DIGIT * (middle + _DIGIT * high)).flatten()


def _conditions(
    w: Conditions, s_norm: Any, s: Any, first: int, count: int, channels: int
) -> list[tuple[tuple[Tensor, ...], ...]]:
    """For each of some blocks: scale, shift and gate of the attention, then those of the transition."""
    from evoattn.pair.products import steps

    start, size = 2 * first * channels, 2 * count * channels
    part = slice(start, start + size)
    scales = steps.product(s_norm, w.scales.rows(start, size), w.scale_bias[part], opened=True)
    shifts = steps.product(s_norm, w.shifts.rows(start, size))
    gates = steps.product(s, w.gates.rows(start, size), w.gate_bias[part], opened=True)
    each = list(zip(*(x.split(channels, -1) for x in (scales, shifts, gates)), strict=True))
    return list(zip(each[::2], each[1::2], strict=True))
