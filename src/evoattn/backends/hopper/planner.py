"""The steps of a pass while it is planned: its launches, the memory that they share, and what its plan says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from evoattn.backends import Description, Plan
from evoattn.backends.hopper.launch import KernelVariant, plan_launch
from evoattn.core.config import Config

_ALIGNMENT = 256


class Workspace:
    """Memory that only the kernels of a call use, in one allocation. A plan adds tensors, a call allocates."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def add(self, like: Tensor | None) -> int:
        """Add room for a tensor, contiguous or a permutation of it. Return where it starts, in bytes; 0 for None."""
        start = self.bytes
        if like is None:
            return 0
        self.bytes += -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
        return start

    def make(self) -> Tensor:
        """Allocate the memory of one call: the caller keeps it until all is launched."""
        return torch.empty(self.bytes, dtype=torch.uint8, device=self.device)


class Planner:
    """The steps of a pass. Each planner of a part adds its own where it decides them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.workspace = Workspace(device)
        self.kernels: list[KernelVariant] = []  # those that are launched, each as often as it is
        self.copies: list[str] = []  # what is copied or laid out anew, "TENSOR: why"
        self.tiles: dict[str, dict[str, int]] = {}  # of each kernel that has tiles of its own

    def plan_launch(self, kernel: KernelVariant, tensors: Mapping[str, Any], **numbers: float) -> Callable[..., None]:
        """Plan a launch of a kernel; see `launch.plan_launch`."""
        self.kernels.append(kernel)
        return plan_launch(kernel, self.device, tensors, **numbers)

    def make_plan(
        self, run: Callable[..., Any], *, config: Config | None = None, gate: str | None = None, writes_into: bool = False
    ) -> Plan:
        """Make the plan that runs these steps; the arguments are those of `Plan` and `Description`."""
        names = ("q", "k", "v", "gate", "pair_bias")
        copies = sorted(dict.fromkeys(self.copies), key=lambda text: names.index(text.partition(":")[0]))
        description = Description(config, self.tiles, tuple(copies), gate)
        return Plan(run, lambda: description, writes_into=writes_into, kernels=tuple(self.kernels))
