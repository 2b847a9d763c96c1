"""Python runs this file when it starts in a program under `evoattn run`, and in its children: their folder is in PYTHONPATH.

It watches for the modules of known clients. Once one has been imported, `evoattn.clients.running` replaces what is in it.
Until then nothing but the standard library is imported. For `evoattn compare` it also seeds what draws random numbers, and
tells the peak of a GPU's memory.
"""

import atexit
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
from typing import Any

_SEEDED = {
    "numpy": lambda seed: importlib.import_module("numpy.random").seed(seed),
    "torch": lambda seed: sys.modules["torch"].manual_seed(seed),
}
"""Modules with a generator of their own, and what seeds it: a program may draw before it takes its own seed."""


class _Watched(importlib.abc.Loader):
    """The loader of a watched module, which then lets evoattn replace what is in it."""

    def __init__(self, loader: Any, clients: list, told: dict) -> None:
        self._loader, self._clients, self._told = loader, clients, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        if module.__name__ in _SEEDED and self._told["seed"] is not None:
            _SEEDED[module.__name__](self._told["seed"])
        if not self._clients:
            return
        try:
            from evoattn.clients import running
        except ImportError as error:
            _leave(self._told["folder"], f"{os.getpid()}.lost", f"{sys.executable} cannot import evoattn ({error})")
        else:
            running.imported(module.__name__, self._clients, self._told["folder"], self._told["options"])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds watched modules as the finders after it do."""

    def __init__(self, told: dict) -> None:
        seeded: dict = {} if told["seed"] is None else {name: [] for name in _SEEDED}
        self._modules, self._told = {**seeded, **told["modules"]}, told

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._modules:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Watched(spec.loader, self._modules[name], self._told)
                return spec
        return None


def _leave(folder: Any, name: str, text: str = "") -> None:
    """Write a file for `evoattn run`, if its folder is there: a child may outlive it, and a disk may be full."""
    if folder is not None:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def _tell_peak(folder: Any) -> None:
    """Leave the most bytes that torch had on one GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peak = max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
        _leave(folder, f"{os.getpid()}.peak", str(peak))


def _leave_the_stage() -> None:
    """Remove this folder from sys.path, and run the sitecustomize that it hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    own = sys.modules.pop("sitecustomize")
    spec = importlib.util.find_spec("sitecustomize")
    sys.modules["sitecustomize"] = own if spec is None else importlib.util.module_from_spec(spec)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(sys.modules["sitecustomize"])


if "EVOATTN_RUN" in os.environ:
    _told = json.loads(os.environ["EVOATTN_RUN"])
    _leave(_told["folder"], f"{os.getpid()}-{os.urandom(4).hex()}.began", " ".join(getattr(sys, "orig_argv", [sys.executable])))
    sys.meta_path.insert(0, _Finder(_told))
    if _told["seed"] is not None:
        importlib.import_module("random").seed(_told["seed"])
        atexit.register(_tell_peak, _told["folder"])
_leave_the_stage()
