"""Plans the forward pass: what is launched, on what, and what a call makes around it."""

from __future__ import annotations

import dataclasses
import functools

from evoattn.backends import GATED_FORWARD, Description, Plan
from evoattn.backends.triton import launch
from evoattn.backends.triton.arguments import RowView, pair_view, view
from evoattn.backends.triton.few import plan_forward_few
from evoattn.backends.triton.fwd import Results, Sizes, Variant, forward_kernel
from evoattn.backends.triton.launch import Launch, Strided, strided
from evoattn.backends.triton.overlap import overlap
from evoattn.backends.triton.prepare import COPIED, RowBias, copied, loads_wide, needs_copy, plan_rows
from evoattn.backends.triton.release import TENSOR_MAPS
from evoattn.backends.triton.tiles.few import few_tiles
from evoattn.backends.triton.tiles.forward import LEFT_OVER_WARPS, ForwardTiles, forward_tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs, Outputs
from evoattn.core.problem import Problem, describe
from evoattn.core.sizes import MIN_TILE

__all__ = ["plan_forward"]

_LOG2E = 1.4426950408889634

_PAIR_ARGUMENT = 5
"""Where p_pair stands among the kernel's arguments."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """The launches of a call. Call it with the tensors, and with o, lse and reference to write.

    Args:
        tiles: of the kernel.
        tuned: whether `evoattn tune` found them on this machine.
        rows: makes the row bias, where there is a mask or a mask bias.
        pair: the pair bias as it is given.
        copy_pair: with rows that load wide, where it is copied to such rows first.
        launches: of the kernel.
        gate: what it does with a gate, where there is one.
    """

    tiles: ForwardTiles
    tuned: bool
    rows: RowBias | None
    pair: Strided | None
    copy_pair: Strided | None
    launches: tuple[Launch, ...]
    gate: str | None

    def describe(self) -> Description:
        """See `evoattn.backends`."""
        tiles = self.tiles
        config = Config(block_q=tiles.block_q, block_k=tiles.block_k, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
        copies = () if self.copy_pair is None else (COPIED,)
        return Description(config, copies=copies, gate=self.gate, tuned="forward" if self.tuned else None)

    def __call__(self, inputs: Inputs, outputs: Outputs) -> None:
        q, k, v, mask, mask_bias, pair_bias, gate = inputs
        o, lse, reference = outputs
        p_pair = q
        if pair_bias is not None:
            p_pair = pair_bias
            if self.copy_pair is not None and self.pair is not None:
                p_pair = launch.empty(self.copy_pair, q.device)
                p_pair.copy_(pair_bias.as_strided(self.pair.shape, self.pair.stride))
        row = runs = lse  # stands in for what is not given: never read
        if self.rows is not None:
            row, runs = self.rows(mask, mask_bias)
        for start in self.launches:
            start(q, k, v, row, runs, p_pair, o, lse, reference, o if gate is None else gate)


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """What computes o [b,n,h,q,c], contiguous in `layout`, lse and reference [b,n,h,q] of tensors that lie like these."""
    q, k, v, mask, mask_bias, pair_bias, gate = inputs
    n, lk = q.shape[1], k.shape[-2]
    if q.shape[:-1].numel() == 0 or lk == 0:
        return Plan(_nothing if q.shape[:-1].numel() == 0 else _no_keys, Description)
    pair = None if pair_bias is None else strided(pair_bias)
    copy_pair = copied(pair) if pair is not None and needs_copy(pair, n) else None
    fold = launch.folds(scale)
    told = None if gate is None else GATED_FORWARD
    problem = dataclasses.replace(describe(inputs), capability=launch.capability(q.device))
    few = few_tiles("forward", problem, config)
    if few is not None:
        run = plan_forward_few(inputs, few, scale=scale, layout=layout)
        return Plan(run, functools.partial(Description, Config(num_warps=few.num_warps), gate=told))
    tiles = forward_tiles(problem, config, launch.shared_memory_limit(q.device))
    rows = None
    if mask is not None or mask_bias is not None:
        rows = plan_rows(mask, mask_bias, lk, q.device, tiles.block_k, unit=scale * _LOG2E if fold else 1.0)
    launches = _launches(
        problem,
        tiles,
        (strided(q), strided(k), strided(v)),
        copy_pair or pair,
        None if gate is None else strided(gate),
        rows,
        scale,
        fold,
        heads_inside=layout == "bnlhd",
    )
    row = None if rows is None else rows.launch
    overlap(q.device, (row, ()), *((start, (row,)) for start in launches))
    tuned = tuned_tiles.is_tuned("triton", "forward", problem, config)
    forward = Forward(tiles, tuned, rows, pair, copy_pair, launches, told)
    return Plan(forward, forward.describe)


def _launches(
    problem: Problem,
    tiles: ForwardTiles,
    qkv: tuple[Strided, Strided, Strided],
    pair: Strided | None,
    gate: Strided | None,
    rows: RowBias | None,
    scale: float,
    fold: bool,
    *,
    heads_inside: bool,
) -> tuple[Launch, ...]:
    b, n, h, lq, lk, d, c = problem.b, problem.n, problem.h, problem.lq, problem.lk, problem.d, problem.c
    grain = launch.grain(*qkv)
    maps = (
        TENSOR_MAPS
        and problem.capability is not None
        and problem.capability[0] == 9
        and pair is not None
        and loads_wide(pair)
        and pair.shape[-2:] == (lq, lk)
        and pair.stride[-2] > 0
    )
    grain_pair = 1 if maps else launch.grain(pair)  # a map needs none: one variant less for every length
    grain_gate = 1 if gate is None else launch.grain(gate)
    variant = Variant(
        D=d,
        C=c,
        BLOCK_D=launch.head_block(d),
        BLOCK_C=launch.head_block(c),
        BLOCK_Q=tiles.block_q,
        BLOCK_K=tiles.block_k,
        TAIL_K=tiles.block_k,
        STAGES=tiles.num_stages,
        GRAIN=grain,
        GRAIN_PAIR=grain_pair,
        GRAIN_GATE=grain_gate,
        HAS_PAIR=pair is not None,
        HAS_ROW=rows is not None,
        HAS_GATE=gate is not None,
        EVEN_K=lk % tiles.block_k == 0,
        HEADS_INSIDE=heads_inside,
        TENSOR_MAP=maps,
        FOLD=fold,
        PRECISION=launch.split_precision(problem.dtype, max(d, c)),
        WIDE=launch.is_wide(*qkv, pair, gate),
    )
    # A pair bias that no map brings takes more registers, for addresses: with a limit they would spill.
    limit = {"maxnreg": tiles.max_registers} if tiles.max_registers and (pair is None or maps) else {}
    q, k, v = (view(x, grain) for x in qkv)
    row_strides = (0, 0, 0, 0) if rows is None else rows.strides
    launches = []
    for first_q, queries, block_q in launch.split(lq, tiles.block_q):
        blocks = -(-queries // block_q)
        through_map = None
        if pair is not None and maps:
            through_map = (_PAIR_ARGUMENT, launch.tensor_map(pair, (1, 1, block_q, tiles.block_k)))
        whole = block_q == tiles.block_q
        start = forward_kernel.plan(
            blocks * n * h * b,
            q=q,
            k=k,
            v=v,
            row=RowView(None, *row_strides[:2]),
            runs=RowView(None, *row_strides[2:]),
            pair=pair_view(pair, grain_pair),
            out=Results(None, None, None),
            gate=view(gate, grain_gate),
            sizes=Sizes(n, h, lq, lk, first_q, blocks, scale),
            V=variant._replace(BLOCK_Q=block_q, TAIL_K=_tail(lk, tiles) if whole else tiles.block_k),
            num_warps=tiles.warps(block_q, LEFT_OVER_WARPS),
            num_stages=tiles.num_stages,
            through_map=through_map,
            **(limit if whole else {}),
        )
        launches.append(start)
    return tuple(launches)


def _tail(lk: int, tiles: ForwardTiles) -> int:
    """Keys of the ragged last tile: half of a whole one where that holds what is left over.

    Not where warps share queries: the half could then break the rule of `tiles.limits`.
    """
    half = tiles.block_k // 2
    halves = half >= MIN_TILE and 0 < lk % tiles.block_k <= half and tiles.block_q >= MIN_TILE * tiles.num_warps
    return half if halves else tiles.block_k


def _nothing(inputs: Inputs, outputs: Outputs) -> None:
    """No query: nothing to write."""


def _no_keys(inputs: Inputs, outputs: Outputs) -> None:
    """Queries that attend to nothing, for want of keys."""
    outputs.o.zero_()
    outputs.lse.fill_(float("-inf"))
    outputs.reference.zero_()
