"""The plan of a forward: what is launched, and what a call does around it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

from evoattn.backends import GATED_FORWARD, Description, Plan
from evoattn.backends.triton.few_plan import plan_forward_few
from evoattn.backends.triton.kernels.forward import Variant, forward_kernel
from evoattn.backends.triton.key_bias_plan import KeyBias, key_bias_views, plan_key_bias
from evoattn.backends.triton.pair_copies_plan import COPIED, aligned_copy, needs_copy
from evoattn.backends.triton.tiles.few import few_tiles
from evoattn.backends.triton.tiles.forward import LEFT_OVER_WARPS, forward_tiles
from evoattn.backends.triton.tiles.limits import Tiles
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.inputs import Inputs, Outputs
from evoattn.core.problem import Problem, describe
from evoattn.core.sizes import MIN_TILE, power_of_two
from evoattn.kit import cards, halves
from evoattn.kit.arguments import Sizes, pair_view, view
from evoattn.kit.launch import Launch, tensor_map
from evoattn.kit.overlap import overlap
from evoattn.kit.strides import Strided, empty, grain, is_long, loads_vectors, split, strided

HAS_TENSOR_MAPS = importlib.util.find_spec("triton.tools.tensor_descriptor") is not None
"""True if this Triton has descriptors that the host makes; 3.3, which goes with torch 2.7, has none."""


@dataclasses.dataclass(frozen=True)
class ForwardLaunches:
    """The launches of a call. Call it with the tensors, and with o, lse and reference to write.

    Args:
        key_bias: the mask and the mask bias in one, if there are any.
        pair: the pair bias of the caller.
        pair_copy: a copy of it that loads 16 bytes at a time, if one pays.
        launches: of the kernel.
    """

    key_bias: KeyBias | None
    pair: Strided | None
    pair_copy: Strided | None
    launches: tuple[Launch, ...]

    def __call__(self, inputs: Inputs, outputs: Outputs) -> None:
        q, k, v, mask, mask_bias, pair, gate = inputs
        o, lse, reference = outputs
        if pair is not None and self.pair is not None and self.pair_copy is not None:
            pair = empty(self.pair_copy, q.device).copy_(pair.as_strided(self.pair.shape, self.pair.stride))
        key_bias = runs = lse  # absent tensors get any address, which is never read
        if self.key_bias is not None:
            key_bias, runs = self.key_bias.allocate()
            self.key_bias.launch(*(key_bias if x is None else x for x in (mask, mask_bias)), key_bias, runs)
        for launch in self.launches:
            launch(q, k, v, key_bias, runs, q if pair is None else pair, o, lse, reference, o if gate is None else gate)


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """Plan o [b,n,h,q,c], contiguous in `layout`, lse and reference [b,n,h,q] of canonical tensors with these strides."""
    q, _, _, mask, mask_bias, pair_bias, gate = inputs
    problem = dataclasses.replace(describe(inputs), capability=cards.capability(q.device))
    if problem.scores == 0:
        return Plan(lambda inputs, outputs: outputs.clear(), Description)
    gated = None if gate is None else GATED_FORWARD
    few = few_tiles("forward", problem, config)
    if few is not None:
        run = plan_forward_few(inputs, few, scale=scale, layout=layout)
        return Plan(run, functools.partial(Description, Config(num_warps=few.num_warps), gate=gated))
    tiles = forward_tiles(problem, config, cards.shared_memory_limit(q.device))
    key_bias = None
    if mask is not None or mask_bias is not None:
        key_bias = plan_key_bias(mask, mask_bias, problem.lk, q.device, tiles.block_k, scale)
    pair = None if pair_bias is None else strided(pair_bias)
    pair_copy = aligned_copy(pair) if pair is not None and needs_copy(pair, problem.n) else None
    launches = _launches(problem, tiles, inputs, pair_copy or pair, key_bias, scale, layout)
    prepared = () if key_bias is None else (key_bias.launch,)
    overlap(q.device, *((launch, ()) for launch in prepared), *((launch, prepared) for launch in launches))
    description = functools.partial(
        Description,
        Config(block_q=tiles.block_q, block_k=tiles.block_k, num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        copies=() if pair_copy is None else (COPIED,),
        gate=gated,
        tuned="forward" if tuned_tiles.is_tuned("triton", "forward", problem, config) else None,
    )
    return Plan(ForwardLaunches(key_bias, pair, pair_copy, launches), description)


def _launches(
    problem: Problem, tiles: Tiles, inputs: Inputs, pair: Strided | None, key_bias: KeyBias | None, scale: float, layout: str
) -> tuple[Launch, ...]:
    """One launch for all queries, or two if a smaller tile holds those that are left over."""
    b, n, h, lq, lk, d, c = problem.b, problem.n, problem.h, problem.lq, problem.lk, problem.d, problem.c
    qkv = [strided(x) for x in inputs.qkv]
    gate = None if inputs.gate is None else strided(inputs.gate)
    maps = HAS_TENSOR_MAPS and problem.capability is not None and problem.capability[0] == 9
    maps = maps and pair is not None and loads_vectors(pair) and pair.shape[-2:] == (lq, lk) and pair.stride[-2] > 0
    grain_qkv, grain_gate = grain(*qkv), 1 if gate is None else grain(gate)
    grain_pair = 1 if maps else grain(pair)  # a map needs none: one variant less for every length
    variant = Variant(
        D=d,
        C=c,
        BLOCK_D=power_of_two(d),
        BLOCK_C=power_of_two(c),
        BLOCK_Q=tiles.block_q,
        BLOCK_K=tiles.block_k,
        TAIL_K=tiles.block_k,
        STAGES=tiles.num_stages,
        GRAIN=grain_qkv,
        GRAIN_PAIR=grain_pair,
        GRAIN_GATE=grain_gate,
        HAS_PAIR=pair is not None,
        HAS_KEY_BIAS=key_bias is not None,
        HAS_GATE=gate is not None,
        EVEN_K=lk % tiles.block_k == 0,
        HEADS_INSIDE=layout == "bnlhd",
        TENSOR_MAP=maps,
        FOLD=cards.folds(scale),
        PRECISION=_precision(problem),
        LONG=is_long(*qkv, pair, gate),
    )
    # A pair bias that no map loads takes more registers, for addresses: with a limit they would spill.
    limit = {"maxnreg": tiles.max_registers} if tiles.max_registers and (pair is None or maps) else {}
    views = {name: view(x, grain_qkv) for name, x in zip("qkv", qkv, strict=True)}
    launches = []
    for first_q, queries, block_q in split(lq, tiles.block_q):
        blocks, full = -(-queries // block_q), block_q == tiles.block_q
        block = (1, 1, block_q, tiles.block_k)
        launch = forward_kernel.plan(
            blocks * n * h * b,
            **views,
            **key_bias_views(key_bias),
            pair=pair_view(pair, grain_pair),
            gate=view(gate, grain_gate),
            sizes=Sizes(n, h, lq, lk, scale),
            first_q=first_q,
            blocks=blocks,
            V=variant._replace(BLOCK_Q=block_q, TAIL_K=tail(lk, tiles) if full else tiles.block_k),
            num_warps=tiles.warps(block_q, LEFT_OVER_WARPS),
            num_stages=tiles.num_stages,
            through_map=tensor_map(forward_kernel.tensors.index("pair_p"), pair, block) if pair is not None and maps else None,
            **(limit if full else {}),
        )
        launches.append(launch)
    return tuple(launches)


def _precision(problem: Problem) -> str:
    """Scores of float32 are three products of float16 in place of three of TF32: half the instructions, nearer to float64."""
    precision = cards.split_precision(problem.dtype, max(problem.d, problem.c))
    return halves.PRECISION if precision == "tf32x3" else precision


def tail(lk: int, tiles: Tiles) -> int:
    """Keys of the ragged last tile: half of a full one if that holds what is left over.

    Not if warps share queries: the half could then break the rule of `tiles.limits`.
    """
    half = tiles.block_k // 2
    is_enough = half >= MIN_TILE and 0 < lk % tiles.block_k <= half and tiles.block_q >= MIN_TILE * tiles.num_warps
    return half if is_enough else tiles.block_k
