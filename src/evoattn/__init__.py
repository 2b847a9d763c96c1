"""evoattn: the attention of the AlphaFold family. Exact, memory-efficient, one import."""

from typing import TYPE_CHECKING, Any

from evoattn._version import __version__
from evoattn.api import BackendStatus, Explanation, backends, evoformer_attention, explain
from evoattn.core.config import Config

if TYPE_CHECKING:
    from evoattn.clients import Patch, patch

__all__ = [
    "BackendStatus",
    "Config",
    "Explanation",
    "Patch",
    "__version__",
    "backends",
    "evoformer_attention",
    "explain",
    "patch",
]


def __getattr__(name: str) -> Any:
    """Import what patches clients when it is asked for: it takes as long as all else."""
    if name not in ("Patch", "patch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evoattn import clients

    globals().update(Patch=clients.Patch, patch=clients.patch)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
