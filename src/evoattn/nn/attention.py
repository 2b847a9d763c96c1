"""Parts of all layers: projections by OpenFold's names, the attention, output product, residual, dropout and checks.

A layer that transposes O before its output product gates O here, in one pass: y = (o * sigmoid(g)) W^T + b. In all others the
attention applies the gate. The backward of that pass keeps o and g, and multiplies them again.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evoattn.api import evoformer_attention
from evoattn.core import guards
from evoattn.core.devices import uncast
from evoattn.core.layouts import share_memory
from evoattn.core.numerics import accumulate_dtype
from evoattn.core.problem import dtype_name
from evoattn.dispatch.autograd import once_differentiable
from evoattn.dispatch.axes import fits
from evoattn.dispatch.checks import compute_dtype
from evoattn.dispatch.distributed import Split, is_distributed
from evoattn.empty_rows.means import EmptyRows, check_empty_rows, may_be_empty, with_means
from evoattn.nn.initial import Layer, start
from evoattn.nn.project import layer_norm, linear, project
from evoattn.nn.submodules import call, is_linear
from evoattn.pair.products.call import linear_of_layer

MaybeTensor = TypeVar("MaybeTensor", bound="Tensor | None")


class Attention(Layer):
    """Projections of an attention: `linear_q`, `linear_k`, `linear_v`, the gate `linear_g` and the output product `linear_o`.

    A layer projects its input by the modules in `inputs`, calls `attend`, and passes the result to `output`. It calls this
    module instead if somebody has to see the call: there are hooks, a wrapper or shards around it. If `shared`, all heads share
    one head of keys and values, as in global attention.

    Attributes:
        layer_norm_q, layer_norm_k: norms of q and k over the channels of all heads, as RosettaFold-3 has them in
            `AttentionPairBias`. None: there are none, as in all other layers.
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
        self.layer_norm_q: nn.Module | None = None
        self.layer_norm_k: nn.Module | None = None
        for projection in (self.linear_q, self.linear_k, self.linear_v):
            start(projection, "xavier")
        start(self.linear_o, "zeros")
        if self.linear_g is not None:  # at first it does not depend on its input
            start(self.linear_g, "zeros", bias=1.0)

    @property
    def inputs(self) -> tuple[nn.Linear, ...]:
        """The projections of self-attention: q, k, v, and the gate if there is one."""
        qkv = (self.linear_q, self.linear_k, self.linear_v)
        return qkv if self.linear_g is None else (*qkv, self.linear_g)

    def forward(
        self,
        q_x: Tensor,
        kv_x: Tensor,
        mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
        *,
        no_heads: int,
        inf: float = 1e9,
        empty_rows: EmptyRows = "mean",
    ) -> Tensor:
        """Compute the attention of inputs that are normalised already.

        Args:
            q_x: `[*, N, Q, c_q]`.
            kv_x: `[*, N, K, c_kv]`; q_x itself in self-attention.
            mask: `[*, N, K]`, 1 or True for a key that is attended. None: all are.
            pair_bias: broadcasts to `[*, N, H, Q, K]`.
            no_heads, inf, empty_rows: of the layer.

        Returns:
            `[*, N, Q, c_q]`.
        """
        if q_x is kv_x:
            q, k, v, *gates = project(q_x, None, self.inputs)
        else:
            q, *gates = project(q_x, None, (self.linear_q, *self.inputs[3:]))
            k, v = project(kv_x, None, (self.linear_k, self.linear_v))
        gate = heads(gates[0], no_heads) if gates else None
        q, k, v = (heads(x, no_heads) for x in (*self.normed(q, k), v))
        return self.output(attend(q, k, v, mask, pair_bias, gate, inf=inf, empty_rows=empty_rows).flatten(-2), None)

    own_forward = forward

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k `[*, H C]` after their norms, if there are some."""
        norms = (self.layer_norm_q, self.layer_norm_k)
        q, k = (x if norm is None else layer_norm(x, norm, x.dtype) for x, norm in zip((q, k), norms, strict=True))
        return q, k

    def output(self, o: Tensor, g: Tensor | None) -> Tensor:
        """The output product of o `[*, H C]`. g is the gate, or None if there is none or if the attention has applied it."""
        return linear(o, self.linear_o) if g is None else gated_linear(o, g, self.linear_o)


def inputs_of(mha: Any) -> tuple[nn.Module, ...]:
    """The projections of an attention, or what stands in its place, to tell the dtype of the products by."""
    return mha.inputs if isinstance(mha, Attention) else (mha,)


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
    """Return the attention `[*, N, Q, H, C]` of q, k and v `[*, N, L, H, C]`, gated if there is a gate.

    A layer that transposes O before its output product passes no gate here and gives it to `Attention.output`: there one pass
    gates and transposes. `inf` is subtracted from the scores of a masked key. The pair bias broadcasts to `[*,N,H,Q,K]`.
    """
    masks = mask_arguments(mask, q.dtype, inf=inf, empty_rows=empty_rows)
    return attend_masked(q, k, v, masks, pair_bias, gate, inf=inf)


def mask_arguments(mask: Tensor | None, dtype: torch.dtype, *, inf: float, empty_rows: EmptyRows) -> dict[str, Tensor]:
    """The mask of `attend` as `evoformer_attention` takes it, for calls of q in a dtype that share it."""
    if mask is None:
        return {}
    mask = mask[..., None, None, :]  # with all axes of q there is one way to read it
    if empty_rows == "native":
        return {"mask": mask.bool()}
    return {"mask_bias": inf * (mask.to(accumulate_dtype(dtype)) - 1)}


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: dict[str, Tensor],
    pair_bias: Tensor | None,
    gate: Tensor | None,
    *,
    inf: float,
) -> Tensor:
    """`attend` with the `mask_arguments` of its mask."""
    if "mask_bias" in masks and may_be_empty(inf, compute_dtype(q)):
        return with_means(evoformer_attention, q, k, v, masks["mask_bias"], pair_bias, None, layout="bnlhd", gate=gate)
    mask, mask_bias = masks.get("mask"), masks.get("mask_bias")
    return evoformer_attention(q, k, v, mask=mask, mask_bias=mask_bias, pair_bias=pair_bias, gate=gate)


def dropout_mask(update: Tensor, dropout: float, shared: int, split: Split | None = None) -> Tensor:
    """Draw a factor of a layer's update: 0 where an entry is dropped, else 1 / (1 - dropout), one for all of an axis.

    If the update is split over processes, the first one draws the mask of all.
    """
    sizes = [1 if axis == shared else size for axis, size in enumerate(update.shape, -update.ndim)]
    if split is None:
        return F.dropout(update.new_ones(sizes), dropout)
    if split.axis != shared:
        sizes[split.axis] = split.length
    mask = split.same(F.dropout(update.new_ones(sizes), dropout))
    return mask if split.axis == shared else split.held(mask, split.axis)


def part_of_mask(mask: Tensor | None, split: Split | None) -> Tensor | None:
    """The part of this process of a mask for the updates of all processes. Axes that share the mask have size 1."""
    return mask if mask is None or split is None or mask.shape[split.axis] == 1 else split.held(mask, split.axis)


def add_residual(x: Tensor, update: Tensor, mask: Tensor | None = None, *, residual: bool, in_place: bool = False) -> Tensor:
    """Return the result of a layer: its update, times a dropout mask or None, plus the layer's input x if it has a residual."""
    if not residual:
        return update if mask is None else update * mask
    if mask is not None:
        return x.addcmul_(update, mask) if in_place else torch.addcmul(x, update, mask)
    return x.add_(update) if in_place else x + update


def check_in_place(layer: nn.Module, name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless a layer may write its result into its input x. x and the products' `dtype` give the result's."""
    if not layer.residual:
        raise ValueError("in_place=True needs residual=True: the result is written over the input that it is added to")
    check_overwritten(layer, name, x)
    result = torch.promote_types(x.dtype, dtype)
    if result != x.dtype:
        raise ValueError(
            f"{name} must have the result's dtype {dtype_name(result)} for in_place=True, got {dtype_name(x.dtype)}"
        )


def check_overwritten(module: nn.Module, name: str, x: Tensor) -> None:
    """Raise ValueError if a module must not overwrite its input x: it is a DTensor, or a gradient is recorded."""
    if is_distributed(x):
        raise ValueError(f"in_place=True takes no DTensors, got one as {name}: leave in_place out")
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        raise ValueError(f"in_place=True overwrites {name}, which a gradient needs: call the layer under torch.no_grad()")


def kept(x: MaybeTensor, z: Tensor) -> MaybeTensor:
    """Return x, or a copy of it if both may share memory: z is overwritten before x is read. No tensor passes as it is."""
    if not isinstance(x, Tensor) or (guards.only_computes() and not share_memory(x, z)):
        return x
    return x.clone()  # type: ignore[return-value]


def check_settings(dropout: float, empty_rows: str) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    check_empty_rows(empty_rows)


def check_input(name: str, x: Tensor, axes: int, channels: int, *, distributed: bool = False) -> None:
    """Raise TypeError or ValueError unless x is a float tensor `[*, channels]` of at least so many axes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not distributed and is_distributed(x):
        raise TypeError(f"{name} must be a plain tensor, got a DTensor: gather it first, with full_tensor()")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of a floating-point dtype, got {dtype_name(x.dtype)}")
    if x.ndim < axes or x.shape[-1] != channels:
        raise ValueError(f"{name} must have at least {axes} axes and {channels} channels, got shape {list(x.shape)}")


def check_shares(name: str, z: Tensor, lead: tuple[int, ...], queries: int, keys: int) -> None:
    """Raise ValueError unless a pair representation is `[*, queries, keys, C]`, and * is `lead` or has size 1 for its axes."""
    if z.ndim != len(lead) + 3 or z.shape[-3:-1] != (queries, keys) or not fits(tuple(z.shape[:-3]), lead):
        raise ValueError(
            f"{name} must be [*, {queries}, {keys}, {z.shape[-1]}] where * broadcasts to {list(lead)} and has as many axes, "
            f"got shape {list(z.shape)}"
        )


def gated_linear(o: Tensor, g: Tensor, module: nn.Linear) -> Tensor:
    """Return the output product `[*, out_features]` of `o * sigmoid(g)`, in memory in the order of its axes.

    o has any strides. An axis of o of size 1 is broadcast.
    """
    if not is_linear(module):
        return call(module, _gate(o, g)[0], o.dtype)
    bias = None if module.bias is None else module.bias.to(o.dtype)
    in_halves = linear_of_layer(o, module.weight.to(o.dtype), bias, gate=g)
    if in_halves is not None:
        return in_halves
    rows: Tensor = _GatedLinear.apply(o, g, module.weight.to(o.dtype), bias)  # type: ignore[no-untyped-call]
    return rows.view(*g.shape[:-1], rows.shape[-1])  # a view made inside the function could not be changed in place


def _gate(o: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """o * sigmoid(g) and sigmoid(g). The gate is the first factor, so the product has its layout, and its rows are a view."""
    opened = torch.sigmoid(g)
    return opened * o, opened


class _GatedLinear(torch.autograd.Function):
    """(o * sigmoid(g)) W^T + b, `[R, out_features]`."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(o, g, weight)
        return F.linear(_gate(o, g)[0].reshape(-1, g.shape[-1]), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
        o, g, weight = ctx.saved_tensors
        need_o, need_g, need_weight, need_bias = ctx.needs_input_grad
        do = dg = dweight = dbias = None
        with uncast(o.device):
            gated, opened = _gate(o, g)
            if need_weight:
                dweight = rows.t() @ gated.reshape(-1, g.shape[-1])
            del gated
            if need_bias:
                dbias = rows.sum(0)
            if need_o or need_g:
                d_gated = (rows @ weight).view(g.shape)
                do = d_gated * opened  # if o was broadcast, autograd sums its gradient afterwards
                dg = torch.ops.aten.sigmoid_backward(d_gated * o, opened)
        return do, dg, dweight, dbias
