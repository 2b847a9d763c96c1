"""A call of a model family, with tensors on "meta" in place of a GPU's: its plans, and the kernels that they launch."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Needed, Plan
from evoattn.call.canonical import canonicalise
from evoattn.devices import Card, planned_for
from evoattn.inputs import Cotangents, Inputs, Options
from evoattn.layouts import empty_gradients, empty_outputs
from evoattn.run import plans
from evoattn.run.dispatch import RefusalError, backend_module
from evoattn.warming.families import Attention, Family

__all__ = ["COMPILERS", "Call", "Found", "calls_of", "find", "find_all", "keep", "why_not"]

COMPILERS = ("hopper", "triton")
"""The backends that compile."""

_LAYOUT = "bnhld"
"""As `evoattn.compat.openfold` calls."""


@dataclasses.dataclass(frozen=True)
class Call:
    """An attention at a length, in a dtype, one pass of it.

    Args:
        attention: which.
        length: residues or tokens.
        dtype: of q, k and v.
        training: whether it is the backward, of q, k, v and the pair bias, and not the forward.
    """

    attention: Attention
    length: int
    dtype: torch.dtype
    training: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.attention.name}, {self.length}, {dtype}, {'backward' if self.training else 'forward'}"

    def inputs(self) -> Inputs:
        """Its tensors in the user's axes, `[*,h,l,d]`, as projections leave them: heads lie inside lengths."""
        of = self.attention
        n, lq, lk = (self.length if size is None else size for size in (of.n, of.q, of.k))
        lead: tuple[int, ...] = (1, n)
        of_pairs: tuple[int, ...] = (1, 1)
        if of.windows is not None:
            lead, of_pairs = (*lead, of.windows), (*of_pairs, of.windows)
        q = self._made(None, *lead, lq, of.h, of.d).transpose(-2, -3)
        k, v = (self._made(None, *lead, lk, 1 if of.shared else of.h, of.d).transpose(-2, -3) for _ in range(2))
        mask = self._made(of.mask_dtype, *lead, 1, 1, lk) if of.mask else None
        pair = None
        if of.pair:
            pair = self._made(of.pair_dtype, *of_pairs, *((lk, lq) if of.turned else (lq, lk)), of.h)
            pair = (pair.transpose(-2, -3) if of.turned else pair).movedim(-1, -3)
        return Inputs(q, k, v, None, mask, pair)

    def make(self) -> tuple[Plan, tuple[Any, ...]]:
        """Its plan for the card that is planned for, and what the plan is run with."""
        options = Options(1.0 if self.attention.scaled else None, _LAYOUT)
        inputs = canonicalise(self.inputs(), _LAYOUT).inputs
        outputs = empty_outputs(inputs, _LAYOUT)
        if not self.training:
            return plans.forward(inputs, options), (inputs, outputs)
        needs = (True, True, True, False, inputs.pair_bias is not None, False)
        values = Cotangents(torch.empty_like(inputs.q)), inputs, outputs
        return plans.backward(*values, needs, options), (*values, empty_gradients(inputs, _LAYOUT, needs))

    def _made(self, dtype: torch.dtype | None, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")


def calls_of(family: Family, lengths: tuple[int, ...], dtypes: tuple[torch.dtype, ...], training: bool) -> Iterator[Call]:
    """All calls of a family, each once."""
    seen: dict[Call, None] = {}
    for attention in family.attentions:
        for dtype in dtypes:
            plain = _plain(attention, dtype)
            for length in lengths:
                for backward in (False, True)[: 1 + training]:
                    seen[Call(plain, length, dtype, backward)] = None
    return iter(seen)


def _plain(attention: Attention, dtype: torch.dtype) -> Attention:
    """The same attention of q in a dtype, in the one way in which it can be said."""
    mask = None if attention.mask_dtype == dtype or not attention.mask else attention.mask_dtype
    pair = None if attention.pair_dtype == dtype or not attention.pair else attention.pair_dtype
    return dataclasses.replace(attention, mask_dtype=mask, pair_dtype=pair)


@dataclasses.dataclass(frozen=True)
class Found:
    """A kernel that a call launches, and the backend that makes it."""

    call: Call
    card: Card
    backend: str
    kernel: Needed

    @property
    def key(self) -> tuple[str, str]:
        """The same for calls that share a kernel."""
        return self.backend, self.kernel.key


def find(call: Call, card: Card) -> list[Found]:
    """The kernels that a call launches on a card; none if no backend that compiles takes it."""
    with planned_for(card):
        try:
            backend = call.make()[0].backend
        except RefusalError:
            return []
        module = _ahead(backend)
        return [] if module is None else [Found(call, card, backend, kernel) for kernel in module.needed(call.make)]


def find_all(calls: list[Call], card: Card) -> list[Found]:
    """The kernels that calls launch on a card, each once."""
    return list({found.key: found for call in calls for found in find(call, card)}.values())


def keep(found: Found) -> Found:
    """Compile a kernel for later processes; the same with what is on disk now."""
    with planned_for(found.card):
        module = _ahead(found.backend)
        module.keep(found.call.make, found.kernel.key)
        kernels: list[Needed] = module.needed(found.call.make)
    return dataclasses.replace(found, kernel=next(x for x in kernels if x.key == found.kernel.key))


def why_not(backend: str) -> str | None:
    """Why a backend cannot compile for the card that is planned for, and what to do; None if it can."""
    missing = backend_module(backend).availability()
    if missing is None and backend == "triton" and importlib.util.find_spec("triton.runtime._async_compile") is None:
        return "this Triton compiles no kernel ahead: pip install 'triton>=3.6'"
    return missing


def _ahead(backend: str) -> Any:
    """The module of a backend that finds and compiles its kernels, or None if it has none."""
    if backend not in COMPILERS or why_not(backend) is not None:
        return None
    return importlib.import_module(f"evoattn.backends.{backend}.ahead")
