"""Layers of clients that `evoattn.nn` can compute: the layer of each, its modules by the client's names, and its call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from evoattn.nn import known_calls as calls
from evoattn.nn.attention import add_residual
from evoattn.nn.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttentionWithPairBias
from evoattn.nn.multiplication import JoinedTriangleMultiplication, TriangleMultiplication
from evoattn.nn.pair_bias import AttentionPairBias
from evoattn.nn.submodules import has_hooks
from evoattn.nn.template import TemplatePointwiseAttention
from evoattn.nn.transition import Transition
from evoattn.nn.triangle import TriangleAttention

_WIDEST = 256
"""Channels of a transition. Wider ones have no kernel, and are left to the client."""

_ACTIVATIONS = {"swiglu": nn.SiLU, "relu": nn.ReLU}


class KnownLayer(NamedTuple):
    """A class of a client, and the layer of `evoattn.nn` that computes it.

    Args:
        kind: makes the layer from its sizes and settings, or returns None to leave it to the client.
        sizes: the client's attributes that `kind` takes. "c_in|mha.c_q" is the first of two that exists. "": the layer itself.
        modules: modules that both layers share, as "path=client's path", or one path for both. An asterisk stands for each of
            q, k, v, g and o.
        call: calls the layer with the client's arguments by name.
    """

    kind: Callable[..., nn.Module | None]
    sizes: str
    modules: str
    call: Callable[..., Tensor]

    def layer(self, client: nn.Module) -> nn.Module | None:
        """Make the layer of `evoattn.nn` for a client's."""
        layer = self.kind(*[_attribute(client, names) for names in self.sizes.split(" ")])
        if layer is not None:
            _share(layer, client, self.modules)
        return layer


def _attribute(client: Any, names: str) -> Any:
    if not names:
        return client
    first, _, second = names.partition("|")
    return operator.attrgetter(first if not second or hasattr(client, first) else second)(client)


def _share(layer: nn.Module, client: nn.Module, modules: str) -> None:
    """Let a layer hold modules of a client's. An attention may have no gate."""
    for pair in modules.split():
        for letter in "qkvgo" if "*" in pair else "*":
            path, _, client_path = pair.replace("*", letter).partition("=")
            holder, _, name = (client_path or path).rpartition(".")
            default = (None,) if "*" in pair and letter == "g" else ()
            parent, _, own_name = path.rpartition(".")
            setattr(layer.get_submodule(parent), own_name, getattr(client.get_submodule(holder), name, *default))


class _ResidueMlp(Transition):
    """ESMFold's transition, whose update gets a dropout `drop`."""

    drop: nn.Module

    def add_to(self, x: Tensor, mask: Tensor | None, *, in_place: bool) -> Tensor:
        drop = self.drop
        if type(drop) is not nn.Dropout or has_hooks(drop) or (drop.training and drop.p > 0):
            return add_residual(x, drop(self(x, mask)), residual=True, in_place=in_place)
        return super().add_to(x, mask, in_place=in_place)


def _normed(norm: nn.Module) -> int:
    """The channels of a norm, also inside a wrapper."""
    shapes: list[tuple[int, ...]] = [x.normalized_shape for x in norm.modules() if isinstance(x, nn.LayerNorm)]
    return shapes[0][0]


def _features(module: nn.Module, name: str) -> int:
    """`in_features` or `out_features` of a projection, also inside a wrapper."""
    sizes: list[int] = [getattr(x, name) for x in module.modules() if hasattr(x, name)]
    return sizes[0]


def _pair_bias(client: Any) -> nn.Module:
    """The attention of OpenFold-3's trunk or diffusion transformer."""
    adaptive = hasattr(client, "linear_ada_out")
    c_s = client.c_s if adaptive else None
    layer = AttentionPairBias(client.c_q, client.c_z, client.mha.c_hidden, client.mha.no_heads, c_s, client.inf)
    norms = "layer_norm_a.layer_norm_a layer_norm_a.layer_norm_s layer_norm_a.linear_g layer_norm_a.linear_s linear_ada_out"
    _share(layer, client, norms if adaptive else "layer_norm_a layer_norm_z")
    return layer


def _boltz_pair_bias(client: Any) -> nn.Module:
    """Boltz's attention may lack the norm of s and the projection of z."""
    projects = isinstance(client.proj_z, nn.Sequential)
    c_z = client.proj_z[1].in_features if projects else client.num_heads
    layer = AttentionPairBias(client.c_s, c_z, client.head_dim, client.num_heads, inf=client.inf)
    layer.layer_norm_a = getattr(client, "norm_s", None)
    layer.layer_norm_z, layer.linear_z = (client.proj_z[0], client.proj_z[1]) if projects else (None, None)
    return layer


def _protenix_pair_bias(client: Any) -> nn.Module | None:
    """The attention of the single track. That of samples and atoms is left to Protenix."""
    if client.has_s or client.cross_attention_mode:
        return None
    mha = client.attention
    return AttentionPairBias(mha.c_q, _features(client.linear_nobias_z, "in_features"), mha.c_hidden, mha.num_heads)


def _boltz_multiplication(outgoing: bool, client: Any) -> nn.Module:
    channels = _normed(client.norm_in)
    return JoinedTriangleMultiplication(channels, channels, outgoing)


def _multiplication(client: Any) -> nn.Module:
    has_sizes = hasattr(client, "c_z")  # ESMFold's layer has none
    channels, hidden = (client.c_z, client.c_hidden) if has_sizes else (_normed(client.layer_norm_in),) * 2
    return TriangleMultiplication(channels, hidden, client._outgoing)


def _rf3_triangle(client: Any) -> nn.Module:
    return TriangleAttention(_features(client.to_q, "in_features"), client.dim, client.h, client.start_node)


def _rf3_multiplication(client: Any) -> nn.Module:
    layer: Any = _boltz_multiplication(client.direction == "outgoing", client)
    layer.by_cuequivariance = client.use_cuequivariance
    return layer  # type: ignore[no-any-return]


_CALL = calls.forwards("x")


def _transition(
    modules: str, function: str, call: Callable[..., Tensor] = _CALL, kind: type[Transition] = Transition
) -> KnownLayer:
    """Describe a transition, which is left to the client if it is too wide or changes the number of channels.

    `function` is the path of the client's module that applies SiLU or ReLU, or "" if it calls a function.
    """
    activation, last = ("swiglu", 3) if "swiglu.linear_a" in modules else ("relu", 2)
    paths = [pair.rpartition("=")[2] for pair in modules.split()]  # of the norm, the projections, and a dropout

    def make(client: nn.Module) -> nn.Module | None:
        channels = _features(client.get_submodule(paths[1]), "in_features")
        outputs = _features(client.get_submodule(paths[last]), "out_features")
        if channels > _WIDEST or outputs != channels:
            return None
        if function and type(client.get_submodule(function)) is not _ACTIVATIONS[activation]:
            raise TypeError(f"{function} is a {type(client.get_submodule(function)).__name__}")
        return kind(channels, 1, activation=activation)

    return KnownLayer(make, "", modules, call)


def _triangle(bias: str, call: Callable[..., Tensor] = calls.triangle) -> KnownLayer:
    """Describe a triangle attention whose projection of the pair bias is called `bias`. OpenDDE's layer has no sizes."""
    sizes = "c_in|mha.c_q c_hidden|mha.c_hidden no_heads|mha.no_heads starting inf"
    return KnownLayer(TriangleAttention, sizes, f"layer_norm linear={bias} mha.linear_*", call)


_MSA_ROWS = KnownLayer(
    MSARowAttentionWithPairBias,
    "c_in c_z c_hidden no_heads inf",
    "layer_norm_m layer_norm_z linear_z mha.linear_*",
    calls.forwards("m", "z"),
)
_MSA_COLUMNS = KnownLayer(
    MSAColumnAttention, "c_m c_hidden no_heads inf", "_msa_att.layer_norm_m _msa_att.mha.linear_*", calls.forwards("m")
)
_GLOBAL_COLUMNS = KnownLayer(
    MSAColumnGlobalAttention, "c_in c_hidden no_heads inf eps", "layer_norm_m global_attention.linear_*", calls.forwards("m")
)
_TEMPLATES = KnownLayer(TemplatePointwiseAttention, "c_t c_z c_hidden no_heads inf", "mha.linear_*", calls.templates)
_PAIR_BIAS = KnownLayer(_pair_bias, "", "linear_z mha.linear_*", calls.pair_bias)
_BOLTZ_PAIR_BIAS = KnownLayer(_boltz_pair_bias, "", "mha.linear_*=proj_*", calls.boltz_pair_bias)
_PROTENIX_PAIR_BIAS = KnownLayer(
    _protenix_pair_bias,
    "",
    "layer_norm_a=layernorm_a layer_norm_z=layernorm_z linear_z=linear_nobias_z mha.linear_*=attention.linear_*",
    calls.protenix_pair_bias,
)

_AROUND = "layer_norm_in layer_norm_out linear_z linear_g"
_BOLTZ_MODULES = "layer_norm_in=norm_in layer_norm_out=norm_out linear_ab_p=p_in linear_ab_g=g_in linear_z=p_out linear_g=g_out"
_MULTIPLICATION = KnownLayer(
    _multiplication, "", f"{_AROUND} linear_a_p linear_a_g linear_b_p linear_b_g", calls.multiplication
)
_JOINED_MULTIPLICATION = KnownLayer(
    JoinedTriangleMultiplication, "c_z c_hidden _outgoing", f"{_AROUND} linear_ab_p linear_ab_g", calls.multiplication
)

_OPENFOLD, _OPENFOLD3, _BOLTZ = "openfold.model", "openfold3.core.model.layers", "boltz.model.layers"
_ESMFOLD, _RF3 = "transformers.models.esm.modeling_esmfold", "rf3.model.layers"
_UPDATE = "triangular_multiplicative_update"

_RELU = "layer_norm linear_1 linear_2"
_RELU_3 = "layer_norm linear_1=transition_mlp.layers.0.0 linear_2=transition_mlp.linear_out"
_SWIGLU = "layer_norm swiglu.linear_a swiglu.linear_b linear_out"
_BOLTZ_SWIGLU = "layer_norm=norm swiglu.linear_a=fc1 swiglu.linear_b=fc2 linear_out=fc3"
_PROTENIX_SWIGLU = (
    "layer_norm=layernorm1 swiglu.linear_a=linear_no_bias_a swiglu.linear_b=linear_no_bias_b linear_out=linear_no_bias"
)
_RF3_SWIGLU = "layer_norm=layer_norm_1 swiglu.linear_a=linear_1 swiglu.linear_b=linear_2 linear_out=linear_3"


def _boltz_layers(package: str, multiplications: str) -> dict[str, KnownLayer]:
    """The layers that Boltz and BoltzGen share, whose triangle multiplications are in a module of another name."""
    layers, known = f"{package}.model.layers", {}
    for name in ("Outgoing", "Incoming"):
        make = functools.partial(_boltz_multiplication, name == "Outgoing")
        layer = KnownLayer(make, "", _BOLTZ_MODULES, _CALL)
        known[f"{layers}.{multiplications}.TriangleMultiplication{name}"] = layer
    known[f"{layers}.triangular_attention.attention.TriangleAttention"] = _triangle("linear")
    known[f"{layers}.transition.Transition"] = _transition(_BOLTZ_SWIGLU, "silu")
    return known


def _protenix_layers(package: str, triangle: Callable[..., Tensor]) -> dict[str, KnownLayer]:
    """The layers that Protenix and OpenDDE share, and what calls their triangle attention."""
    triangles = f"{package}.model.triangular.triangular"
    return {
        f"{triangles}.TriangleAttention": _triangle("linear", triangle),
        f"{triangles}.TriangleMultiplicativeUpdate": _MULTIPLICATION,
        f"{package}.model.modules.transformer.AttentionPairBias": _PROTENIX_PAIR_BIAS,
        f"{package}.model.modules.primitives.Transition": _transition(_PROTENIX_SWIGLU, ""),
    }


LAYERS: dict[str, KnownLayer] = {
    f"{_OPENFOLD}.triangular_attention.TriangleAttention": _triangle("linear"),
    f"{_OPENFOLD}.msa.MSARowAttentionWithPairBias": _MSA_ROWS,
    f"{_OPENFOLD}.msa.MSAColumnAttention": _MSA_COLUMNS,
    f"{_OPENFOLD}.msa.MSAColumnGlobalAttention": _GLOBAL_COLUMNS,
    f"{_OPENFOLD}.template.TemplatePointwiseAttention": _TEMPLATES,
    f"{_OPENFOLD}.{_UPDATE}.TriangleMultiplicativeUpdate": _MULTIPLICATION,
    f"{_OPENFOLD}.{_UPDATE}.FusedTriangleMultiplicativeUpdate": _JOINED_MULTIPLICATION,
    f"{_OPENFOLD}.pair_transition.PairTransition": _transition(_RELU, "relu", calls.forwards("z")),
    f"{_OPENFOLD}.evoformer.MSATransition": _transition(_RELU, "relu", calls.forwards("m")),
    f"{_OPENFOLD3}.triangular_attention.TriangleAttention": _triangle("linear_z"),
    f"{_OPENFOLD3}.msa.MSARowAttentionWithPairBias": _MSA_ROWS,
    f"{_OPENFOLD3}.msa.MSAColumnAttention": _MSA_COLUMNS,
    f"{_OPENFOLD3}.msa.MSAColumnGlobalAttention": _GLOBAL_COLUMNS,
    f"{_OPENFOLD3}.attention_pair_bias.AttentionPairBias": _PAIR_BIAS,
    f"{_OPENFOLD3}.attention_pair_bias.DiffusionAttentionPairBias": _PAIR_BIAS,
    f"{_OPENFOLD3}.{_UPDATE}.TriangleMultiplicativeUpdate": _MULTIPLICATION,
    f"{_OPENFOLD3}.{_UPDATE}.FusedTriangleMultiplicativeUpdate": _JOINED_MULTIPLICATION,
    f"{_OPENFOLD3}.transition.SwiGLUTransition": _transition(_SWIGLU, "swiglu.swish"),
    f"{_OPENFOLD3}.transition.ReLUTransition": _transition(_RELU_3, "transition_mlp.layers.0.1"),
    f"{_BOLTZ}.attention.AttentionPairBias": _BOLTZ_PAIR_BIAS,
    f"{_BOLTZ}.attentionv2.AttentionPairBias": _BOLTZ_PAIR_BIAS,
    **_boltz_layers("boltz", "triangular_mult"),
    **_boltz_layers("boltzgen", "triangular"),
    **_protenix_layers("protenix", calls.protenix_triangle),
    **_protenix_layers("opendde", calls.triangle),
    f"{_RF3}.attention.TriangleAttention": KnownLayer(
        _rf3_triangle,
        "",
        "layer_norm=norm linear=to_b mha.linear_q=to_q mha.linear_k=to_k mha.linear_v=to_v mha.linear_g=to_g"
        " mha.linear_o=to_out",
        calls.rf3_triangle,
    ),
    f"{_RF3}.attention.TriangleMultiplication": KnownLayer(_rf3_multiplication, "", _BOLTZ_MODULES, calls.rf3_multiplication),
    f"{_RF3}.layer_utils.Transition": _transition(_RF3_SWIGLU, "", calls.forwards("X")),
    f"{_ESMFOLD}.EsmFoldTriangleAttention": _triangle("linear"),
    f"{_ESMFOLD}.EsmFoldTriangleMultiplicativeUpdate": _MULTIPLICATION,
    f"{_ESMFOLD}.EsmFoldResidueMLP": _transition(
        "layer_norm=mlp.0 linear_1=mlp.1 linear_2=mlp.3 drop=mlp.4", "mlp.2", calls.residue_mlp, _ResidueMlp
    ),
}
"""By the full name of a client's class."""
