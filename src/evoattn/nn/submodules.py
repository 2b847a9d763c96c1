"""Tests for plain sub-modules, which a joined product may read, and calls of all others.

A layer reads the parameters of its projections and norms, and computes several of them at once. That is right only while each
of them is a plain linear module or layer norm. People change modules after they made them: adapters, hooks, pruning, weight
norm, sharding and offloading all replace or surround the module's own forward. A weight may be a wrapper around other tensors,
and torch.func or torch.jit may want to see each operator. So a layer asks at each call, and calls the modules that are not
plain. Such a call gives what the modules define, and is only slower.

Functions of torch and of clients are compared with those that stood there at import, since a program may replace them.

The questions look at classes and at dictionaries that are empty in a plain module: about 1 us of the host a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from evoattn.core.own_code import is_from, torchs

_linears: frozenset[str] = frozenset()
"""Classes of clients, each with a linear forward that computes the same as torch's if it sets no precision."""

_norms: frozenset[str] = frozenset()
"""The same for layer norms over the last axis."""


def take_for_plain(linears: Iterable[str], norms: Iterable[str]) -> None:
    """Take classes of a client, by their full names, for linear modules and layer norms that compute the same as torch's."""
    global _linears, _norms
    _linears, _norms = _linears.union(linears), _norms.union(norms)


_LINEAR, _NORM = torchs(nn.Linear, "forward"), torchs(nn.LayerNorm, "forward")
_CALL, _CALL_IMPL = torchs(nn.Module, "__call__"), torchs(nn.Module, "_call_impl")
_F_LINEAR, _F_NORM = F.linear, F.layer_norm

_TENSORS = frozenset((Tensor, nn.Parameter, type(None)))
"""Classes of a plain weight, which are asked first: to find no attribute takes three times as long."""


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes `x W^T + b` from its `weight` and `bias`, and nobody has to see that it is called."""
    if F.linear is not _F_LINEAR or not _is_plain(module, _LINEAR, _linears):
        return False
    return module.__dict__.get("precision") is None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a layer norm over the last axis, and nobody has to see that it is called."""
    if F.layer_norm is not _F_NORM or not _is_plain(module, _NORM, _norms):
        return False
    return len(module.__dict__.get("normalized_shape", (0,))) == 1


def call(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Call a module that is not plain. x is cast to the dtype of the module's parameters unless autocast does that."""
    parameter = parameter_of([module])
    if parameter is not None and not torch.is_autocast_enabled(x.device.type):
        x = x.to(parameter.dtype)
    y: Tensor = module(x)
    return y.to(dtype)


def parameter_of(modules: Sequence[nn.Module]) -> Tensor | None:
    """The first floating-point parameter of some modules, or None. A weight that is not a parameter counts, as in replicas."""
    for module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():
            return weight
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter
    return None


def may_skip(module: nn.Module, kind: Any) -> bool:
    """Return whether a layer may compute what one of its containers computes, and nobody has to see that it is called.

    `kind` is the class that the layer made it of. Its attribute `own_forward` is the forward that the layer stands in for.
    """
    if kind.forward is not kind.own_forward or type(module) is not kind or has_own_call(module):
        return False
    return not has_hooks(module) and not has_global_hooks()


def _is_plain(module: nn.Module, forward: Any, known: frozenset[str]) -> bool:
    """Return whether a call runs `forward`, or one that is known to compute the same, and nothing else."""
    own = type(module)
    if own.forward is not forward and not _is_known(own, known):
        return False
    if has_own_call(module) or has_hooks(module) or has_global_hooks() or _has_function_modes():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
        return False  # torch.func and torch.jit take no autograd function of Python
    return _is_plain_weight(module, "weight") and _is_plain_weight(module, "bias")


def _is_plain_weight(module: nn.Module, name: str) -> bool:
    """Return whether a weight is a plain tensor or None. It may be an attribute, as in replicas.

    A parametrization computes it at each look, so the module is called.
    """
    own = module.__dict__
    parameters = own["_parameters"]
    weight = type(parameters[name] if name in parameters else own[name] if name in own else own["_buffers"].get(name, module))
    return weight in _TENSORS or (issubclass(weight, Tensor) and _is_ordinary(weight))


def has_own_call(module: nn.Module) -> bool:
    """Return whether a call of a module runs something else than the forward of its class: a method on the module itself, or
    on its class in the place of torch's `__call__`, or compiled code.
    """
    own, kind = module.__dict__, type(module)
    if "forward" in own or "_call_impl" in own or own.get("_compiled_call_impl") is not None:
        return True
    return kind.__call__ is not nn.Module.__call__ or kind._call_impl is not nn.Module._call_impl


_FORWARDS: dict[Any, str] = {}
"""For forwards of subclasses: the class of a client that defines each. Not functools.cache, of which Dynamo warns."""


def _is_known(own: Any, known: frozenset[str]) -> bool:
    """Return whether a class inherits the forward of a known class of a client, and nobody has replaced it."""
    forward = own.forward
    name = _FORWARDS.get(forward)
    if name is None:
        kind = next(x for x in own.__mro__ if "forward" in vars(x))
        name = f"{kind.__module__}.{kind.__qualname__}" if is_from(forward, kind.__module__) else ""
        _FORWARDS[forward] = name
    return name in known


_OVERRIDES = ("__torch_function__", "__torch_dispatch__", "__tensor_flatten__")


def _is_ordinary(weight: Any) -> bool:
    """Return whether tensors of a class are computed as plain ones: torch's own while it traces, and classes that change
    nothing. DTensors and quantised weights are not.
    """
    if weight.__module__.startswith("torch._subclasses."):
        return True
    own = weight.__mro__[: weight.__mro__.index(Tensor)]
    return not any(name in vars(x) for x in own if x is not nn.Parameter for name in _OVERRIDES)


def _has_function_modes() -> bool:
    """Return whether a mode sees each call of a function of torch, such as `F.linear`, but for that of a default device."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run when a module is called."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"])


def has_hooks_inside(module: nn.Module) -> bool:
    """Return whether hooks run when a module, or one inside it, is called.

    `nn.Module.modules` takes twice as long to find them: 40 us, not 20, for the 59 modules of a pairformer block.
    """
    modules, seen = [module], {id(module)}
    for each in modules:
        if has_hooks(each):
            return True
        for inner in each._modules.values():  # not from __dict__: those of a traced module are elsewhere
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                modules.append(inner)
    return False


def has_global_hooks() -> bool:
    """Return whether hooks run when any module is called, or a program calls modules in a way of its own.

    torch 2.7 has no `_has_any_global_hook`.
    """
    if nn.Module.__call__ is not _CALL or nn.Module._call_impl is not _CALL_IMPL:
        return True
    forward = torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
    return bool(forward or torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks)
