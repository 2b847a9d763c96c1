"""The Hopper backend: kernels for compute capability 9.0 (H100, H200, GH200) in NVIDIA's CuTe DSL.

Importing this package imports no CuTe DSL: the kernels are imported when a call reaches them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Plan
from evoattn.compile import beside, cache
from evoattn.compile.workers import Task
from evoattn.core import attempts
from evoattn.core.config import Config
from evoattn.core.devices import card, install_extra, installed, on_device_of, planned
from evoattn.core.inputs import Cotangents, Inputs, Outputs
from evoattn.core.problem import Needs, Problem, dtype_name

__all__ = [
    "NAME",
    "availability",
    "faster",
    "plan_backward",
    "plan_forward",
    "unsupported",
]

NAME = "hopper"

_CAPABILITY = (9, 0)
_COMPILER = "evoattn.backends.hopper.launch"
_CHANNELS = (8, 16, 24, 32, 48, 64)
_DTYPES = (torch.float16, torch.bfloat16)
_MASK_BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_FLOAT16_SCALES = 2.0**-5, 2.0**12
"""The least and the largest scale in float16. A power of two of any other goes into q, and out of dq: float16 overflows or
loses digits."""

_SHORT_QUERIES, _SHORT_KEYS, _SHORT_BACKWARD_KEYS = 32, 64, 32
"""Up to these queries and keys, or for a backward up to so many keys alone, `triton` was faster on an H200."""

_SHORT_KEYS_OF_ONE_QUERY = {8: 256, 16: 256, 24: 256, 32: 256, 48: 128, 64: 128}
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
    """Return what to install, or None."""
    if not installed("nvidia_cutlass_dsl"):
        extra = "hopper-cu12" if (torch.version.cuda or "").startswith("12.") else "hopper"
        return f"CuTe DSL is not installed: {install_extra(extra)}"
    return None


def folder() -> pathlib.Path | None:
    """The folder of compiled kernels; None if nothing is to be kept."""
    root = cache.folder()
    return None if root is None else root / NAME


def unsupported(problem: Problem, config: Config) -> list[str]:
    """Every reason why this backend does not take the problem; empty when it does."""
    from evoattn.backends.hopper.tiles import query_variant

    reasons = []
    if problem.device != "cuda":
        reasons.append(f"needs tensors on a GPU, got device {problem.device}")
    if problem.capability is not None and problem.capability != _CAPABILITY:
        reasons.append("needs compute capability 9.0 (Hopper), this card has {}.{}".format(*problem.capability))
    if problem.dtype not in _DTYPES:
        reasons.append(f"takes float16 and bfloat16, got {dtype_name(problem.dtype)}")
    if problem.d != problem.c or problem.d not in _CHANNELS:
        reasons.append(
            f"takes as many value as query channels, {', '.join(map(str, _CHANNELS))}; got {problem.d} and {problem.c}"
        )
    if problem.pair_bias not in (None, problem.dtype, torch.float32):
        reasons.append(f"takes a pair_bias of q's dtype or float32, got {dtype_name(problem.pair_bias)}")
    if problem.mask_bias not in (None, *_MASK_BIAS_DTYPES):
        reasons.append(f"takes a mask_bias in float16, bfloat16 or float32, got {dtype_name(problem.mask_bias)}")
    least, most = _FLOAT16_SCALES
    if problem.dtype == torch.float16 and problem.scale and not least <= abs(problem.scale) <= most:
        reasons.append(
            f"takes a scale from {least:g} to {most:g} in float16, which may not hold q times another, got {problem.scale:g}"
        )
    if not problem.scores:
        reasons.append("takes no empty tensors")
    if problem.pair_bias is not None and problem.n == 1:
        reasons.append("takes a pair_bias that two or more rows share, got 1 row")
    needs, pair = Needs(*problem.needs), problem.pair_bias is not None
    if (needs.q or needs.pair_bias) and problem.d in _CHANNELS and query_variant(problem.d, problem.lk, pair) is None:
        reasons.append(f"its backward has no room for {problem.lk} keys of {problem.d} channels")
    if config.given():
        reasons.append("its tiles are fixed: it takes no config")
    return reasons


def faster(problem: Problem) -> tuple[str, str] | None:
    """The backend that runs a forward, or the backward of some needs, in less time, and why (notes/hopper-or-triton.md).

    A forward of `triton` must not meet a backward of this backend: in float16 that takes biases below -65,504 for that number,
    and the log-sum-exp with them. So what leaves the forward leaves the backward too.
    """
    backward = any(problem.needs)
    short = problem.lq <= _SHORT_QUERIES and problem.lk <= _SHORT_KEYS
    one = problem.lq == 1 and problem.pair_bias is None and problem.lk <= _SHORT_KEYS_OF_ONE_QUERY.get(problem.d, 0)
    if short or one or (backward and problem.lk <= _SHORT_BACKWARD_KEYS):
        which = "backward" if backward else "forward"
        return "triton", f"{problem.lq} queries and {problem.lk} keys fill little of the tiles of its {which}"
    return None


def plan_forward(inputs: Inputs, *, scale: float, layout: str, config: Config) -> Plan:
    """Plan a forward; see `evoattn.backends`."""
    _leave_to_worker(inputs, scale, layout)
    if _COMPILER not in sys.modules and torch.is_grad_enabled() and any(x.requires_grad for x in inputs.qkv):
        beside.start_helpers(f"{__name__}.ahead", folder())  # a backward will follow
    from evoattn.backends.hopper import forward_plan

    plan = _on_device(inputs.q, forward_plan.plan_forward(inputs, scale=scale, layout=layout))
    return dataclasses.replace(plan, compile_together=_compile_together)


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
    """Plan a backward; see `evoattn.backends`."""
    from evoattn.backends.hopper import backward_plan

    options: dict[str, Any] = {"scale": scale, "layout": layout, "needs": needs, "deterministic": deterministic, "into": into}
    return _on_device(inputs.q, backward_plan.plan_backward(cotangents, inputs, outputs, **options))


def _on_device(tensor: Tensor, plan: Plan) -> Plan:
    """Run a plan on a tensor's device: launches go to the current one."""
    return dataclasses.replace(plan, run=on_device_of(tensor, plan.run))


def _leave_to_worker(inputs: Inputs, scale: float, layout: str) -> None:
    """Give up an attempt that would import the compiler, which takes seconds, if no kernel can be there.

    A worker plans the forward in its place, and compiles the kernels. Then a thread imports the compiler.
    """
    attempt, place, here = attempts.current(), folder(), card(inputs.q.device)
    begun = _import_compiler.cache_info().currsize > 0
    if attempt is None or place is None or here is None or not _was_empty(place):
        return
    if _import_compiler().done() if begun else _COMPILER in sys.modules:
        return
    like = [x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs]
    strides = [x if x is None else (x.dtype, *x.shape, *x.stride()) for x in inputs]
    task = Task(f"{__name__}.ahead:keep_forward", (like, scale, layout, here))
    planning = beside.submitted(f"{NAME} {scale} {layout} {strides}", task)
    if planning is None:
        return
    missing = _import_compiler() if planning.done() else planning
    if not missing.done():
        attempt.give_up(missing)
        raise attempts.NotCompiled


@functools.cache
def _import_compiler() -> Future[None]:
    """Begin to import the compiler, on a thread."""
    imported: Future[None] = Future()

    def load() -> None:
        with contextlib.suppress(Exception):  # the call that needs it says what is wrong
            importlib.import_module(_COMPILER)
        imported.set_result(None)

    threading.Thread(target=load, name="evoattn-imports", daemon=True).start()
    return imported


@functools.cache
def _was_empty(folder: pathlib.Path) -> bool:
    """Return whether no kernel was kept in a folder when a process first asked."""
    return not any(folder.glob("[!.]*"))


def _compile_together(plans: Callable[[], Sequence[Plan]]) -> None:
    """Have the kernels of several plans that are not kept compiled in other processes; see `compile.beside`."""
    found = plans() if beside.helpers() else ()
    if found:
        from evoattn.backends.hopper.ahead import begin

        begin(kernel for plan in found for kernel in plan.kernels)
