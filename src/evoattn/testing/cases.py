"""Cases: plain descriptions of a call, and the random inputs made from them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from evoattn.core.problem import GRADIENTS
from evoattn.testing.drawing import Drawing
from evoattn.workloads import Workload

Strides = Literal["contiguous", "transposed", "sliced"]
Low = Literal["minus_1e9", "minus_1e9_rows", "minus_1e10_first", "minus_inf", "minus_inf_rows", "lowest", "lowest_rows"]


@dataclasses.dataclass(frozen=True)
class CaseInputs:
    """The arguments of one call, and random cotangents for its outputs."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    mask_bias: Tensor | None
    pair_bias: Tensor | None
    do: Tensor
    dlse: Tensor | None
    gate: Tensor | None = None

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """The inputs that have a gradient in this case, by name."""
        tensors = {name: getattr(self, name) for name in GRADIENTS}
        return {name: x for name, x in tensors.items() if x is not None and name in self.case.gradients}


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """One call in words.

    Args:
        name: for test ids.
        lead: batch axes before the rows.
        n, h, lq, lk, d, c: sizes; c = None is d.
        dtype: of q, k, v.
        layout: of q, k, v.
        mask: keys kept at random, the first half kept, every third row without a key, every second batch without a key, or no
            mask.
        mask_axes: axes that the mask varies along, a 1 where it is broadcast; leading ones may be left out.
        mask_bias: random finite values; -1e9, -inf or the dtype's lowest number at random keys; the same, and at all keys of
            every third row; -1e10 at the first half of the keys; or none.
        mask_bias_axes: as mask_axes; "bn11k" has the two unit axes of DeepSpeed's call.
        pair_bias: axes that the bias varies along, a 1 where it is broadcast, such as "b1hqk"; or none. The letters x, y and z
            are the first, second and third batch axis alone.
        pair_fill: put -1e9, -inf or the dtype's lowest number into the pair bias at random; "..._rows" also into all of its
            last query; "minus_1e10_first" puts -1e10 at the first half of the keys. True is "minus_inf_rows". "last_key_1e4"
            puts 1e4 at the last key alone, which padding switches off.
        bias_dtype: of both biases; None is dtype. float16 has -6e4 in the place of -1e9 and -1e10.
        pair_bias_dtype: of the pair bias; None is bias_dtype.
        strides: of q, k and v, one for all or one each: contiguous, heads and lengths swapped in memory, every second element
            of a wider tensor. For all tensors: a pair bias whose heads lie innermost as a permuted linear gives it, or every
            tensor one element after the start of its memory.
        bias_strides: of mask and biases: contiguous, the last two axes swapped in memory, every second element of a wider
            tensor, unit axes expanded with stride 0; or a pair bias whose heads lie innermost.
        cotangent: of the output: random; one number expanded with stride 0 as `.sum()` gives it, to the LSE's too; one number a
            query, or one row, expanded; or heads and lengths swapped in memory.
        scale: None for the default.
        spread: factor on q; large values give an LSE far from 0.
        lse_gradient: whether a gradient flows through the LSE too.
        gradients: the inputs to differentiate by.
        kv_heads: heads of k and v, h or 1; None is h.
        gate: random; or with -80 and 80 at two fifths of its entries, where its sigmoid is 0 and 1; or none.
        gate_strides: of the gate: as `strides` of q, or one row, or one channel, expanded with stride 0.
    """

    name: str
    lead: tuple[int, ...] = (1,)
    n: int = 3
    h: int = 2
    lq: int = 20
    lk: int = 20
    d: int = 8
    c: int | None = None
    dtype: torch.dtype = torch.float32
    layout: Literal["bnlhd", "bnhld"] = "bnlhd"
    mask: Literal["random", "padding", "empty_rows", "empty_batches"] | None = None
    mask_axes: str = "bnk"
    mask_bias: Literal["finite"] | Low | None = None
    mask_bias_axes: str = "bn11k"
    pair_bias: str | None = None
    pair_fill: bool | Low | Literal["last_key_1e4"] = False
    bias_dtype: torch.dtype | None = None
    pair_bias_dtype: torch.dtype | None = None
    strides: Strides | Literal["permuted_pair", "offset"] | tuple[Strides, Strides, Strides] = "contiguous"
    bias_strides: Literal["contiguous", "transposed", "sliced", "expanded", "permuted"] = "contiguous"
    cotangent: Literal["random", "expanded", "expanded_channels", "expanded_rows", "transposed"] = "random"
    scale: float | None = None
    spread: float = 1.0
    lse_gradient: bool = False
    gradients: tuple[str, ...] = GRADIENTS
    kv_heads: int | None = None
    gate: Literal["random", "large"] | None = None
    gate_strides: Strides | Literal["expanded_rows", "expanded_channels"] = "contiguous"

    def make(self, seed: int = 0, device: torch.device | str = "cpu") -> CaseInputs:
        """Fresh random inputs, drawn on the CPU and moved to a device: the same seed gives the same numbers on every device."""
        tensors: dict[str, Any] = Drawing(self, seed, device).tensors()
        return CaseInputs(case=self, **tensors)

    def strides_of(self, name: str) -> str:
        """The strides of q, k or v."""
        return self.strides if isinstance(self.strides, str) else self.strides["qkv".index(name)]

    def __repr__(self) -> str:
        """A line of Python that makes the case again: its name, and the arguments that differ from their defaults."""
        words = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "name" and getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join([repr(self.name), *words])})"


def from_workload(workload: Workload, dtype: torch.dtype) -> Case:
    """A workload as a case: the key mask as a bool mask, and the pair bias in q's dtype."""
    sizes = {name: getattr(workload, name) for name in ("name", "n", "h", "lq", "lk", "d", "kv_heads")}
    mask: Literal["random"] | None = "random" if workload.key_mask else None
    pair_bias = "b1hqk" if workload.pair_bias else None
    return Case(**sizes, lead=(workload.b,), dtype=dtype, mask=mask, pair_bias=pair_bias)


_QKV = ("q", "k", "v")
_FIVE = GRADIENTS[:5]
_BOTH: dict[str, Any] = {"mask_bias": "finite", "pair_bias": "b1hqk"}

AWKWARD: tuple[Case, ...] = (
    *(Case(f"length_{size}", n=2, lq=size, lk=size, **_BOTH) for size in (1, 15, 16, 17, 100, 127, 129)),
    Case("length_397", n=1, h=1, lq=397, lk=397, **_BOTH),
    Case("length_192_mask", n=2, h=1, lq=192, lk=192, mask="random", pair_bias="b1hqk"),
    Case("no_bias", lq=33, lk=33),
    Case("mask_bias_alone", mask_bias="finite"),
    Case("pair_bias_alone", pair_bias="b1hqk"),
    Case("padding", n=4, lq=70, lk=70, mask="padding", pair_bias="b1hqk"),
    Case("mask_and_both_biases", mask="random", **_BOTH),
    Case("no_queries", lq=0, **_BOTH),
    Case("no_keys", lk=0, **_BOTH),
    Case("no_keys_query_bias", lk=0, mask_bias="finite", pair_bias="b1hq1"),
    Case("no_rows", n=0, **_BOTH),
    Case("one_query", lq=1, lk=40, **_BOTH),
    Case("more_queries", lq=50, lk=19, **_BOTH),
    Case("more_keys", lq=19, lk=50, **_BOTH),
    Case("few_queries_many_channels", n=3, h=4, lq=2, lk=47, d=40, c=32),
    Case("few_queries_few_values", lead=(2,), n=17, h=4, lq=16, lk=47, d=40, c=8),
    Case("few_queries_wide_values", n=2, h=2, lq=5, lk=33, d=64, c=32),
    Case(
        "one_query_of_keys_bias",
        lead=(2,),
        n=2,
        h=2,
        lq=1,
        lk=33,
        d=24,
        c=40,
        pair_bias="11h1k",
        cotangent="expanded",
        gradients=("k", "v", "pair_bias"),
    ),
    Case("wider_values", c=24, **_BOTH),
    Case("narrower_values", d=24, c=8, **_BOTH),
    *(Case(f"channels_{d}", d=d, **_BOTH) for d in (1, 5, 16, 24, 32, 48, 64, 80, 128, 256)),
    Case("rows_without_keys", n=4, mask="empty_rows", pair_bias="b1hqk", lse_gradient=True),
    Case("rows_without_keys_and_bias", n=4, mask="empty_rows", **_BOTH),
    Case("rows_of_minus_inf", n=4, mask_bias="minus_inf_rows", pair_bias="b1hqk", lse_gradient=True),
    Case("rows_of_minus_1e9", n=4, mask_bias="minus_1e9_rows", pair_bias="b1hqk", lse_gradient=True),
    Case("mask_bias_minus_1e9", mask_bias="minus_1e9", pair_bias="b1hqk"),
    Case("mask_bias_minus_inf", mask_bias="minus_inf", pair_bias="b1hqk"),
    Case("pair_bias_minus_inf", pair_bias="b1hqk", pair_fill=True, lse_gradient=True),
    Case("pair_bias_minus_1e9_rows", mask="random", pair_bias="b1hqk", pair_fill="minus_1e9_rows", lse_gradient=True),
    Case("pair_bias_large_in_the_padding", mask="padding", pair_bias="b1hqk", pair_fill="last_key_1e4", lse_gradient=True),
    Case(
        "pair_bias_minus_1e9_where_keys_are_left",
        n=16,
        h=4,
        lq=11,
        lk=10,
        d=1,
        mask_bias="lowest",
        pair_bias="11hqk",
        pair_fill="minus_1e9",
    ),
    # Whole tiles of keys that are switched off come before the others: windows of atoms begin so.
    Case("mask_bias_minus_1e10_first", n=2, h=2, lq=40, lk=300, mask_bias="minus_1e10_first", lse_gradient=True),
    Case(
        "pair_bias_minus_1e10_first",
        n=1,
        h=2,
        lq=32,
        lk=300,
        d=32,
        pair_bias="b1hqk",
        pair_fill="minus_1e10_first",
        lse_gradient=True,
    ),
    Case("pair_bias_lowest_rows", mask="random", pair_bias="b1hqk", pair_fill="lowest_rows", lse_gradient=True),
    Case("lse_far_from_zero", spread=60.0, **_BOTH, lse_gradient=True),
    Case("lse_gradient", **_BOTH, lse_gradient=True),
    Case("wide_bias", bias_dtype=torch.float32, **_BOTH),
    Case("expanded_cotangent", cotangent="expanded", **_BOTH),
    Case("transposed", strides="transposed", **_BOTH),
    Case("sliced", strides="sliced", **_BOTH),
    Case("permuted_pair", strides="permuted_pair", **_BOTH),
    Case("offset", strides="offset", d=32, lse_gradient=True, **_BOTH),
    Case("offset_heads_first", layout="bnhld", strides="offset", d=32, lq=70, lk=70, **_BOTH),
    Case("heads_first", layout="bnhld", **_BOTH),
    Case("heads_first_transposed", layout="bnhld", strides="transposed", **_BOTH),
    Case("batch_2", lead=(2,), **_BOTH),
    Case("batch_2_pair_bias_of_1", lead=(2,), mask_bias="finite", pair_bias="11hqk"),
    Case("no_batch_axis", lead=(), mask_bias="finite", pair_bias="1hqk"),
    Case("two_batch_axes", lead=(2, 3), mask_bias="finite", pair_bias="b1hqk"),
    Case("pair_bias_of_each_row", lead=(2,), mask_bias="finite", pair_bias="bnhqk"),
    Case("pair_bias_of_rows_alone", lead=(2,), mask_bias="finite", pair_bias="1nhqk"),
    Case("pair_bias_without_heads", mask_bias="finite", pair_bias="b11qk"),
    Case("pair_bias_of_keys", mask_bias="finite", pair_bias="b1h1k"),
    Case("pair_bias_of_queries", mask_bias="finite", pair_bias="b1hq1", lse_gradient=True),
    Case("pair_bias_short", mask_bias="finite", pair_bias="hqk"),
    Case("one_key_head", kv_heads=1, h=4, **_BOTH),
    Case("one_query_one_key_head", lq=1, kv_heads=1, h=4, mask="random", **_BOTH, lse_gradient=True),
    Case("one_query_one_key_head_first", layout="bnhld", lq=1, kv_heads=1, h=4, pair_bias="hqk"),
    Case("own_scale", scale=0.37, **_BOTH),
    Case("negative_scale", scale=-0.5, **_BOTH),
    Case("few_point", n=40, h=4, lq=1, lk=4, d=16, mask="random", gradients=_QKV),
    Case("few_of_all", n=40, lq=3, lk=5, mask="empty_rows", mask_bias="finite", gradients=_QKV, lse_gradient=True),
    Case("few_column", n=30, h=3, lq=4, lk=16, d=24, c=5, layout="bnhld", mask="random", gradients=_QKV),
    Case("few_backward", n=30, h=3, lq=8, lk=13, d=24, c=40, mask="random", mask_bias="finite", gradients=_QKV),
    Case("few_one_query", n=9, lq=1, lk=61, d=16, mask="padding", gradients=_QKV),
    Case("few_without_bias", lead=(2, 3), n=7, lq=5, lk=9, d=40, scale=-0.3, gradients=_QKV, cotangent="expanded"),
    Case("few_minus_inf_rows", n=70, lq=2, lk=2, mask_bias="minus_inf_rows", gradients=_QKV, lse_gradient=True),
    Case("few_minus_1e9_rows", n=70, lq=2, lk=7, mask_bias="minus_1e9_rows", bias_dtype=torch.float32, gradients=_QKV),
    Case("few_offset", n=9, lq=4, lk=8, d=32, strides="offset", mask="random", mask_bias="finite", gradients=_QKV),
    Case("few_transposed", n=9, lq=4, lk=8, d=32, strides="transposed", mask="random", gradients=_QKV),
    Case("few_sliced", n=9, lq=4, lk=8, d=33, strides="sliced", mask_bias="finite", gradients=_QKV, spread=60.0),
    Case("few_with_all_gradients", n=9, lq=4, lk=8, mask="random", mask_bias="finite"),
    *(Case(f"few_only_{name}", n=5, lq=6, lk=3, mask_bias="finite", gradients=(name,)) for name in ("q", "k", "v")),
    *(Case(f"only_{name}", gradients=(name,), **_BOTH) for name in ("q", "k", "v", "mask_bias", "pair_bias")),
    *(Case(f"gate_length_{size}", n=2, lq=size, lk=size, gate="random", **_BOTH) for size in (15, 16, 17, 100)),
    *(Case(f"gate_channels_{d}", d=d, gate="random", pair_bias="b1hqk") for d in (5, 16, 24, 32, 64)),
    Case("gate_alone", lq=33, lk=33, gate="random"),
    Case("gate_large", gate="large", **_BOTH, lse_gradient=True),
    Case("gate_heads_first", layout="bnhld", gate="random", mask="random", **_BOTH),
    Case("gate_transposed", gate="random", gate_strides="transposed", **_BOTH),
    Case("gate_heads_first_transposed", layout="bnhld", gate="random", gate_strides="transposed", pair_bias="b1hqk"),
    Case("gate_sliced", gate="large", gate_strides="sliced", strides="sliced", **_BOTH),
    Case("gate_offset", gate="random", strides="offset", d=32, **_BOTH),
    Case("gate_of_one_row", n=4, gate="random", gate_strides="expanded_rows", **_BOTH),
    Case("gate_of_one_channel", gate="large", gate_strides="expanded_channels", pair_bias="b1hqk"),
    Case("gate_expanded_cotangent", gate="random", cotangent="expanded", **_BOTH, lse_gradient=True),
    Case("gate_wider_values", c=24, gate="random", **_BOTH),
    Case("gate_rows_without_keys", n=4, gate="random", mask="empty_rows", pair_bias="b1hqk", lse_gradient=True),
    Case("gate_no_queries", lq=0, gate="random", **_BOTH),
    Case("gate_no_keys", lk=0, gate="random", **_BOTH),
    Case("gate_no_batch_axis", lead=(), gate="random", pair_bias="1hqk"),
    Case("gate_two_batch_axes", lead=(2, 3), gate="random", mask_bias="finite", pair_bias="b1hqk"),
    Case("gate_pair_bias_of_each_row", lead=(2,), gate="random", pair_bias="bnhqk"),
    Case("gate_one_query_one_key_head", lq=1, kv_heads=1, h=4, gate="random", mask="random", lse_gradient=True),
    Case("gate_few", n=40, h=4, lq=1, lk=4, d=16, gate="random", mask="random"),
    Case("gate_few_column", n=30, h=3, lq=4, lk=16, d=24, c=5, layout="bnhld", gate="large", mask="random"),
    Case("gate_without_its_gradient", gate="random", gradients=_FIVE, **_BOTH),
    *(Case(f"gate_only_{name}", gate="random", gradients=(name,), **_BOTH) for name in GRADIENTS),
)
"""Cases that broke other kernels. Every backend must take them, in every dtype that it takes."""
