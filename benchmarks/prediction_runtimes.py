"""Other programs that run a client's model with its weights, for `predictions.py`: NVIDIA's BioNeMo Inference Runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BIONEMO", "Runtime", "padded"]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Another program that runs a program's model.

    Args:
        package: what is imported.
        distribution: the package whose version is recorded.
        precision: of its denoiser.
        build: its model with the weights of the program's, on a device.
        inputs: its inputs from those of the program.
        predict: as that of `Program`.
        stages: those of its model, as those of `Program`.
    """

    package: str
    distribution: str
    precision: str
    build: Callable[[nn.Module, torch.device], nn.Module]
    inputs: Callable[[Any], Any]
    predict: Callable[[nn.Module, Any, int, int, int], Mapping[str, Tensor]]
    stages: Callable[[nn.Module], Mapping[str, tuple[str, str]]]


def _build(model: nn.Module, device: torch.device) -> nn.Module:
    """Boltz-2 of NVIDIA's BioNeMo Inference Runtime, in the precisions that it chooses."""
    from bionemo_ir.models.boltz2 import Boltz2

    made: Any = Boltz2(include_load_weights=False)
    made.load_weights(weights={name: x.cpu() for name, x in model.state_dict().items()})
    outputs: nn.Module = made.to(device).eval()
    return outputs


def padded(features: Mapping[str, Tensor], multiple: int = 8) -> dict[str, Tensor]:
    """Features of Boltz-2 with so many tokens that their number is a multiple: zeros follow the last."""
    tokens = features["token_pad_mask"].shape[1]

    def longer(x: Tensor) -> Tensor:
        more = [-tokens % multiple * (axis > 0 and size == tokens) for axis, size in enumerate(x.shape)]
        return torch.nn.functional.pad(x, [part for y in reversed(more) for part in (0, y)])

    return {name: longer(x) for name, x in features.items()}


def _predict(model: nn.Module, inputs: Any, steps: int, recycles: int, samples: int) -> dict[str, Tensor]:
    # A copy: the model writes into the mapping.
    outputs = model(dict(inputs), recycling_steps=recycles, num_sampling_steps=steps, diffusion_samples=samples)
    return {"coordinates": outputs["coords"]}


def _stages(model: nn.Module) -> dict[str, tuple[str, str]]:
    sampler = ("diffusion_sampler", "forward") if hasattr(model, "diffusion_sampler") else ("structure_module", "sample")
    return {"trunk": ("trunk", "forward"), "denoiser": sampler, "confidence": ("confidence_module", "forward")}


BIONEMO = Runtime("bionemo_ir", "bionemo-ir", "bf16", _build, padded, _predict, _stages)
"""The way `bionemo-ir`."""
