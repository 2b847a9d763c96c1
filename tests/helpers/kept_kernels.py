"""The compiled Hopper kernels that a cache folder keeps."""

import pathlib

from evoattn.backends.hopper import ahead
from evoattn.compile import cache


def new_process() -> None:
    """Forget what this process has loaded."""
    ahead.functions.clear()
    cache.cannot_keep.cache_clear()


def kept(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a cache folder, by name."""
    return sorted((folder / "hopper").iterdir())
