"""A copy of a module that stands for all modules of its structure: each replay writes their weights into it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evoattn.clients.graphs.modules import Seen
from evoattn.clients.graphs.recorder import Recorder
from evoattn.clients.site import taped


class Twin:
    """A copy of a module, with weights of its own, each in memory of its own.

    Args:
        of: the module.
        seen: the same, as it was seen.
        needs: whether each of its weights needs a gradient. None: no one does.

    Attributes:
        weights: in the order of `Seen.weights`.
    """

    def __init__(self, of: nn.Module, seen: Seen, needs: Sequence[bool] | None = None) -> None:
        with torch.inference_mode(False):  # its weights shall have versions
            self.module = copy.deepcopy(of).requires_grad_(False)
            self.weights = Seen(self.module).weights
            storages: set[int] = set()
            for weight in {id(x): x for x in self.weights}.values():  # copies of views share their memory, as the views do
                storage = weight.untyped_storage()
                if storage.nbytes() > weight.nbytes or storage.data_ptr() in storages:
                    weight.data = weight.detach().clone()
                storages.add(storage.data_ptr())
        for weight, need in zip(self.weights, needs or (), strict=needs is not None):
            if need:  # one that is there twice needs one gradient, at its first place
                weight.requires_grad_()
        self._groups: dict[tuple[torch.dtype, bool], list[int]] = {}  # places of weights that one launch copies
        for place, (weight, source) in enumerate(zip(self.weights, seen.weights, strict=True)):
            self._groups.setdefault((weight.dtype, weight.stride() == source.stride()), []).append(place)

    @torch.no_grad()
    def write(self, weights: list[Tensor]) -> None:
        """Write the weights of another module of this structure, in the order of `Seen.weights`."""
        for places in self._groups.values():
            torch._foreach_copy_([self.weights[i] for i in places], [weights[i] for i in places])


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
        twin = Twin(module, seen, needs)
        random = recorder.random_state(device)
        try:
            with taped([]):
                run(twin.module)
        finally:
            recorder.set_random_state(device, random)
        self._twins[key] = twin
        return twin
