"""One step of a denoiser on one noise, by each way, against float64: a part of `predictions.py`.

Boltz casts to float32 in many places. So `Tensor.float` stands for `Tensor.double` in the float64 step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, Protocol
from unittest.mock import patch

import torch
from prediction_programs import Program
from prediction_ways import Way, used
from torch import Tensor, nn

from evoattn.nn import sampling

__all__ = ["Step"]

_STEPS = 8
"""Steps of the prediction of which one is taken: the middle one."""


class Run(Protocol):
    """What a step needs of `predictions.Run`."""

    @property
    def program(self) -> Program: ...

    @property
    def model(self) -> nn.Module: ...

    def predict(self, inputs: Any, steps: int, exact: bool = False) -> dict[str, Tensor]: ...


class Step:
    """A call of the denoiser in a prediction by the program as it is installed, and its result in float64."""

    def __init__(self, run: Run, inputs: Any) -> None:
        denoiser = run.program.denoiser
        assert denoiser is not None
        self._run, self._method = run, denoiser.method
        self._part = run.model.get_submodule(denoiser.part)
        self._atoms = inputs[denoiser.atoms].bool()
        self._call = self._taken(inputs)
        args, kwargs = _double(self._call)
        exact = copy.deepcopy(self._part).double()
        with torch.no_grad(), _float64():
            self._true: Tensor = getattr(exact, self._method)(*args, **kwargs)

    def _taken(self, inputs: Any) -> tuple[Any, Any]:
        """The arguments of the step in the middle."""
        calls: list[tuple[Any, Any]] = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return getattr(type(self._part), self._method)(self._part, *args, **kwargs)

        with used(Way(None), self._run.program, self._run.model), patch.object(self._part, self._method, watched, create=True):
            self._run.predict(inputs, _STEPS)
        return calls[len(calls) // 2]

    def distance(self, way: Way) -> float:
        """The distance of a way from float64: the root mean square over the atoms, in the unit of the coordinates."""
        args, kwargs = self._call
        loops = (way.patch or {}).get("graphs")
        kept = sampling(way.named or "exact") if loops else contextlib.nullcontext()  # as the loop of the program is
        with used(way, self._run.program, self._run.model), torch.no_grad(), kept:
            result: Tensor = getattr(self._part, self._method)(*args, **kwargs)
        squares = (result.double() - self._true).square().sum(-1)[self._atoms.expand(result.shape[:-1])]
        return float(f"{squares.mean().sqrt().item():.3e}")


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """Let what is cast to float32, or made without a dtype, be float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(before)


def _double(value: Any) -> Any:
    """Arguments with all that is floating-point in float64, also what a partial function is given."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _double(x) for name, x in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_double, value))
    if isinstance(value, functools.partial):
        return functools.partial(value.func, *_double(value.args), **_double(value.keywords))
    return value
