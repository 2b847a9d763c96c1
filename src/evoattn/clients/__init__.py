"""Patches of installed programs: their attention is computed by `evoattn`, without a changed line.

    with evoattn.patch("boltz") as patched:
        ...
    print(patched)

One module a client says which functions compute attention there, and how each is replaced.
"""

from evoattn.clients.patching import Patch, patch
from evoattn.clients.releases import UnknownRelease

__all__ = ["Patch", "UnknownRelease", "patch"]
