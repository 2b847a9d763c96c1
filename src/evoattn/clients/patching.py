"""Find a client's attention, check that it is the code that is known, replace it, count the calls, and put it back."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from evoattn.clients.sources import SOURCES

__all__ = ["NAMES", "Client", "Count", "Patch", "Site", "UnknownRelease", "client", "digest", "patch"]

NAMES = ("boltz", "boltzgen", "esmfold", "opendde", "openfold3", "protenix")
"""Clients that `patch` knows; each has a module of this folder, or shares one (`_MODULES`)."""

_MODULES = {"boltzgen": "boltz", "opendde": "protenix"}


class UnknownRelease(RuntimeError):  # noqa: N818
    """A client's code is not the code that the patch was written for."""


class Count:
    """How often a site was called: by ours, or passed on to the original, with the reason.

    Calls inside code that torch.compile made are not counted: a number that changes would have it compiled anew.
    """

    def __init__(self) -> None:
        self.ours = 0
        self.passed_on: collections.Counter[str] = collections.Counter()

    def one(self) -> None:
        """A call that ours computes."""
        if not torch.compiler.is_compiling():
            self.ours += 1

    def other(self, reason: str) -> None:
        """A call that the original computes."""
        if not torch.compiler.is_compiling():
            self.passed_on[reason] += 1


Replace = Callable[[Callable[..., Any], Count], Callable[..., Any]]
"""Makes a replacement of a function from it and from what counts its calls."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A function that computes attention, or that decides which one does.

    Args:
        module: its module, by its full name.
        name: the function in the module, or "Class.function".
        replace: makes what stands there instead. None: it is only checked, because the replacements rely on it.
        missing: the site is replaced only if this module is not installed.
    """

    module: str
    name: str
    replace: Replace | None = None
    missing: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def find(self) -> tuple[Any, str, Callable[..., Any] | None]:
        """What owns the function, a module or a class, its name there, and the function, or None. Imports the module."""
        *classes, name = self.name.split(".")
        owner: Any = importlib.import_module(self.module)
        for part in classes:
            owner = getattr(owner, part, None)
        return owner, name, None if owner is None else vars(owner).get(name)


@dataclasses.dataclass(frozen=True)
class Client:
    """A program whose attention can be replaced.

    Args:
        name: what `patch` takes.
        distribution: its name in the package registry.
        sites: the functions to replace, and those that are only checked.
        values: module, name and value of what says that a kernel is there, or is one; set where nothing is there.
    """

    name: str
    distribution: str
    sites: tuple[Site, ...]
    values: tuple[tuple[str, str, Any], ...] = ()

    @property
    def installed(self) -> str | None:
        """The version that is installed, or None."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None


def digest(function: Callable[..., Any]) -> str:
    """What tells one source of a function from another; comments count, indentation and spaces at the ends of lines do not."""
    lines = textwrap.dedent(inspect.getsource(function)).strip().splitlines()
    return hashlib.sha256("\n".join(line.rstrip() for line in lines).encode()).hexdigest()[:16]


_NOTHING = object()


@dataclasses.dataclass
class _Change:
    """One attribute that was set."""

    owner: Any
    name: str
    before: Any
    now: Any

    def undo(self) -> bool:
        """Put back what was there, unless somebody else has changed it since."""
        if vars(self.owner).get(self.name) is not self.now:
            return False
        if self.before is _NOTHING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)
        return True


class Patch:
    """What was replaced, and how often it ran. A context manager: at its end the originals are back.

    Attributes:
        sites: the functions that were replaced, as "module:function".
        versions: the client's version, by its name.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.versions: dict[str, str] = {}
        self._counts: dict[str, Count] = {}
        self._changes: list[_Change] = []
        self._entered: list[bool] = []
        self._fresh = True
        for name in names:
            self._apply(client(name))

    @property
    def sites(self) -> tuple[str, ...]:
        """The functions that were replaced."""
        return tuple(self._counts)

    @property
    def calls(self) -> int:
        """How often ours ran, in all."""
        return sum(self.calls_by_site.values())

    @property
    def calls_by_site(self) -> dict[str, int]:
        """How often ours ran at each site."""
        return {site: count.ours for site, count in self._counts.items()}

    @property
    def passed_on(self) -> dict[str, int]:
        """How often the original ran, by the reason."""
        total: collections.Counter[str] = collections.Counter()
        for count in self._counts.values():
            total.update(count.passed_on)
        return dict(total)

    def undo(self) -> None:
        """Put the originals back. Counts stay."""
        lost = [change.name for change in reversed(self._changes) if not change.undo()]
        self._changes.clear()
        for name in self.versions:
            if _active.get(name) is self:
                del _active[name]
        if lost:
            warnings.warn(f"not put back, because others have replaced them since: {', '.join(lost)}", stacklevel=2)

    def __enter__(self) -> Patch:
        self._entered.append(self._fresh)
        self._fresh = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._entered.pop():
            self.undo()

    def __str__(self) -> str:
        clients = ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "no client"
        lines = [f"evoattn computes the attention of {clients}: {self.calls} calls"]
        lines += [f"  {calls:6d}  {site}" for site, calls in self.calls_by_site.items()]
        lines += [f"  {calls:6d}  by the original: {reason}" for reason, calls in self.passed_on.items()]
        return "\n".join(lines)

    def _apply(self, of: Client) -> None:
        """Check all sites of a client, then replace them: nothing is half patched."""
        version = of.installed
        if version is None:
            raise ImportError(f"{of.name} is not installed: no distribution {of.distribution}")
        found = [(site, *_find(of, version, site)) for site in of.sites]
        changes: list[_Change] = []
        counts: dict[str, Count] = {}
        for site, owner, name, original in found:
            if site.replace is None or (site.missing is not None and _is_installed(site.missing)):
                continue
            count = counts[str(site)] = Count()
            made = functools.wraps(original)(site.replace(original, count))
            places = [(owner, name)] if inspect.isclass(owner) else _names_of(original, of)
            changes += [_Change(place, where, original, made) for place, where in places]
        for module, name, value in of.values:
            owner = importlib.import_module(module)
            if not getattr(owner, name, None):
                changes.append(_Change(owner, name, getattr(owner, name, _NOTHING), value))
        for change in changes:
            setattr(change.owner, change.name, change.now)
        self._changes += changes
        self._counts |= counts
        self.versions[of.name] = version


_active: dict[str, Patch] = {}
"""The patch of each client that is patched."""


def patch(name: str | None = None) -> Patch:
    """Let `evoattn` compute the attention of an installed program.

    Every function of the client that computes attention is replaced, and nothing else. Answers stay the same, padded rows too.
    Patching twice is the same as once.

    Args:
        name: one of `NAMES`. None: every client that is installed and not patched yet; which ones is printed on stderr.

    Returns:
        A `Patch`: a context manager with `undo()`, `sites`, `calls`, `calls_by_site` and `passed_on`.

    Raises:
        ValueError: the name is not known.
        ImportError: the client is not installed.
        UnknownRelease: its code is not the code that the patch was written for. Nothing is replaced then.

    Example:
        >>> import evoattn
        >>> with evoattn.patch("esmfold") as patched:
        ...     len(patched.sites)
        2
    """
    if name is None:
        return _patch_all()
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(map(repr, NAMES))}, or None for all that are installed; got {name!r}")
    if name in _active:
        _active[name]._fresh = False
        return _active[name]
    made = Patch([name])
    _active[name] = made
    return made


def _patch_all() -> Patch:
    made = Patch()
    for name in NAMES:
        if name in _active or client(name).installed is None:
            continue
        try:
            made._apply(client(name))
            _active[name] = made
        except (ImportError, UnknownRelease) as error:
            print(f"evoattn does not patch {name}: {error}", file=sys.stderr)
    print(str(made).splitlines()[0].partition(":")[0], file=sys.stderr)
    return made


def client(name: str) -> Client:
    """What is known of a client."""
    module = importlib.import_module(f"evoattn.clients.{_MODULES.get(name, name)}")
    found: Client = module.CLIENTS[name]
    return found


def _find(of: Client, version: str, site: Site) -> tuple[Any, str, Callable[..., Any]]:
    """A site's owner, a module or a class, its name there, and the function, if it is the one that is known."""
    owner, name, function = site.find()
    if function is None:
        raise UnknownRelease(_unknown(of, version, f"has no {site}"))
    try:
        if digest(function) not in {of_sites.get(str(site)) for of_sites in SOURCES[of.name].values()}:
            raise UnknownRelease(_unknown(of, version, f"has another {site}"))
    except (OSError, TypeError) as error:
        raise UnknownRelease(_unknown(of, version, f"does not show the source of {site}")) from error
    return owner, name, function


def _unknown(of: Client, version: str, what: str) -> str:
    return (
        f"{of.name} {version} {what}; known are {', '.join(SOURCES[of.name])}. Install one of these, or replace the calls by "
        "those of evoattn.compat"
    )


def _names_of(function: Callable[..., Any], of: Client) -> list[tuple[types.ModuleType, str]]:
    """Every name of a function in the client's modules that are imported: some import it by name."""
    packages = {site.module.partition(".")[0] for site in of.sites}
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages and module is not None
    ]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is function]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a stand-in in sys.modules that has no spec
        return module in sys.modules
