"""The pair bias in the backward: copies that each kernel loads best, and its gradient from partial sums to the result.

The result's memory is written last. Until then it holds a transposed copy of the bias for the dK and dV kernel, which loads
tiles [k,q]: without it that kernel takes .305 ms instead of .249 at tri384 on an H200.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from evoattn.backends.triton.backward_call import BackwardCall, round_up
from evoattn.backends.triton.kernels.backward import PAD
from evoattn.backends.triton.pair_copies_plan import COPIED, ROWS_WORTH_A_COPY, PairCopy, plan_pack
from evoattn.backends.triton.pair_in_order import InOrder, plan_in_order
from evoattn.backends.triton.tiles.limits import Tiles
from evoattn.kit.strides import Strided, contiguous, empty, loads_vectors

_OUTPUTS_OF_A_COPY = 100
"""The outputs must be this many times as large as a copy of the pair bias that needs its own memory."""


@dataclasses.dataclass(frozen=True)
class PairBias:
    """The pair bias of a call and its gradient.

    Args:
        call: the call.
        bias: the caller's, [b|1,h|1,q|1,k|1]; None without one, and then all other fields have their defaults.
        result: its gradient, if that is wanted.
        mode: PAIR_MODE of the dQ kernel.
        straight, transposed: copies.
        reuses: whether the result's memory holds the transposed copy until `finish`.
        sums: memory to which partial sums are added, if it is not the result.
        in_order: the kernel of a fixed order of summation.
    """

    call: BackwardCall
    bias: Strided | None = None
    result: Strided | None = None
    mode: str = "none"
    straight: PairCopy | None = None
    transposed: PairCopy | None = None
    reuses: bool = False
    sums: Strided | None = None
    in_order: InOrder | None = None

    @property
    def full_q(self) -> bool:
        """Return whether the bias varies along queries."""
        return self.bias is not None and self.bias.shape[2] == self.call.problem.lq

    @property
    def full_k(self) -> bool:
        """Return whether the bias varies along keys."""
        return self.bias is not None and self.bias.shape[3] == self.call.problem.lk

    @property
    def by_query(self) -> Strided | None:
        """The bias that kernels load if their programs own queries."""
        return self.bias if self.straight is None else self.straight.tensor

    @property
    def by_key(self) -> Strided | None:
        """The bias that the kernel loads whose programs own keys."""
        return self.by_query if self.transposed is None else self.transposed.tensor

    def needs_mask(self, view: Strided | None, tile: Tiles) -> bool:
        """Return whether loads of this view need a mask, as those of the caller's bias if its last tiles are not full."""
        problem = self.call.problem
        return view is not None and view is self.bias and bool(problem.lq % tile.block_q or problem.lk % tile.block_k)

    def copies(self) -> tuple[str, ...]:
        """The copies of the bias, in words."""
        words = []
        if self.straight is not None and self.bias is not None:
            words.append("pair_bias: padded to whole tiles once a backward" if loads_vectors(self.bias) else COPIED)
        if self.transposed is not None:
            words.append("pair_bias: transposed once a backward, for dK and dV")
        return tuple(words)

    def allocate(self, bias: Tensor | None) -> dict[str, Tensor | None]:
        """The memory of a run, whose sums are cleared: the bias as kernels load it, its gradient, and what that is made from.

        `distant` is one float32 number, not 0 if a query has a reference (`backward.store_statistics`). `pair_sums` may be
        dpair_bias itself.
        """
        if bias is None:
            return dict.fromkeys(("by_query", "by_key", "distant", "pair_sums", "dpair_bias", "spans", "shares"))
        device = self.call.device
        by_query = bias if self.straight is None else empty(self.straight.tensor, device)
        by_key = by_query if self.transposed is None else empty(self.transposed.tensor, device)
        result, sums, distant = None, None, None
        if self.result is not None:
            if self.mode == "add":
                sums, distant = self._zeros(self.result if self.sums is None else self.sums)
            if self.reuses:
                result = by_key.as_strided(*self.result[:2])
            else:
                result = sums if self.mode == "add" and self.sums is None else empty(self.result, device)
            if self.mode == "store":
                # Tiles that a mask switches off are not visited.
                sums = result.zero_() if self.call.key_bias is not None and result is not None else result
        if distant is None:
            distant = torch.zeros(1, dtype=torch.float32, device=device)
        spans, shares = (None, None) if self.in_order is None else self.in_order.allocate()
        return {
            "by_query": by_query,
            "by_key": by_key,
            "distant": distant,
            "pair_sums": sums,
            "dpair_bias": result,
            "spans": spans,
            "shares": shares,
        }

    def _zeros(self, like: Strided) -> tuple[Tensor, Tensor]:
        """Zeros for a record that has no gaps, and `distant`, in one piece of memory."""
        behind = round_up(math.prod(like.shape), PAD)
        memory = torch.zeros(behind + 1, dtype=torch.float32, device=self.call.device)
        return memory.as_strided(like.shape, like.stride), memory.as_strided((1,), (1,), behind)

    def finish(self, tensors: dict[str, Tensor]) -> Tensor | None:
        """The gradient in the bias's shape and dtype."""
        if self.result is None:
            return None
        result, sums = tensors["dpair_bias"], tensors["pair_sums"]
        if self.in_order is not None:
            return self.in_order.finish(tensors["shares"], result)
        return result if sums is result else result.copy_(sums.as_strided(result.shape, sums.stride()))


def plan_pair(call: BackwardCall, bias: Strided | None) -> PairBias:
    """Plan which copies of the pair bias pay, and which memory its gradient is summed in."""
    problem, tile = call.problem, call.tiles.dq
    pair = PairBias(call, bias)
    if bias is None:
        return pair
    full = pair.full_q and pair.full_k
    wanted = problem.needs.pair_bias
    stored = full and bias.shape[:2] == (problem.b, problem.h) and problem.n == 1  # nothing is to be summed
    pair = dataclasses.replace(pair, result=contiguous(bias.shape, bias.dtype) if wanted else None)
    if full and problem.n >= ROWS_WORTH_A_COPY:
        pair = _with_copies(pair, bias, reuse=wanted and not stored)
    if not wanted:
        return pair
    if stored:
        return dataclasses.replace(pair, mode="store")
    if problem.deterministic:
        in_order = plan_in_order(call, bias, pair.by_query, masked=pair.needs_mask(pair.by_query, call.tiles.pair))
        return dataclasses.replace(pair, in_order=in_order)
    unread = tile.block_q if call.key_bias is not None else 0  # rows without a live key add to these lines
    size_q = round_up(problem.lq, tile.block_q) + unread if pair.full_q else 1
    size_k = round_up(problem.lk, tile.block_k) if pair.full_k else 1
    same = bias.dtype == torch.float32 and (size_q, size_k) == bias.shape[2:]
    sums = None if same else contiguous((*bias.shape[:2], size_q, size_k), torch.float32)
    return dataclasses.replace(pair, mode="add", sums=sums)


def _with_copies(pair: PairBias, bias: Strided, *, reuse: bool) -> PairBias:
    """The same with copies. reuse: the memory of the result is free until it is written."""
    problem, tiles = pair.call.problem, pair.call.tiles
    each = (tiles.dq, tiles.dkdv, tiles.pair)
    size_q = round_up(problem.lq, max(tile.block_q for tile in each))
    size_k = round_up(problem.lk, max(tile.block_k for tile in each))
    if (size_q, size_k) != (problem.lq, problem.lk) or not loads_vectors(bias):
        pair = dataclasses.replace(pair, straight=plan_pack(bias, size_q, size_k, transpose=False))
    numel = bias.shape[0] * bias.shape[1] * size_q * size_k
    outputs = problem.b * problem.n * problem.h * (problem.lq + problem.lk) * (problem.d + problem.c)
    inside = reuse and bias.dtype.itemsize == 2
    if not inside and numel * bias.dtype.itemsize * _OUTPUTS_OF_A_COPY > outputs * problem.dtype.itemsize:
        return pair
    return dataclasses.replace(pair, transposed=plan_pack(bias, size_q, size_k, transpose=True), reuses=inside)
