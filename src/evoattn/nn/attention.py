"""What all layers share: the projections of an attention by OpenFold's names, the attention itself, residual and dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.api import evoformer_attention
from evoattn.call.canonical import fits
from evoattn.call.sharded import is_distributed
from evoattn.compat.empty_rows import EmptyRows, check_choice, with_means
from evoattn.nn.gate import gated_linear
from evoattn.nn.project import linear
from evoattn.numerics import accumulate_dtype
from evoattn.run.split import Split

__all__ = [
    "Attention",
    "attend",
    "check_in_place",
    "check_input",
    "check_settings",
    "check_shares",
    "check_square",
    "dropout_mask",
    "heads",
    "part_of_mask",
    "update",
]


class Attention(nn.Module):
    """Projections of an attention: `linear_q`, `linear_k`, `linear_v`, the gate `linear_g` and the output product `linear_o`.

    A layer projects its input by the modules in `inputs`, calls `attend`, and passes the result to `end`.

    Args:
        c_q: channels of the output, and of the tensor that queries and gate are projected from.
        c_kv: channels of the tensor that keys and values are projected from.
        c_hidden: channels of a head.
        no_heads: heads H.
        gating: whether there is a gate.
        q_bias, gate_bias, out_bias: whether these products add a bias.
        shared: whether all heads share one head of keys and values, as in global attention.
    """

    def __init__(
        self,
        c_q: int,
        c_kv: int,
        c_hidden: int,
        no_heads: int,
        *,
        gating: bool = True,
        q_bias: bool = False,
        gate_bias: bool = True,
        out_bias: bool = True,
        shared: bool = False,
    ) -> None:
        super().__init__()
        width = c_hidden * no_heads
        self.linear_q = nn.Linear(c_q, width, bias=q_bias)
        self.linear_k, self.linear_v = (nn.Linear(c_kv, c_hidden if shared else width, bias=False) for _ in range(2))
        self.linear_o = nn.Linear(width, c_q, bias=out_bias)  # before the gate, as optimizers of OpenFold have it
        self.linear_g = nn.Linear(c_q, width, bias=gate_bias) if gating else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as AlphaFold does: the gate does not depend on its input, and the output is 0."""
        for x in (self.linear_q.weight, self.linear_k.weight, self.linear_v.weight):
            nn.init.xavier_uniform_(x)
        nn.init.zeros_(self.linear_o.weight)
        if self.linear_g is not None:
            nn.init.zeros_(self.linear_g.weight)
        for module, start in ((self.linear_q, 0.0), (self.linear_g, 1.0), (self.linear_o, 0.0)):
            if module is not None and module.bias is not None:
                nn.init.constant_(module.bias, start)

    @property
    def inputs(self) -> tuple[nn.Linear, ...]:
        """The projections of self-attention: q, k, v, and the gate if there is one."""
        made = (self.linear_q, self.linear_k, self.linear_v)
        return made if self.linear_g is None else (*made, self.linear_g)

    def end(self, o: Tensor, g: Tensor | None) -> Tensor:
        """The output product of o `[*, H C]`. g is the gate, or None if there is none or if the attention has applied it."""
        return linear(o, self.linear_o) if g is None else gated_linear(o, g, self.linear_o)


def heads(x: Tensor, no_heads: int) -> Tensor:
    """View `[*, H C]` as `[*, H, C]`."""
    return x.view(*x.shape[:-1], no_heads, x.shape[-1] // no_heads)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    pair_bias: Tensor | None,
    gate: Tensor | None,
    *,
    inf: float,
    empty_rows: EmptyRows,
) -> Tensor:
    """The attention of a layer.

    Args:
        q, k, v: `[*, N, L, H, C]`.
        mask: `[*, N, K]` with as many axes, each of that size or 1: 1 or True for a key that is attended.
        pair_bias: broadcasts to `[*, N, H, Q, K]`.
        gate: `[*, N, Q, H, C]`, before the sigmoid, or None. A layer that transposes O before its output product passes None
            and gives the gate to `Attention.end`: there one pass gates and transposes.
        inf: is subtracted from the scores of a masked key.
        empty_rows: as in `TriangleAttention`.

    Returns:
        `[*, N, Q, H, C]`, gated if there is a gate.

    Raises:
        RuntimeError: `torch.jit.trace` meets the means of rows without a key, which are a call of Python: nobody could save it.
    """
    if mask is None:
        return evoformer_attention(q, k, v, pair_bias=pair_bias, gate=gate)
    mask = mask[..., None, None, :]  # with all axes of q there is one way to read it
    if empty_rows == "native":
        return evoformer_attention(q, k, v, mask=mask.bool(), pair_bias=pair_bias, gate=gate)
    if torch._C._get_tracing_state() is not None and q.dtype != torch.float64:
        raise RuntimeError(
            'torch.jit.trace takes no mask with empty_rows="mean": make the layer with empty_rows="native", or use torch.export'
        )
    mask_bias = inf * (mask.to(accumulate_dtype(q.dtype)) - 1)
    return with_means(evoformer_attention, q, k, v, mask_bias, pair_bias, None, layout="bnlhd", gate=gate)


def dropout_mask(made: Tensor, dropout: float, shared: int, split: Split | None = None) -> Tensor:
    """Draw what a layer's update is multiplied by: 0 where an entry is dropped, else 1 / (1 - dropout).

    Args:
        made: the update.
        dropout: the probability that an entry is dropped.
        shared: the axis along which all entries are dropped together. It has size 1 in the mask.
        split: how the update lies on several processes, or None. The first process draws the mask of all.
    """
    sizes = [1 if axis == shared else size for axis, size in enumerate(made.shape, -made.ndim)]
    if split is None:
        return F.dropout(made.new_ones(sizes), dropout)
    if split.axis != shared:
        sizes[split.axis] = split.length
    mask = split.same(F.dropout(made.new_ones(sizes), dropout))
    return mask if split.axis == shared else split.held(mask, split.axis)


def part_of_mask(mask: Tensor | None, split: Split | None) -> Tensor | None:
    """What a process needs of a mask for the updates of all processes, which has size 1 along axes that share it."""
    return mask if mask is None or split is None or mask.shape[split.axis] == 1 else split.held(mask, split.axis)


def update(x: Tensor, made: Tensor, mask: Tensor | None = None, *, residual: bool, in_place: bool = False) -> Tensor:
    """The result of a layer: its update, times a dropout mask if one was drawn, plus the layer's input if it has a residual.

    Args:
        x: the layer's input.
        made: the update, of x's shape.
        mask: from `dropout_mask`, or None.
        residual: whether x is added.
        in_place: whether the sum is written into x.
    """
    if not residual:
        return made if mask is None else made * mask
    if mask is not None:
        return x.addcmul_(made, mask) if in_place else torch.addcmul(x, made, mask)
    return x.add_(made) if in_place else x + made


def check_in_place(layer: nn.Module, name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless a layer may write its result into its input x.

    dtype: of the products. With x's dtype it gives that of the result.
    """
    if is_distributed(x):
        raise ValueError("in_place=True takes no DTensors")
    if not layer.residual:
        raise ValueError("in_place=True needs residual=True: the result is written over the input that it is added to")
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in layer.parameters())):
        raise ValueError(f"in_place=True overwrites {name}, which a gradient needs: call the layer under torch.no_grad()")
    if torch.promote_types(x.dtype, dtype) != x.dtype:
        raise ValueError(f"in_place=True needs {name} in {torch.promote_types(x.dtype, dtype)}, the result's, got {x.dtype}")


def check_settings(dropout: float, empty_rows: str) -> None:
    """Raise ValueError for settings that no layer takes."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    check_choice(empty_rows)


def check_input(name: str, x: Tensor, axes: int, channels: int, *, distributed: bool = False) -> None:
    """Raise TypeError or ValueError unless x is a float tensor `[*, channels]` of at least so many axes.

    distributed: whether it may be a DTensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not distributed and is_distributed(x):
        raise TypeError(f"{name} must be a plain tensor: this layer takes no DTensors")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of a floating-point dtype, got {x.dtype}")
    if x.ndim < axes or x.shape[-1] != channels:
        raise ValueError(f"{name} must have at least {axes} axes and {channels} channels, got shape {list(x.shape)}")


def check_square(name: str, z: Tensor) -> None:
    """Raise ValueError unless a pair representation has as many rows as columns."""
    if z.shape[-2] != z.shape[-3]:
        raise ValueError(f"{name} must be [*, L, L, {z.shape[-1]}], the same L twice, got shape {list(z.shape)}")


def check_shares(name: str, z: Tensor, lead: tuple[int, ...], queries: int, keys: int) -> None:
    """Raise ValueError unless a pair representation is `[*, queries, keys, C]`, and * is `lead` or has size 1 for its axes."""
    if z.ndim != len(lead) + 3 or z.shape[-3:-1] != (queries, keys) or not fits(tuple(z.shape[:-3]), lead):
        wanted = f"[*, {queries}, {keys}, {z.shape[-1]}] where * broadcasts to {list(lead)} and has as many axes"
        raise ValueError(f"{name} must be {wanted}, got shape {list(z.shape)}")
