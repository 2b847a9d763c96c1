"""The facts from which the kernels of a backward are planned: sizes, strides, tiles, and arguments that follow from them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from evoattn.backends.triton.kernels.backward import PAD, CallConstants, Stats
from evoattn.backends.triton.key_bias_plan import KeyBias, key_bias_views, plan_key_bias
from evoattn.backends.triton.tiles.backward import BackwardTiles
from evoattn.backends.triton.tiles.limits import Tiles
from evoattn.core import layouts
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.problem import Needs, Problem
from evoattn.core.sizes import power_of_two
from evoattn.kit import cards
from evoattn.kit.arguments import Sizes, view
from evoattn.kit.strides import Strided, contiguous, grain, is_long, strided


class GateTensors(NamedTuple):
    """The gate in the statistics kernel. Tensors are [b,n,h,q,c].

    Args:
        gate: before the sigmoid.
        do: the cotangent of the gated o.
        written: strides of do * sigmoid(gate), which later kernels read in the place of do, and of the gradient of the gate.
        needs_do, needs_dgate: which of the two are written.
    """

    gate: Strided
    do: Strided
    written: Strided
    needs_do: bool
    needs_dgate: bool


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """One backward call before its tensors.

    Args:
        do: what the kernels multiply: the cotangent of O or, with a gate, do * sigmoid(gate) of the statistics kernel.
        stats: [2, b, n, h, padded_q]: lse and delta; with a pair bias [4, ...], see `backward.store_statistics`.
        key_bias: mask and mask bias, if there are any, or if a key tile reaches past the end.
        heads_inside: whether gradients are [b,n,l,h,c] in memory.
        gate: what the statistics kernel does with a gate, if there is one and O has a cotangent.
    """

    problem: Problem
    tiles: BackwardTiles
    device: torch.device
    qkv: tuple[Strided, Strided, Strided]
    o: Strided
    do: Strided
    dlse: Strided | None
    stats: Strided
    key_bias: KeyBias | None
    scale: float
    heads_inside: bool
    gate: GateTensors | None

    @property
    def grain(self) -> int:
        """Of q, k, v, do and o."""
        return grain(*self.qkv, self.do, self.o)

    def arguments(self, tiles: Tiles, *others: Strided | None) -> dict[str, Any]:
        """The arguments that all kernels have, and Triton's options; `others`: more tensors, whose offsets may be long."""
        problem = self.problem
        tensors = zip(("q", "k", "v", "dO"), (*self.qkv, self.do), strict=True)
        tile = CallConstants(
            D=problem.d,
            C=problem.c,
            BLOCK_D=power_of_two(problem.d),
            BLOCK_C=power_of_two(problem.c),
            BLOCK_Q=tiles.block_q,
            BLOCK_K=tiles.block_k,
            STAGES=tiles.num_stages,
            GRAIN=self.grain,
            HAS_KEY_BIAS=self.key_bias is not None,
            EVEN_Q=problem.lq % tiles.block_q == 0,
            EVEN_K=problem.lk % tiles.block_k == 0,
            FOLD=cards.folds(self.scale),
            PRECISION=cards.split_precision(problem.dtype, max(problem.d, problem.c)),
            HEADS_INSIDE=self.heads_inside,
            # Strides of tensors, or the way from an lse to its delta.
            LONG=is_long(*self.qkv, self.do, self.o, *others) or self.stats.stride[0] >= 1 << 31,
        )
        limit = {"maxnreg": tiles.max_registers} if tiles.max_registers and not cards.on_amd() else {}
        return {
            **{name: view(tensor, self.grain) for name, tensor in tensors},
            "stats": Stats(None, None, self.stats.shape[-1] // PAD, self.stats.stride[0] // PAD),
            "key_bias": key_bias_views(self.key_bias, PAD)["key_bias"],
            "sizes": Sizes(problem.n, problem.h, problem.lq, problem.lk, self.scale),
            "T": tile,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            **limit,
        }


def describe_call(
    problem: Problem,
    tiles: BackwardTiles,
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
) -> BackwardCall:
    """The call of canonical tensors with these strides."""
    (do, dlse), (o, lse, _), each = cotangents, outputs, (tiles.dq, tiles.dkdv, tiles.pair)
    q, k, v, mask, mask_bias, *_ = inputs
    gate = gate_pass(cotangents, inputs, outputs, layout, problem.needs)
    do_strides = Strided(tuple(o.shape), (0,) * 5, o.dtype) if do is None else strided(do)
    padded_q = round_up(problem.lq, max(tile.block_q for tile in each))
    key_bias = None
    if mask is not None or mask_bias is not None or any(problem.lk % tile.block_k for tile in each):
        key_bias = plan_key_bias(mask, mask_bias, problem.lk, q.device, tiles.dq.block_k, scale)
    return BackwardCall(
        problem=problem,
        tiles=tiles,
        device=q.device,
        qkv=(strided(q), strided(k), strided(v)),
        o=strided(o),
        do=do_strides if gate is None else gate.written,
        dlse=None if dlse is None else strided(dlse),
        stats=contiguous((2 if inputs.pair_bias is None else 4, *lse.shape[:3], padded_q), torch.float32),
        key_bias=key_bias,
        scale=scale,
        heads_inside=layout == "bnlhd",
        gate=gate,
    )


def gate_pass(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, layout: str, needs: Needs) -> GateTensors | None:
    """Plan the gate in the statistics kernel; None without one, and if o has no cotangent, so that its gradient is 0."""
    if inputs.gate is None or cotangents.do is None:
        return None
    written = strided(layouts.empty(outputs.o.shape, layout, outputs.o, "meta"))
    return GateTensors(strided(inputs.gate), strided(cotangents.do), written, any(needs._replace(gate=False)), needs.gate)


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not below length."""
    return -(-length // multiple) * multiple
