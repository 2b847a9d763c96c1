"""The device that a command runs on."""

from __future__ import annotations

import torch

from evoattn.bench.machine import devices, free_bytes, name, synchronize, version_of
from evoattn.cli.terminal import RefusedError

__all__ = ["devices", "free_bytes", "name", "pick", "synchronize", "version_of"]


def pick(wish: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        RefusedError: there is no GPU that torch can use.
    """
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cuda" and not torch.cuda.is_available():
        raise RefusedError("--device cuda: torch finds no GPU here; expected one, or --device cpu (evoattn doctor tells more)")
    return torch.device(wish)
