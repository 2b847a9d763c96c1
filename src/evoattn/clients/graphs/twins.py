"""A copy of a module that stands for all modules of its structure: each replay writes their weights into it."""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.recorder import Recorder
from evoattn.clients.site import taped
from evoattn.core.devices import uncast

_UNIT = 512
"""Bytes at whose multiples torch's allocator begins tensors on a GPU."""


class Twin:
    """A copy of a module, with its weights moved into one tensor for each dtype, which one launch fills.

    Weights stay where they are that are not contiguous, are there twice, or are no multiple of 512 bytes: torch begins each
    tensor at one, and what kernels compute may depend on where a weight begins.

    Args:
        of: the module.
        needs: whether each of its weights needs a gradient. None: no one does.

    Attributes:
        weights: in the order of `Seen.weights`.
    """

    def __init__(self, of: nn.Module, needs: Sequence[bool] | None = None) -> None:
        with torch.inference_mode(False):  # its weights shall have versions
            self.module = copy.deepcopy(of).requires_grad_(False)
            weights = self.weights = Seen(self.module).weights
            times = collections.Counter(map(id, weights))
            alone = [i for i, x in enumerate(weights) if times[id(x)] == 1 and _is_aligned(x)]
            self._parts: list[tuple[Tensor, list[int]]] = []
            for dtype in dict.fromkeys(weights[i].dtype for i in alone):
                places = [i for i in alone if weights[i].dtype == dtype]
                packed = torch.cat([weights[i].detach().reshape(-1) for i in places])
                for i, part in zip(places, packed.split([weights[i].numel() for i in places]), strict=True):
                    weights[i].data = part.view(weights[i].shape)
                self._parts.append((packed, places))
        for weight, need in zip(weights, needs or (), strict=needs is not None):
            if need:  # one that is there twice needs one gradient, at its first place
                weight.requires_grad_()
        self._others = [i for i in range(len(weights)) if i not in alone]
        self._targets = [weights[i] for i in self._others]

    @torch.no_grad()
    def write(self, weights: list[Tensor]) -> None:
        """Write the weights of another module of this structure, in the order of `Seen.weights`."""
        for packed, places in self._parts:
            with uncast(packed.device):
                torch.cat([weights[i].reshape(-1) for i in places], out=packed)
        if self._targets:
            torch._foreach_copy_(self._targets, [weights[i] for i in self._others])


def _is_aligned(weight: Tensor) -> bool:
    return weight.is_contiguous() and weight.numel() > 0 and weight.nbytes % _UNIT == 0


class Twins:
    """The twins of one structure, one for each state of a recorder, and so for each stream, and for each choice of gradients.

    All recordings in a state read one twin, whatever the lengths of their calls. It is gone with the last of them.
    """

    def __init__(self) -> None:
        self._twins: weakref.WeakValueDictionary[Any, Twin] = weakref.WeakValueDictionary()

    def of(
        self,
        module: nn.Module,
        seen: Seen,
        recorder: Recorder,
        device: torch.device,
        run: Callable[[nn.Module], Any],
        needs: Sequence[bool] | None = None,
    ) -> Twin:
        """The twin of this state, with the weights of a module that was `seen`. needs: which of them need gradients.

        A new one is run once, so that what its layers make at the first call is there.
        """
        key = recorder.state(device), needs and tuple(needs)
        twin = self._twins.get(key)
        if twin is not None:
            twin.write(seen.weights)
            return twin
        twin = Twin(module, needs)
        random = recorder.random_state(device)
        try:
            with taped([]):
                run(twin.module)
        finally:
            recorder.set_random_state(device, random)
        self._twins[key] = twin
        return twin
