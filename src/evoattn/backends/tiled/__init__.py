"""Memory-efficient attention in plain torch: any device, any dtype, O(L) memory. The default on CPU.

The problem is cut into blocks of batches, rows, heads, queries and keys whose scores fit in `Config.score_bytes`. While rows
are short a block holds several of them with all their keys; when they are long, keys come block by block and the running sum
and output are rescaled as the running maximum m grows:

    first   m = max S            l = sum exp(S - m)                      o = exp(S - m) v
    middle  m' = max(m, max S)   l = l exp(m - m') + sum exp(S - m')     o = o exp(m - m') + exp(S - m') v
    last    sigmoid(gate) o / l  LSE = m + log l

The backward walks the same blocks, recomputes P = exp(S - LSE) from the saved statistic and sums the bias gradients in place.

If all scores of a call on the CPU are few, the call is dense (`dense`), and its backward can start from saved probabilities.

On a CPU threads share the blocks, and each does all operations of a block alone (`evoattn.backends.tiled.threads`).

Scores, statistics and sums are float32 (float64 for float64) whatever the dtype of the inputs, but for dense calls in bfloat16.
In blocks scores are kept in units of log 2: torch's CPU exp2 takes 75 us for 2^20 numbers where exp takes 330, and 1,070 when
a tenth of them are masked.
Source: Rabe and Staats 2021; Dao et al. 2022.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from evoattn.backends import Description, Plan
from evoattn.backends.tiled import dense, threads
from evoattn.backends.tiled.backward import Work, shares
from evoattn.backends.tiled.forward import forward_pieces
from evoattn.backends.tiled.scores import Rows, Scores, spans, statistic, subtrahends
from evoattn.backends.tiled.sizes import TiledPlan, tiled_plan
from evoattn.core import tuned_tiles
from evoattn.core.config import Config
from evoattn.core.devices import without_autocast
from evoattn.core.inputs import Cotangents, Inputs, Outputs, SavedProbabilities
from evoattn.core.layouts import as_planned, empty_gradients, empty_outputs
from evoattn.core.numerics import LOG2E, accumulate_dtype, key_bias
from evoattn.core.problem import Problem, describe

NAME = "tiled"

_SHARES = 2
"""Shares of the backward for each thread. More shares balance the threads better, but hold more sums of bias gradients."""


def availability() -> str | None:
    """Runs wherever torch runs."""
    return None


def unsupported(problem: Problem, config: Config) -> list[str]:
    """Takes every problem; refuses only launch options that mean nothing here."""
    return [
        f"{name}={value} in config: the tiled backend has block_q, block_k and score_bytes alone"
        for name, value in config.given().items()
        if name in ("num_warps", "num_stages")
    ]


def faster(problem: Problem) -> None:
    """Knows of none."""


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """See `evoattn.backends`."""
    blocks = Blocks(describe(inputs), config)
    empty = empty_outputs(inputs, layout, "meta")
    view_inputs, view_outputs, view_o = as_planned(inputs), as_planned(empty), as_planned((empty.o,))

    def run(inputs: Inputs, outputs: Outputs) -> None:
        inputs, outputs = Inputs(*view_inputs(inputs)), Outputs(*view_outputs(outputs))
        if not blocks.dense or dense.forward(inputs, outputs.o, scale, outputs) is None:
            _forward(inputs, outputs, scale, blocks)

    def save_probabilities(inputs: Inputs, o: Tensor) -> SavedProbabilities | None:
        p = dense.forward(Inputs(*view_inputs(inputs)), view_o((o,))[0], scale)
        return None if p is None else SavedProbabilities(o, p)

    saves = without_autocast(inputs.q, save_probabilities) if blocks.dense else None
    return Plan(without_autocast(inputs.q, run), blocks.describe, save_probabilities=saves)


def plan_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs | SavedProbabilities,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, ...],
    deterministic: bool,
    config: Config,
    into: Sequence[Tensor | None] | None = None,
) -> Plan:
    """See `evoattn.backends`. Every sum has a fixed order, so results are bit-equal from run to run by nature."""
    blocks = Blocks(describe(inputs), config)
    wanted = empty_gradients(inputs, layout, needs, "meta") if into is None else into
    views = [as_planned(planned) for planned in (cotangents, inputs, outputs, wanted)]
    saved = isinstance(outputs, SavedProbabilities)

    def run(*given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        cotangents, inputs, outputs, gradients = [view(each) for view, each in zip(views, given, strict=True)]
        tensors = Cotangents(*cotangents), Inputs(*inputs)
        p = outputs[1] if saved else dense.probabilities(tensors[1], scale) if blocks.dense else None
        if p is not None:
            return dense.backward(*tensors, SavedProbabilities(outputs[0], p), gradients, scale, needs)
        return _backward(*tensors, Outputs(*outputs), gradients, scale, needs, blocks)

    return Plan(without_autocast(inputs.q, run), blocks.describe, writes_into=into is not None)


class Blocks:
    """The blocks of a problem, for as many threads as torch has when it runs; on a GPU no work is shared."""

    def __init__(self, problem: Problem, config: Config) -> None:
        self.problem, self.config = problem, config
        self.tuned = tuned_tiles.is_tuned(NAME, "both", problem, config)
        self.dense = not config.given() and not self.tuned and dense.fits(problem)
        self._plans: dict[int, TiledPlan] = {}

    def plan(self) -> TiledPlan:
        """For the threads that there are now."""
        workers = threads.available() if self.problem.device == "cpu" else 1
        if workers not in self._plans:
            self._plans[workers] = tiled_plan(self.problem, self.config, workers)
        return self._plans[workers]

    def rows(self, plan: TiledPlan) -> list[Rows]:
        """The pieces b, n, h; those that share a pair bias come one after another."""
        p = self.problem
        return [(b, n, h) for b, h, n in itertools.product(spans(p.b, plan.b), spans(p.h, plan.h), spans(p.n, plan.n))]

    def describe(self) -> Description:
        """See `evoattn.backends`."""
        return Description(self.plan().config, tuned="both" if self.tuned else None)


def _forward(inputs: Inputs, outputs: Outputs, scale: float, blocks: Blocks) -> None:
    q, _, _, mask, mask_bias, pair_bias, _ = inputs
    if blocks.problem.scores == 0:
        outputs.clear()
        return
    acc, plan = accumulate_dtype(q.dtype), blocks.plan()
    pieces = [(*rows, qs) for rows in blocks.rows(plan) for qs in spans(q.shape[-2], plan.q)]
    workers = min(plan.threads, len(pieces))
    with threads.single_threaded(workers):
        scores = Scores.of(plan, scale, key_bias(mask, mask_bias, acc), pair_bias, acc)
        threads.share(pieces, lambda own: forward_pieces(own, scores, inputs, outputs), workers)
        if scores.plain:
            for saved, value in zip(outputs[1:], statistic(outputs.reference, outputs.lse, None), strict=True):
                saved.copy_(value)


def _backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    gradients: Sequence[Tensor | None],
    scale: float,
    needs: tuple[bool, ...],
    blocks: Blocks,
) -> tuple[Tensor | None, ...]:
    q, k, v, mask, mask_bias, pair_bias, gate = inputs
    acc = accumulate_dtype(q.dtype)
    biases = [bias if need else None for bias, need in zip((mask_bias, pair_bias), needs[3:5], strict=True)]
    sums = [None if bias is None else bias.new_zeros(bias.shape, dtype=acc) for bias in biases]
    if blocks.problem.scores == 0:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
    else:
        o, lse, reference = outputs
        do, dlse = cotangents
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape) if do is None else do
        plan = blocks.plan()
        rows = blocks.rows(plan)
        workers = min(plan.threads, len(rows))
        parts = shares(rows, 1 if workers == 1 else min(_SHARES * workers, len(rows)), *sums)
        with threads.single_threaded(workers):
            scores = Scores.of(plan, scale, key_bias(mask, mask_bias, acc), pair_bias, acc)
            numbers = subtrahends(lse, reference, None) if scores.plain else (lse, reference)
            work = Work(scores, (q, k, v, do, o), gate, numbers, None if dlse is None else dlse * LOG2E, gradients)
            threads.share(parts, work.run, workers)
            for part in parts:
                part.add_up()
    return tuple([None if x is None or bias is None else x.to(bias.dtype) for x, bias in zip(sums, biases, strict=True)])
