"""Boltz-1, Boltz-2 and BoltzGen: triangle attention, its kernel, and the pair-biased attention inline in a `forward`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients import conditioning, diffusion, graphs, initial, losses, sampling, writing
from evoattn.clients.arguments import forwards, ignore
from evoattn.clients.blocks import END, KnownBlock, PairLayers, SplitBlock
from evoattn.clients.calls import LONG, additive, faster_as_installed, kernel, multiplication
from evoattn.clients.known import KnownLayer, averaging, channels_of, features, renamed, transition, triangle
from evoattn.clients.layers import FEW, layer, sites
from evoattn.clients.site import Client, Count, Replace, Site, named, replacement
from evoattn.compat.openfold import attention
from evoattn.core import attempts
from evoattn.nn.msa_module import OuterProductMean
from evoattn.nn.multiplication import JoinedTriangleMultiplication
from evoattn.nn.pair_bias import AttentionPairBias
from evoattn.nn.sharded import like, local


def unless_faster_as_installed(replace: Replace, *, counted: bool = True) -> Replace:
    """`replace`, except for calls that are faster as installed. These are counted here if no site inside counts them.

    None of more than `LONG` residues is on a GPU, if it norms their pairs: torch's norm of these is slow.
    """

    def wrap(original: Any, count: Count) -> Any:
        ours = replace(original, count)

        def forward(self: Any, s: Tensor, z: Tensor | None, *rest: Any, **named: Any) -> Any:
            # From Boltz-1's second step on z is None, and its projection `[B, H, Q, K]` is in the cache.
            queries, keys = named["model_cache"]["z"].shape[-2:] if z is None else z.shape[-3:-1]
            is_busy = s.is_cuda and z is not None and max(queries, keys) > LONG and isinstance(self.proj_z, nn.Sequential)
            if is_busy or not (reason := faster_as_installed(s, queries, keys, s.shape[0] * self.num_heads * queries * keys)):
                return ours(self, s, z, *rest, **named)
            if counted:
                count.count_passed_on(reason)
            return original(self, s, z, *rest, **named)

        return forward

    return wrap


def attend(self: Any, s: Tensor, qkv: tuple[Tensor, ...], bias: Tensor, mask: Tensor, multiplicity: int) -> Tensor:
    """The gated, pair-biased attention of S samples that share the bias `[B, H, Q, K]`, as its output `[B * S, Q, C]`.

    s is `[B * S, Q, C]`; q, k and v are `[B * S, L, H, D]`, the mask is `[B * S, K]`.

    The originals repeat the bias for each sample, and compute in float32. -1e6 or so is added where the mask is 0.
    """
    q, k, v = (x.transpose(1, 2).unflatten(0, (-1, multiplicity)) for x in qkv)  # [b,s,h,l,d]
    off = (1 - mask.float()) * -self.inf
    masks = off.unflatten(0, (-1, multiplicity))[:, :, None, None]
    with torch.autocast(q.device.type, enabled=False):
        o = attention(q, k, v, [bias.unsqueeze(1), masks], scaled=False, empty_rows="native")
    o = o.flatten(0, 1).transpose(1, 2)
    return self.proj_o(self.proj_g(s).sigmoid() * o.reshape(s.shape[0], -1, self.c_s))  # type: ignore[no-any-return]


@replacement
def boltz2_attention(self: Any, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
    """The attention with pair bias of Boltz-2 and BoltzGen."""
    q, k, v = projected(self, s, k_in)
    if getattr(self, "use_qk_norm", False):
        q, k = self.q_norm(q), self.k_norm(k)
    return attend(self, s, (q, k, v), self.proj_z(z), mask, multiplicity)


@replacement
def _boltz1_attention(
    self: Any,
    s: Tensor,
    z: Tensor,
    mask: Tensor,
    multiplicity: int = 1,
    to_keys: Any = None,
    model_cache: dict[str, Tensor] | None = None,
) -> Tensor:
    """The attention with pair bias of Boltz-1. Its keys may be of windows, and all steps of a diffusion share its bias."""
    if self.initial_norm:
        s = self.norm_s(s)
    k_in = s
    if to_keys is not None:
        k_in, mask = to_keys(s), to_keys(mask.unsqueeze(-1)).squeeze(-1)
    qkv = projected(self, s, k_in)
    if model_cache is None or "z" not in model_cache:
        z = self.proj_z(z)
    else:
        z = model_cache["z"]
    o = attend(self, s, qkv, z, mask, multiplicity)
    attempts.check()  # what was given up leaves nothing in the caller's cache
    if model_cache is not None:
        model_cache["z"] = z
    return o


def projected(self: Any, s: Tensor, k_in: Tensor) -> tuple[Tensor, ...]:
    """q, k and v `[B, L, H, D]`."""
    qkv = (self.proj_q(s), self.proj_k(k_in), self.proj_v(k_in))
    return tuple(x.view(s.shape[0], -1, self.num_heads, self.head_dim) for x in qkv)


def _make_pair_bias(client: Any) -> nn.Module:
    projects = isinstance(client.proj_z, nn.Sequential)
    c_z = client.proj_z[1].in_features if projects else client.num_heads
    return AttentionPairBias(client.c_s, c_z, client.head_dim, client.num_heads, inf=client.inf)


def _pair_bias(
    layer: Any,
    s: Tensor,
    z: Tensor,
    mask: Tensor,
    *,
    k_in: Tensor | None = None,
    multiplicity: int = 1,
    to_keys: Callable[[Tensor], Tensor] | None = None,
    model_cache: dict[str, Any] | None = None,
) -> Tensor:
    """Call the layer with Boltz's arguments. The first axis of s and mask holds structures times samples.

    `to_keys` picks the keys of each window.
    """
    if to_keys is not None:
        k_in, mask = to_keys(s), to_keys(mask.unsqueeze(-1)).squeeze(-1)
    pair_bias = None if model_cache is None else model_cache.get("z")
    if pair_bias is None:
        pair_bias = layer.pair_bias(z)
    samples = (-1, multiplicity)
    keys = None if k_in is None or k_in is s else k_in.unflatten(0, samples)
    mask, bias = mask.unflatten(0, samples), pair_bias.unsqueeze(1)
    o: Tensor = layer(s.unflatten(0, samples), None, mask=mask, keys=keys, pair_bias=bias).flatten(0, 1)
    attempts.check()  # what was given up leaves nothing in the caller's cache
    if model_cache is not None:
        model_cache["z"] = pair_bias
    return o


def _make_multiplication(outgoing: bool, client: Any) -> nn.Module:
    channels = channels_of(client.norm_in)
    return JoinedTriangleMultiplication(channels, channels, outgoing)


def _make_outer_product(client: Any) -> nn.Module:
    channels = features(client.proj_o, "out_features")
    return OuterProductMean(channels_of(client.norm), channels, client.c_hidden, at_least_one=True)


MULTIPLICATION_MODULES = (
    "layer_norm_in=norm_in layer_norm_out=norm_out linear_ab_p=p_in linear_ab_g=g_in linear_z=p_out linear_g=g_out"
)
_PAIR_BIAS = KnownLayer(
    _make_pair_bias, "layer_norm_a=norm_s? layer_norm_z=proj_z.0? linear_z=proj_z.1? mha.linear_*=proj_*", _pair_bias
)
_OUTGOING, _INCOMING = (
    KnownLayer(
        functools.partial(_make_multiplication, outgoing),
        MULTIPLICATION_MODULES,
        forwards("x"),
        kind="triangle multiplication",
    )
    for outgoing in (True, False)
)
_OUTER_PRODUCT = KnownLayer(
    _make_outer_product,
    "layer_norm=norm linear_1=proj_a linear_2=proj_b linear_out=proj_o",
    forwards("m"),
    kind="MSA layer",
)
_AVERAGING = averaging(
    "layer_norm_m=norm_m layer_norm_z=norm_z linear_z=proj_z linear_v=proj_m linear_g=proj_g linear_o=proj_o",
    "c_m c_z c_h num_heads inf",
)
_TRANSITION = transition("layer_norm=norm swiglu.linear_a=fc1 swiglu.linear_b=fc2 linear_out=fc3", "silu")


def from_boltz(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters in a state dict of Boltz, of one layer or of a whole model, to those of `evoattn.nn`.

    Make `TriangleAttention` with `gate_bias=False, out_bias=False`, `TriangleMultiplication` with `bias=False`, and
    `AttentionPairBias` with `inf=1e6`. Add `norm=False` if Boltz's layer has no `norm_s`.

    Args:
        state: tensors by Boltz's names, with any prefixes. An attention is renamed if the state has all five of its
            projections, a triangle multiplication if it has all six weights, a transition if it has all four. Names of other
            layers are kept.

    Returns:
        Tensors by the names of `evoattn.nn`. Some are views: Boltz has one projection for both halves of a multiplication.

    Example:
        >>> import torch
        >>> state = {f"attention.proj_{x}.weight": torch.ones(8, 8) for x in "qkvgo"}
        >>> list(from_boltz({**state, "outer_product_mean.proj_o.weight": torch.ones(8, 8)}))[3:]
        ['attention.mha.linear_g.weight', 'attention.mha.linear_o.weight', 'outer_product_mean.proj_o.weight']
    """
    return renamed(state, (_PAIR_BIAS, _OUTGOING, _TRANSITION))


def _call_pairs(
    layers: PairLayers,
    block: Any,
    z: Tensor,
    pair_mask: Tensor,
    chunk_size_tri_attn: int | None = None,
    package: str = "boltz",
    **switches: Any,
) -> Tensor:
    """`package` is no argument of the client. Boltz draws dropout masks in inference too, which moves the random numbers of the
    diffusion.
    """
    ignore(switches)
    drop = sys.modules[f"{package}.model.layers.pairformer"].get_dropout_mask
    first = z.dtype
    z = z.to(torch.promote_types(first, torch.float32))  # as Boltz' z becomes by its dropout mask, also in inference

    def draw(z: Tensor, which: int) -> Tensor | None:
        columns = which == END
        rows = (z[:, :1, :, :1] if columns else z[:, :, :1, :1]).to(z.dtype if which else first)
        if block.training and block.dropout:
            return drop(block.dropout, rows, True, columnwise=columns)  # type: ignore[no-any-return]
        torch.rand(rows.shape, dtype=torch.float32 if package == "boltz" else rows.dtype, device=z.device)
        return None

    return layers.run(z, pair_mask, draw)


def _call_block(
    layers: Any, block: Any, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, **switches: Any
) -> tuple[Tensor, Tensor]:
    z = _call_pairs(layers, block, z, pair_mask, **switches)
    with torch.autocast("cuda", enabled=False):
        s, float_z, mask = (x if x.dtype == torch.float64 else x.float() for x in (s, z, mask))
        normed = layers.pre_norm_s(s)
        s = s + layers.attention(s=normed, z=float_z, mask=mask, k_in=normed)
        s = s + layers.transition_s(s)
        return layers.s_post_norm(s), z


def _split_single(client: Any, attention: Any, s: Any, z: Any, mask: Any, **_: Any) -> Any:
    """The updated s of a block whose z is split over processes."""
    with torch.autocast(z.device.type, enabled=False):
        s, z, mask = (like(local(x).to(torch.promote_types(x.dtype, torch.float32)), x) for x in (s, z, mask))
        part = local(s)
        normed = like(client.pre_norm_s(part), s)
        part = part + local(attention(normed, z, None, mask))
        part = part + client.transition_s(part)
        return like(client.s_post_norm(part), s)


_SINGLE = ("pre_norm_s", "attention", "transition_s", "s_post_norm")


def _known(package: str, multiplied: str) -> dict[str, KnownLayer | KnownBlock]:
    """The layers and blocks that Boltz and BoltzGen share. `multiplied` is the module of the triangle multiplication."""
    there = f"{package}.model.layers"
    blocks = {
        "PairformerLayer": KnownBlock(functools.partial(_call_block, package=package), "transition_z", single=_SINGLE),
        "PairformerNoSeqLayer": KnownBlock(functools.partial(_call_pairs, package=package), "transition_z"),
    }
    return {
        f"{there}.{multiplied}.TriangleMultiplicationOutgoing": _OUTGOING,
        f"{there}.{multiplied}.TriangleMultiplicationIncoming": _INCOMING,
        f"{there}.triangular_attention.attention.TriangleAttention": triangle(),
        f"{there}.transition.Transition": _TRANSITION,
        f"{there}.outer_product_mean.OuterProductMean": _OUTER_PRODUCT,
        f"{there}.pair_averaging.PairWeightedAveraging": _AVERAGING,
        **{f"{there}.pairformer.{name}": block for name, block in blocks.items()},
    }


_uncounted = functools.partial(named, method="", counted=False)


def _client(
    package: str,
    multiplied: str,
    pairs: dict[str, Replace],
    diffusions: tuple[str, ...],
    layers: tuple[Site, ...] = (),
    known: Mapping[str, KnownLayer] | None = None,
    *,
    transformers: Mapping[str, KnownLayer],
    encoders: str,
    msas: tuple[str, ...],
    initials: tuple[str, ...],
    split: Mapping[str, SplitBlock] | None = None,
    command: tuple[Site, ...] = (),
) -> Client:
    """Boltz or BoltzGen.

    `multiplied` is the module of the triangle multiplication. `pairs` has replacements of `AttentionPairBias.forward` by
    module, `diffusions` modules of the diffusion, of which the last passes pair biases to its denoiser and has a loss that is a
    mean over copies, `transformers` those of its transformers, `encoders` the one of the condition, `msas` those of the MSA
    module, and `initials` those that draw initial weights. The rest is what only one of both has.
    """
    there = f"{package}.model.layers"
    transformers = {f"{package}.model.modules.{name}": x for name, x in transformers.items()}
    attention, multiplication_kernel = f"{there}.triangular_attention", "kernel_triangular_mult"
    shared = _known(package, multiplied)
    diffusions = tuple(f"{package}.model.modules.{name}" for name in diffusions)
    return Client(
        package,
        package,
        (
            Site(f"{attention}.primitives", "_attention", additive),
            Site(f"{attention}.primitives", "kernel_triangular_attn", kernel),
            *(Site(f"{there}.{name}", "AttentionPairBias.forward", unless_faster_as_installed(x)) for name, x in pairs.items()),
            Site(f"{there}.{multiplied}", ("_" if package == "boltzgen" else "") + multiplication_kernel,
                 multiplication, missing="cuequivariance_torch", counted=False),
            Site(f"{attention}.primitives", "Attention.forward"),
            Site(f"{attention}.attention", "TriangleAttention.forward"),
        ),
        layers=(
            *layers,
            *sites(shared, least=FEW),
            *diffusion.boltz_sites(transformers),
            *_uncounted(diffusion.conditioned, f"{diffusions[-1]}:DiffusionModule.forward"),
            *(Site(name, "trunc_normal_init_", initial.truncated, counted=False) for name in initials),
            Site(diffusions[-1].replace("modules", "loss"), "smooth_lddt_loss", losses.by_copy, counted=False),
            *_uncounted(conditioning.joined, f"{package}.model.modules.diffusion_conditioning:DiffusionConditioning.forward"),
            *_uncounted(diffusion.shared_condition, f"{package}.model.modules.{encoders}:SingleConditioning.forward"),
        ),
        steps=(
            *named(graphs.step, *(f"{module}:DiffusionModule" for module in diffusions)),
            *_uncounted(graphs.loop, *(f"{module}:AtomDiffusion.sample" for module in diffusions)),
            *graphs.blocks(
                *(f"{there}.pairformer:{name}" for name in ("PairformerLayer", "PairformerNoSeqLayer")),
                *(f"{package}.model.modules.{name}:MSALayer" for name in msas),
            ),
            *diffusion.recorded_layers(transformers),
        ),
        command=command,
        known={**shared, **(known or {}), **diffusion.known(transformers)},
        split=split or {},
        linears=(f"{attention}.primitives.Linear",),
        norms=(f"{attention}.primitives.LayerNorm",),
    )  # fmt: skip


_MODULES, _LOSS = "boltz.model.modules", "boltz.model.loss"

CLIENTS = {
    "boltz": _client(
        "boltz",
        "triangular_mult",
        {"attentionv2": boltz2_attention, "attention": _boltz1_attention},
        ("diffusion", "diffusionv2"),
        (
            *named(
                unless_faster_as_installed(layer, counted=False),
                "boltz.model.layers.attention:AttentionPairBias",
                "boltz.model.layers.attentionv2:AttentionPairBias",
            ),
            *(Site(f"{_LOSS}.diffusion{x}", "weighted_rigid_align", sampling.aligned, counted=False) for x in ("", "v2")),
            *_uncounted(
                sampling.schedule,
                f"{_MODULES}.diffusion:AtomDiffusion.sample_schedule",
                f"{_MODULES}.diffusionv2:AtomDiffusion.sample_schedule",
            ),
            *_uncounted(sampling.sampled, f"{_MODULES}.diffusionv2:AtomDiffusion.sample"),
            *(Site(f"{_MODULES}.utils", name, counted=False) for name in sampling.DRAWS),
        ),
        {f"boltz.model.layers.{name}.AttentionPairBias": _PAIR_BIAS for name in ("attention", "attentionv2")},
        transformers={"transformers": diffusion.BOLTZ1, "transformersv2": diffusion.BOLTZ2},
        encoders="encodersv2",
        msas=("trunk", "trunkv2"),
        initials=("boltz.model.layers.initialize",),
        split={
            "boltz.model.layers.pairformer.PairformerLayer": SplitBlock(_call_pairs, "", "mask", "attention", _split_single),
            "boltz.model.layers.pairformer.PairformerNoSeqLayer": SplitBlock(_call_pairs),
        },
        command=(
            *_uncounted(
                writing.then_write, f"{_MODULES}.diffusion:AtomDiffusion.sample", f"{_MODULES}.diffusionv2:AtomDiffusion.sample"
            ),
            Site("boltz.data.write.writer", "BoltzWriter.write_on_batch_end", writing.later, counted=False),
            Site("boltz.data.write.writer", "BoltzWriter.on_predict_epoch_end", writing.write_first, counted=False),
        ),
    ),
    "boltzgen": _client(
        "boltzgen",
        "triangular",
        {"attention": boltz2_attention},
        ("diffusion",),
        transformers={"transformers": diffusion.BOLTZ2},
        encoders="encoders",
        msas=("trunk",),
        initials=("boltzgen.model.layers.initialize", "boltzgen.model.layers.triangular_attention.primitives"),
    ),
}
