"""The swap of a client's layer or block for the layers of `evoattn.nn` that compute it.

1. Recognise the class by its full name (`registry.known`).
2. Convert: make the layer of `evoattn.nn`, which holds the client's own norms and projections.
3. Compute a call by it, or say why the client's own code has to compute it.
4. Look at each call whether the client's layer has changed, and convert it again if it has.

Three entries call it:

- `replace`, for the layers of one model, which get another class;
- `layers`, for a method of a client's class, which `evoattn.patch` replaces;
- `distribute`, for blocks whose pair representation is split over processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from evoattn.clients.arguments import ClientsOwn, UnknownArgument, by_name
from evoattn.clients.blocks import KnownBlock
from evoattn.clients.known import KnownLayer
from evoattn.clients.registry import known
from evoattn.clients.snapshots import ATTRIBUTE, Snapshot, check_methods, original_of, own_method
from evoattn.core.own_code import CALLS, method_names
from evoattn.nn.submodules import has_global_hooks, has_hooks

_ACTIVATIONS: dict[str, Any] = {
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "relu": nn.ReLU,
    "softmax": nn.Softmax,
}
"""Classes of modules that no layer of `evoattn.nn` calls, by the names that clients give them."""


def recognised(kind: type) -> tuple[Any, KnownLayer | KnownBlock] | None:
    """The class of a client that is known, of which a class is a subclass, and what is known of it."""
    classes = known()
    return next(((x, classes[name]) for x in original_of(kind).__mro__ if (name := _name(x)) in classes), None)


class Swap:
    """The layer of `evoattn.nn` for a client's layer as it was, or the reason why there is none.

    It does not hold the client's layer itself, but modules inside it. Unless it `is_called`, and this stands for the `forward`
    of the known class, a `forward` of its own is a reason not to swap it.

    Attributes:
        reason: why there is no `layer`. "": there is one, or the client's own is as fast, or its class is not known.
        is_block: whether the client's class is a known block.
        snapshot: tells whether the client's layer has changed.
    """

    def __init__(self, client: nn.Module, *, is_called: bool) -> None:
        self.layer: Any = None
        self.reason = ""
        self._bypassed: tuple[tuple[str, nn.Module], ...] = ()
        kind, description = recognised(type(client)) or (type(client), None)
        self.is_block = isinstance(description, KnownBlock)
        self._call: Any = description and description.call
        try:
            layer = convert(client, is_called=is_called)
            if layer is not None:
                self._bypassed = _bypassed(client, layer, kind)
            self.layer = layer
        except ValueError as error:
            self.reason = str(error)
        self.snapshot = Snapshot(client)

    @property
    def is_left(self) -> bool:
        """Return whether the client's own layer is as fast, or its class is not known."""
        return self.layer is None and not self.reason

    def obstacle(self) -> str:
        """The reason not to use the layer now: there are hooks on a module that it does not call. Else ""."""
        for name, module in self._bypassed:
            if has_hooks(module):
                return f"{name} has hooks, and evoattn.nn does not call it"
        return "there are hooks on all modules, or calls of modules are replaced" if has_global_hooks() else ""

    def run(
        self, client: nn.Module, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, str | None]:
        """Compute a call of the client's layer, whose method takes arguments of these names by position.

        Return the result and None. Or None and the reason why the client's own code has to compute the call; "" if its answer
        is wanted, or it is as fast.
        """
        if self.layer is None:
            return None, self.reason
        missed = self.obstacle()
        if missed:
            return None, missed
        try:
            arguments = by_name(names, args, kwargs)
            if self.is_block:
                return self._call(self.layer, client, **arguments), None
            return self._call(self.layer, **arguments), None
        except ClientsOwn:
            return None, ""
        except UnknownArgument as error:
            return None, str(error)


def current(client: nn.Module) -> Swap:
    """The swap that a layer holds as an attribute. It is made again if the layer has changed."""
    swap: Swap | None = client.__dict__.get(ATTRIBUTE)
    if swap is None or not swap.snapshot.holds(client):
        swap = client.__dict__[ATTRIBUTE] = Swap(client, is_called=True)
    return swap


def convert(client: nn.Module, *, is_called: bool = False) -> nn.Module | None:
    """Make the layer of `evoattn.nn` for a client's layer. None: its class is not known, or it is as fast as it is.

    Raises:
        ValueError: a method is overridden or replaced, the layer has other parameters than the one of `evoattn.nn`, or it sets
            the precision of a projection.
    """
    found = recognised(type(client))
    if found is None:
        return None
    kind, description = found
    if method := _overridden(client, kind, is_called):
        raise ValueError(f"a {type(client).__name__} overrides {method} of {_name(kind)}, which evoattn.nn would not call")
    check_methods("", client)
    try:
        # A mode of the caller's shall not see it: nothing is computed.
        with _disable_current_modes(), torch.device("meta"), _Uninitialised():
            layer = description.layer(client, _inside)
    except (AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"a {type(client).__name__} has other modules than the layer that evoattn.nn knows") from error
    if layer is None:
        return None
    if {id(x) for x in layer.parameters()} != {id(x) for x in client.parameters()}:
        raise ValueError(f"a {type(client).__name__} has other parameters than the layer that evoattn.nn knows")
    for name, module in layer.named_modules():
        if getattr(module, "precision", None) is not None:
            raise ValueError(f"{name} is computed in a precision of its own, {module.precision}: set it to None")
    return layer


class _Uninitialised(TorchFunctionMode):
    """Leaves out `torch.nn.init`: on "meta" it would take half of the time that a layer is made in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _inside(client: nn.Module) -> nn.Module:
    """The layer of `evoattn.nn` for a layer in a block, which the block does not call."""
    layer = convert(client)
    if layer is None:
        raise ValueError(f"evoattn.nn has no {type(client).__name__}: keep the client's layers in the block, or leave it out")
    return layer


def _overridden(client: nn.Module, known_kind: type, is_called: bool) -> str:
    """A method of the known class that a layer overrides, in its class or in itself, or "".

    If the layer is called, its own `forward` runs, and may call ours. That of a replaced layer's class counts: ours hides it.
    """
    names = method_names(known_kind)
    kind = original_of(type(client))
    may_call_ours = CALLS if is_called else ()
    own = [name for name in names if name in client.__dict__ and name not in may_call_ours]
    if kind is not type(client):
        may_call_ours = ()
    inherited = [x for owner in kind.__mro__[: kind.__mro__.index(known_kind)] for x in vars(owner) if x in names]
    return next((x for x in inherited if x not in may_call_ours), own[0] if own else "")


def _bypassed(client: nn.Module, layer: nn.Module, kind: type) -> tuple[tuple[str, nn.Module], ...]:
    """The modules inside a client's layer that ours does not call, by name.

    ValueError: one of them may compute something else than the code of the known class.
    """
    adopted = {id(x) for x in layer.modules()}
    modules = tuple((name, x) for name, x in client.named_modules() if x is not client and id(x) not in adopted)
    for name, module in modules:
        _check_bypassed(name, module, kind)
    return modules


def _check_bypassed(name: str, module: nn.Module, kind: type) -> None:
    package, own = type(module).__module__.partition(".")[0], kind.__module__.partition(".")[0]
    plain = type(module).__module__.startswith("torch.nn.modules.")
    wanted = _ACTIVATIONS.get(name.rpartition(".")[2], type(module))
    if (package not in (own, "einops", "evoattn") and not plain) or wanted is not type(module):
        raise ValueError(f"{name} is a {type(module).__qualname__}, which evoattn.nn would not call")
    check_methods(name, module)
    if method := own_method(module):
        raise ValueError(f"{name} has a {method} of its own, which evoattn.nn would not call")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
