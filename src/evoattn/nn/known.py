"""Layers of clients that `evoattn.nn` can compute: how to make ours of them, and how to call it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from evoattn.nn import known_calls as calls
from evoattn.nn.attention import Attention, add_residual
from evoattn.nn.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttentionWithPairBias
from evoattn.nn.multiplication import JoinedTriangleMultiplication, TriangleMultiplication
from evoattn.nn.pair_bias import AdaLN, AttentionPairBias
from evoattn.nn.submodules import has_hooks
from evoattn.nn.template import TemplatePointwiseAttention
from evoattn.nn.transition import Transition
from evoattn.nn.triangle import TriangleAttention

__all__ = ["LAYERS"]

_MULTIPLICATION_MODULES = ("layer_norm_in", "layer_norm_out", "linear_z", "linear_g")
"""Modules of a triangle multiplication that OpenFold calls as we do."""

_WIDEST = 256
"""Channels of a transition. Wider ones have no kernel, and are left to the client."""

_TRANSITION_MODULES = {
    "swiglu": ("layer_norm", "swiglu.linear_a", "swiglu.linear_b", "linear_out"),
    "relu": ("layer_norm", "linear_1", "linear_2"),
}
"""The modules of our transition, by its activation."""

_ACTIVATIONS = {"swiglu": nn.SiLU, "relu": nn.ReLU}


class _ResidueMlp(Transition):
    """ESMFold's transition, whose update gets a dropout `drop`."""

    drop: nn.Module

    def add_to(self, x: Tensor, mask: Tensor | None, *, in_place: bool) -> Tensor:
        drop = self.drop
        if type(drop) is not nn.Dropout or has_hooks(drop) or (drop.training and drop.p > 0):
            return add_residual(x, drop(self(x, mask)), residual=True, in_place=in_place)
        return super().add_to(x, mask, in_place=in_place)


def _adopt(ours: nn.Module, theirs: nn.Module, *names: str, **renamed: str) -> None:
    """Let our layer hold modules of the client's: `names` are the same in both, `renamed` are ours=theirs."""
    for here, there in (*zip(names, names, strict=True), *renamed.items()):
        setattr(ours, here, getattr(theirs, there))


def _adopt_attention(ours: Attention, theirs: nn.Module, prefix: str = "linear_") -> None:
    for which in "qkvgo":
        setattr(ours, f"linear_{which}", getattr(theirs, f"{prefix}{which}", None))


def _triangle(linear: str, theirs: Any) -> nn.Module:
    """`linear` is their name of the projection of the pair bias."""
    mha = theirs.mha
    channels, sizes = (theirs.c_in, theirs) if hasattr(theirs, "c_in") else (mha.c_q, mha)  # OpenDDE's layer has no sizes
    ours = TriangleAttention(channels, sizes.c_hidden, sizes.no_heads, theirs.starting, theirs.inf)
    _adopt(ours, theirs, "layer_norm", linear=linear)
    _adopt_attention(ours.mha, mha)
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


def _protenix_pair_bias(theirs: Any) -> nn.Module | None:
    """Make our layer for the single track's attention of Protenix, or return None for that of samples and atoms."""
    if theirs.has_s or theirs.cross_attention_mode:
        return None
    mha = theirs.attention
    ours = AttentionPairBias(mha.c_q, _features(theirs.linear_nobias_z, "in_features"), mha.c_hidden, mha.num_heads)
    _adopt(ours, theirs, layer_norm_a="layernorm_a", layer_norm_z="layernorm_z", linear_z="linear_nobias_z")
    _adopt_attention(ours.mha, mha)
    return ours


def _multiplication(theirs: Any) -> nn.Module:
    # ESMFold's layer has no sizes
    channels, hidden = (theirs.c_z, theirs.c_hidden) if hasattr(theirs, "c_z") else (_normed(theirs.layer_norm_in),) * 2
    ours = TriangleMultiplication(channels, hidden, theirs._outgoing)
    _adopt(ours, theirs, *_MULTIPLICATION_MODULES, "linear_a_p", "linear_a_g", "linear_b_p", "linear_b_g")
    return ours


def _joined_multiplication(theirs: Any) -> nn.Module:
    ours = JoinedTriangleMultiplication(theirs.c_z, theirs.c_hidden, theirs._outgoing)
    _adopt(ours, theirs, *_MULTIPLICATION_MODULES, "linear_ab_p", "linear_ab_g")
    return ours


def _boltz_multiplication(outgoing: bool, theirs: Any) -> nn.Module:
    channels = _normed(theirs.norm_in)
    ours = JoinedTriangleMultiplication(channels, channels, outgoing)
    _adopt(ours, theirs, linear_ab_p="p_in", linear_ab_g="g_in", linear_z="p_out", linear_g="g_out")
    _adopt(ours, theirs, layer_norm_in="norm_in", layer_norm_out="norm_out")
    return ours


def _rf3_triangle(theirs: Any) -> nn.Module:
    ours = TriangleAttention(_features(theirs.to_q, "in_features"), theirs.dim, theirs.h, theirs.start_node)
    _adopt(ours, theirs, layer_norm="norm", linear="to_b")
    _adopt_attention(ours.mha, theirs, "to_")
    ours.mha.linear_o = theirs.to_out
    return ours


def _rf3_multiplication(theirs: Any) -> nn.Module:
    ours: Any = _boltz_multiplication(theirs.direction == "outgoing", theirs)
    ours.by_cuequivariance = theirs.use_cuequivariance
    return ours  # type: ignore[no-any-return]


def _transition(
    activation: str, function: str, paths: tuple[str, ...], theirs: nn.Module, kind: type[Transition] = Transition
) -> Any:
    """Make our transition of a client's, or return None if it is too wide or changes the number of channels.

    `function` is the path of the client's module that applies SiLU or ReLU, or "" if it calls a function. `paths` are those of
    its norm and projections, in the order of `_TRANSITION_MODULES`.
    """
    modules = [theirs.get_submodule(path) for path in paths]
    channels, outputs = _features(modules[1], "in_features"), _features(modules[-1], "out_features")
    if channels > _WIDEST or outputs != channels:
        return None
    if function and type(theirs.get_submodule(function)) is not _ACTIVATIONS[activation]:
        raise TypeError(f"{function} is a {type(theirs.get_submodule(function)).__name__}")
    ours = kind(channels, 1, activation=activation)
    for path, module in zip(_TRANSITION_MODULES[activation], modules, strict=True):
        parent, _, name = path.rpartition(".")
        setattr(ours.get_submodule(parent), name, module)
    return ours


def _residue_mlp(theirs: Any) -> nn.Module | None:
    """Make our transition of ESMFold's, which adds its update to its input, after a dropout."""
    ours: nn.Module | None = _transition("relu", "mlp.2", ("mlp.0", "mlp.1", "mlp.3"), theirs, _ResidueMlp)
    if ours is not None:
        ours.drop = theirs.mlp[4]
    return ours


def _normed(norm: nn.Module) -> int:
    """The channels of a norm, which may have a wrapper."""
    shapes: list[tuple[int, ...]] = [x.normalized_shape for x in norm.modules() if isinstance(x, nn.LayerNorm)]
    return shapes[0][0]


def _features(module: nn.Module, name: str) -> int:
    """The sizes that a projection knows by name, which may have a wrapper."""
    sizes: list[int] = [getattr(x, name) for x in module.modules() if hasattr(x, name)]
    return sizes[0]


_OPENFOLD, _OPENFOLD3, _BOLTZ = "openfold.model", "openfold3.core.model.layers", "boltz.model.layers"
_ESMFOLD = "transformers.models.esm.modeling_esmfold"
_RF3 = "rf3.model.layers"
_UPDATE = "triangular_multiplicative_update"

_RELU = functools.partial(_transition, "relu", "relu", ("layer_norm", "linear_1", "linear_2"))
_OPENFOLD3_RELU = functools.partial(
    _transition, "relu", "transition_mlp.layers.0.1", ("layer_norm", "transition_mlp.layers.0.0", "transition_mlp.linear_out")
)
_SWIGLU = functools.partial(_transition, "swiglu", "swiglu.swish", _TRANSITION_MODULES["swiglu"])
_BOLTZ_SWIGLU = functools.partial(_transition, "swiglu", "silu", ("norm", "fc1", "fc2", "fc3"))
_RF3_SWIGLU = functools.partial(_transition, "swiglu", "", ("layer_norm_1", "linear_1", "linear_2", "linear_3"))
_PROTENIX_SWIGLU = functools.partial(
    _transition, "swiglu", "", ("layernorm1", "linear_no_bias_a", "linear_no_bias_b", "linear_no_bias")
)

_Layer = tuple[Callable[[Any], nn.Module | None], Callable[..., Tensor]]


def _boltz_layers(package: str, multiplications: str) -> dict[str, _Layer]:
    """The layers that Boltz and BoltzGen share, whose triangle multiplications are in a module of another name."""
    layers, call = f"{package}.model.layers", calls.forwards("x")
    outgoing, incoming = (functools.partial(_boltz_multiplication, which) for which in (True, False))
    return {
        f"{layers}.triangular_attention.attention.TriangleAttention": (functools.partial(_triangle, "linear"), calls.triangle),
        f"{layers}.{multiplications}.TriangleMultiplicationOutgoing": (outgoing, call),
        f"{layers}.{multiplications}.TriangleMultiplicationIncoming": (incoming, call),
        f"{layers}.transition.Transition": (_BOLTZ_SWIGLU, calls.forwards("x")),
    }


def _protenix_layers(package: str, triangle: Callable[..., Tensor]) -> dict[str, _Layer]:
    """The layers that Protenix and OpenDDE share, and what calls their triangle attention."""
    triangles = f"{package}.model.triangular.triangular"
    return {
        f"{triangles}.TriangleAttention": (functools.partial(_triangle, "linear"), triangle),
        f"{triangles}.TriangleMultiplicativeUpdate": (_multiplication, calls.multiplication),
        f"{package}.model.modules.transformer.AttentionPairBias": (_protenix_pair_bias, calls.protenix_pair_bias),
        f"{package}.model.modules.primitives.Transition": (_PROTENIX_SWIGLU, calls.forwards("x")),
    }


LAYERS: dict[str, _Layer] = {
    f"{_OPENFOLD}.triangular_attention.TriangleAttention": (functools.partial(_triangle, "linear"), calls.triangle),
    f"{_OPENFOLD}.msa.MSARowAttentionWithPairBias": (_rows, calls.forwards("m", "z")),
    f"{_OPENFOLD}.msa.MSAColumnAttention": (_columns, calls.forwards("m")),
    f"{_OPENFOLD}.msa.MSAColumnGlobalAttention": (_global, calls.forwards("m")),
    f"{_OPENFOLD}.template.TemplatePointwiseAttention": (_templates, calls.templates),
    f"{_OPENFOLD}.{_UPDATE}.TriangleMultiplicativeUpdate": (_multiplication, calls.multiplication),
    f"{_OPENFOLD}.{_UPDATE}.FusedTriangleMultiplicativeUpdate": (_joined_multiplication, calls.multiplication),
    f"{_OPENFOLD}.pair_transition.PairTransition": (_RELU, calls.forwards("z")),
    f"{_OPENFOLD}.evoformer.MSATransition": (_RELU, calls.forwards("m")),
    f"{_OPENFOLD3}.triangular_attention.TriangleAttention": (functools.partial(_triangle, "linear_z"), calls.triangle),
    f"{_OPENFOLD3}.msa.MSARowAttentionWithPairBias": (_rows, calls.forwards("m", "z")),
    f"{_OPENFOLD3}.msa.MSAColumnAttention": (_columns, calls.forwards("m")),
    f"{_OPENFOLD3}.msa.MSAColumnGlobalAttention": (_global, calls.forwards("m")),
    f"{_OPENFOLD3}.attention_pair_bias.AttentionPairBias": (_pair_bias, calls.pair_bias),
    f"{_OPENFOLD3}.attention_pair_bias.DiffusionAttentionPairBias": (_pair_bias, calls.pair_bias),
    f"{_OPENFOLD3}.{_UPDATE}.TriangleMultiplicativeUpdate": (_multiplication, calls.multiplication),
    f"{_OPENFOLD3}.{_UPDATE}.FusedTriangleMultiplicativeUpdate": (_joined_multiplication, calls.multiplication),
    f"{_OPENFOLD3}.transition.SwiGLUTransition": (_SWIGLU, calls.forwards("x")),
    f"{_OPENFOLD3}.transition.ReLUTransition": (_OPENFOLD3_RELU, calls.forwards("x")),
    f"{_BOLTZ}.attention.AttentionPairBias": (_boltz_pair_bias, calls.boltz_pair_bias),
    f"{_BOLTZ}.attentionv2.AttentionPairBias": (_boltz_pair_bias, calls.boltz_pair_bias),
    **_boltz_layers("boltz", "triangular_mult"),
    **_boltz_layers("boltzgen", "triangular"),
    **_protenix_layers("protenix", calls.protenix_triangle),
    **_protenix_layers("opendde", calls.triangle),
    f"{_RF3}.attention.TriangleAttention": (_rf3_triangle, calls.rf3_triangle),
    f"{_RF3}.attention.TriangleMultiplication": (_rf3_multiplication, calls.rf3_multiplication),
    f"{_RF3}.layer_utils.Transition": (_RF3_SWIGLU, calls.forwards("X")),
    f"{_ESMFOLD}.EsmFoldTriangleAttention": (functools.partial(_triangle, "linear"), calls.triangle),
    f"{_ESMFOLD}.EsmFoldTriangleMultiplicativeUpdate": (_multiplication, calls.multiplication),
    f"{_ESMFOLD}.EsmFoldResidueMLP": (_residue_mlp, calls.residue_mlp),
}
"""By the full name of a client's class: what makes ours of it, or None if it is left to the client, and what calls ours with
its arguments.
"""
