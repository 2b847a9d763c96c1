"""Structures that Boltz writes while the GPU computes the next one, in a program under `evoattn run`.

Boltz writes a structure before the next prediction begins. The GPU stands still meanwhile, for 0.04 s at 100 residues and
0.19 s at 400. Here the host writes it in the next prediction, once it has queued all steps of the sampling. A thread would not
help: it would take Python's lock from the host that launches kernels.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from evoattn.clients.site import Count

listeners: list[Callable[[], None]] = []
"""Called for each structure that waits for the next prediction."""

_waiting: list[Callable[[], None]] = []
"""At most one function, which writes the structure of the last prediction."""

_REPRESENTATIONS = ("s", "z")
"""Large tensors of a prediction, which are written on demand alone."""


def write_waiting() -> None:
    """Write the structure that waits, if there is one. It raises what the writer raises."""
    while _waiting:
        _waiting.pop()()


def later(original: Callable[..., None], count: Count) -> Callable[..., None]:
    """A `BoltzWriter.write_on_batch_end` that waits for the sampling of the next prediction, if one follows on a GPU."""

    def write_on_batch_end(
        self: Any, trainer: Any, module: Any, prediction: dict[str, Any], indices: Any, batch: Any, *number: Any
    ) -> None:
        write_waiting()  # unless the sampling did: a prediction that runs out of memory has none
        if not _another_follows(trainer) or not _is_on_gpu(prediction.get("coords")):
            return original(self, trainer, module, prediction, indices, batch, *number)
        needed = (x for x in prediction if self.write_embeddings or x not in _REPRESENTATIONS)
        kept = _on_cpu({x: prediction[x] for x in needed})  # recordings write into what they returned
        scores = kept.get("confidence_score")
        if scores is not None and scores.unique().numel() != scores.numel():  # the GPU may rank equal samples otherwise
            return original(self, trainer, module, prediction, indices, batch, *number)
        records = {"record": batch["record"]}
        _waiting.append(functools.partial(original, self, trainer, module, kept, indices, records, *number))
        _write_at_exit()
        for listener in listeners:
            listener()
        return None

    return write_on_batch_end


def then_write(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A sampling that has queued its steps when it returns: the time to write the structure of the last prediction."""

    def sample(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        write_waiting()
        return result

    return sample


def write_first(original: Callable[..., Any], count: Count) -> Callable[..., Any]:
    """A function of the writer before which all structures have to be there."""

    def at_end(*args: Any, **kwargs: Any) -> Any:
        write_waiting()
        return original(*args, **kwargs)

    return at_end


@functools.cache
def _write_at_exit() -> None:
    """Write what waits if the program ends by an error, or is interrupted."""
    atexit.register(write_waiting)


def _another_follows(trainer: Any) -> bool:
    """Return whether Lightning's trainer calls the writer, and predicts another input after this one."""
    progress = getattr(getattr(trainer, "predict_loop", None), "batch_progress", None)
    return getattr(trainer, "predicting", False) is True and getattr(progress, "is_last_batch", True) is False


def _is_on_gpu(coordinates: Any) -> bool:
    return isinstance(coordinates, Tensor) and coordinates.is_cuda


def _on_cpu(value: Any) -> Any:
    """Copies on the CPU of the tensors in dicts."""
    if isinstance(value, dict):
        return {name: _on_cpu(x) for name, x in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value
