"""The Hopper backend: kernels for compute capability 9.0 (H100, H200, GH200) in NVIDIA's CuTe DSL.

Importing this package imports no CuTe DSL: the kernels are imported when a call reaches them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import GATED_AFTER, GATED_BACKWARD, Description, Plan
from evoattn.compile import first_calls
from evoattn.devices import installed, on_device_of, planned, processors
from evoattn.inputs import Cotangents, Inputs, Outputs
from evoattn.problem import Needs, Problem, describe
from evoattn.tuning.config import Config

__all__ = [
    "NAME",
    "availability",
    "compile_together",
    "copies",
    "faster",
    "plan_backward",
    "plan_forward",
    "resolve",
    "resolve_backward",
    "unsupported",
]

NAME = "hopper"

WRITES_ANYWHERE = True
"""Gradients may have any strides (`evoattn.backends.Backend`)."""

_CAPABILITY = (9, 0)
_COMPILER = "evoattn.backends.hopper.host.launch"
_CHANNELS = (8, 16, 24, 32, 48, 64)
_DTYPES = (torch.float16, torch.bfloat16)
_BIASES = (torch.float16, torch.bfloat16, torch.float32)

_LEAST_SCALE, _MOST_SCALE = 2.0**-5, 2.0**12
"""In float16. A power of two of any other scale goes into q, and out of dq: float16 overflows or loses digits."""

_FEW_QUERIES, _FEW_KEYS, _FEWEST_KEYS = 32, 64, 32
"""Up to these queries and keys, or for a backward up to so few keys, `triton` was faster on an H200."""

_KEYS_OF_ONE_QUERY = {8: 256, 16: 256, 24: 256, 32: 256, 48: 128, 64: 128}
"""By channels: up to so many keys of one query without a pair bias, `triton` was faster on an H200 (256 keys of 32 channels:
282 us, here 344). Its kernels for one query take no more keys of more channels."""


def availability() -> str | None:
    """None where the kernels can run, or can be compiled for the card that is planned for, else why not and what to do."""
    return _missing() if planned() is not None else _of_this_machine()


@functools.cache
def _of_this_machine() -> str | None:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU that torch can use"
    if all(torch.cuda.get_device_capability(index) != _CAPABILITY for index in range(torch.cuda.device_count())):
        return "no GPU of compute capability 9.0 (H100, H200, GH200)"
    return _missing()


def _missing() -> str | None:
    """What to install, or None."""
    if not installed("nvidia_cutlass_dsl"):
        extra = "hopper-cu12" if (torch.version.cuda or "").startswith("12.") else "hopper"
        return f"CuTe DSL is not installed: pip install 'evoattn[{extra}]'"
    return None


def unsupported(problem: Problem, config: Config) -> list[str]:
    """Every reason why this backend does not take the problem; empty when it does."""
    reasons = []
    if problem.device != "cuda":
        reasons.append(f"needs tensors on a GPU, got device {problem.device}")
    if problem.capability is not None and problem.capability != _CAPABILITY:
        reasons.append("needs compute capability 9.0 (Hopper), this card has {}.{}".format(*problem.capability))
    if problem.dtype not in _DTYPES:
        reasons.append(f"takes float16 and bfloat16, got {problem.dtype}")
    if problem.d != problem.c or problem.d not in _CHANNELS:
        reasons.append(
            f"takes as many value as query channels, {', '.join(map(str, _CHANNELS))}; got {problem.d} and {problem.c}"
        )
    if problem.pair_bias not in (None, problem.dtype, torch.float32):
        reasons.append(f"takes a pair_bias of q's dtype or float32, got {problem.pair_bias}")
    if problem.mask_bias not in (None, *_BIASES):
        reasons.append(f"takes a mask_bias in float16, bfloat16 or float32, got {problem.mask_bias}")
    if problem.dtype == torch.float16 and problem.scale and not _LEAST_SCALE <= abs(problem.scale) <= _MOST_SCALE:
        reasons.append(
            f"takes a scale from {_LEAST_SCALE:g} to {_MOST_SCALE:g} in float16, which may not hold q times another,"
            f" got {problem.scale:g}"
        )
    if not problem.scores:
        reasons.append("takes no empty tensors")
    if problem.pair_bias is not None and problem.n == 1:
        reasons.append("takes a pair_bias that two or more rows share, got 1 row")
    reasons += _unsupported_gradients(problem)
    if config.given():
        reasons.append("its tiles are fixed: it takes no config")
    return reasons


def faster(problem: Problem) -> tuple[str, str] | None:
    """The backend that runs a forward, or the backward of some needs, in less time, and why (notes/hopper-or-triton.md).

    A forward of `triton` must not meet a backward of this backend: in float16 that takes biases below -65,504 for that number,
    and the log-sum-exp with them. So what leaves the forward leaves the backward too.
    """
    backward = any(problem.needs)
    few = problem.lq <= _FEW_QUERIES and problem.lk <= _FEW_KEYS
    one = problem.lq == 1 and problem.pair_bias is None and problem.lk <= _KEYS_OF_ONE_QUERY.get(problem.d, 0)
    if few or one or (backward and problem.lk <= _FEWEST_KEYS):
        which = "backward" if backward else "forward"
        return "triton", f"{problem.lq} queries and {problem.lk} keys fill little of the tiles of its {which}"
    return None


def resolve() -> Config:
    """The tiles of the forward, which are the same for every problem."""
    return Config(block_q=128, block_k=64)


def resolve_backward(problem: Problem) -> dict[str, dict[str, int]]:
    """The tiles of the backward's kernels: those of its gradients that are wanted; `cluster` blocks share a tile's keys."""
    from evoattn.backends.hopper.backward.variants import key_variant, one_kernel, query_variant

    of_q, of_k, of_v, of_mask_bias, of_pair_bias, _ = problem.needs
    pair = problem.pair_bias is not None
    if one_kernel(problem.needs, pair, problem.d, _sizes(problem), processors()):
        return {"whole": {"block_q": 64, "block_k": 64}}
    found = {}
    if of_q or of_pair_bias:
        chosen = query_variant(problem.d, problem.lk, pair) or {}
        keys = chosen["groups"] * chosen["slices"] * 32
        found["dq"] = {"block_q": 64, "block_k": keys, "num_stages": chosen["stages"], "cluster": chosen["cluster"]}
    if of_k or of_v or of_mask_bias:
        stages = key_variant(problem.d, problem.lq, pair, _skips(problem), exact=_exact(problem))["stages"]
        found["dkdv"] = {"block_q": 64, "block_k": 64, "num_stages": stages}
    return found


def _sizes(problem: Problem) -> tuple[int, int, int, int, int]:
    """b, n, h, q, k."""
    return problem.b, problem.n, problem.h, problem.lq, problem.lk


def _exact(problem: Problem) -> bool:
    """Whether its pair bias is float32."""
    return problem.pair_bias == torch.float32


def _skips(problem: Problem) -> bool:
    """Whether the two kernels of its backward leave out what a mask switches off."""
    from evoattn.backends.hopper.backward.variants import skips_rows

    pair, exact = problem.pair_bias is not None, _exact(problem)
    return skips_rows(problem.mask, problem.needs, pair, problem.d, _sizes(problem), exact=exact)


def copies(problem: Problem, inputs: Inputs, factor: float = 1.0) -> list[str]:
    """What a pass copies or lays out anew, each with the reason.

    That is a q, k, v or gate that the copy engine does not take, a q that is multiplied by a factor of the scale, and a pair
    bias.

    Args:
        problem: the call.
        inputs: its tensors.
        factor: what q is multiplied by, as `fold` finds it.
    """
    from evoattn.backends.hopper.backward.variants import key_variant
    from evoattn.backends.hopper.host.memory import loads_wide

    found = [
        f"{name}: copied once a pass, so that each row of channels starts on 16 bytes and is in memory once for each head"
        for name, x in zip(("q", "k", "v", "gate"), (*inputs.qkv, inputs.gate), strict=True)
        if x is not None and not loads_wide(x) and (name != "q" or factor == 1.0)
    ]
    if factor != 1.0:
        found.insert(
            0,
            f"q: copied once a pass, multiplied by {factor:g}, since the kernels take no scale that is negative or far from 1",
        )
    if inputs.pair_bias is None:
        return found
    found.append("pair_bias: laid out anew once a pass, measured from the largest of each query")
    exact = _exact(problem)
    if exact:
        found.append("pair_bias: in float32, laid out anew once a forward, to be streamed")
    if any(problem.needs[1:4]) and key_variant(problem.d, problem.lq, True, _skips(problem), exact=exact)["ring"]:
        found.append("pair_bias: laid out anew once a backward, to be streamed")
    return found


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """The forward of all tensors that lie in memory like these; see `evoattn.backends`."""
    if _COMPILER not in sys.modules and torch.is_grad_enabled() and any(x.requires_grad for x in inputs.qkv):
        first_calls.expect(NAME)  # a backward will follow
    from evoattn.backends.hopper.forward.gate import plan_product
    from evoattn.backends.hopper.forward.plan import plan_forward
    from evoattn.backends.hopper.host.launch import noting
    from evoattn.backends.hopper.host.prepare import fold

    gate = inputs.gate
    with noting() as kernels:
        attend = plan_forward(*inputs[:6], scale=scale, layout=layout)
        multiply = None if gate is None else plan_product(gate, layout)
    copied = tuple(copies(describe(inputs), inputs, fold(scale)[0]))
    told = Description(resolve(), copies=copied, gate=None if gate is None else GATED_AFTER)

    def run(inputs: Inputs, outputs: Outputs) -> None:
        attend(*inputs[:6], *outputs)
        if multiply is not None and inputs.gate is not None:
            multiply(outputs.o, inputs.gate)

    return Plan(on_device_of(inputs.q, run), lambda: told, kernels=tuple(kernels))


def plan_backward(
    cotangents: Cotangents,
    inputs: Inputs,
    outputs: Outputs,
    *,
    scale: float,
    layout: str,
    needs: Needs,
    deterministic: bool,
    config: Config,
    into: Sequence[Tensor | None] | None = None,
) -> Plan:
    """The backward of all tensors that lie in memory like these; see `evoattn.backends`."""
    from evoattn.backends.hopper.backward.facts import fold_for_backward
    from evoattn.backends.hopper.backward.gate.plan import plan_gated_backward
    from evoattn.backends.hopper.backward.plan import plan_backward
    from evoattn.backends.hopper.host.launch import noting

    options: dict[str, Any] = {"scale": scale, "layout": layout, "needs": needs, "deterministic": deterministic, "into": into}
    problem = describe(inputs, needs=needs, deterministic=deterministic)
    gate = GATED_BACKWARD if problem.gate and cotangents.do is not None else None
    factor, _ = fold_for_backward(scale, inputs.q.dtype, pair=inputs.pair_bias is not None)
    copied = tuple(copies(problem, inputs, factor if any(needs[:5]) else 1.0))
    told = Description(kernels=resolve_backward(problem), copies=copied, gate=gate)
    with noting() as kernels:
        if problem.gate:
            run = plan_gated_backward(cotangents, inputs, outputs, **options)
        else:
            tensors: tuple[Any, ...] = (*cotangents, *inputs[:6], *outputs)
            launch = plan_backward(*tensors, **options)

            def run(cotangents: Cotangents, inputs: Inputs, outputs: Outputs, gradients: tuple[Tensor | None, ...]) -> Any:
                return launch(*cotangents, *inputs[:6], *outputs, *gradients[:3])

    return Plan(on_device_of(inputs.q, run), lambda: told, kernels=tuple(kernels))


def compile_together(plans: Callable[[], Sequence[Plan]]) -> None:
    """Have the kernels of several plans that are not kept compiled in other processes; see `compile.first_calls`."""
    found = plans() if first_calls.wanted() else ()
    if found:
        from evoattn.backends.hopper.ahead import begin

        begin(kernel for plan in found for kernel in plan.kernels)


def _unsupported_gradients(problem: Problem) -> list[str]:
    """What the backward refuses besides: keys that have no room."""
    from evoattn.backends.hopper.backward.variants import query_variant

    of_q, _, _, _, of_pair, _ = problem.needs
    pair = problem.pair_bias is not None
    reasons = []
    if (of_q or of_pair) and problem.d in _CHANNELS and query_variant(problem.d, problem.lk, pair) is None:
        reasons.append(f"its backward has no room for {problem.lk} keys of {problem.d} channels")
    return reasons
