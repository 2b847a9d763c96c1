"""Memory-efficient attention in plain torch: any device, any dtype, O(L) memory. The default on CPU.

The problem is cut into blocks of batches, rows, heads, queries and keys whose scores fit in `Config.score_bytes`. While rows
are short a block holds several of them with all their keys; when they are long, keys come block by block and the running sum
and output are rescaled as the running maximum m grows:

    first   m = max S            l = sum exp(S - m)                      o = exp(S - m) v
    middle  m' = max(m, max S)   l = l exp(m - m') + sum exp(S - m')     o = o exp(m - m') + exp(S - m') v
    last    o / l                LSE = m + log l

The backward walks the same blocks, recomputes P = exp(S - LSE) from the saved statistic and sums the bias gradients in place.

On a CPU threads share the blocks, and each does all operations of a block alone (`evoattn.threads`).

Scores, statistics and sums are float32 (float64 for float64) whatever the dtype of the inputs. Scores are kept in units of
log 2: torch's CPU exp2 takes 75 us for 2^20 numbers where exp takes 330, and 1,070 when a tenth of them are masked.
Source: Rabe and Staats 2021; Dao et al. 2022.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from evoattn import threads
from evoattn.backends.tiled.backward import Work, shares
from evoattn.backends.tiled.forward import forward_pieces
from evoattn.backends.tiled.scores import Rows, Scores, spans, statistic, subtrahends
from evoattn.layouts import empty
from evoattn.numerics import LOG2E, accumulate_dtype, row_bias
from evoattn.problem import Problem, describe
from evoattn.tuning import Config, TiledPlan, tiled_plan

__all__ = ["NAME", "availability", "backward", "copies", "forward", "resolve", "unsupported"]

NAME = "tiled"

_SHARES = 2
"""Shares of the backward for each thread: more balance better, and hold more sums of bias gradients."""


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


def resolve(problem: Problem, config: Config) -> Config:
    """The block sizes that fit the score budget."""
    return _plan(problem, config).config


def copies(problem: Problem, q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor | None) -> list[str]:
    """Reads every tensor as it lies."""
    return []


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    *,
    scale: float,
    layout: str,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `evoattn.backends`."""
    problem = describe(q, k, v, mask, mask_bias, pair_bias)
    acc = accumulate_dtype(q.dtype)
    b, n, h, lq, _ = q.shape
    o = empty((b, n, h, lq, v.shape[-1]), layout, q)
    lse = torch.empty((b, n, h, lq), dtype=acc, device=q.device)
    reference = torch.empty_like(lse)
    if k.shape[-2] == 0 or lse.numel() == 0:
        return o.zero_(), torch.full_like(lse, -torch.inf), torch.zeros_like(lse)
    plan = _plan(problem, config)
    pieces = [(*rows, qs) for rows in _rows(problem, plan) for qs in spans(lq, plan.q)]
    several = min(plan.threads, len(pieces))
    with threads.alone(several):
        scores = Scores.of(plan, scale, row_bias(mask, mask_bias, acc), pair_bias, acc)
        threads.share(pieces, lambda taken: forward_pieces(taken, scores, q, k, v, o, lse, reference), several)
        if scores.plain:
            lse, reference = statistic(reference, lse, None)
    return o, lse, reference


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    reference: Tensor,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, ...],
    deterministic: bool,
    config: Config,
) -> tuple[Tensor | None, ...]:
    """See `evoattn.backends`. Every sum has a fixed order, so results are bit-equal from run to run by nature."""
    problem = describe(q, k, v, mask, mask_bias, pair_bias)
    acc = accumulate_dtype(q.dtype)
    dq = empty(q.shape, layout, q) if needs[0] else None
    dk = empty(k.shape, layout, k) if needs[1] else None
    dv = empty(v.shape, layout, v) if needs[2] else None
    dmask_bias = mask_bias.new_zeros(mask_bias.shape, dtype=acc) if needs[3] and mask_bias is not None else None
    dpair_bias = pair_bias.new_zeros(pair_bias.shape, dtype=acc) if needs[4] and pair_bias is not None else None
    if problem.scores == 0:
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
    else:
        do = torch.zeros((), dtype=o.dtype, device=o.device).expand(o.shape) if do is None else do
        plan = _plan(problem, config)
        rows = _rows(problem, plan)
        several = min(plan.threads, len(rows))
        parts = shares(rows, 1 if several == 1 else min(_SHARES * several, len(rows)), dmask_bias, dpair_bias)
        with threads.alone(several):
            scores = Scores.of(plan, scale, row_bias(mask, mask_bias, acc), pair_bias, acc)
            of_query = subtrahends(lse, reference, None) if scores.plain else (lse, reference)
            work = Work(scores, (q, k, v, do, o), of_query, None if dlse is None else dlse * LOG2E, (dq, dk, dv))
            threads.share(parts, work.run, several)
            for part in parts:
                part.add_up()
    return (
        dq,
        dk,
        dv,
        None if dmask_bias is None or mask_bias is None else dmask_bias.to(mask_bias.dtype),
        None if dpair_bias is None or pair_bias is None else dpair_bias.to(pair_bias.dtype),
    )


def _plan(problem: Problem, config: Config) -> TiledPlan:
    """The plan of a problem for as many threads as torch has here; on a GPU nothing is shared."""
    return tiled_plan(problem, config, threads.available() if problem.device == "cpu" else 1)


def _rows(problem: Problem, plan: TiledPlan) -> list[Rows]:
    """The pieces b, n, h; those that share a pair bias come one after another."""
    of_b, of_n, of_h = spans(problem.b, plan.b), spans(problem.n, plan.n), spans(problem.h, plan.h)
    return [(b, n, h) for b, h, n in itertools.product(of_b, of_h, of_n)]
