"""The parent of a program under `evoattn run`: what it tells the program's processes, and what it says of their counts.

Nothing here imports torch, which takes seconds: the program starts at once.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import textwrap

from evoattn.clients.kinds import ELSEWHERE, in_words, joined, precision_in_words
from evoattn.clients.registry import NAMES, sources

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


def totals(folder: pathlib.Path) -> collections.Counter[tuple[str, ...]]:
    """The counts of all processes, by their names."""
    counter: collections.Counter[tuple[str, ...]] = collections.Counter()
    for path in folder.glob("*.names"):
        counts = memoryview(path.with_suffix(".counts").read_bytes()).cast("q")
        for name, count in zip(path.read_text().splitlines(), counts, strict=False):
            with contextlib.suppress(json.JSONDecodeError):  # the disk was full in the middle of a name
                counter[tuple(json.loads(name))] += count
    return counter


def has_computed(folder: pathlib.Path) -> bool:
    """Return whether evoattn computed a call."""
    return any(name[0] == "call" and not name[2] and count for name, count in totals(folder).items())


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
    graphs: bool = True,
    precision: str = "exact",
    wait: bool = True,
    seed: int | None = None,
) -> dict[str, str]:
    """The environment of a program whose processes patch clients: its start-up file gets JSON.

    `folder` is that of the counts, or None, and `watched` has modules with the clients that they are of (`modules`). The
    generators of Python, numpy and torch begin with the `seed`, if there is one.
    """
    where = None if folder is None else str(folder)
    options = {"layers": layers, "graphs": graphs, "precision": precision, "wait": wait}
    told = json.dumps({"folder": where, "modules": watched, "options": options, "seed": seed})
    paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, VARIABLE: told, "PYTHONPATH": os.pathsep.join(paths)}


def modules(names: tuple[str, ...] = NAMES) -> dict[str, list[str]]:
    """The modules to watch, each with the clients that it is of: those of all functions whose source is known."""
    clients_by_module: dict[str, list[str]] = {}
    for name in names:
        for module in sorted({site.partition(":")[0] for sites in sources()[name].values() for site in sites}):
            clients_by_module.setdefault(module, []).append(name)
    return clients_by_module
