"""A call of a model family, with tensors on "meta" in place of a GPU's: its plans, and the kernels that they launch."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evoattn.backends import COMPILERS, Needed, Plan
from evoattn.cli.warm.families import Attention
from evoattn.core.devices import Card, planned_for
from evoattn.core.inputs import Cotangents, Inputs
from evoattn.core.layouts import empty_gradients, empty_outputs
from evoattn.core.problem import Needs, dtype_name
from evoattn.dispatch import lookup
from evoattn.dispatch.axes import canonicalise
from evoattn.dispatch.lookup import BackwardPass, ForwardPass, Options, RefusalError, backend_module

_LAYOUT = "bnhld"
"""The layout of the calls of `evoattn.compat.openfold`."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One pass of an attention at a length; with `training` the backward, of q, k, v and the pair bias, and not the forward."""

    attention: Attention
    length: int
    dtype: torch.dtype
    training: bool = False
    mask_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype)
        return f"{self.attention.name}, {self.length}, {dtype}, {'backward' if self.training else 'forward'}"

    def inputs(self) -> Inputs:
        """Make its tensors in the user's axes, `[*,h,l,d]`, as projections leave them: heads lie inside lengths."""
        attention = self.attention
        n, lq, lk = (self.length if size is None else size for size in (attention.n, attention.q, attention.k))
        windows = () if attention.windows is None else (attention.windows,)
        lead = (1, n, *windows)
        q = self._empty(None, *lead, lq, attention.h, attention.d).transpose(-2, -3)
        kv_heads = 1 if attention.shared else attention.h
        k, v = (self._empty(None, *lead, lk, kv_heads, attention.d).transpose(-2, -3) for _ in range(2))
        mask = self._empty(self.mask_dtype, *lead, 1, 1, lk) if attention.mask else None
        pair = None
        if attention.pair:
            lengths = (lk, lq) if attention.turned else (lq, lk)
            pair = self._empty(torch.float32 if attention.float32_biases else None, 1, 1, *windows, *lengths, attention.h)
            pair = (pair.transpose(-2, -3) if attention.turned else pair).movedim(-1, -3)
        return Inputs(q, k, v, None, mask, pair)

    def make(self) -> tuple[Plan, tuple[Any, ...]]:
        """Make its plan for the current card, and the arguments of the plan's `run`."""
        options = Options(1.0 if self.attention.scaled else None, _LAYOUT).settled()
        inputs = canonicalise(self.inputs(), _LAYOUT)[0]
        outputs = empty_outputs(inputs, _LAYOUT)
        if not self.training:
            return lookup.find_plan(ForwardPass(inputs, options)), (inputs, outputs)
        needs = Needs(q=True, k=True, v=True, pair_bias=inputs.pair_bias is not None)
        cotangents = Cotangents(torch.empty_like(inputs.q))
        plan = lookup.find_plan(BackwardPass(inputs, options, cotangents, outputs, needs))
        return plan, (cotangents, inputs, outputs, empty_gradients(inputs, _LAYOUT, needs))

    def _empty(self, dtype: torch.dtype | None, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")


def calls_of(
    attentions: Iterable[Attention], lengths: tuple[int, ...], dtypes: tuple[torch.dtype, ...], training: bool
) -> Iterator[Call]:
    """Yield all calls of attentions: masks in q's dtype and in float32, as autocast and masks of whole numbers leave them."""
    for attention, dtype in itertools.product(attentions, dtypes):
        if attention.float32_biases and dtype == torch.float32:
            continue  # the same attention without this has these biases
        masks = dict.fromkeys((torch.float32,) if attention.float32_biases or not attention.mask else (dtype, torch.float32))
        for length, mask, backward in itertools.product(lengths, masks, (False, True)[: 1 + training]):
            yield Call(attention, length, dtype, backward, mask)


class Launched(NamedTuple):
    """A kernel that a call launches, and the backend that makes it."""

    call: Call
    backend: str
    kernel: Needed


def find_all(calls: list[Call], card: Card) -> list[Launched]:
    """List the kernels that calls launch on a card, each once. A call that no compiling backend takes has none."""
    kernels: dict[tuple[str, str], Launched] = {}
    with planned_for(card):
        for call in calls:
            try:
                backend = call.make()[0].backend
            except RefusalError:
                continue
            if backend in COMPILERS and why_not(backend) is None:
                needed = importlib.import_module(COMPILERS[backend]).needed(call.make)
                kernels.update({(backend, kernel.key): Launched(call, backend, kernel) for kernel in needed})
    return list(kernels.values())


def why_not(backend: str) -> str | None:
    """Return the reason why a backend cannot compile for the current card, and the remedy. None if it can."""
    missing = backend_module(backend).availability()
    if missing is None and backend == "triton" and importlib.util.find_spec("triton.runtime._async_compile") is None:
        return "this Triton compiles no kernel ahead: pip install 'triton>=3.6'"
    return missing
