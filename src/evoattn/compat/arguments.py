"""Checks of a drop-in's arguments as the caller gave them, before they are brought to the axes of `evoformer_attention`."""

from __future__ import annotations

from torch import Tensor

__all__ = ["check_keys", "check_tensors"]


def check_tensors(**given: object) -> None:
    """Raise TypeError unless each argument is a tensor."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_keys(q: Tensor, k: Tensor, v: Tensor, axes: int) -> None:
    """Raise ValueError unless k `[*, H|1, K, D]` and v `[*, H|1, K, C]` go with q `[*, H, Q, D]`.

    axes: how many a tensor has at the least. One of fewer axes has ones in front.
    """
    of_q, of_k, of_v = ((1,) * (axes - x.ndim) + tuple(x.shape) for x in (q, k, v))
    for name, x, sizes in (("k", k, of_k), ("v", v, of_v)):
        if sizes[:-3] != of_q[:-3]:
            raise ValueError(f"{name} must have the leading axes of q, {list(q.shape)}, got shape {list(x.shape)}")
        if sizes[-3] != of_q[-3] and sizes[-3] != 1:
            raise ValueError(f"{name} must have the {of_q[-3]} heads of q, or 1, got shape {list(x.shape)}")
    if of_k[-1] != of_q[-1]:
        raise ValueError(f"k must have the {of_q[-1]} channels of q, got shape {list(k.shape)}")
    if of_v[-2] != of_k[-2]:
        raise ValueError(f"v must have the {of_k[-2]} keys of k, got shape {list(v.shape)}")
