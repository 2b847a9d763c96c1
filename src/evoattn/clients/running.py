"""Patches inside a program under `evoattn run`: each module of a client at its import. Calls are counted.

The counts lie in a folder of the parent, one file a process, and are there however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import mmap
import os
import pathlib
import secrets
import threading
from typing import Any

from evoattn.clients import writing
from evoattn.clients.loading import load_ahead
from evoattn.clients.patching import patch_as_imported
from evoattn.clients.registry import client
from evoattn.clients.releases import UnknownRelease
from evoattn.compile import beside
from evoattn.dispatch import lookup

_MOST = 1024  # names of a process
_BYTES = 8


class Tally:
    """Counts of names, in a file that is mapped to memory: they outlive a process that is killed.

    A forked process begins a file of its own. If the folder is None, gone or full, nothing is counted; names beyond
    1,024 are not.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else pathlib.Path(folder)
        self._begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[tuple[str, ...], int] = {}
        self._counts = memoryview(b"")  # until there is a name
        self._failed = self._folder is None
        self._stem = (self._folder or pathlib.Path()) / f"{os.getpid()}-{secrets.token_hex(4)}"

    def add(self, *name: str) -> None:
        with self._lock:
            if name not in self._places:
                if self._failed or len(self._places) == _MOST:
                    return
                try:
                    self._write(name)
                except OSError:
                    self._failed = True
                    with contextlib.suppress(OSError):  # an empty file finds room on a full disk
                        self._stem.with_suffix(".uncounted").touch()
                    return
                self._places[name] = len(self._places)
            self._counts[self._places[name]] += 1

    def _write(self, name: tuple[str, ...]) -> None:
        """Put a name into the file of names; the first one makes both files."""
        if not self._counts:
            with self._stem.with_suffix(".counts").open("w+b", buffering=0) as file:
                # The bytes are written, because a store to a hole that finds no room on the disk ends the process: SIGBUS.
                if file.write(bytes(_MOST * _BYTES)) != _MOST * _BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        with self._stem.with_suffix(".names").open("a") as file:
            file.write(json.dumps(name) + "\n")


_refused: set[str] = set()
"""Clients that are not patched in this process."""


@functools.cache
def _tally(folder: str | None) -> Tally:
    """The counts of this process, which also count the backend of each plan that runs."""
    tally = Tally(folder)
    lookup.listeners.append(functools.partial(tally.add, "backend"))
    beside.listeners.append(functools.partial(tally.add, "waited"))
    writing.listeners.append(functools.partial(tally.add, "written later"))
    return tally


@functools.cache
def modules_of(name: str, layers: bool, graphs: bool) -> set[str]:
    """The modules of a client in which something is replaced."""
    of = client(name)
    sites = (site for sites in of.parts(layers, graphs, command=graphs).values() for site in sites if site.replace)
    return {site.module for site in sites} | {module for module, _, _ in of.values}


def imported(module: str, names: list[str], folder: str | None, options: dict[str, Any]) -> None:
    """A watched module of the named clients has been imported: replace what is in it, with options of `parent.environment`."""
    tally = _tally(folder)
    for name in names:
        if name in _refused or module not in modules_of(name, options["layers"], options["graphs"]):
            continue
        load_ahead()

        def tell(kind: str, reason: str, name: str = name) -> None:
            tally.add(*(("step", name, reason) if kind == "step" else ("call", name, reason, kind)))

        try:
            patched = patch_as_imported(name, module, tell, **options)
        except Exception as error:  # the program's own import shall not fail
            _refused.add(name)
            known = isinstance(error, UnknownRelease)
            tally.add("refused", name, str(error) if known else f"{type(error).__name__}: {error}")
        else:
            tally.add("patched", name, patched.versions[name])
