"""Layers of clients that `evoattn.nn` can compute: how to make ours of them, and how to call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from evoattn.call.canonical import with_axes
from evoattn.nn.attention import Attention
from evoattn.nn.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttentionWithPairBias
from evoattn.nn.multiplication import JoinedTriangleMultiplication, TriangleMultiplication
from evoattn.nn.pair_bias import AdaLN, AttentionPairBias
from evoattn.nn.submodules import has_hooks
from evoattn.nn.template import TemplatePointwiseAttention
from evoattn.nn.transition import Transition
from evoattn.nn.triangle import TriangleAttention

__all__ = ["LAYERS", "ClientsOwn", "UnknownArgument", "check_scaled", "ignore"]

_OF_MULTIPLICATION = ("layer_norm_in", "layer_norm_out", "linear_z", "linear_g")
"""Modules of a triangle multiplication that OpenFold calls as we do."""

_WIDEST = 256
"""Channels of a transition. Wider ones have no kernel, and are left to the client."""

_OF_TRANSITION = {
    "swiglu": ("layer_norm", "swiglu.linear_a", "swiglu.linear_b", "linear_out"),
    "relu": ("layer_norm", "linear_1", "linear_2"),
}
"""The modules of our transition, by its activation."""

_ACTIVATIONS = {"swiglu": nn.SiLU, "relu": nn.ReLU}

_FEW = 16
"""Keys up to which Protenix' triangle attention takes no kernel."""

_IGNORED = (
    "chunk_size",
    "ckpt_chunk_size",
    "_inplace_chunk_size",
    "inplace_safe",
    "flash_mask",
    "triangle_attention",
    "triangle_multiplicative",
)
"""Arguments that change no answer, beside those of which only the beginning is known."""


class UnknownArgument(TypeError):  # noqa: N818
    """A client's layer was called with an argument that `evoattn.nn` does not know. Nothing was computed."""


class ClientsOwn(UnknownArgument):
    """A client's layer was called in a way in which it has an answer of its own, which is kept."""


def _adopt(ours: nn.Module, theirs: nn.Module, *names: str, **renamed: str) -> None:
    """Let our layer hold modules of the client's: `names` are the same in both, `renamed` are ours=theirs."""
    for here, there in (*zip(names, names, strict=True), *renamed.items()):
        setattr(ours, here, getattr(theirs, there))


def _adopt_attention(ours: Attention, theirs: nn.Module, prefix: str = "linear_") -> None:
    for which in "qkvgo":
        setattr(ours, f"linear_{which}", getattr(theirs, f"{prefix}{which}", None))


def _triangle(linear: str, theirs: Any) -> nn.Module:
    ours = TriangleAttention(theirs.c_in, theirs.c_hidden, theirs.no_heads, theirs.starting, theirs.inf)
    _adopt(ours, theirs, "layer_norm", linear=linear)
    _adopt_attention(ours.mha, theirs.mha)
    return ours


def _rows(theirs: Any) -> nn.Module:
    ours = MSARowAttentionWithPairBias(theirs.c_in, theirs.c_z, theirs.c_hidden, theirs.no_heads, theirs.inf)
    _adopt(ours, theirs, "layer_norm_m", "layer_norm_z", "linear_z")
    _adopt_attention(ours.mha, theirs.mha)
    return ours


def _columns(theirs: Any) -> nn.Module:
    ours = MSAColumnAttention(theirs.c_m, theirs.c_hidden, theirs.no_heads, theirs.inf)
    _adopt(ours._msa_att, theirs._msa_att, "layer_norm_m")
    _adopt_attention(ours._msa_att.mha, theirs._msa_att.mha)
    return ours


def _global(theirs: Any) -> nn.Module:
    ours = MSAColumnGlobalAttention(theirs.c_in, theirs.c_hidden, theirs.no_heads, theirs.inf, theirs.eps)
    _adopt(ours, theirs, "layer_norm_m")
    _adopt_attention(ours.global_attention, theirs.global_attention)
    return ours


def _templates(theirs: Any) -> nn.Module:
    ours = TemplatePointwiseAttention(theirs.c_t, theirs.c_z, theirs.c_hidden, theirs.no_heads, theirs.inf)
    _adopt_attention(ours.mha, theirs.mha)
    return ours


def _pair_bias(theirs: Any) -> nn.Module:
    """Make our layer for OpenFold-3's attention with pair bias, of the trunk or of the diffusion transformer."""
    mha, adaptive = theirs.mha, hasattr(theirs, "linear_ada_out")
    c_s = theirs.c_s if adaptive else None
    ours = AttentionPairBias(theirs.c_q, theirs.c_z, mha.c_hidden, mha.no_heads, c_s, theirs.inf)
    if adaptive:
        _adopt(cast(AdaLN, ours.layer_norm_a), theirs.layer_norm_a, "layer_norm_a", "layer_norm_s", "linear_g", "linear_s")
        _adopt(ours, theirs, "linear_z", "linear_ada_out")
    else:
        _adopt(ours, theirs, "layer_norm_a", "layer_norm_z", "linear_z")
    _adopt_attention(ours.mha, mha)
    return ours


def _boltz_pair_bias(theirs: Any) -> nn.Module:
    """Make our layer for Boltz's attention with pair bias, which may lack the norm of s and the projection of z."""
    projects = isinstance(theirs.proj_z, nn.Sequential)
    c_z = theirs.proj_z[1].in_features if projects else theirs.num_heads
    ours = AttentionPairBias(theirs.c_s, c_z, theirs.head_dim, theirs.num_heads, inf=theirs.inf)
    ours.layer_norm_a = getattr(theirs, "norm_s", None)
    ours.layer_norm_z, ours.linear_z = (theirs.proj_z[0], theirs.proj_z[1]) if projects else (None, None)
    _adopt_attention(ours.mha, theirs, "proj_")
    return ours


def _multiplication(theirs: Any) -> nn.Module:
    ours = TriangleMultiplication(theirs.c_z, theirs.c_hidden, theirs._outgoing)
    _adopt(ours, theirs, *_OF_MULTIPLICATION, "linear_a_p", "linear_a_g", "linear_b_p", "linear_b_g")
    return ours


def _joined_multiplication(theirs: Any) -> nn.Module:
    ours = JoinedTriangleMultiplication(theirs.c_z, theirs.c_hidden, theirs._outgoing)
    _adopt(ours, theirs, *_OF_MULTIPLICATION, "linear_ab_p", "linear_ab_g")
    return ours


def _boltz_multiplication(outgoing: bool, theirs: Any) -> nn.Module:
    norms = [x for x in theirs.norm_in.modules() if hasattr(x, "normalized_shape")]  # it may have a wrapper
    channels = norms[0].normalized_shape[0]
    ours = JoinedTriangleMultiplication(channels, channels, outgoing)
    _adopt(ours, theirs, linear_ab_p="p_in", linear_ab_g="g_in", linear_z="p_out", linear_g="g_out")
    _adopt(ours, theirs, layer_norm_in="norm_in", layer_norm_out="norm_out")
    return ours


def _transition(activation: str, function: str, paths: tuple[str, ...], theirs: nn.Module) -> nn.Module | None:
    """Make our transition of a client's, or return None if it is too wide or changes the number of channels.

    Args:
        activation: that of ours.
        function: the path of the client's module that applies SiLU or ReLU. "": it calls a function.
        paths: those of the client's norm and projections, in the order of `_OF_TRANSITION`.
        theirs: the client's layer.
    """
    found = [theirs.get_submodule(path) for path in paths]
    channels, outputs = _features(found[1], "in_features"), _features(found[-1], "out_features")
    if channels > _WIDEST or outputs != channels:
        return None
    if function and type(theirs.get_submodule(function)) is not _ACTIVATIONS[activation]:
        raise TypeError(f"{function} is a {type(theirs.get_submodule(function)).__name__}")
    ours = Transition(channels, 1, activation=activation)
    for path, module in zip(_OF_TRANSITION[activation], found, strict=True):
        parent, _, name = path.rpartition(".")
        setattr(ours.get_submodule(parent), name, module)
    return ours


def _residue_mlp(theirs: Any) -> nn.Module | None:
    """Make our transition of ESMFold's, which adds its update to its input, after a dropout."""
    paths = ("mlp.0", "mlp.1", "mlp.3")
    ours = _transition("relu", "mlp.2", paths, theirs)
    if ours is not None:
        ours.drop = theirs.mlp[4]
    return ours


def _features(module: nn.Module, name: str) -> int:
    """The sizes that a projection knows by name, which may have a wrapper."""
    found: list[int] = [getattr(x, name) for x in module.modules() if hasattr(x, name)]
    return found[0]


def ignore(switches: dict[str, Any]) -> None:
    """Raise UnknownArgument unless every argument is a kernel switch, a chunk size, or permits overwriting an input."""
    for name in switches:
        if not name.startswith(("use_", "_chunk", "_checkpoint")) and name not in _IGNORED:
            raise UnknownArgument(f"evoattn.nn.replace does not know the argument {name!r} of this layer")


def _call_triangle(
    ours: Any, x: Tensor, mask: Tensor | None = None, *, transpose_bias: bool = False, **switches: Any
) -> Tensor:
    ignore(switches)
    made: Tensor = ours(x, mask, transpose_bias=transpose_bias)
    return made


def check_scaled(x: Tensor, triangle_attention: str) -> None:
    """Raise ClientsOwn if Protenix' triangle attention of x does not scale q: it takes no kernel for so few residues."""
    if x.shape[-2] <= _FEW and triangle_attention in ("cuequivariance", "deepspeed"):
        raise ClientsOwn(f"{_FEW} residues or fewer with {triangle_attention}, for which the client does not scale q")


def _call_protenix_triangle(
    ours: Any, x: Tensor, mask: Tensor | None = None, *, triangle_attention: str = "torch", **switches: Any
) -> Tensor:
    """Call our layer with Protenix' arguments. The mask may lack leading axes along which it does not vary."""
    check_scaled(x, triangle_attention)
    return _call_triangle(ours, x, None if mask is None else with_axes(mask, x.ndim - 1), **switches)


def _call_rows(ours: Any, m: Tensor, z: Tensor | None = None, mask: Tensor | None = None, **switches: Any) -> Tensor:
    ignore(switches)
    made: Tensor = ours(m, z, mask)
    return made


def _call_columns(ours: Any, m: Tensor, mask: Tensor | None = None, **switches: Any) -> Tensor:
    ignore(switches)
    made: Tensor = ours(m, mask)
    return made


def _call_templates(ours: Any, t: Tensor, z: Tensor, template_mask: Tensor | None = None, **switches: Any) -> Tensor:
    ignore(switches)
    made: Tensor = ours(t, z, template_mask)
    return made


def _call_pair_bias(
    ours: Any, a: Tensor, z: Tensor, s: Tensor | None = None, mask: Tensor | None = None, **switches: Any
) -> Tensor:
    """Call our layer with OpenFold-3's arguments. z and mask may lack leading axes along which they do not vary."""
    ignore(switches)
    mask = None if mask is None else with_axes(mask, a.ndim - 1)
    made: Tensor = ours(a, with_axes(z, a.ndim + 1), s, mask)
    return made


def _call_trunk_pair_bias(ours: Any, a: Tensor, z: Tensor, mask: Tensor | None = None, **switches: Any) -> Tensor:
    return _call_pair_bias(ours, a, z, None, mask, **switches)


def _call_boltz_pair_bias(
    ours: Any,
    s: Tensor,
    z: Tensor,
    mask: Tensor,
    *,
    k_in: Tensor | None = None,
    multiplicity: int = 1,
    to_keys: Callable[[Tensor], Tensor] | None = None,
    model_cache: dict[str, Any] | None = None,
) -> Tensor:
    """Call our layer with Boltz's arguments. The first axis of s and mask holds structures times samples.

    `to_keys` picks the keys of each window.
    """
    if to_keys is not None:
        k_in, mask = to_keys(s), to_keys(mask.unsqueeze(-1)).squeeze(-1)
    pair_bias = None if model_cache is None else model_cache.get("z")
    if pair_bias is None:
        pair_bias = ours.pair_bias(z)
        if model_cache is not None:
            model_cache["z"] = pair_bias
    samples = (-1, multiplicity)
    keys = None if k_in is None or k_in is s else k_in.unflatten(0, samples)
    mask, bias = mask.unflatten(0, samples), pair_bias.unsqueeze(1)
    made: Tensor = ours(s.unflatten(0, samples), None, mask=mask, keys=keys, pair_bias=bias).flatten(0, 1)
    return made


def _call_multiplication(
    ours: Any,
    z: Tensor,
    mask: Tensor | None = None,
    *,
    inplace_safe: bool = False,
    _add_with_inplace: bool = False,
    **switches: Any,
) -> Tensor:
    """Call our layer with OpenFold's arguments. If z may be overwritten, the update may have to be added to it, in place.

    Template stacks keep z and drop what the layer returns. OpenFold-3 adds nothing if it calls cuEquivariance. The mask may
    lack leading axes along which it does not vary.
    """
    ignore(switches)
    made: Tensor = ours(z, None if mask is None else with_axes(mask, z.ndim - 1))
    adds = inplace_safe and _add_with_inplace and not switches.get("use_cueq_triangle_kernels")
    return z.add_(made) if adds else made


def _call_boltz_multiplication(ours: Any, x: Tensor, mask: Tensor, **switches: Any) -> Tensor:
    ignore(switches)
    made: Tensor = ours(x, mask)
    return made


def _call_transition(ours: Any, x: Tensor, mask: Tensor | None = None, **switches: Any) -> Tensor:
    """Call our layer with OpenFold-3's arguments. The mask may lack leading axes along which it does not vary."""
    ignore(switches)
    made: Tensor = ours(x, None if mask is None else with_axes(mask, x.ndim - 1))
    return made


def _call_pair_transition(ours: Any, z: Tensor, mask: Tensor | None = None, **switches: Any) -> Tensor:
    return _call_transition(ours, z, mask, **switches)


def _call_msa_transition(ours: Any, m: Tensor, mask: Tensor | None = None, **switches: Any) -> Tensor:
    return _call_transition(ours, m, mask, **switches)


def _call_plain_transition(ours: Any, x: Tensor, **switches: Any) -> Tensor:
    return _call_transition(ours, x, **switches)


def _call_residue_mlp(ours: Any, x: Tensor, **switches: Any) -> Tensor:
    ignore(switches)
    drop = ours.drop
    drops = type(drop) is not nn.Dropout or has_hooks(drop) or (drop.training and drop.p > 0)
    made: Tensor = x + drop(ours(x)) if drops else ours.add_to(x, None, in_place=False)
    return made


_OPENFOLD, _OPENFOLD3, _BOLTZ = "openfold.model", "openfold3.core.model.layers", "boltz.model.layers"
_PROTENIX = "protenix.model"
_UPDATE = "triangular_multiplicative_update"

_RELU = functools.partial(_transition, "relu", "relu", ("layer_norm", "linear_1", "linear_2"))
_RELU_OF_OPENFOLD3 = functools.partial(
    _transition,
    "relu",
    "transition_mlp.layers.0.1",
    ("layer_norm", "transition_mlp.layers.0.0", "transition_mlp.linear_out"),
)
_SWIGLU = functools.partial(_transition, "swiglu", "swiglu.swish", _OF_TRANSITION["swiglu"])
_SWIGLU_OF_BOLTZ = functools.partial(_transition, "swiglu", "silu", ("norm", "fc1", "fc2", "fc3"))
_SWIGLU_OF_PROTENIX = functools.partial(
    _transition, "swiglu", "", ("layernorm1", "linear_no_bias_a", "linear_no_bias_b", "linear_no_bias")
)

LAYERS: dict[str, tuple[Callable[[Any], nn.Module | None], Callable[..., Tensor]]] = {
    f"{_OPENFOLD}.triangular_attention.TriangleAttention": (functools.partial(_triangle, "linear"), _call_triangle),
    f"{_OPENFOLD}.msa.MSARowAttentionWithPairBias": (_rows, _call_rows),
    f"{_OPENFOLD}.msa.MSAColumnAttention": (_columns, _call_columns),
    f"{_OPENFOLD}.msa.MSAColumnGlobalAttention": (_global, _call_columns),
    f"{_OPENFOLD}.template.TemplatePointwiseAttention": (_templates, _call_templates),
    f"{_OPENFOLD}.{_UPDATE}.TriangleMultiplicativeUpdate": (_multiplication, _call_multiplication),
    f"{_OPENFOLD}.{_UPDATE}.FusedTriangleMultiplicativeUpdate": (_joined_multiplication, _call_multiplication),
    f"{_OPENFOLD}.pair_transition.PairTransition": (_RELU, _call_pair_transition),
    f"{_OPENFOLD}.evoformer.MSATransition": (_RELU, _call_msa_transition),
    f"{_OPENFOLD3}.triangular_attention.TriangleAttention": (functools.partial(_triangle, "linear_z"), _call_triangle),
    f"{_OPENFOLD3}.msa.MSARowAttentionWithPairBias": (_rows, _call_rows),
    f"{_OPENFOLD3}.msa.MSAColumnAttention": (_columns, _call_columns),
    f"{_OPENFOLD3}.msa.MSAColumnGlobalAttention": (_global, _call_columns),
    f"{_OPENFOLD3}.attention_pair_bias.AttentionPairBias": (_pair_bias, _call_trunk_pair_bias),
    f"{_OPENFOLD3}.attention_pair_bias.DiffusionAttentionPairBias": (_pair_bias, _call_pair_bias),
    f"{_OPENFOLD3}.{_UPDATE}.TriangleMultiplicativeUpdate": (_multiplication, _call_multiplication),
    f"{_OPENFOLD3}.{_UPDATE}.FusedTriangleMultiplicativeUpdate": (_joined_multiplication, _call_multiplication),
    f"{_OPENFOLD3}.transition.SwiGLUTransition": (_SWIGLU, _call_transition),
    f"{_OPENFOLD3}.transition.ReLUTransition": (_RELU_OF_OPENFOLD3, _call_transition),
    f"{_BOLTZ}.triangular_attention.attention.TriangleAttention": (functools.partial(_triangle, "linear"), _call_triangle),
    f"{_BOLTZ}.attention.AttentionPairBias": (_boltz_pair_bias, _call_boltz_pair_bias),
    f"{_BOLTZ}.attentionv2.AttentionPairBias": (_boltz_pair_bias, _call_boltz_pair_bias),
    f"{_BOLTZ}.triangular_mult.TriangleMultiplicationOutgoing": (
        functools.partial(_boltz_multiplication, True),
        _call_boltz_multiplication,
    ),
    f"{_BOLTZ}.triangular_mult.TriangleMultiplicationIncoming": (
        functools.partial(_boltz_multiplication, False),
        _call_boltz_multiplication,
    ),
    f"{_BOLTZ}.transition.Transition": (_SWIGLU_OF_BOLTZ, _call_plain_transition),
    f"{_PROTENIX}.triangular.triangular.TriangleAttention": (functools.partial(_triangle, "linear"), _call_protenix_triangle),
    f"{_PROTENIX}.triangular.triangular.TriangleMultiplicativeUpdate": (_multiplication, _call_multiplication),
    f"{_PROTENIX}.modules.primitives.Transition": (_SWIGLU_OF_PROTENIX, _call_plain_transition),
    "transformers.models.esm.modeling_esmfold.EsmFoldResidueMLP": (_residue_mlp, _call_residue_mlp),
}
"""By the full name of a client's class: what makes ours of it, or None if it is left to the client, and what calls ours with
its arguments.
"""
