"""The verdict on one random layer: its output and all gradients, against dense torch in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evoattn.dispatch.lookup import RefusalError
from evoattn.nn import attention as layers
from evoattn.testing.judging import Outcome, bits, poisoned, verdict
from evoattn.testing.oracle import FLOOR, relative_error
from tests.fuzz.layer_kinds import KINDS
from tests.fuzz.random_layers import RandomLayer
from tests.helpers.dense_layers import MaskedSoftmax
from tests.helpers.surroundings import COMPILERS, COUNTERS, DTENSORS, INSTEAD, MODES, distribute, like, local

_MULTIPLE = 3.0
"""The factor on the loss of dense torch in the compute dtype, as in tests/nn. In 2,000 layers on a CPU 999 of 1,000
values lost no more than 1.7 times as much, beyond the floor, and the worst one 2.6 times.
"""

_ROUGH = {torch.float64: 4e-15, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""`MaskedSoftmax.rough`: 16 times the distance of neighbours, or 4 times in 16 bits, where it exceeds other roundings."""

_SWALLOWS = {torch.float32: 1e8, torch.bfloat16: 3e4, torch.float16: 3e4, torch.float64: math.inf}
"""The least `inf` that leaves the scores of a masked row no digits, by compute dtype."""

_MORE, _MORE_SIDES = 4, 16
"""Runs of dense torch that a failure is compared with besides. More for a ReLU: a run seldom takes the one number whose sign is
uncertain to the other side.
"""

_STEADY = 0.1
"""relu_ gets no cotangent if the output is below this share of its usual size, because rounding may change its sign."""

_MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}

Values = dict[str, "Tensor | None"]
"""The output "o", and the gradient "d..." of each input and parameter."""


def judge_layer(problem: RandomLayer, backend: str = "auto", device: torch.device | str = "cpu") -> Outcome:
    """Run a layer forward and backward, and judge all results.

    The truth calls the same sub-modules one after the other, in dense torch and float64. The budget is what the same dense
    torch loses in the compute dtype, times 3, and times 1 + 2 / sqrt(n) for the n numbers of a value, since few errors vary
    more. Its floor is that of `budgets`: the rounding of the result itself. If a gradient is 0 but for rounding, as that of a
    norm's shift before a pair bias is, the rounding of a backend decides: dense torch imitates it (`MaskedSoftmax.rough`).

    Shapes, dtypes, finite values, and None for what is frozen have to be right too, and no argument may change.

    Args:
        problem: from `random_layer`.
        backend: of its attention, as `evoformer_attention` takes it. A refusal is no failure.
        device: where the layer runs; its numbers are drawn on the CPU.

    Returns:
        An `Outcome`. An exception is a failure too.
    """

    def find() -> Outcome | list[tuple[str, str]]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a backward hook says so if no input needs a gradient
                return _failures(problem, backend, torch.device(device))
        except RefusalError as error:
            if backend == "auto":
                raise
            return Outcome("refused", "; ".join(error.reasons[backend]))

    return verdict(find)


def _failures(problem: RandomLayer, backend: str, device: torch.device) -> list[tuple[str, str]]:
    with INSTEAD[problem.around](device) if problem.around in INSTEAD else contextlib.nullcontext():
        return _failures_inside(problem, backend, device)


def _failures_inside(problem: RandomLayer, backend: str, device: torch.device) -> list[tuple[str, str]]:
    values, changed = _layer_values(problem, backend, device)
    compute = problem.compute_dtype
    double = _dense_values(problem, device, torch.float64, MaskedSoftmax())
    plain = [_dense_values(problem, device, compute, MaskedSoftmax(rough=_ROUGH[compute]))]
    failures = _wrong(problem, values, double, plain)
    if any(kind.startswith("error of") for kind, _ in failures):  # a few roundings may cancel by chance
        more = _MORE_SIDES if problem.options.get("activation") == "relu" else _MORE
        plain += [
            _dense_values(problem, device, compute, MaskedSoftmax(rough=_ROUGH[compute], seed=seed))
            for seed in range(1, 1 + more)
        ]
        failures = _wrong(problem, values, double, plain)
    return [(f"mutated {name}", "") for name in changed] + failures


def _wrong(problem: RandomLayer, results: Values, double: Values, plain: list[Values]) -> list[tuple[str, str]]:
    failures = []
    for name, right in double.items():
        value, rough = results[name], [x for values in plain if (x := values[name]) is not None]
        if value is None or right is None:
            if not (value is None and right is None):
                failures.append((f"gradient {name}", f"{'none' if value is None else 'one'} is given"))
            continue
        if value.shape != right.shape:
            failures.append((f"shape of {name}", f"{tuple(value.shape)}, expected {tuple(right.shape)}"))
            continue
        if bool((right.to(value.dtype).isfinite() & rough[0].isfinite() & ~value.isfinite()).any()):
            failures.append((f"not finite: {name}", ""))
        lost = max(relative_error(x.to(value.dtype), right) for x in rough)
        floor = max(FLOOR[problem.compute_dtype], FLOOR[value.dtype])
        allowed = max(_MULTIPLE * (1 + 2 / math.sqrt(value.numel())) * lost, floor)
        error = relative_error(value, right)
        if not error <= allowed:
            failures.append((f"error of {name}", f"{error:.2e}, allowed {allowed:.2e}"))
    out = results["o"]
    if out is not None and out.dtype != problem.out_dtype:
        failures.append(("dtype of o", f"{out.dtype}, expected {problem.out_dtype}"))
    return failures


def _layer_values(problem: RandomLayer, backend: str, device: torch.device) -> tuple[Values, list[str]]:
    """The results of the layer, and the names of tensors that it changed."""
    attention = functools.partial(layers.__dict__["evoformer_attention"], backend=backend)
    with contextlib.ExitStack() as at_end, mock.patch.object(layers, "evoformer_attention", attention), poisoned():
        at_end.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(problem.default_dtype)
        layer, inputs, mask = problem.layer(device), problem.inputs(device), problem.masks(device)
        do, factor = problem.cotangents(device)
        do = do.where(_steady(problem, device), 0) if problem.in_place == "relu_" else do
        arguments = {**inputs, **dict(layer.named_parameters()), "mask": mask, "do": do}
        before = {name: bits(x) for name, x in arguments.items() if x is not None}
        if problem.around == DTENSORS:
            *tensors, mask = distribute(layer, [*inputs.values(), mask], device)
            inputs = dict(zip(inputs, tensors, strict=True))
        modes = MODES | COUNTERS
        with modes[problem.around](device) if problem.around in modes else contextlib.nullcontext():
            with _cast(problem, device, problem.autocast is not None), _MODES[problem.mode]():
                out = _in_place(problem, _called(problem, layer, inputs, mask), factor)
            if out.requires_grad and problem.mode == "grad":  # not a leaf that was overwritten
                with _cast(problem, device, problem.autocast is not None and problem.backward_under_autocast):
                    out.backward(like(do.to(out.dtype), out))
    if problem.overwrites:
        del before[next(iter(inputs))]
    changed = [name for name, same in before.items() if not torch.equal(same, bits(arguments[name]))]  # type: ignore[arg-type]
    return _values(out, {**inputs, "mask": mask}, layer), changed


def _called(problem: RandomLayer, layer: nn.Module, inputs: dict[str, Tensor], mask: Tensor | None) -> Tensor:
    """The output of the layer."""
    name = KINDS[problem.kind].overwrites if problem.overwrites else ""

    def call(*tensors: Tensor) -> Tensor:
        more = {name: tensors[0] if name == "out" else True} if name else {}
        return layer(**dict(zip(inputs, tensors, strict=True)), **problem.called, **more, mask=mask)  # type: ignore[no-any-return]

    if problem.checkpoint:
        return checkpoint(call, *inputs.values(), use_reentrant=problem.checkpoint == "reentrant")  # type: ignore[no-any-return]
    if problem.around in COMPILERS:
        torch.compiler.reset()
        return torch.compile(call, backend=COMPILERS[problem.around], fullgraph=True)(*inputs.values())  # type: ignore[no-any-return]
    return call(*inputs.values())


def _dense_values(problem: RandomLayer, device: torch.device, dtype: torch.dtype, weights: MaskedSoftmax) -> Values:
    """The same in dense torch, with the layer and the inputs in a dtype."""
    do, factor = problem.cotangents(device)
    do = do.where(_steady(problem, device), 0) if problem.in_place == "relu_" else do
    with _MODES[problem.mode]():
        layer, leaves, result = _dense(problem, device, dtype, weights)
        out = _in_place(problem, result, factor.to(dtype))
    if out.requires_grad:
        out.backward(do.to(out.dtype))
    return _values(out, leaves, layer)


def _dense(
    problem: RandomLayer, device: torch.device, dtype: torch.dtype, weights: MaskedSoftmax
) -> tuple[nn.Module, dict[str, Tensor | None], Tensor]:
    kind, layer, mask = KINDS[problem.kind], problem.layer(device).to(dtype), problem.masks(device)
    inputs = {name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in problem.inputs(device).items()}
    swallowed = problem.options.get("inf", 0.0) >= _SWALLOWS[problem.compute_dtype]
    native = problem.options.get("empty_rows") == "native"
    weights = dataclasses.replace(weights, empty="native" if native else "mean" if swallowed else "scores")
    if mask is not None and mask.requires_grad:
        mask = mask.detach().to(dtype).requires_grad_()
    whole = None if mask is None else mask.expand(problem.shape(kind.mask))
    out = kind.dense(layer, **inputs, **problem.called, mask=whole, weights=weights)
    return layer, {**inputs, "mask": mask}, out


def _steady(problem: RandomLayer, device: torch.device) -> Tensor:
    with torch.no_grad():
        size = _dense(problem, device, torch.float64, MaskedSoftmax())[2].abs()
    return size > _STEADY * size.square().mean().sqrt()


def _in_place(problem: RandomLayer, out: Tensor, factor: Tensor) -> Tensor:
    if problem.in_place == "mul_":
        out *= factor
    if problem.in_place == "add_":
        out += factor
    if problem.in_place == "part":
        out[..., ::2] *= factor
    return out.relu_() if problem.in_place == "relu_" else out


def _values(out: Tensor, leaves: dict[str, Tensor | None], layer: nn.Module) -> Values:
    values: Values = {"o": local(out.detach())}
    named = (*leaves.items(), *layer.named_parameters())
    return values | {f"d{name}": None if x is None else local(x.grad) for name, x in named}


def _cast(problem: RandomLayer, device: torch.device, on: bool) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, problem.autocast) if on else contextlib.nullcontext()
