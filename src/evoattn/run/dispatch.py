"""Problem -> backend: the backends are asked in order, and the first without a reason to refuse runs the problem."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import cast

from evoattn.backends import AUTO_ORDER, BACKENDS, Backend
from evoattn.problem import Problem
from evoattn.tuning import Config

__all__ = ["AUTO_ORDER", "BACKENDS", "RefusalError", "backend_module", "objections", "refusals", "select"]


def backend_module(name: str) -> Backend:
    """The backend's module; importing it pulls in no kernel language."""
    return cast(Backend, importlib.import_module(f"evoattn.backends.{name}"))


def refusals(name: str, problem: Problem, config: Config) -> list[str]:
    """Every reason why a backend does not take a problem; empty when it does."""
    backend = backend_module(name)
    reasons = backend.unsupported(problem, config)
    if reasons and problem.device == "cpu":  # asking for a GPU would start CUDA, which does not outlive a fork
        return reasons
    unavailable = backend.availability()
    return ([unavailable] if unavailable else []) + reasons


def objections(names: Iterable[str], problem: Problem, config: Config) -> dict[str, list[str]]:
    """For each of the backends asked, why it does not run a problem; the first without a reason does.

    One that could, but knows another of them to be faster, leaves it to that one.
    """
    found = {name: refusals(name, problem, config) for name in names}
    able = [name for name in found if not found[name]]
    if len(able) > 1:
        known = getattr(backend_module(able[0]), "faster", None)
        faster = None if known is None else known(problem)
        if faster is not None and faster[0] in able:
            for name in able[: able.index(faster[0])]:
                found[name] = ["leaves it to {}: {}".format(*faster)]
    return found


class RefusalError(ValueError):
    """No backend that was asked takes a problem.

    Args:
        message: the problem, and the reasons in lines.
        reasons: all reasons of each backend that was asked.
    """

    def __init__(self, message: str, reasons: dict[str, list[str]]) -> None:
        super().__init__(message)
        self.reasons = reasons


def select(problem: Problem, backend: str, config: Config) -> tuple[Backend, dict[str, list[str]]]:
    """The backend that runs a problem, and the reasons of those that do not.

    Raises:
        RefusalError: the named backend (or, for "auto", every backend) refuses; the message lists all reasons.
    """
    found = objections(AUTO_ORDER if backend == "auto" else (backend,), problem, config)
    for name, reasons in found.items():
        if not reasons:
            return backend_module(name), {other: why for other, why in found.items() if why}
    refused = [f"{name}: {reason}" for name, reasons in found.items() for reason in reasons]
    raise RefusalError(f"backend={backend!r} cannot run this problem ({problem}):\n  " + "\n  ".join(refused), found)
