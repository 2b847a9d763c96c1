"""evoattn: the attention of the AlphaFold family. Exact, memory-efficient, one import."""

from evoattn._version import __version__
from evoattn.api import BackendStatus, Explanation, backends, evoformer_attention, explain
from evoattn.clients import Patch, patch
from evoattn.core.config import Config

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
