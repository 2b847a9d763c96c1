"""Comparisons of a module with its earlier state, and with other modules that have the same structure."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from evoattn.clients.graphs.states import ClassLook, Values, brought, classes_of, is_leaf, key, spread
from evoattn.clients.graphs.trees import NotCaptured

_COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}

_parts_of = operator.itemgetter("_parameters", "_buffers", "_modules")
_version_of = operator.attrgetter("_version")
_layout_of = operator.attrgetter("dtype", "device", "shape")
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
_hooks_of = operator.itemgetter(*(f"_{name}" for name in _HOOKS))


class Seen:
    """A module as it was when it was looked at. It keeps no part of the module alive, so that the module may refer to itself.

    A graph holds the addresses of the weights, so weights count by their addresses. They also count by their versions, which
    a write in place raises. A write through `.data` raises none: a graph reads weights where they are, so it reads what was
    written.

    Everything else counts that the code of the modules can read of them: attributes, what lists, dicts and objects among these
    contain, and the attributes of their classes. On an AMD EPYC it takes 1.3 ms to compare the 973 modules of Boltz-2's
    denoiser, and .1 ms for a block of its trunk.

    Args:
        of: the module.
        trains: whether it may be in training mode.

    Attributes:
        device: where all weights lie, or None.
        obstacle: why no call of the module can be captured as it is, or "".
    """

    def __init__(self, of: nn.Module, trains: bool = False) -> None:
        inner = list(of.modules())[1:]
        self._values: Values | None = None
        self._weights: list[weakref.ref[Tensor]] = []
        self.device: torch.device | None = None
        self.obstacle = ""
        try:
            if any(isinstance(x, torch.jit.ScriptModule) for x in (of, *inner)):
                raise NotCaptured("a module inside is a ScriptModule")
            self._weights = [weakref.ref(x) for x in _members(map(vars, (of, *inner))) if isinstance(x, Tensor)]
            devices = {x.device for x in self.weights}
            self.device = devices.pop() if len(devices) == 1 else None
            self.obstacle = self._obstacle(of, inner, trains)
            values = self._find_all(of, inner)
            tensors = [x for x in values if isinstance(x, Tensor)]
            self._tensors, self._versioned = [weakref.ref(x) for x in tensors], [not x.is_inference() for x in tensors]
            self._at = [] if self.obstacle else self.addresses()
            self._layouts = self._layouts_of_weights()
            self._values = Values(values)
        except Exception as error:  # whatever an object of the client raises when it is looked at
            known = isinstance(error, NotCaptured)
            why = str(error) if known else f"a module inside cannot be compared: {type(error).__name__}: {error}"
            self.obstacle = self.obstacle or why

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers, in the same order in all modules of one structure."""
        return [x for ref in self._weights if (x := ref()) is not None]

    def holds(self, at: list[int] | None = None) -> bool:
        """Return whether the module has not changed. One that cannot be compared is not asked.

        at: addresses and versions of its weights that are compared, in place of those of the look.
        """
        return self._is(lambda: bool(self.obstacle) or self.addresses() == (self._at if at is None else at))

    def is_alike(self) -> bool:
        """Return whether nothing but the values of the weights has changed."""
        return self._is(lambda: self._layouts_of_weights() == self._layouts)

    def _is(self, are_weights: Callable[[], bool]) -> bool:
        if self._values is None:
            return True
        try:
            return self._values.are(self._look()) and are_weights()
        except Exception:  # a module or an attribute is gone, or what stands there now cannot be compared
            return False

    def has_hooks(self) -> bool:
        """Return whether a hook runs when one of the modules inside is called. Hooks on these count as of the last look."""
        return self._hooked or any(getattr(torch_modules, f"_global_{name}") for name in _HOOKS)

    def structure(self) -> Hashable:
        """A key that is equal for modules that compute the same with the same weights.

        Raises:
            NotCaptured: the module cannot be compared; a tensor is an attribute and neither parameter nor buffer; or a module
                inside refers to other modules, or to itself by a function or a class, so that a copy would refer to it too.
        """
        if self._values is None:
            raise NotCaptured(self.obstacle)
        if self._refers_outside:
            raise NotCaptured("a module inside refers to a module that is not inside")
        modules = [x() for x in self._modules]
        members = _members(map(vars, modules))
        places: dict[int, int] = {}  # weights and modules may be there twice
        shape = [places.setdefault(id(x), place) for place, x in enumerate((modules[0], *members))]
        values: list[Any] = []
        looked, of_classes = self._look(members=False), self._look_at_classes()
        if any(isinstance(x, (nn.Module, Tensor)) for x in (*brought(looked), *of_classes)):
            raise NotCaptured("a function or a class inside refers to a module or a tensor")
        for value in looked:
            if isinstance(value, Tensor):
                raise NotCaptured("a module inside has a tensor that is neither parameter nor buffer")
            values.append(places[id(value)] if isinstance(value, nn.Module) else key(value))
        layouts = [x if x is None else (x.dtype, x.device, tuple(x.shape), x.stride()) for x in members if not _is_module(x)]
        names = [tuple(own.keys() - _COMMON_ATTRIBUTES) for own in map(vars, modules)]
        return (*map(frozenset, names), *self._containers, *values, *shape, *layouts, *map(key, of_classes))

    def _find_all(self, of: nn.Module, inner: list[nn.Module]) -> list[Any]:
        """Look at the modules and classes that the code can read, until a look has no new ones. Return that look."""
        self._classes: list[ClassLook] = []
        others: dict[int, nn.Module] = {}
        classes: set[type] = set()
        known = set(map(id, (of, *inner)))
        while True:
            self._note(of, (*inner, *others.values()))
            values = self._look()
            found = [x for value in values if isinstance(value, nn.Module) and id(value) not in known for x in value.modules()]
            new_classes = [x for x in classes_of(values) if x not in classes]
            if not found and not new_classes:
                self._refers_outside = bool(others)
                return values
            others |= {id(x): x for x in found if id(x) not in known}
            known.update(others)
            classes.update(new_classes)
            self._classes += map(ClassLook, new_classes)

    def _note(self, of: nn.Module, others: tuple[nn.Module, ...]) -> None:
        """Note how to look at modules: those with the same attributes are next to each other."""
        leaves = {id(x): tuple(sorted(name for name in _names(x) if is_leaf(vars(x)[name]))) for x in (of, *others)}
        modules = [of, *sorted(others, key=lambda x: leaves[id(x)])]
        self._get: list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], slice]] = []
        start = 0
        for names, group in itertools.groupby(modules, lambda x: leaves[id(x)]):
            end = start + len(list(group))
            self._get.append((operator.itemgetter("training", "training", *names), slice(start, end)))  # two, to get a tuple
            start = end
        self._containers = [(at, x) for at, each in enumerate(modules) for x in sorted(_names(each) - set(leaves[id(each)]))]
        self._modules = [weakref.ref(x) for x in modules]

    def _look(self, members: bool = True) -> list[Any]:
        """Everything that may differ: classes, attributes, what is in them; and all parameters, buffers and modules, and the
        attributes of classes.
        """
        modules = [x() for x in self._modules]
        owns = list(map(vars, modules))
        self._hooked = any(itertools.chain.from_iterable(map(_hooks_of, owns[1:])))
        values = [*map(type, modules), *map(len, owns)]
        for get, group in self._get:
            values += itertools.chain.from_iterable(map(get, owns[group]))
        for at, name in self._containers:
            spread(owns[at][name], values)
        return values + _members(owns) + self._look_at_classes() if members else values

    def _look_at_classes(self) -> list[Any]:
        values: list[Any] = []
        for each in self._classes:
            each.append(values)
        return values

    def addresses(self) -> list[int]:
        """The addresses of weights and other tensors, and the versions that they count."""
        tensors = [x() for x in self._tensors]
        return [*map(Tensor.data_ptr, tensors), *map(_version_of, itertools.compress(tensors, self._versioned))]  # type: ignore[arg-type]

    def _layouts_of_weights(self) -> list[tuple[Any, ...]]:
        weights = self.weights
        return [*map(_layout_of, weights), *map(Tensor.stride, weights)]

    def _obstacle(self, of: nn.Module, inner: list[nn.Module], trains: bool) -> str:
        weights = self.weights
        if any(type(x) not in (Tensor, nn.Parameter) for x in weights):
            return "a weight is of a subclass of Tensor"
        if any(x.is_inference() for x in weights):  # has no version
            return "a weight was made in inference mode"
        if weights and self.device is None:
            return "weights lie on several devices"
        if not trains and any(x.training for x in (of, *inner)):
            return "the module is in training mode"
        if any("forward" in vars(x) for x in inner):
            return "a module inside has a forward of its own"
        return ""


def _names(module: nn.Module) -> set[str]:
    """The attributes of a module that not every module has."""
    return vars(module).keys() - _COMMON_ATTRIBUTES


def _members(owns: Iterable[dict[str, Any]]) -> list[Any]:
    """Parameters, buffers and modules inside modules, from the attributes of these."""
    return list(itertools.chain.from_iterable(map(dict.values, itertools.chain.from_iterable(map(_parts_of, owns)))))


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)
