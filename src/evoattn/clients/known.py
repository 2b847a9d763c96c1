"""Descriptions of clients' layers: the layer of `evoattn.nn` that computes each, its modules by the client's names, its call.

The file of each client describes its layers. Here are the descriptions that several clients share.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from evoattn.clients import arguments
from evoattn.clients.arguments import forwards
from evoattn.clients.kinds import KINDS
from evoattn.nn.msa import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttentionWithPairBias
from evoattn.nn.msa_module import MSAPairWeightedAveraging, OuterProductMean
from evoattn.nn.multiplication import JoinedTriangleMultiplication, TriangleMultiplication, split_joined
from evoattn.nn.transition import Transition
from evoattn.nn.triangle import TriangleAttention

WIDEST = 256
"""Channels of a transition. Wider ones have no kernel, and are left to the client."""

_ACTIVATIONS = {"swiglu": nn.SiLU, "relu": nn.ReLU}


class KnownLayer(NamedTuple):
    """A class of a client, and the layer of `evoattn.nn` that computes it.

    Args:
        make: makes the layer from its sizes and settings, or returns None to leave it to the client.
        modules: modules that both layers share, as "path=client's path", or one path for both. A question mark after it: the
            client's layer may lack it. An asterisk stands for each of q, k, v, g and o, of which it may lack g.
        call: calls the layer with the client's arguments by name.
        sizes: the client's attributes that `make` takes. "c_in|mha.c_q" is the first of two that exists. "": the layer itself.
        kind: what a call of it is counted as, of `KINDS`.
        base: the class in the same module whose `forward` it inherits. "": it has its own.
        in_part: whether the layer computes some calls alone, such as those of a sampling. `replace` leaves such classes.
    """

    make: Callable[..., nn.Module | None]
    modules: str
    call: Callable[..., Tensor]
    sizes: str = ""
    kind: str = KINDS[0]
    base: str = ""
    in_part: bool = False

    def layer(self, client: nn.Module, _: Any) -> nn.Module | None:
        layer = self.make(*[_attribute(client, names) for names in self.sizes.split(" ")])
        if layer is not None:
            share(layer, client, self.modules)
        return layer


def _attribute(client: Any, names: str) -> Any:
    if not names:
        return client
    first, _, second = names.partition("|")
    return operator.attrgetter(first if not second or hasattr(client, first) else second)(client)


def _paths(modules: str) -> Iterator[tuple[str, str, bool]]:
    """The paths of each module, ours and the client's, and whether it may lack the module."""
    for pair in modules.split():
        for letter in "qkvgo" if "*" in pair else "*":
            path, _, client_path = pair.rstrip("?").replace("*", letter).partition("=")
            yield path, client_path or path, pair.endswith("?") or letter == "g"


def share(layer: nn.Module, client: nn.Module, modules: str) -> None:
    """Let a layer hold modules of a client's."""
    for path, client_path, is_optional in _paths(modules):
        (parent, _, own_name), (holder, _, name) = path.rpartition("."), client_path.rpartition(".")
        default = (None,) if is_optional else ()
        setattr(layer.get_submodule(parent), own_name, getattr(client.get_submodule(holder), name, *default))


def renamed(state: Mapping[str, Tensor], layers: Iterable[KnownLayer]) -> dict[str, Tensor]:
    """Rename the parameters of known layers in a client's state dict to those of `evoattn.nn`.

    A layer is renamed if the state has the weights of all modules that it cannot lack. Other names are kept.
    """
    paths = [tuple(_paths(layer.modules)) for layer in layers]

    def own(name: str) -> str:
        module, _, kind = name.rpartition(".")
        for modules in paths if kind in ("weight", "bias") else ():
            for path, client_path, _ in modules:
                prefix = module.removesuffix(client_path)
                if prefix != module and prefix[-1:] in ("", ".") and _has_all(modules, prefix):
                    return f"{prefix}{path}.{kind}"
        return name

    def _has_all(modules: Iterable[tuple[str, str, bool]], prefix: str) -> bool:
        return all(is_optional or f"{prefix}{path}.weight" in state for _, path, is_optional in modules)

    return {here: part for name, x in state.items() for here, part in split_joined(own(name), x).items()}


def channels_of(norm: nn.Module) -> int:
    """The channels of a norm, also inside a wrapper."""
    shapes: list[tuple[int, ...]] = [x.normalized_shape for x in norm.modules() if isinstance(x, nn.LayerNorm)]
    return shapes[0][0]


def features(module: nn.Module, name: str) -> int:
    """`in_features` or `out_features` of a projection, also inside a wrapper."""
    sizes: list[int] = [getattr(x, name) for x in module.modules() if hasattr(x, name)]
    return sizes[0]


_OF_X = forwards("x")


def transition(
    modules: str,
    function: str,
    call: Callable[..., Tensor] = _OF_X,
    kind: type[Transition] = Transition,
    base: str = "",
) -> KnownLayer:
    """Describe a transition, which is left to the client if it is too wide or changes the number of channels.

    The first of the `modules` is the norm, the next are the projections. `function` is the path of the client's module that
    applies SiLU or ReLU, or "" if it calls a function.
    """
    activation, last = ("swiglu", 3) if "swiglu.linear_a" in modules else ("relu", 2)
    paths = [client_path for _, client_path, _ in _paths(modules)]

    def make(client: nn.Module) -> nn.Module | None:
        channels = features(client.get_submodule(paths[1]), "in_features")
        outputs = features(client.get_submodule(paths[last]), "out_features")
        if channels > WIDEST or outputs != channels:
            return None
        if function and type(client.get_submodule(function)) is not _ACTIVATIONS[activation]:
            raise TypeError(f"{function} is a {type(client.get_submodule(function)).__name__}")
        return kind(channels, 1, activation=activation)

    return KnownLayer(make, modules, call, kind="transition", base=base)


def triangle(bias: str = "linear", call: Callable[..., Tensor] = arguments.triangle) -> KnownLayer:
    """Describe a triangle attention whose projection of the pair bias is called `bias`. OpenDDE's layer has no sizes."""
    sizes = "c_in|mha.c_q c_hidden|mha.c_hidden no_heads|mha.no_heads starting inf"
    return KnownLayer(TriangleAttention, f"layer_norm linear={bias} mha.linear_*", call, sizes)


def _multiplication(client: Any) -> nn.Module:
    has_sizes = hasattr(client, "c_z")  # ESMFold's layer has none
    channels, hidden = (client.c_z, client.c_hidden) if has_sizes else (channels_of(client.layer_norm_in),) * 2
    return TriangleMultiplication(channels, hidden, client._outgoing)


_AROUND = "layer_norm_in layer_norm_out linear_z linear_g"
MULTIPLICATION = KnownLayer(
    _multiplication,
    f"{_AROUND} linear_a_p linear_a_g linear_b_p linear_b_g",
    arguments.multiplication,
    kind="triangle multiplication",
)


OUTER_PRODUCT_MEAN = KnownLayer(
    OuterProductMean,
    "layer_norm linear_1 linear_2 linear_out",
    forwards("m"),
    "c_m c_z c_hidden eps",
    "MSA layer",
)
"""That of OpenFold-3 and Protenix."""


def averaging(modules: str, sizes: str) -> KnownLayer:
    """Describe a pair-weighted averaging. `sizes` are its channels of m, of z and of a head, its heads, and perhaps `inf`."""
    return KnownLayer(MSAPairWeightedAveraging, modules, forwards("m", "z"), sizes, "MSA layer")


def layers_of_openfold(folder: str, bias: str = "linear") -> dict[str, KnownLayer]:
    """Describe the layers that OpenFold and OpenFold-3 have in files of the same names. `bias` is as in `triangle`."""
    return {
        f"{folder}.triangular_attention.TriangleAttention": triangle(bias),
        f"{folder}.triangular_multiplicative_update.TriangleMultiplicativeUpdate": MULTIPLICATION,
        f"{folder}.triangular_multiplicative_update.FusedTriangleMultiplicativeUpdate": KnownLayer(
            JoinedTriangleMultiplication,
            f"{_AROUND} linear_ab_p linear_ab_g",
            arguments.multiplication,
            "c_z c_hidden _outgoing",
            "triangle multiplication",
        ),
        f"{folder}.msa.MSARowAttentionWithPairBias": KnownLayer(
            MSARowAttentionWithPairBias,
            "layer_norm_m layer_norm_z linear_z mha.linear_*",
            forwards("m", "z"),
            "c_in c_z c_hidden no_heads inf",
            base="MSAAttention",
        ),
        f"{folder}.msa.MSAColumnAttention": KnownLayer(
            MSAColumnAttention, "_msa_att.layer_norm_m _msa_att.mha.linear_*", forwards("m"), "c_m c_hidden no_heads inf"
        ),
        f"{folder}.msa.MSAColumnGlobalAttention": KnownLayer(
            MSAColumnGlobalAttention,
            "layer_norm_m global_attention.linear_*",
            forwards("m"),
            "c_in c_hidden no_heads inf eps",
        ),
    }
