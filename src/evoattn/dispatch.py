"""Problem -> backend. The one place that knows which backends exist and in which order `auto` asks them."""

from __future__ import annotations

import importlib
from typing import cast

from evoattn.backends import Backend
from evoattn.problem import Problem
from evoattn.tuning import Config

__all__ = ["AUTO_ORDER", "BACKENDS", "backend_module", "refusals", "select"]

AUTO_ORDER = ("hopper", "triton", "tiled")
"""`auto` takes the first of these that has no reason to refuse."""

BACKENDS = (*AUTO_ORDER, "reference")
"""Every name that `backend=` takes besides "auto"."""


def backend_module(name: str) -> Backend:
    """The backend's module; importing it pulls in no kernel language."""
    return cast(Backend, importlib.import_module(f"evoattn.backends.{name}"))


def refusals(name: str, problem: Problem, config: Config) -> list[str]:
    """Every reason why a backend does not take a problem; empty when it does."""
    backend = backend_module(name)
    unavailable = backend.availability()
    return ([unavailable] if unavailable else []) + backend.unsupported(problem, config)


def select(problem: Problem, backend: str, config: Config) -> Backend:
    """The backend that runs a problem.

    Raises:
        ValueError: the named backend (or, for "auto", every backend) refuses; the message lists all reasons.
    """
    names = AUTO_ORDER if backend == "auto" else (backend,)
    refused = []
    for name in names:
        reasons = refusals(name, problem, config)
        if not reasons:
            return backend_module(name)
        refused += [f"{name}: {reason}" for reason in reasons]
    raise ValueError(f"backend={backend!r} cannot run this problem ({problem}):\n  " + "\n  ".join(refused))
