"""Tests for plain sub-modules, which a joined product may read, and calls of all others.

A layer reads the parameters of its projections and norms, and computes several of them at once. That is right only while each
of them is a plain linear module or layer norm. People change modules after they made them: adapters, hooks, pruning, weight
norm, sharding and offloading all replace or surround the module's own forward. A weight may be a wrapper around other tensors,
and torch.func or torch.jit may want to see each operator. So a layer asks at each call, and calls the modules that are not
plain. Such a call gives what the modules define, and is only slower.

The questions look at classes and at dictionaries that are empty in a plain module: about 1 us of the host a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

_LINEARS = {
    "protenix.model.triangular.layers": "OpenfoldLinear.forward",
    "opendde.model.triangular.layers": "OpenfoldLinear.forward",
    "openfold.model.primitives": "Linear.forward",
    "openfold3.core.model.primitives.linear": "Linear.forward",
    "boltz.model.layers.triangular_attention.primitives": "Linear.forward",
    "boltzgen.model.layers.triangular_attention.primitives": "Linear.forward",
    "protenix.model.modules.primitives": "Linear.forward",
    "opendde.model.modules.primitives": "Linear.forward",
}
"""Modules of clients, each with a linear forward that computes the same as torch's if it sets no precision."""

_NORMS = {
    "openfold.model.primitives": "LayerNorm.forward",
    "openfold3.core.model.primitives.normalization": "LayerNorm.forward",
    "boltz.model.layers.triangular_attention.primitives": "LayerNorm.forward",
    "boltzgen.model.layers.triangular_attention.primitives": "LayerNorm.forward",
    "protenix.model.triangular.layers": "OpenFoldLayerNorm.forward",
    "opendde.model.triangular.layers": "OpenFoldLayerNorm.forward",
    "protenix.model.layer_norm.layer_norm": "FusedLayerNorm.forward",
    "opendde.model.layer_norm.layer_norm": "FusedLayerNorm.forward",
}
"""The same for layer norms over the last axis."""


_TENSORS = frozenset((Tensor, nn.Parameter, type(None)))
"""Classes of a plain weight, which are asked first: to find no attribute takes three times as long."""


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes `x W^T + b` from its `weight` and `bias`, and nobody has to see that it is called."""
    return _is_plain(module, nn.Linear, _LINEARS) and module.__dict__.get("precision") is None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a layer norm over the last axis, and nobody has to see that it is called."""
    return _is_plain(module, nn.LayerNorm, _NORMS) and len(module.__dict__.get("normalized_shape", (0,))) == 1


def call(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Call a module that is not plain.

    Args:
        module: any module that takes a tensor.
        x: its input, cast to the dtype of the module's parameters unless autocast does that.
        dtype: of the result.
    """
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


def check_container(name: str, module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise TypeError unless a sub-module that only holds others is as the layer made it.

    Nobody calls it, so hooks on it would not run, and what stands in its place would not compute.
    """
    if type(module) is not kind:
        raise TypeError(
            f"{name} must be the {kind.__name__} that the layer made, got {type(module).__name__}: the layer never calls "
            f"{name}. Wrap or shard the whole layer, or the projections inside {name}"
        )
    if "forward" in module.__dict__ or has_hooks(module):
        raise TypeError(
            f"{name} has hooks or a forward of its own, and the layer never calls it: put them on the layer, or on the "
            f"projections inside {name}. If they are of ZeRO-3, give deepspeed.utils.set_z3_leaf_modules the layer's class"
        )


def _is_plain(module: nn.Module, kind: Any, known: dict[str, str]) -> bool:
    """Return whether a call runs the forward of `kind`, or one that is known to compute the same, and nothing else."""
    own = type(module)
    if own is not kind:
        forward = own.forward
        same = forward is kind.forward or known.get(forward.__module__) == forward.__qualname__
        if not same or own.__call__ is not nn.Module.__call__:
            return False
    if "forward" in module.__dict__ or has_hooks(module) or has_global_hooks():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
        return False  # torch.func and torch.jit take no autograd function of Python
    weight = type(module.__dict__["_parameters"].get("weight"))
    return weight in _TENSORS or not hasattr(weight, "__tensor_flatten__")  # DTensors have it, and quantised weights


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run when a module is called."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"])


def has_global_hooks() -> bool:
    """Return whether hooks run when any module is called. torch 2.7 has no `_has_any_global_hook`."""
    forward = torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
    return bool(forward or torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks)
