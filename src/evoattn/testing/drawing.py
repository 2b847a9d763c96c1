"""Random tensors for a case: every number is drawn on the CPU from one seed, then moved to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evoattn.core.layouts import to_canonical
from evoattn.core.numerics import accumulate_dtype

if TYPE_CHECKING:
    from evoattn.testing.cases import Case


class Drawing:
    """One case, its generator, and the device that the tensors go to."""

    def __init__(self, case: Case, seed: int, device: torch.device | str) -> None:
        self.case, self.device = case, device
        self.rng = torch.Generator().manual_seed(seed)
        self.mask_bias_dtype = case.bias_dtype or case.dtype
        self.pair_bias_dtype = case.pair_bias_dtype or self.mask_bias_dtype

    def tensors(self) -> dict[str, Tensor | None]:
        """Draw the tensors of `CaseInputs`, by name."""
        case = self.case
        c = case.d if case.c is None else case.c
        kv_heads = case.kv_heads or case.h
        q = self.activation(case.strides_of("q"), case.lq, case.h, case.d)
        q = q * case.spread if case.spread != 1 else q
        k = self.activation(case.strides_of("k"), case.lk, kv_heads, case.d)
        v = self.activation(case.strides_of("v"), case.lk, kv_heads, c)
        o_shape = to_canonical(q, case.layout).shape[:-1]
        do = self.cotangent((*q.shape[:-1], c))
        drawn = {
            "q": q,
            "k": k,
            "v": v,
            "mask": self.mask(),
            "mask_bias": self.mask_bias(),
            "pair_bias": self.pair_bias(),
            "do": do,
            "dlse": self.lse_cotangent(o_shape) if case.lse_gradient else None,
            "gate": self.gate(q.shape, c),
        }
        if case.strides != "offset":
            return drawn
        return {name: None if x is None else with_strides(x, "offset") for name, x in drawn.items()}

    def double(self, *sizes: int) -> Tensor:
        """Random float64 numbers of mean 0 and variance 1, on the CPU."""
        return torch.randn(sizes, generator=self.rng, dtype=torch.float64)

    def single(self, *sizes: int) -> Tensor:
        """The same in float32."""
        return torch.randn(sizes, generator=self.rng, dtype=torch.float32)

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.double(*sizes).to(dtype or self.case.dtype).to(self.device)

    def activation(self, strides: str, length: int, heads: int, channels: int) -> Tensor:
        case = self.case
        stored = (heads, length) if (case.layout == "bnhld") != (strides == "transposed") else (length, heads)
        step = 2 if strides == "sliced" else 1
        x = self.normal(*case.lead, case.n, *stored, channels * step)[..., ::step]
        return x.transpose(-2, -3) if strides == "transposed" else x

    def cotangent(self, shape: tuple[int, ...]) -> Tensor:
        if self.case.cotangent == "transposed":
            return self.normal(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3)
        return self.normal(*_distinct(shape, self.case.cotangent)).expand(shape)

    def gate(self, q_shape: torch.Size, channels: int) -> Tensor | None:
        """It is drawn last, so that a case with a gate has the other numbers of the same case without."""
        case = self.case
        if case.gate is None:
            return None
        shape = (*q_shape[:-1], channels)
        kind = case.gate_strides
        expanded = kind.startswith("expanded")
        x = self.normal(*_distinct(shape, kind)) if expanded else self.activation(kind, case.lq, case.h, channels)
        if case.gate == "large":
            lot = torch.rand(x.shape, generator=self.rng, dtype=torch.float32).to(x.device)
            x = torch.where(lot < 0.2, -80, torch.where(lot > 0.8, 80, x))
            x = with_strides(x, kind, (-2, -3))
        return x.expand(shape)

    def lse_cotangent(self, shape: tuple[int, ...]) -> Tensor:
        drawn = (1,) if self.case.cotangent == "expanded" else shape
        return self.normal(*drawn, dtype=accumulate_dtype(self.case.dtype)).expand(shape)

    def sizes(self, axes: str) -> tuple[int, ...]:
        """The shape that letters stand for."""
        case = self.case
        single = {"n": case.n, "h": case.h, "q": case.lq, "k": case.lk, "1": 1, **dict(zip("xyz", case.lead, strict=False))}
        return tuple(size for axis in axes for size in (case.lead if axis == "b" else (single[axis],)))

    def keys(self, shape: tuple[int, ...]) -> Tensor:
        """Seven keys of ten, the first always."""
        kept = torch.rand(shape, generator=self.rng, dtype=torch.float32) > 0.3
        kept[..., :1] = True
        return kept

    def mask(self) -> Tensor | None:
        case = self.case
        if case.mask is None:
            return None
        kept = self.keys(self.sizes(case.mask_axes))
        if case.mask == "padding" and case.mask_axes.endswith("k"):
            kept[...] = torch.arange(case.lk) < (case.lk + 1) // 2
        if case.mask == "empty_rows" and kept.ndim > 1:
            kept[..., ::3, :] = False
        if case.mask == "empty_batches" and kept.ndim > 1:
            kept[::2] = False
        return self.bias_with_strides(kept.to(self.device), case.mask_axes)

    def mask_bias(self) -> Tensor | None:
        case = self.case
        if case.mask_bias is None:
            return None
        axes = case.mask_bias_axes.replace("11k", "k") if case.mask_bias_axes.endswith("n11k") else case.mask_bias_axes
        shape = self.sizes(axes)
        bias = self.single(*shape).to(self.mask_bias_dtype)
        low = _low(case.mask_bias, self.mask_bias_dtype)
        if case.mask_bias.endswith("first"):
            bias[..., : case.lk // 2] = low
        elif case.mask_bias != "finite":
            bias = bias * 0
            bias[~self.keys(shape)] = low
        if case.mask_bias.endswith("rows") and bias.ndim > 1:
            bias[..., ::3, :] = low
        bias = bias if axes == case.mask_bias_axes else bias[..., :, None, None, :]
        return self.bias_with_strides(bias.to(self.device), case.mask_bias_axes)

    def pair_bias(self) -> Tensor | None:
        case = self.case
        if case.pair_bias is None:
            return None
        shape = self.sizes(case.pair_bias)
        bias = self.single(*shape).to(self.pair_bias_dtype)
        if case.pair_fill == "last_key_1e4":
            bias[..., -1:] = 1e4
        elif case.pair_fill:
            kind = case.pair_fill if isinstance(case.pair_fill, str) else "minus_inf_rows"
            low = _low(kind, self.pair_bias_dtype)
            if kind.endswith("first"):
                bias[..., : case.lk // 2] = low
            else:
                bias[torch.rand(shape, generator=self.rng, dtype=torch.float32) < 0.2] = low
            if kind.endswith("rows"):
                bias[..., -1:, :] = low
        bias = bias.to(self.device)
        if case.strides == "permuted_pair" or case.bias_strides == "permuted":
            return bias.movedim(-3, -1).contiguous().movedim(-1, -3) if bias.ndim > 2 else bias
        return self.bias_with_strides(bias, case.pair_bias, by_key=False)

    def bias_with_strides(self, bias: Tensor, axes: str, *, by_key: bool = True) -> Tensor:
        """A bias with the strides that the case asks for. by_key: it is a mask or a mask bias, of rows and keys."""
        if self.case.bias_strides == "expanded":
            return bias.expand(self.sizes("".join(_expanded_axes(axes, len(self.case.lead), by_key))))
        return with_strides(bias, self.case.bias_strides, (-1, -2))


def _expanded_axes(axes: str, lead: int, by_key: bool) -> list[str]:
    """The letters of a bias with every unit axis but those between rows and keys replaced by the axis that it stands for."""
    spelt = list(axes.replace("b", "xyz"[:lead]))
    if spelt[-3:-1] == ["1", "1"] and len(spelt) == lead + 4:  # [*, n, 1, 1, k] of a mask, or a pair bias like that
        full = [*"xyz"[:lead], "n", "1", "1", "k"]
    elif by_key and len(spelt) <= lead + 2:
        full = [*"xyz"[:lead], "n", "k"]
    else:
        full = [*"xyz"[:lead], "n", "h", "q", "k"]
    return full[len(full) - len(spelt) :]


def _distinct(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The sizes of a tensor of this shape before it is expanded."""
    expanded = {"expanded": (1,), "expanded_channels": (*shape[:-1], 1), "expanded_rows": (*shape[:-4], 1, *shape[-3:])}
    return expanded.get(kind, shape)


def _low(kind: str, dtype: torch.dtype) -> float:
    """A bias that switches a key off: -inf, the lowest finite number, or -1e9 or -1e10, which float16 does not have."""
    if "inf" in kind:
        return -torch.inf
    if "lowest" in kind:
        return torch.finfo(dtype).min
    if dtype == torch.float16:
        return -6e4
    return -1e10 if "1e10" in kind else -1e9


def with_strides(x: Tensor, kind: str, axes: tuple[int, int] = (-2, -3)) -> Tensor:
    """The same numbers in memory with two axes swapped ("transposed"), as every second element of a wider tensor ("sliced"),
    or one element after the start of their memory, on no multiple of 16 bytes ("offset")."""
    if kind == "transposed" and x.ndim >= -min(axes):
        return x.transpose(*axes).contiguous().transpose(*axes)
    if kind == "sliced":
        pairs = x.new_zeros((*x.shape, 2))
        pairs[..., 0] = x
        return pairs[..., 0]
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) if kind == "offset" else x
