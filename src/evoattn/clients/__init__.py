"""Patches of installed programs: their attention is computed by `evoattn`, without a changed line.

    with evoattn.patch("boltz") as patched:
        ...
    print(patched)

One module a client says which functions compute attention there, and how each is replaced.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evoattn.clients.patching import Patch, patch
    from evoattn.clients.releases import UnknownRelease

__all__ = ["Patch", "UnknownRelease", "patch"]


def __getattr__(name: str) -> Any:
    """Import what patches when it is asked for. `evoattn run` starts its program without it, and without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evoattn.clients import patching, releases

    globals().update(Patch=patching.Patch, patch=patching.patch, UnknownRelease=releases.UnknownRelease)
    return globals()[name]
