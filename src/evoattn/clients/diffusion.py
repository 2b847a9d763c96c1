"""Diffusion transformers of clients, of tokens and of windows of atoms, by `evoattn.nn.DiffusionTransformer` in a sampling.

Each replacement computes calls that the fused kernels take (`evoattn.nn.diffusion_steps`). The client's own code computes all
others: training, a CPU, autocast, a call outside of a sampling loop.
"""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evoattn.clients import graphs
from evoattn.clients.arguments import ClientsOwn, UnknownArgument
from evoattn.clients.kinds import TRANSFORMER
from evoattn.clients.known import KnownLayer, share
from evoattn.clients.layers import layer
from evoattn.clients.site import Count, PassedOn, Site
from evoattn.core import attempts
from evoattn.core.keeping import fact, keeps, made_once
from evoattn.nn import diffusion_steps
from evoattn.nn.condition_steps import add_transition
from evoattn.nn.diffusion import DiffusionTransformer, DiffusionTransformerBlock, ThreefoldConditionedTransition, ToKeys
from evoattn.nn.submodules import has_hooks_inside

KIND = TRANSFORMER

_NORM = "layer_norm_a=a_norm layer_norm_s=s_norm linear_g=s_scale linear_s=s_bias"
_BLOCK = (
    "attention_pair_bias.mha.linear_*=pair_bias_attn.proj_* "
    "attention_pair_bias.linear_ada_out=output_projection_linear "
    "conditioned_transition.linear_ba=transition.swish_gate.0 conditioned_transition.linear_c=transition.a_to_b "
    "conditioned_transition.linear_out=transition.b_to_a conditioned_transition.linear_g=transition.output_projection.0"
)


def _make_boltz(client: Any) -> nn.Module:
    """The transformer of Boltz-1, Boltz-2 or BoltzGen. Only that of Boltz-1 projects its pair biases itself."""
    first = client.layers[0]
    if not all(type(layer) is type(first) and _is_known(layer) for layer in client.layers):
        raise TypeError  # said as "has other modules"
    made = DiffusionTransformer(*_sizes(first), len(client.layers), inf=first.pair_bias_attn.inf)
    made.layer_norm_z = None
    for block, own in zip(made.blocks, client.layers, strict=True):
        _share_block(block, own)
    return made


def _is_known(layer: Any) -> bool:
    """Return whether a layer of a transformer has nothing that ours has not."""
    attention = layer.pair_bias_attn
    plain = not getattr(attention, "use_qk_norm", False) and not getattr(attention, "initial_norm", False)
    return plain and type(getattr(layer, "post_lnorm", nn.Identity())) is nn.Identity


def _sizes(layer: Any) -> tuple[int, int, int, int, int]:
    """The channels of a, of the condition, of the pairs and of a head, and the heads."""
    attention = layer.pair_bias_attn
    c_z: Any = attention.proj_z[1].in_features if isinstance(attention.proj_z, nn.Sequential) else 1
    return attention.c_s, layer.adaln.s_norm.normalized_shape[0], c_z, attention.head_dim, attention.num_heads


def _share_block(block: Any, own: Any) -> None:
    """Let a block hold the modules of a client's layer."""
    block.conditioned_transition = ThreefoldConditionedTransition(*_sizes(own)[:2], residual=True)
    share(block, own, _BLOCK)
    share(block.attention_pair_bias.layer_norm_a, own.adaln, _NORM)
    share(block.conditioned_transition.layer_norm, own.transition.adaln, _NORM)
    projection = own.pair_bias_attn.proj_z
    projects = isinstance(projection, nn.Sequential)
    block.attention_pair_bias.layer_norm_z = projection[0] if projects else None
    block.attention_pair_bias.linear_z = projection[1] if projects else None


def _make_layer(client: Any) -> nn.Module | None:
    """A layer of the transformer of Boltz-2 or BoltzGen, whose pair biases come with a call."""
    if not _is_known(client):
        raise TypeError  # said as "has other modules"
    if isinstance(client.pair_bias_attn.proj_z, nn.Sequential):
        return None
    block = DiffusionTransformerBlock(*_sizes(client), inf=client.pair_bias_attn.inf)
    _share_block(block, client)
    return block


def _call_layer(
    block: Any,
    a: Tensor,
    s: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    to_keys: ToKeys | None = None,
    multiplicity: int = 1,
) -> Tensor:
    """The bias is `[B, Q, K, H]`, and is shared by so many samples as `multiplicity` says."""
    if to_keys is not None or bias is None or mask is None:
        raise ClientsOwn  # atoms, whose products are too narrow to gain
    if {len(a), len(s), len(mask)} != {len(bias) * multiplicity}:
        raise ClientsOwn  # something is broadcast
    a, s, mask = (x.unflatten(0, (-1, multiplicity)) for x in (a, s, mask))
    pair_bias = bias.movedim(-1, -3).unsqueeze(1)
    return block(a, s, mask, pair_bias=pair_bias).flatten(0, 1)  # type: ignore[no-any-return]


def _call_boltz2(
    transformer: Any,
    a: Tensor,
    s: Tensor,
    bias: Tensor,
    mask: Tensor,
    to_keys: ToKeys | None = None,
    multiplicity: int = 1,
    use_uniform_bias: bool = False,
) -> Tensor:
    """The bias is `[B, Q, K, layers H]`, and is shared by so many samples as `multiplicity` says."""
    if use_uniform_bias:
        raise UnknownArgument("a bias that all layers of a diffusion transformer share")
    fused = prepared(transformer, a, s, mask, bias)
    biases = fused.bias(bias, heads_first).unflatten(1, (len(transformer.blocks), -1)).transpose(0, 1)
    return _run(fused, a, s, mask, to_keys, multiplicity, biases)


def _call_boltz1(
    transformer: Any,
    a: Tensor,
    s: Tensor,
    z: Tensor | None,
    mask: Tensor,
    to_keys: ToKeys | None = None,
    multiplicity: int = 1,
    model_cache: dict[str, dict[str, Tensor]] | None = None,
) -> Tensor:
    """The pair biases of all layers are in the cache from the first step on."""

    fused = prepared(transformer, a, s, mask)
    caches = [(model_cache or {}).get(f"layer_{i}", {}) for i in range(len(transformer.blocks))]
    biases = [
        cache["z"] if "z" in cache else heads_first(block.attention_pair_bias.pair_bias(z).movedim(-3, -1))
        for cache, block in zip(caches, transformer.blocks, strict=True)
    ]
    result = _run(fused, a, s, mask, to_keys, multiplicity, biases)
    attempts.check()  # what was given up leaves nothing in the caller's cache
    for i, bias in enumerate(biases if model_cache is not None else ()):
        model_cache.setdefault(f"layer_{i}", {})["z"] = bias  # type: ignore[union-attr]
    return result


def prepared(transformer: Any, a: Tensor, s: Tensor, *others: Tensor | None) -> diffusion_steps.Prepared:
    """Return what the kernels need for a call. An exception leaves one to the client that they do not take."""
    found = diffusion_steps.prepared(transformer.blocks, a, s, *others)
    if found is None and a.is_cuda:
        raise UnknownArgument("a diffusion transformer that is not sampled in float32")
    if found is None:
        raise ClientsOwn
    return found


def _run(
    fused: diffusion_steps.Prepared,
    a: Tensor,
    s: Tensor,
    mask: Tensor,
    to_keys: ToKeys | None,
    samples: int,
    biases: Sequence[Tensor] | Tensor,
) -> Tensor:
    """Compute a call whose first axis is `[B samples]`, with the pair bias `[B, H, Q, K]` of each block."""
    picked: ToKeys | None = None
    if to_keys is not None:
        mask = to_keys(mask.unsqueeze(-1)).squeeze(-1)

        def pick(x: Tensor) -> Tensor:
            return to_keys(x.flatten(0, 1)).unflatten(0, (-1, samples))  # type: ignore[no-any-return]

        picked = _kept(to_keys, pick, (a.shape[0] // samples, samples), a.shape[1])
    a, mask = (x.unflatten(0, (-1, samples)) for x in (a, mask))
    s = s.unflatten(0, (-1, samples if s.shape[0] == a.shape[:2].numel() else 1))
    pair_bias = [x.unsqueeze(1) for x in biases]
    attended = None if to_keys is None and _facts.get().every_token else mask
    result: Tensor = diffusion_steps.run(fused, a, s, pair_bias, attended, picked, None)
    return result.flatten(0, 1)


def _kept(to_keys: ToKeys, pick: ToKeys, lead: tuple[int, int], positions: int) -> ToKeys:
    """`pick`, by rows that are found once in a sampling if all that the client's `to_keys` refers to can be told."""
    owners: list[Any] = []
    numbers: list[Any] = [lead, positions]
    tensors = [x for x in owners if isinstance(x, Tensor)] if _refers(to_keys, owners, numbers) else []
    if not tensors:
        return pick
    find = functools.partial(diffusion_steps.rows_of_keys, pick, lead, positions, tensors[0].device)
    return made_once(f"keys of windows {numbers}", owners, lambda: diffusion_steps.Keys(find()))


def _refers(value: Any, owners: list[Any], numbers: list[Any]) -> bool:
    """Append what a function refers to: tensors and code to `owners`, plain values to `numbers`. False: there is more."""
    if value is None or type(value) in (bool, int, str):
        numbers.append(value)
        return True
    if isinstance(value, functools.partial):
        numbers.append(list(value.keywords))
        return all(_refers(x, owners, numbers) for x in (value.func, *value.args, *value.keywords.values()))
    numbers.append(type(value).__name__)  # so the order of numbers and owners is in the key
    if isinstance(value, Tensor):
        owners.append(value)
        return True
    if not isinstance(value, types.FunctionType) or any(x is value.__code__ for x in owners):
        return False
    owners.append(value.__code__)
    found = (value.__globals__.get(name) for name in value.__code__.co_names)
    if not all(x is None or isinstance(x, types.ModuleType | types.FunctionType | type) for x in found):
        return False
    inner = [*(cell.cell_contents for cell in value.__closure__ or ()), *(value.__defaults__ or ())]
    return not value.__kwdefaults__ and all(_refers(x, owners, numbers) for x in inner)


def heads_first(bias: Tensor) -> Tensor:
    """A bias `[*, Q, K, H]` as `[*, H, Q, K]` with aligned rows, in bfloat16 if the sampling is, else in float32 at least.

    A copy if need be.
    """
    low = diffusion_steps.attention_dtype()
    dtype = torch.promote_types(bias.dtype, low) if low == torch.float32 else low
    return diffusion_steps.aligned(bias.movedim(-1, -3), dtype)


def attends_to_all(mask: Tensor) -> bool:
    """Return whether a mask leaves nothing out. The host waits for it once in a sampling."""
    return bool(fact("every token", mask, lambda x: bool(x.all())))


def conditioned(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The denoiser of Boltz-2 and BoltzGen, which casts what its steps share to float32, and arranges pair biases, once."""

    def arranged(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if name == "token_trans_bias" and diffusion_steps.attention_dtype() == torch.float32:  # else `Prepared.bias` does so
            return made_once(name, (x,), lambda: heads_first(x.float()).movedim(1, -1))
        return x if x.dtype == torch.float32 else made_once(name, (x,), x.float)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: list[Any] = [kwargs.get(name) for name in ("diffusion_conditioning", "s_trunk", "feats")]
        shared, trunk, feats = given
        known = isinstance(shared, dict) and isinstance(trunk, Tensor) and isinstance(feats, dict) and "token_pad_mask" in feats
        if not known or torch.is_grad_enabled() or not may_have_kernels(self):
            return original(self, *args, **kwargs)
        kwargs["diffusion_conditioning"] = {name: arranged(name, x) for name, x in shared.items()}
        shares = trunk.shape[0] == 1 and graphs.in_loop()
        condition = (trunk, kwargs.get("s_inputs")) if shares else None
        token = _facts.set(_Facts(condition, attends_to_all(feats["token_pad_mask"])))
        try:
            return original(self, *args, **kwargs)
        finally:
            _facts.reset(token)

    return forward


class _Facts(NamedTuple):
    """Facts of a denoiser's call in a sampling.

    Args:
        condition: the single representations of the trunk and of the inputs, `[1, L, C]`, if all samples have one condition:
            they are of one structure, and the client's own loop gives them one noise level.
        every_token: whether every token is attended: there is no padding.
    """

    condition: tuple[Tensor, Any] | None = None
    every_token: bool = False


_NOTHING_KNOWN = _Facts()
_facts: contextvars.ContextVar[_Facts] = contextvars.ContextVar("facts", default=_NOTHING_KNOWN)


def shared_condition(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The condition `[1, L, C]` of samples that have the same. The client computes it, and all that it gives, for each.

    What it gets from the trunk is made once in a sampling.
    """

    def forward(self: Any, times: Tensor, s_trunk: Tensor, s_inputs: Tensor) -> Any:
        owners = _facts.get().condition
        if owners is None:
            return original(self, times, s_trunk, s_inputs)
        times, s_trunk, s_inputs = times[:1], s_trunk[:1], s_inputs[:1]
        if not isinstance(owners[1], Tensor) or self.disable_times or has_hooks_inside(self):
            return original(self, times, s_trunk, s_inputs)
        embed = functools.partial(_embedded, self, s_trunk, s_inputs)
        s = made_once("single condition", (*owners, *self.norm_single.parameters(), *self.single_embed.parameters()), embed)
        fourier = self.norm_fourier(self.fourier_embed(times))
        s = self.fourier_to_single(fourier)[:, None] + s
        for transition in self.transitions:
            s = _moved(s, transition, count)
        return s, fourier

    return forward


def _moved(s: Tensor, transition: Any, count: Count) -> Tensor:
    """s + transition(s)."""
    moved: Tensor | PassedOn | None = None
    if type(transition).__qualname__ == "Transition" and "forward" not in vars(transition):
        moved = count.compute(add_transition, s, transition.norm, transition.fc1, transition.fc2, transition.fc3)
    if isinstance(moved, PassedOn):
        count.count_passed_on(moved.reason)
        moved = None
    return transition(s) + s if moved is None else moved


def _embedded(condition: Any, s_trunk: Tensor, s_inputs: Tensor) -> Tensor:
    return condition.single_embed(condition.norm_single(torch.cat((s_trunk, s_inputs), -1)))  # type: ignore[no-any-return]


BOLTZ1, BOLTZ2 = (KnownLayer(_make_boltz, "", call, kind=KIND, in_part=True) for call in (_call_boltz1, _call_boltz2))


def transformer(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A transformer's `forward` by `evoattn.nn` in a sampling on a GPU. The client's own computes all other calls, unseen."""
    by_layers = layer(original, count)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (by_layers if may_have_kernels(self) else original)(self, *args, **kwargs)

    return forward


TRAINED = KnownLayer(_make_layer, "", _call_layer, in_part=True)


def trained(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The `forward` of a layer of a transformer, by `evoattn.nn` in training in float32 on a GPU, whose products are fast.

    Also in passes without gradients, so that a checkpoint computes the same twice. The client's own computes all other calls,
    unseen.
    """
    by_layers = layer(original, count)

    def forward(self: nn.Module, a: Tensor, s: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = self.training and a.is_cuda and a.dtype == s.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        return (by_layers if known else original)(self, a, s, *args, **kwargs)

    return forward


def replayed(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """The `forward` of a layer of tokens, recorded in training, for all layers of one structure.

    In inference the whole denoiser is recorded. A layer of atoms takes a function, which a recording cannot follow.
    """
    recorded = graphs.step(original, count, shared=True)

    def forward(self: Any, a: Any, s: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        of_atoms = bias is None or (len(args) > 1 and args[1] is not None) or kwargs.get("to_keys") is not None
        if of_atoms or not self.training:
            return original(self, a, s, bias, *args, **kwargs)
        return recorded(self, a, s, bias.contiguous(), *args, **kwargs)  # a copy with its strides would be one of all layers

    forward._evoattn_steps = recorded._evoattn_steps  # type: ignore[attr-defined]
    return forward


def may_have_kernels(module: nn.Module) -> bool:
    return keeps() and next(module.parameters()).is_cuda


def boltz_sites(transformers: Mapping[str, KnownLayer]) -> tuple[Site, ...]:
    """The transformers in these modules of Boltz or BoltzGen, and what is taken for granted of them."""
    checked = ("AdaLN", "ConditionedTransitionBlock")
    layers = {module: trained if known is BOLTZ2 else None for module, known in transformers.items()}
    return (
        *(Site(module, "DiffusionTransformer.forward", transformer, kind=KIND) for module in transformers),
        *(Site(x, "DiffusionTransformerLayer.forward", replace, counted=bool(replace)) for x, replace in layers.items()),
        *(Site(module, f"{name}.forward", counted=False) for module in transformers for name in checked),
        Site(f"{next(iter(transformers)).rpartition('.')[0]}.utils", "SwiGLU.forward", counted=False),
    )


def recorded_layers(transformers: Mapping[str, KnownLayer]) -> tuple[Site, ...]:
    """The layers in these modules that are recorded in training: those whose pair biases come with a call."""
    return tuple(
        Site(module, "DiffusionTransformerLayer.forward", replayed) for module, known in transformers.items() if known is BOLTZ2
    )


def known(transformers: Mapping[str, KnownLayer]) -> dict[str, KnownLayer]:
    """The classes in these modules that `evoattn.nn` can compute in part."""
    layers = {f"{module}.DiffusionTransformerLayer": TRAINED for module, known in transformers.items() if known is BOLTZ2}
    return {f"{module}.DiffusionTransformer": x for module, x in transformers.items()} | layers
