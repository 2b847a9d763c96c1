"""The specification in code: dense, a page long, any dtype, every equation written out. It holds all b*n*h*q*k scores.

    S = scale * q k^T + mask_bias + pair_bias       P = exp(S - LSE)       LSE = log sum_k exp(S)
    o = sigmoid(gate) * P v, without the first factor if there is no gate

    delta = sum_c o do - dLSE      do' = sigmoid(gate) do      dP = do' v^T      dS = P * (dP - delta)
    dgate = o do (1 - sigmoid(gate))
    dv = P^T do'     dq = scale dS k      dk = scale dS^T q      dpair_bias = sum_n dS      dmask_bias = sum_hq dS

Source: Jumper et al. 2021, supplementary algorithms 7, 8, 13, 14; Dao et al. 2022 for the backward from O and LSE.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evoattn.backends import Description, Plan
from evoattn.core import numerics
from evoattn.core.config import Config
from evoattn.core.devices import without_autocast
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.layouts import as_planned, empty_gradients, empty_outputs
from evoattn.core.numerics import LOG2E, accumulate_dtype, shifted_biases
from evoattn.core.problem import Problem

NAME = "reference"


def availability() -> str | None:
    """Runs wherever torch runs."""
    return None


def unsupported(problem: Problem, config: Config) -> list[str]:
    """The reference takes every problem, but has no tiles to configure."""
    return [f"{name}={value} in config: the dense reference has no tiles" for name, value in config.given().items()]


def _scores(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """Scores [b,n,h,q,k], measured from the row shift and the query shift, and the latter, [b|1,n|1,h|1,q|1,1]."""
    q, k, _, mask, mask_bias, pair_bias, _ = inputs
    acc = accumulate_dtype(q.dtype)
    s = torch.matmul(q.to(acc) * scale, k.to(acc).transpose(-1, -2))  # [b,n,h,q,k]
    query_shift = s.new_zeros((1, 1, 1, 1, 1))
    key_bias = numerics.key_bias(mask, mask_bias, acc)
    if pair_bias is not None:
        query_shift = numerics.query_shift(pair_bias, key_bias, acc)
        s = s + shifted_biases(pair_bias, key_bias, query_shift)
    elif key_bias is not None:
        s = s + key_bias[:, :, None, None, :]
    return s, query_shift


def _probabilities(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P, the largest score m and the sum of exp(S - m); a row without a single attended key has P = 0, m = 0 and sum 0."""
    if s.shape[-1] == 0:
        return s, s.new_zeros((*s.shape[:-1], 1)), s.new_zeros((*s.shape[:-1], 1))
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == -torch.inf, 0, m)
    e = torch.exp(s - m)  # [b,n,h,q,k]
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1, total), m, total


def attention(inputs: Inputs, *, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """O and the saved statistic (`core.numerics`) of canonical tensors, in the compute dtype, differentiable by autograd."""
    s, query_shift = _scores(inputs, scale)
    p, m, total = _probabilities(s)
    reference = (m + query_shift).detach().clamp_min(torch.finfo(m.dtype).min)
    # What rounding the sum takes away goes to the LSE.
    lse = total.log2() + (m - (reference - query_shift)) * LOG2E
    o = torch.matmul(p, inputs.v.to(p.dtype))
    if inputs.gate is not None:
        o = o * torch.sigmoid(inputs.gate.to(o.dtype))
    return o, lse.squeeze(-1), reference.squeeze(-1)


def faster(problem: Problem) -> None:
    """Knows of none."""


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """See `evoattn.backends`."""
    view_inputs, view_outputs = as_planned(inputs), as_planned(empty_outputs(inputs, layout, "meta"))

    def run(inputs: Inputs, outputs: Outputs) -> None:
        values = attention(Inputs(*view_inputs(inputs)), scale=scale)
        for out, value in zip(view_outputs(outputs), values, strict=True):
            out.copy_(value)

    return Plan(without_autocast(inputs.q, run), lambda: Description(config))


def plan_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
    needs: tuple[bool, ...],
    deterministic: bool,
    config: Config,
    into: Sequence[Tensor | None] | None = None,
) -> Plan:
    """See `evoattn.backends`."""
    wanted = empty_gradients(inputs, layout, needs, "meta") if into is None else into
    views = [as_planned(planned) for planned in (cotangents, inputs, outputs, wanted)]

    def run(*arguments: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        cotangents, tensors, outputs, gradients = [view(each) for view, each in zip(views, arguments, strict=True)]
        inputs = Inputs(*tensors)
        values, biases = _gradients(Cotangents(*cotangents), inputs, Outputs(*outputs), scale)
        for out, value in zip(gradients, values, strict=True):
            if out is not None:
                out.copy_(value)
        return tuple([_bias_gradient(*each) for each in zip(inputs.differentiable[3:5], needs[3:5], biases, strict=True)])

    return Plan(without_autocast(inputs.q, run), lambda: Description(config), writes_into=into is not None)


def _bias_gradient(bias: Tensor | None, need: bool, gradient: Tensor) -> Tensor | None:
    """The gradient of a bias, if it is wanted, summed over what it was broadcast along."""
    return gradient.sum_to_size(bias.shape).to(bias.dtype) if need and bias is not None else None


def _gradients(
    cotangents: Cotangents, inputs: Inputs, outputs: Outputs, scale: float
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, Tensor]]:
    """dq, dk, dv and dgate, and dmask_bias and dpair_bias before they are summed over what broadcasts.

    The equations at the top of this file, in their order.
    """
    (do, dlse), (q, k, v, *_, gate), (o, lse, reference) = cotangents, inputs, outputs
    acc = accumulate_dtype(q.dtype)
    q_, k_, v_, o_ = (x.to(acc) for x in (q, k, v, o))
    do_ = torch.zeros_like(o_) if do is None else do.to(acc)
    s, query_shift = _scores(inputs, scale)
    empty = (lse == -torch.inf).unsqueeze(-1)  # [b,n,h,q,1]
    from_reference = s - (reference.unsqueeze(-1) - query_shift)  # [b,n,h,q,k]
    p = torch.exp2(from_reference * LOG2E - torch.where(empty, torch.inf, lse.unsqueeze(-1)))  # [b,n,h,q,k]
    delta = (o_ * do_).sum(-1, keepdim=True)  # [b,n,h,q,1]
    if dlse is not None:
        delta = delta - dlse.unsqueeze(-1) * LOG2E
    delta = torch.where(empty, 0, delta)
    dgate = None
    if gate is not None:
        dgate = o_ * do_ * torch.sigmoid(-gate.to(acc))  # 1 - sigmoid(gate), which is exact where that is near 0
        do_ = do_ * torch.sigmoid(gate.to(acc))
    ds = p * (torch.matmul(do_, v_.transpose(-1, -2)) - delta)  # [b,n,h,q,k]
    dv = torch.matmul(p.transpose(-1, -2), do_)
    dq = scale * torch.matmul(ds, k_)
    dk = scale * torch.matmul(ds.transpose(-1, -2), q_)
    return (dq, dk, dv, dgate), (ds.sum((2, 3)), ds.sum(1))
