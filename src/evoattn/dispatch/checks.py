"""Check the arguments of `evoformer_attention` and its drop-ins.

Every check runs before any work and names the argument, what came and what was expected.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import BACKENDS
from evoattn.core import guards
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs
from evoattn.core.layouts import LAYOUTS
from evoattn.core.problem import dtype_name
from evoattn.dispatch.axes import fits, has_unit_axes
from evoattn.dispatch.lookup import Options

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AXES = {
    "bnlhd": ("[*, N, Lq, H, D]", "[*, N, Lk, H, D]", "[*, N, Lk, H, C]"),
    "bnhld": ("[*, N, H, Lq, D]", "[*, N, H, Lk, D]", "[*, N, H, Lk, C]"),
}


def compute_dtype(x: Tensor, weight: Tensor | None = None) -> torch.dtype:
    """The dtype that an input is computed in: autocast's where it is on, but for float64, which autocast leaves alone.

    weight: what it is multiplied by, if the narrower dtype of both counts.
    """
    if weight is not None:
        dtype, other = compute_dtype(x), compute_dtype(weight)
        return other if other.itemsize < dtype.itemsize else dtype
    device = x.device.type
    if x.dtype != torch.float64 and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless the mask is None or has as many axes as `shape` and broadcasts to it."""
    check_tensors_or_none(**{name: mask})
    if mask is None:
        return
    if mask.ndim != len(shape) or not fits(tuple(mask.shape), shape):
        raise ValueError(f"{name} must broadcast to {list(shape)} and have as many axes, got shape {list(mask.shape)}")


def check_tensors(**tensors: object) -> None:
    """Raise TypeError unless each argument is a tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_tensors_or_none(**tensors: object) -> None:
    """Raise TypeError unless each argument is a tensor or None."""
    for name, x in tensors.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")


def check_keys(q: Tensor, k: Tensor, v: Tensor, axes: tuple[str, str], *, layout: str = "bnhld", least: int = 0) -> None:
    """Raise ValueError unless keys and values go with the queries: leading axes, heads, devices, channels and lengths.

    q, k and v are `[*, H, L, C]`, or `[*, L, H, C]` in the layout "bnlhd". k and v may have one head. `axes` names those of k
    and v in messages. A tensor of fewer axes than `least` has ones in front.
    """
    heads, length = (-2, -3) if layout == "bnlhd" else (-3, -2)
    q_shape, k_shape, v_shape = ((1,) * (least - x.ndim) + tuple(x.shape) for x in (q, k, v))
    for name, x, shape, wanted in (("k", k, k_shape, axes[0]), ("v", v, v_shape, axes[1])):
        if shape[:-3] != q_shape[:-3]:
            raise ValueError(f"{name} must be {wanted} with the leading axes of q, {list(q.shape)}, got shape {list(x.shape)}")
        if shape[heads] != q_shape[heads] and shape[heads] != 1:
            raise ValueError(f"{name} must be {wanted} with the {q_shape[heads]} heads of q, or 1, got shape {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if k_shape[-1] != q_shape[-1]:
        raise ValueError(f"k must have the {q_shape[-1]} channels of q, {axes[0]}, got shape {list(k.shape)}")
    if v_shape[length] != k_shape[length]:
        raise ValueError(f"v must have the {k_shape[length]} keys of k, {axes[1]}, got shape {list(v.shape)}")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] == 0:
            raise ValueError(f"{name} must have at least one channel, got shape {list(x.shape)}")


def check_arguments(inputs: Inputs, options: Options) -> None:
    """Raise TypeError or ValueError for the first argument that does not fit."""
    check_no_tangent(*inputs)  # torch.compile of torch 2.7 reads no property of a NamedTuple, and takes no slice of one
    _check_options(options)
    layout = options.layout
    named: dict[str, Any] = dict(zip(Inputs._fields, inputs, strict=True))
    for name in ("q", "k", "v"):
        _check_tensor(name, named[name])
        if named[name].dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype_name(named[name].dtype)}")
    q, k, v, *_ = inputs
    for name, x in (("k", k), ("v", v)):
        if compute_dtype(x) != compute_dtype(q):
            raise TypeError(f"{name} must have the dtype of q, {dtype_name(q.dtype)}, got {dtype_name(x.dtype)}")
    q_axes, *axes = _AXES[layout]
    if q.ndim < 4:
        raise ValueError(f"q must have at least 4 axes, {q_axes} in layout {layout!r}, got shape {list(q.shape)}")
    check_keys(q, k, v, (axes[0], axes[1]), layout=layout)
    if inputs.gate is not None:
        _check_tensor("gate", inputs.gate)
        _check_gate(inputs.gate, q, v, layout)
    head_axis, length_axis = (-2, -3) if layout == "bnlhd" else (-3, -2)
    lead = tuple(q.shape[:-3])
    lk = k.shape[length_axis]
    for name in ("mask", "mask_bias", "pair_bias"):
        bias = named[name]
        if bias is None:
            continue
        _check_tensor(name, bias)
        _check_bias_dtype(name, bias)
        if bias.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {bias.device}")
        if name == "pair_bias":
            _check_broadcast(name, bias, (*lead, q.shape[head_axis], q.shape[length_axis], lk), "[*, N, H, Lq, Lk]")
        else:
            _check_key_bias(name, bias, q, (*lead, lk))


def _check_options(options: Options) -> None:
    scale, layout, deterministic, backend, config, return_lse = options
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be an evoattn.Config or None, got {type(config).__name__}")
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True, False or None, got {deterministic!r}")
    if scale is not None:
        if isinstance(scale, (bool, Tensor)) or not isinstance(scale, Real):
            raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
        # What torch.compile traces may be a symbol, of which it does not say whether it is finite.
        if not torch.compiler.is_compiling() and not _is_finite(scale):
            raise ValueError(f"scale must be finite, got {scale}")


def _is_finite(x: float) -> bool:
    try:
        return math.isfinite(x)
    except OverflowError:  # an int that no float holds
        return False


def check_no_tangent(*tensors: Tensor | None, of: str = "evoformer_attention") -> None:
    """torch gives registered operators a tangent of zero, silently; a wrong derivative is worse than none."""
    if guards.has_tangent(*tensors):
        raise NotImplementedError(f"{of} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad); use reverse mode")


def _check_tensor(name: str, x: Any) -> None:
    check_tensors(**{name: x})
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor with strides, got one of layout {layout}")


def _check_bias_dtype(name: str, x: Tensor) -> None:
    if name == "mask":
        if x.dtype != torch.bool:
            raise TypeError(f"mask must be bool (True = attend), got {dtype_name(x.dtype)}; an additive mask goes to mask_bias")
    elif x.dtype not in _DTYPES:
        hint = "; a bool mask goes to mask" if x.dtype == torch.bool else ""
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {dtype_name(x.dtype)}{hint}")


def _check_gate(gate: Tensor, q: Tensor, v: Tensor, layout: str) -> None:
    if compute_dtype(gate) != compute_dtype(q):
        raise TypeError(f"gate must have the dtype of q, {dtype_name(q.dtype)}, got {dtype_name(gate.dtype)}")
    expected = (*q.shape[:-1], v.shape[-1])
    if gate.shape != expected:
        axes = _AXES[layout][0].replace("D", "C")
        raise ValueError(f"gate must be {axes} = {list(expected)} in layout {layout!r}, got shape {list(gate.shape)}")
    if gate.device != q.device:
        raise ValueError(f"gate must be on the device of q, {q.device}, got {gate.device}")


def _check_key_bias(name: str, x: Tensor, q: Tensor, expected: tuple[int, ...]) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name} must be [*, N, Lk] or [*, N, 1, 1, Lk], got a scalar")
    if has_unit_axes(x, q):
        if x.ndim > q.ndim or x.ndim < 3 or x.shape[-2] != 1 or x.shape[-3] != 1:
            raise ValueError(
                f"{name} must be [*, N, Lk] or [*, N, 1, 1, Lk] and so broadcast to {list(expected)}, "
                f"got shape {list(x.shape)}; a bias that varies over heads or queries goes to pair_bias"
            )
        x = x.squeeze(-2).squeeze(-2)
    elif x.ndim > 3 and x.shape[-2] == 1 and x.shape[-3] == 1 != x.shape[-4] and fits(tuple(x.shape[:-3]), expected[:-1]):
        raise ValueError(
            f"{name} of shape {list(x.shape)} can be read as [*, N, 1, 1, Lk] and as [*, N, Lk] = {list(expected)};"
            " give it all leading axes of q"
        )
    _check_broadcast(name, x, expected, "[*, N, Lk]")


def _check_broadcast(name: str, x: Tensor, expected: tuple[int, ...], axes: str) -> None:
    if not fits(tuple(x.shape), expected):
        raise ValueError(f"{name} must broadcast to {axes} = {list(expected)}, got shape {list(x.shape)}")
