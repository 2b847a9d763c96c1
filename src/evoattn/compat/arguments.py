"""Checks of a drop-in's arguments as the caller gave them, before they are brought to the axes of `evoformer_attention`."""

from __future__ import annotations

from torch import Tensor


def check_tensors(**tensors: object) -> None:
    """Raise TypeError unless each argument is a tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_keys(q: Tensor, k: Tensor, v: Tensor, axes: int) -> None:
    """Raise ValueError unless k `[*, H|1, K, D]` and v `[*, H|1, K, C]` go with q `[*, H, Q, D]`.

    axes: how many a tensor has at the least. One of fewer axes has ones in front.
    """
    q_shape, k_shape, v_shape = ((1,) * (axes - x.ndim) + tuple(x.shape) for x in (q, k, v))
    for name, x, sizes in (("k", k, k_shape), ("v", v, v_shape)):
        if sizes[:-3] != q_shape[:-3]:
            raise ValueError(f"{name} must have the leading axes of q, {list(q.shape)}, got shape {list(x.shape)}")
        if sizes[-3] != q_shape[-3] and sizes[-3] != 1:
            raise ValueError(f"{name} must have the {q_shape[-3]} heads of q, or 1, got shape {list(x.shape)}")
    if k_shape[-1] != q_shape[-1]:
        raise ValueError(f"k must have the {q_shape[-1]} channels of q, got shape {list(k.shape)}")
    if v_shape[-2] != k_shape[-2]:
        raise ValueError(f"v must have the {k_shape[-2]} keys of k, got shape {list(v.shape)}")
