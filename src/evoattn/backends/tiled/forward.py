"""The forward of the tiled backend: what a thread does with the pieces that it takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from evoattn.backends.tiled.scores import Part, Rows, Scores, spans, stack, statistic, unflatten
from evoattn.core.inputs import Inputs, Outputs


def forward_pieces(pieces: Iterator[Part], scores: Scores, inputs: Inputs, outputs: Outputs) -> None:
    """Write o, lse and reference of some rows and queries after the other.

    If nothing but the row shift is taken from the scores, lse and reference are l and m, for `statistic` to make both of all
    queries at once.
    """
    (q, k, v, *_, gate), (o, lse, reference) = inputs, outputs
    plan, buffer = scores.plan, scores.new_buffer(q)
    rows: Rows | None = None
    for part in pieces:
        if part[:3] != rows:
            rows = part[:3]
            k_, v_ = (stack(x[rows], scores.dtype) for x in (k, v))  # [g,l,d], g = b*n*h of this piece
        q_, query_shift = stack(q[part], scores.dtype), scores.query_shift(part)
        sums: tuple[Tensor, ...] = ()
        for ks in spans(k.shape[-2], plan.k):
            sums = _online_softmax(sums, scores.block(buffer, part, ks, q_, k_[:, ks], query_shift), v_[:, ks])
        m, l, o_ = (unflatten(x, part) for x in sums)
        total = l.clamp_min(1)  # the largest score adds 1 to l, unless there is no key
        if gate is None:
            torch.div(o_, total, out=o[part])
        else:
            torch.mul(o_.div_(total), torch.sigmoid(gate[part].to(scores.dtype)), out=o[part])
        m, l = m.squeeze(-1), l.squeeze(-1)
        lse[part], reference[part] = (l, m) if query_shift is None else statistic(m, l, query_shift)


def _online_softmax(sums: tuple[Tensor, ...], s: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Take in a block of scores `[g,q,k]`, which are overwritten, and its values `[g,k,c]`.

    sums: running maximum `[g,q,1]`, sum `[g,q,1]` and unnormalised output `[g,q,c]` of the blocks before; `()` if none.
    """
    # A row without an attended key so far is measured from the lowest number: all its terms are exp2(-inf) = 0, never NaN.
    m = s.amax(-1, keepdim=True).clamp_min_(torch.finfo(s.dtype).min)
    if not sums:
        p = s.sub_(m).exp2_()
        return m, p.sum(-1, keepdim=True), torch.bmm(p, v)
    before, l, o = sums
    m = torch.maximum(before, m)
    p, rescale = s.sub_(m).exp2_(), torch.exp2(before - m)
    return m, l.mul_(rescale).add_(p.sum(-1, keepdim=True)), o.mul_(rescale).baddbmm_(p, v)
