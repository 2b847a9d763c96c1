"""Replace the forward of layers of clients: attention, triangle multiplication, transition.

A layer of the client stays where it is, with its parameters, their names and its hooks. Only its class changes, to a subclass
whose `forward` calls a layer of `evoattn.nn` that holds the same projection and norm modules.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evoattn.nn.known import LAYERS
from evoattn.nn.known_blocks import BLOCKS
from evoattn.nn.known_calls import ClientsOwn, UnknownArgument
from evoattn.nn.snapshots import ATTRIBUTE, Snapshot, check_methods, original_of, own_method
from evoattn.nn.submodules import has_global_hooks, has_hooks

_ENTRIES = {"forward", "__call__", "_call_impl"}
"""Methods that run when a module is called."""

_ACTIVATIONS: dict[str, Any] = {
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "relu": nn.ReLU,
    "softmax": nn.Softmax,
}
"""Classes of modules that no layer of `evoattn.nn` calls, by the names that clients give them."""


def replace(model: nn.Module) -> list[str]:
    """Compute the attention layers, triangle multiplications and transitions of a client's model by `evoattn.nn`, in place.

    These layers are known:

    - OpenFold 1 and 2: triangle, MSA row, MSA column, global column and template pointwise attention, triangle
      multiplication, and the transitions of pairs and of the MSA;
    - OpenFold-3: triangle, MSA row, MSA column and global column attention, attention with pair bias in the trunk and the
      diffusion transformer, triangle multiplication, and transitions;
    - Boltz-1 and Boltz-2: triangle attention, attention with pair bias, triangle multiplication, and transitions;
    - BoltzGen, Protenix, OpenDDE and RosettaFold-3: triangle attention, triangle multiplication, and transitions;
      of Protenix and OpenDDE also the single track's attention with pair bias;
    - ESMFold in transformers: triangle attention, triangle multiplication, and the transition of pairs.

    So are the pair blocks, whose layers add their updates to z themselves: of OpenFold 2 (`PairStack`), OpenFold-3
    (`PairBlock`), Boltz and BoltzGen (`PairformerLayer`, `PairformerNoSeqLayer`), Protenix and OpenDDE (`PairformerBlock`), and
    ESMFold (`EsmFoldTriangularSelfAttentionBlock`). A block that `evoattn.nn` cannot compute runs its
    own forward, with replaced layers: there is a hook on one of its layers, a forward of its own or another layer in it.
    OpenDDE's pairformer calls another method of its blocks than `forward`, so they run that, with replaced layers;
    `evoattn.patch` replaces the method.

    Transitions of more than 256 channels, such as those of the single track, are left as they are.

    Both layers hold the same parameters, under the names that they had. So optimizers, checkpoints and later moves to a device
    work as before. Arguments for chunk sizes and kernels are ignored. Only OpenFold's request to add the update of a triangle
    multiplication to its input, in place, is followed. Each replaced layer gets a subclass of its class, of the same name.

    Sub-modules may be exchanged later, as adapters do, and settings such as `inf` may be changed: each call looks at them. If
    `evoattn.nn` cannot compute a changed layer, the layer's own forward runs, and a warning says why: a sub-module that
    `evoattn.nn` does not call has hooks or a forward of its own, or a program has replaced a method of its class.

    Args:
        model: the client's model, or one of its layers.

    Returns:
        The names of the replaced layers, as `model.named_modules()` has them.

    Raises:
        ValueError: no layer of the model is known. Or a known layer has other parameters than the one of `evoattn.nn`, sets the
            precision of a projection, or overrides `forward` or another method of the class that is known, or a program has
            replaced such a method. No layer is replaced then.

    Example:
        >>> from torch import nn
        >>> replace(nn.Linear(3, 3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: no layer of Linear is known: replace takes models of openfold, openfold3, boltz, ...
    """
    candidates = [(name, module, _replacement_of(module, entries=True)) for name, module in model.named_modules()]
    replacements = [(name, module, replacement) for name, module, replacement in candidates if replacement is not None]
    if not replacements:
        clients = ", ".join(dict.fromkeys(name.partition(".")[0] for name in LAYERS))
        raise ValueError(f"no layer of {type(model).__name__} is known: replace takes models of {clients}")
    for _, module, replacement in replacements:
        module.__class__ = _replaced(original_of(type(module)))
        setattr(module, ATTRIBUTE, replacement)
    return [name for name, _, _ in replacements]


def _replacement_of(client: nn.Module, *, entries: bool) -> Replacement | None:
    """Make a replacement, or return None. A block that evoattn.nn cannot compute has none: it keeps its forward."""
    try:
        return Replacement.of(client, entries=entries)
    except ValueError:
        if is_block(client):
            return None
        raise


@functools.cache
def _replaced(original: Any) -> Any:
    """The subclass of a client's class whose forward is that of the replacement.

    A class, because it knows the module that is called: copies, pickled layers and the replicas of DataParallel compute with
    modules of their own.
    """

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        replacement: Replacement | None = self.__dict__.get(ATTRIBUTE)
        if replacement is None or not replacement.snapshot.holds(self):
            replacement = _renew(self)
        if replacement.computes:
            missed = replacement.obstacle()
            if missed:
                _tell(self, missed)
                return original.forward(self, *args, **kwargs)
            try:
                return replacement(by_name(replacement.names, args, kwargs), self)
            except UnknownArgument as error:
                if not (replacement.is_block or isinstance(error, ClientsOwn)):
                    raise
        return original.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, 2)
        state = {name: x for name, x in reduced[2].items() if name != ATTRIBUTE}
        return (_new, (original,), state, *reduced[3:])

    def fill(self: Any, state: dict[str, Any]) -> None:
        super(kind, self).__setstate__(state)
        _renew(self)

    kind = subclass(original, forward=forward, __reduce_ex__=reduce, __setstate__=fill, _evoattn_original=original)
    return kind


def subclass(original: Any, **members: Any) -> Any:
    """A subclass of a client's class, of the same name."""
    named = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original)(original.__name__, (original,), named | members)


def _renew(client: nn.Module) -> Replacement:
    """Make and store the replacement of a layer again.

    A layer that `evoattn.nn` cannot compute any more, or that is faster as it is, runs its own forward until it changes again.
    """
    renewed = None
    try:
        renewed = Replacement.of(client, entries=False)
    except ValueError as error:
        _tell(client, str(error))
    if renewed is None:
        renewed = Replacement(nn.Identity(), None, (), client)
    client.__dict__[ATTRIBUTE] = renewed
    return renewed


def _tell(client: nn.Module, reason: str) -> None:
    """Warn that a replaced layer runs its own forward."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"a replaced {type(client).__name__} runs its own forward: {reason}", stacklevel=2)


def _new(original: type) -> Any:
    """A replaced layer without attributes, for `copy` and `pickle` to fill."""
    kind = _replaced(original)
    return kind.__new__(kind)


def positions(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments after `self` that a method takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if getattr(forward, "__qualname__", "").startswith("activation_checkpointing."):  # RosettaFold-3's decorator
        forward = inspect.getclosurevars(forward).nonlocals["function"]
    return tuple(name for name, x in inspect.signature(forward).parameters.items() if x.kind in kinds)[1:]


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments given by position, as a method of the client names them."""
    if len(args) > len(names):
        raise TypeError(f"the layer takes {len(names)} arguments by position, got {len(args)}")
    first = names[: len(args)]
    twice = [name for name in first if name in kwargs]
    if twice:
        raise TypeError(f"the layer got two values for the argument {twice[0]!r}")
    return {**dict(zip(first, args, strict=True)), **kwargs}


class Replacement:
    """The layer of `evoattn.nn` for a client's layer, and the modules that it was made of.

    It does not hold the client's layer itself.

    Attributes:
        layer: the layer of `evoattn.nn`.
        names: of the arguments that the client's forward takes by position.
        computes: whether the layer is used. Else the client's own forward runs.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any] | None, names: tuple[str, ...], client: nn.Module) -> None:
        self.layer, self._forward, self.names, self.is_block = layer, forward, names, is_block(client)
        self.snapshot, self.computes = Snapshot(client), forward is not None
        adopted = {id(x) for x in layer.modules()}
        self._bypassed = tuple((name, x) for name, x in client.named_modules() if x is not client and id(x) not in adopted)

    @classmethod
    def of(cls, client: nn.Module, *, entries: bool) -> Replacement | None:
        """Make it, or return None if the client's layer is not known, or is faster as it is.

        `entries` tells whether the layer must not override `forward` either.

        Raises:
            ValueError: a method is overridden or replaced, the layer has other parameters than the one of `evoattn.nn`, or it
                sets the precision of a projection.
        """
        kind: Any = _known(type(client))
        if kind is None:
            return None
        method = overridden(client, entries=entries)
        if method:
            raise ValueError(f"a {type(client).__name__} overrides {method} of {_name(kind)}, which evoattn.nn would not call")
        check_methods("", client)
        known: Any = LAYERS.get(_name(kind)) or BLOCKS[_name(kind)]
        try:
            with torch.device("meta"):
                layer = known.layer(client, _layer_of) if is_block(client) else known.layer(client)
        except (AttributeError, TypeError, IndexError) as error:
            raise ValueError(f"a {type(client).__name__} has other modules than the layer that evoattn.nn knows") from error
        if layer is None:
            return None
        _check(layer, client)
        replacement = cls(layer, known.call, positions(kind.forward), client)
        replacement.check_bypassed(kind)
        return replacement

    def check_bypassed(self, kind: type) -> None:
        """Raise ValueError if a module that the layer does not call may compute something else than the client's code."""
        for name, module in self._bypassed:
            package, own = type(module).__module__.partition(".")[0], kind.__module__.partition(".")[0]
            plain = type(module).__module__.startswith("torch.nn.modules.")
            wanted = _ACTIVATIONS.get(name.rpartition(".")[2], type(module))
            if (package not in (own, "einops", "evoattn") and not plain) or wanted is not type(module):
                raise ValueError(f"{name} is a {type(module).__qualname__}, which evoattn.nn would not call")
            check_methods(name, module)
            if method := own_method(module):
                raise ValueError(f"{name} has a {method} of its own, which evoattn.nn would not call")

    def obstacle(self) -> str:
        """The reason not to use the layer now: there are hooks on a module that it does not call. Else ""."""
        for name, module in self._bypassed:
            if has_hooks(module):
                return f"{name} has hooks, and evoattn.nn does not call it"
        return "there are hooks on all modules, or calls of modules are replaced" if has_global_hooks() else ""

    def __call__(self, arguments: dict[str, Any], client: nn.Module) -> Any:
        """Compute the client's layer or block from its arguments by name.

        The function of a block also takes the client's module, whose dropout it applies.
        """
        forward: Any = self._forward
        return forward(self.layer, client, **arguments) if self.is_block else forward(self.layer, **arguments)


def is_block(client: nn.Module) -> bool:
    """Return whether a module is a block of a client, whose layers are known too."""
    kind = _known(type(client))
    return kind is not None and _name(kind) in BLOCKS


def _layer_of(client: nn.Module) -> nn.Module:
    """The layer of `evoattn.nn` for a layer in a block."""
    replacement = Replacement.of(client, entries=True)
    if replacement is None:
        raise ValueError(f"evoattn.nn has no {type(client).__name__}: keep the client's layers in the block, or leave it out")
    return replacement.layer


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known(kind: type) -> type | None:
    """The class of a client that is known, of which `kind` is a subclass."""
    return next((x for x in original_of(kind).__mro__ if _name(x) in LAYERS or _name(x) in BLOCKS), None)


def _methods(kind: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    """The methods of the known class that `kind` is or inherits from, and those of them that `kind` overrides."""
    known = _known(kind)
    if known is None:
        return frozenset(), ()
    mro = original_of(kind).__mro__
    classes = known.__mro__[: known.__mro__.index(nn.Module)]
    methods = {name for x in classes for name, value in vars(x).items() if inspect.isroutine(value)} - {"__init__"}
    methods |= _ENTRIES
    names = [name for x in mro[: mro.index(known)] for name in vars(x)]
    return frozenset(methods), tuple(name for name in names if name in methods)


_METHODS: dict[type, tuple[Any, tuple[frozenset[str], tuple[str, ...]]]] = {}
"""Results of `_methods` by class, and how many attributes it and its bases had. Not functools.cache, of which Dynamo warns."""


def overridden(client: nn.Module, *, entries: bool) -> str:
    """A method of the known class that a layer overrides, in its class or in itself. "" if there is none.

    entries: whether `forward` counts too. It does not if the caller stands in for the known class's own `forward`. That of a
    replaced layer's class counts in any case: our own forward hides it.
    """
    kind = type(client)
    sizes = [len(vars(x)) for x in kind.__mro__]
    stored = _METHODS.get(kind)
    if stored is None or stored[0] != sizes:
        stored = _METHODS[kind] = sizes, _methods(kind)
    methods, names = stored[1]
    own = [name for name in methods & client.__dict__.keys() if entries or name not in _ENTRIES]
    inherited = [name for name in names if entries or name not in _ENTRIES or original_of(kind) is not kind]
    return next(iter((*inherited, *own)), "")


def _check(layer: nn.Module, client: nn.Module) -> None:
    """Raise ValueError unless both layers have the same parameters, and no module has a precision of its own."""
    if {id(x) for x in layer.parameters()} != {id(x) for x in client.parameters()}:
        raise ValueError(f"a {type(client).__name__} has other parameters than the layer that evoattn.nn knows")
    for name, module in layer.named_modules():
        if getattr(module, "precision", None) is not None:
            raise ValueError(f"{name} is computed in a precision of its own, {module.precision}: set it to None")
