"""Patches inside a program under `evoattn run`: each module of a client at its import. Calls are counted.

The counts lie in a folder of the parent, one file a process, and are there however the process ends.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import json
import mmap
import os
import pathlib
import secrets
import textwrap
import threading
from typing import Any

from evoattn.clients import writing
from evoattn.clients.graphs import ELSEWHERE
from evoattn.clients.loading import load_ahead
from evoattn.clients.patching import NAMES, client, patch_as_imported
from evoattn.clients.releases import UnknownRelease
from evoattn.clients.site import in_words, joined, precision_in_words
from evoattn.compile import beside
from evoattn.dispatch import lookup

VARIABLE = "EVOATTN_RUN"
"""The environment's name for what `evoattn run` tells the processes of its program: see `environment`."""

BEGAN = ".began"
"""The suffix of the files in the folder of the counts in which each Python that reads the start-up file leaves its command."""

STARTUP = pathlib.Path(__file__).parent / "startup"
"""The folder that goes to PYTHONPATH."""

UNREAD = """\
A Python process that does not read evoattn's start-up file runs unpatched: \
Python ignores it with -I, -E or -S, and if PYTHONPATH is removed, as by `env -i`. \
Start the program without these, or call evoattn.patch() in it"""

_MOST = 1024  # names of a process
_BYTES = 8


class Tally:
    """Counts of names, in a file that is mapped to memory: they outlive a process that is killed.

    A forked process begins a file of its own. If the folder is None, gone or full, nothing is counted.
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


def totals(folder: pathlib.Path) -> collections.Counter[tuple[str, ...]]:
    """The counts of all processes, by their names."""
    counter: collections.Counter[tuple[str, ...]] = collections.Counter()
    for path in folder.glob("*.names"):
        counts = memoryview(path.with_suffix(".counts").read_bytes()).cast("q")
        for name, count in zip(path.read_text().splitlines(), counts, strict=False):
            with contextlib.suppress(json.JSONDecodeError):  # the disk was full in the middle of a name
                counter[tuple(json.loads(name))] += count
    return counter


def summary(folder: pathlib.Path, names: tuple[str, ...], precision: str = "exact") -> str:
    """Tell in a line what the processes counted. precision: what they were asked for."""
    computed: collections.Counter[str] = collections.Counter()
    passed_on: dict[str, collections.Counter[str]] = {}
    steps: collections.Counter[str] = collections.Counter()
    backends, patched, refused, later = set(), set(), set(), 0
    for name, count in totals(folder).items():
        match name:
            case ("call", _, "", kind):
                computed[kind] += count
            case ("call", _, reason, kind):
                passed_on.setdefault(reason, collections.Counter())[kind] += count
            case ("step", _, reason):
                steps[reason] += count
            case ("backend", backend):
                backends.add(backend)
            case ("written later",):
                later += count
            case ("waited", reason):
                refused.add(f"calls waited for their kernels to be compiled: {reason}")
            case ("patched", client_name, version):
                patched.add(f"{client_name} {version}")
            case ("refused", client_name, reason):
                refused.add(f"{client_name} was not patched: {reason}")
    refused |= {path.read_text() for path in folder.glob("*.lost")}
    if any(folder.glob("*.uncounted")):
        refused.add(f"not all calls were counted: {folder.parent} cannot take the counts; TMPDIR names another place")
    ending = "" if computed or passed_on or steps or refused else f". {UNREAD}"
    if computed:
        where = f" on {joined(sorted(backends))}" if backends else ""
        parts = [f"{in_words(computed)} of {joined(sorted(patched))} computed by evoattn{where}"]
    elif patched and ending:
        parts = [f"{joined(sorted(patched))} patched, but no attention was called in {_readers(folder)}"]
    elif patched:
        parts = [f"{joined(sorted(patched))} patched, but no attention was computed by evoattn"]
    elif refused:
        parts = []
    else:
        parts = [_not_patched(folder, names)]
    if precision != "exact" and patched:
        parts.append(precision_in_words(precision, computed))
    by_count = sorted(passed_on.items(), key=lambda item: -item[1].total())
    parts += [f"{in_words(counts)} by the original: {reason}" for reason, counts in by_count]
    if later:
        parts.append(f"{later:,} structure{'s' if later != 1 else ''} written beside the next prediction")
    return "; ".join([*parts, *_steps(steps), *sorted(refused)]) + ending


def _not_patched(folder: pathlib.Path, names: tuple[str, ...]) -> str:
    if not folder.exists():
        return f"nothing was counted: the program removed {folder}"
    if not any(folder.glob(f"*{BEGAN}")):
        return "nothing was counted: no Python process reported that it read evoattn's start-up file"
    return f"nothing was patched: no attention of {', '.join(names)} was imported in {_readers(folder)}"


def _readers(folder: pathlib.Path) -> str:
    """Name the Python processes that read the start-up file, the first three by their commands."""
    files = sorted(folder.glob(f"*{BEGAN}"), key=lambda path: path.stat().st_mtime_ns)
    shown = [_shown(path.read_text(encoding="utf-8", errors="replace")) for path in files[:3]]
    more = [f"{len(files) - 3} more"] if len(files) > 3 else []
    processes = "Python process" if len(files) == 1 else f"{len(files)} Python processes"
    return f"the {processes} that read evoattn's start-up file ({'; '.join(shown + more)})"


def _shown(command: str) -> str:
    """A command in one short line that sends nothing but letters to the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in textwrap.shorten(command, 60, placeholder=" ..."))


def _steps(counts: collections.Counter[str]) -> list[str]:
    """Tell how many steps and blocks were replayed, unless the machine has no GPU."""
    replayed = counts.pop("", 0)
    counts.pop(ELSEWHERE, None)
    if not replayed and not counts:
        return []
    why = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    ran = f" and {sum(counts.values()):,} not ({why})" if why else ""
    return [f"{replayed:,} steps and blocks replayed as CUDA graphs{ran}"]


def environment(
    folder: pathlib.Path | None,
    watched: dict[str, list[str]],
    *,
    layers: bool = True,
    graphs: bool = False,
    precision: str = "exact",
    wait: bool = True,
) -> dict[str, str]:
    """The environment of a program whose processes patch clients: its start-up file gets JSON.

    `folder` is that of the counts, or None, and `watched` has modules with the clients that they are of (`modules`).
    """
    where = None if folder is None else str(folder)
    options = {"layers": layers, "graphs": graphs, "precision": precision, "wait": wait}
    told = json.dumps({"folder": where, "modules": watched, "options": options})
    paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, VARIABLE: told, "PYTHONPATH": os.pathsep.join(paths)}


def modules(names: tuple[str, ...] = NAMES, *, layers: bool = True, graphs: bool = False) -> dict[str, list[str]]:
    """The modules to watch, each with the clients that it is of."""
    clients_by_module: dict[str, list[str]] = {}
    for name in names:
        of = client(name)
        sites = (site for sites in of.parts(layers, graphs, command=graphs).values() for site in sites if site.replace)
        for module in sorted({site.module for site in sites} | {module for module, _, _ in of.values}):
            clients_by_module.setdefault(module, []).append(name)
    return clients_by_module


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


def imported(module: str, names: list[str], folder: str | None, options: dict[str, Any]) -> None:
    """A watched module of the named clients has been imported: replace what is in it, with these options of `environment`."""
    tally = _tally(folder)
    load_ahead()
    for name in names:
        if name in _refused:
            continue

        def tell(kind: str, reason: str, name: str = name) -> None:
            tally.add(*(("step", name, reason) if kind == "step" else ("call", name, reason, kind)))

        try:
            patched = patch_as_imported(name, module, tell, **options)
        except UnknownRelease as error:
            _refused.add(name)
            tally.add("refused", name, str(error))
        else:
            tally.add("patched", name, patched.versions[name])
