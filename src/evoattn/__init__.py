"""evoattn: the attention of the AlphaFold family. Exact, memory-efficient, one import."""

import pathlib
import sys
from typing import TYPE_CHECKING, Any

from evoattn._version import __version__
from evoattn.core.config import Config

if TYPE_CHECKING:
    from evoattn.api import BackendStatus, Explanation, backends, evoformer_attention, explain
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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_api()
    if name not in globals():
        from evoattn import clients

        globals().update(Patch=clients.Patch, patch=clients.patch)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_api() -> None:
    """Import the attention, which also defines its operators for torch."""
    from evoattn import api

    globals().update({name: getattr(api, name) for name in __all__ if hasattr(api, name)})


def _runs_a_program() -> bool:
    """True in `evoattn run` and `python -m evoattn run`, which start a program. They import no torch, which takes seconds."""
    command, *arguments = getattr(sys, "argv", None) or [""]
    is_module = command == "-m" and "-m evoattn run" in " ".join(getattr(sys, "orig_argv", ()))
    return (is_module or pathlib.PurePath(command).stem == "evoattn") and arguments[:1] == ["run"]


if not _runs_a_program():
    _import_api()
