"""Find a client's attention, check that it is the code that is known, replace it, count the calls, and put it back."""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import itertools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evoattn.clients import graphs as recorded
from evoattn.clients.kinds import KINDS, in_words, precision_in_words
from evoattn.clients.loading import load_ahead
from evoattn.clients.registry import NAMES, client
from evoattn.clients.releases import UnknownRelease, check_files, check_function, is_known
from evoattn.clients.site import Client, Count, Site
from evoattn.core.devices import installed
from evoattn.core.precisions import check_precision

__all__ = ["NAMES", "Patch", "active", "client", "patch", "patch_as_imported"]

_NOTHING = object()

_STEP = "step"
"""The kind under which replays of CUDA graphs are counted."""

WAITS = False
"""The `wait` of a patch if nobody says. Tests, which count the calls that evoattn computes, have True."""


class Patch:
    """The functions that a patch replaced, and counts of their calls. As a context manager, it restores the originals at exit.

    A second call of `patch` for a client returns the same object. The originals come back when each call is undone, by its
    `with` block or by `undo`. A `with` block also undoes the calls inside it. A patch that was undone may be entered again: it
    then replaces the same functions, and its counts go on.

    Counts are those of this process. A forked process has a copy of them.

    Attributes:
        sites: the functions that were replaced, as "module:function".
        versions: the client's version, by its name.
        precision: of diffusion transformers, as `patch` was asked for it.
        waits: whether calls wait for their kernels to be compiled, as `patch` was asked for it.
    """

    def __init__(self, tell: Callable[[str, str], None] | None = None, precision: str = "exact", waits: bool = True) -> None:
        self.precision, self.waits = precision, waits
        self.versions: dict[str, str] = {}
        self.sites: tuple[str, ...] = ()
        self._parts: dict[str, set[str]] = {}  # of each client, those that were asked for
        self._counts: dict[tuple[str, str], Count] = {}  # by the kind of call and the site
        self._changes: dict[tuple[Any, str], tuple[Any, Any]] = {}  # by owner and name: the original, and what stands there
        self._replacements: dict[Site, Callable[..., Any]] = {}
        self._calls = 0  # of `patch`, that are not undone
        self._fresh = 0  # of these, those without a `with` block
        self._entered: list[tuple[bool, int]] = []
        self._tell = tell
        self._forks_before = len(_forks())

    @property
    def calls(self) -> int:
        """Calls of attentions, layers and blocks that evoattn computed. A block is one call, with all its layers."""
        return sum(self.calls_by_site.values())

    @property
    def calls_by_kind(self) -> dict[str, int]:
        """Calls that evoattn computed, by kind: "attention call", "triangle multiplication", "transition", "MSA layer",
        "pair block" and "diffusion transformer".
        """
        kinds = {kind for kind, _ in self._counts}
        return {x: sum(count.replaced for (kind, _), count in self._counts.items() if kind == x) for x in KINDS if x in kinds}

    @property
    def calls_by_site(self) -> dict[str, int]:
        """Calls that evoattn computed, by site."""
        return {site: count.replaced for (kind, site), count in self._counts.items() if kind != _STEP}

    @property
    def passed_on(self) -> dict[str, int]:
        """Calls that the client's own functions computed, by reason."""
        counts = (count.passed_on for (kind, _), count in self._counts.items() if kind != _STEP)
        return dict(sum(counts, collections.Counter()))

    @property
    def steps(self) -> dict[str, dict[str, int]]:
        """For each function that is recorded as a CUDA graph, how often a graph was replayed, as "", or why it was not."""
        counts = {site: count for (kind, site), count in self._counts.items() if kind == _STEP}
        return {site: {"": count.replaced, **count.passed_on} for site, count in counts.items()}

    def undo(self) -> None:
        """Undo one call of `patch`.

        The last one puts the originals back, and frees the memory of CUDA graphs. Counts are kept.
        """
        self._leave(self._calls - 1)

    def __enter__(self) -> Patch:
        if not self._calls:
            self._redo()
        own = self._fresh > 0
        self._entered.append((own, self._calls - own))
        self._fresh -= own
        return self

    def __exit__(self, *_: object) -> None:
        own, others = self._entered.pop()
        self._leave(min(self._calls - own, others))

    def _leave(self, calls: int) -> None:
        """Let so many calls of `patch` be in force, and undo the others."""
        was, self._calls = self._calls, max(calls, 0)
        self._fresh = min(self._fresh, self._calls)
        if was and not self._calls:
            self._restore()

    def _restore(self) -> None:
        for replacement in self._replacements.values():
            recorded.release(replacement)
        lost = []
        for (owner, name), (original, ours) in self._changes.items():
            if vars(owner).get(name) is not ours:
                lost.append(name)
            elif original is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._changes.clear()
        self._replacements.clear()
        for name in self.versions:
            if active.get(name) is self:
                del active[name]
        if lost:
            names = ", ".join(lost)
            warnings.warn(f"not put back, because others have replaced them since: {names}", stacklevel=4)

    def __str__(self) -> str:
        clients = ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "no client"
        lines = [f"evoattn computes the attention of {clients}: {in_words(self.calls_by_kind) or 'no call'}"]
        if self.precision != "exact":
            lines.append(f"  {precision_in_words(self.precision, self.calls_by_kind)}")
        lines += [f"  {calls:6d}  {site}" for site, calls in self.calls_by_site.items()]
        lines += [f"  {calls:6d}  by the original: {reason}" for reason, calls in self.passed_on.items()]
        for site, calls_by_reason in self.steps.items():
            words = {reason: f"not replayed, {reason}" if reason else "replayed as a CUDA graph" for reason in calls_by_reason}
            lines += [f"  {calls:6d}  {words[reason]}: {site}" for reason, calls in calls_by_reason.items() if calls]
        lines += [f"  not by evoattn any more: {site} was reloaded, or replaced by others" for site in self._lost()]
        if forks := len(_forks()) - self._forks_before:
            processes = "1 process that was" if forks == 1 else f"{forks} processes that were"
            lines.append(f"  calls in {processes} forked since are not counted here")
        return "\n".join(lines)

    def _apply(self, of: Client, parts: Iterable[str]) -> None:
        """Replace parts of a client. Parts replaced before are replaced again if their module was reloaded; what others put
        there stays.

        All sites are checked first: nothing is half patched.
        """
        version = of.installed
        if version is None:
            raise ImportError(f"{of.name} is not installed: no distribution {of.distribution} in this environment")
        there, lost = self._parts.get(of.name, set()) if self._calls else set(), self._lost()
        every = of.parts(command=True)
        new = {part: sites for part, sites in every.items() if part in parts and part not in there}
        for site in itertools.chain.from_iterable(new.values()):
            check_function(of, site)
        for part, sites in every.items():
            again = [site for site in sites if site in lost and is_known(of, site)] if part in there else new.get(part)
            if again:
                self._replace(of, part, again)
        self._parts[of.name] = there | set(parts)
        self.versions[of.name] = version
        active[of.name] = self

    def _redo(self) -> None:
        """Replace again what `undo` put back."""
        others = [name for name in self.versions if name in active]
        if others:
            raise RuntimeError(f"another patch of {', '.join(others)} is active: undo it before you enter this one again")
        try:
            for name, parts in list(self._parts.items()):
                self._apply(client(name), parts)
        except BaseException:
            self._restore()
            raise
        self._calls = self._fresh = 1

    def _lost(self) -> list[Site]:
        """The sites at which another function stands by now, which does not call the replacement."""

        def is_lost(function: Any, replacement: Callable[..., Any]) -> bool:
            return inspect.unwrap(function, stop=lambda x: x is replacement) is not replacement

        return [site for site, replacement in self._replacements.items() if is_lost(site.find()[2], replacement)]

    def _replace(self, of: Client, part: str, sites: Iterable[Site], module: str = "") -> None:
        """Check these sites of a part, then replace them. module: the only one that gets a value. "": all get theirs."""
        targets = [(site, *check_function(of, site)) for site in sites]
        for before in self._replacements.values():  # what was recorded did not call what comes now
            recorded.release(before)
        changes: list[tuple[Any, str, Any]] = []
        replacements: dict[Site, Callable[..., Any]] = {}
        for site, owner, name, original in targets:
            if site.replace is None or (site.missing is not None and installed(site.missing)):
                continue
            kind = _STEP if part == "steps" else site.kind
            tell = functools.partial(self._tell, kind) if self._tell and site.counted else None
            count = self._counts.get((kind, str(site))) or Count(tell, self.precision, self.waits)
            if site.counted:
                self._counts[kind, str(site)] = count
            replacement = replacements[site] = functools.wraps(original)(site.replace(original, count))
            places = [(owner, name)] if inspect.isclass(owner) else _names_of(original, of)
            changes += [(*place, replacement) for place in places]
        for path, name, value in of.values:
            if module in ("", path) and not getattr(owner := importlib.import_module(path), name, None):
                changes.append((owner, name, value))
        for owner, name, now in changes:
            there = vars(owner).get(name, _NOTHING)
            original, ours = self._changes.get((owner, name), (there, there))
            self._changes[owner, name] = (original if ours is there else there), now
            setattr(owner, name, now)
        self._replacements |= replacements
        self.sites = tuple(dict.fromkeys((*self.sites, *map(str, replacements))))


@functools.cache
def _forks() -> list[int]:
    """A list that gets a 1 for each process that is forked from now on."""
    forks: list[int] = []
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_parent=functools.partial(forks.append, 1))
    return forks


active: dict[str, Patch] = {}
"""The patch of each client that is patched."""


def patch(
    name: str | None = None,
    *,
    layers: bool = True,
    graphs: bool | None = None,
    precision: str | None = None,
    wait: bool | None = None,
) -> Patch:
    """Let `evoattn` compute the pair blocks and the attention of an installed client, such as Boltz, in this process.

    This replaces every function of the client that computes attention, and the layers and blocks around it that `evoattn.nn`
    has. The client's answers stay the same but for rounding, also in padded rows. A second call for the same client replaces
    only what was reloaded since, by `importlib.reload`. The client stays patched until both calls are undone.

    Args:
        name: "alphafold3_pytorch", "boltz", "boltzgen", "esmfold", "opendde", "openfold", "openfold3", "protenix" or "rf3".
            None: every client that is installed and not patched yet. Their names are printed on stderr.
        layers: whether whole layers and pair blocks are replaced, from the norm to the residual, by those of `evoattn.nn`:
            attention, triangle multiplication and transition. Three kinds stay the client's, with only the attention replaced:
            layers that `evoattn.nn` does not know, layers called with unknown arguments, and layers that torch.compile
            compiles. For the last, call `evoattn.nn.replace` before you compile the model. False: only functions that compute
            attention are replaced.
        graphs: whether what repeats is recorded as CUDA graphs and replayed on a GPU. In inference the denoiser's step of
            Boltz, BoltzGen, OpenDDE, OpenFold-3, Protenix and, in part, RosettaFold-3. In training layers of the denoisers of
            Boltz-2 and BoltzGen, if they are in a checkpoint. In both, up to 512 residues, the trunk's blocks of all these but
            RosettaFold-3, and of ESMFold and OpenFold. A replay has the bits of the call that it stands for. Calls that cannot
            be replayed run as they are, and the report says why. None: yes, if the client has such parts.
        precision: of the diffusion transformers that a client samples in float32 on a GPU: "exact", "tf32" or "bf16", as
            `evoattn.nn.sampling` takes it. The last two need graphs. All other calls have the client's own precision,
            and the report counts those that do not. None: that of an earlier patch of this client, else "exact".
        wait: whether calls wait for their kernels to be compiled. False: worker processes compile kernels that are not kept,
            and the client's own code computes inference calls meanwhile, in the client's own precision. So the calls that
            follow may differ by rounding. The report counts such calls. Calls that record gradients wait in any case. None: as
            an earlier patch of this client, else False.

    Returns:
        A `Patch`: a context manager with `undo()`, `sites`, `calls`, `calls_by_kind`, `calls_by_site`, `passed_on` and `steps`.

    Raises:
        TypeError: `wait` is no bool and not None.
        ValueError: the name or the precision is not known, `graphs` is True and none of the client's steps can be recorded,
            nothing of the client would have the precision, or an earlier patch of the client has another precision or `wait`.
        ImportError: the client is not installed.
        UnknownRelease: the client's code differs from the releases that the patch knows. Nothing is replaced then.

    Example:
        >>> import evoattn
        >>> with evoattn.patch("esmfold", layers=False, graphs=False) as patched:
        ...     len(patched.sites)
        2
    """
    wanted = "exact" if precision is None else precision
    check_precision(wanted)
    if wait is not None and not isinstance(wait, bool):
        raise TypeError(f"wait must be True, False or None, got {wait!r}")
    if name is None:
        return _patch_all(layers, graphs is not False, wanted, wait)
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(map(repr, NAMES))}, or None for all that are installed; got {name!r}")
    if graphs and not client(name).steps:
        known = ", ".join(repr(each) for each in NAMES if client(each).steps)
        raise ValueError(f"graphs must be False for {name!r}: CUDA graphs are recorded of {known}")
    graphs = graphs is not False
    patched = active.get(name) or Patch(precision=wanted, waits=WAITS if wait is None else wait)
    if precision not in (None, patched.precision):
        raise ValueError(
            f"precision must be {patched.precision!r} for {name!r}, which is patched with it, got {precision!r}: undo it first"
        )
    if wait not in (None, patched.waits):
        raise ValueError(f"wait must be {patched.waits} for {name!r}, which is patched with it, got {wait}: undo it first")
    check_reach(wanted, (name,), layers, graphs)
    patched._apply(client(name), client(name).parts(layers, graphs))
    patched._calls += 1
    patched._fresh += 1
    load_ahead()
    return patched


def check_reach(precision: str, names: Sequence[str], layers: bool, graphs: bool) -> None:
    """Raise ValueError if nothing of the named clients would be computed in a precision."""
    if precision == "exact":
        return
    if not layers or not graphs:
        raise ValueError(
            f"precision must be 'exact' unless layers and graphs are True, got {precision!r}: "
            "it is that of the diffusion transformers of a sampling loop"
        )
    if not any(client(name).has_transformers for name in names):
        known = ", ".join(repr(name) for name in NAMES if client(name).has_transformers)
        wanted = ", ".join(map(repr, names))
        raise ValueError(
            f"precision must be 'exact' for {wanted}, got {precision!r}: it is that of diffusion transformers, of {known}"
        )


def _patch_all(layers: bool, graphs: bool, precision: str, wait: bool | None) -> Patch:
    check_reach(precision, NAMES, layers, graphs)
    patched = Patch(precision=precision, waits=WAITS if wait is None else wait)
    for name in NAMES:
        if name in active:
            has = active[name].precision
            if has != precision and client(name).has_transformers:
                print(f"evoattn leaves {name} in precision {has!r}: another patch of it is active", file=sys.stderr)
            if wait not in (None, active[name].waits):
                print(f"evoattn leaves {name} with wait={not wait}: another patch of it is active", file=sys.stderr)
            continue
        if client(name).installed is None:
            continue
        try:
            patched._apply(client(name), client(name).parts(layers, graphs))
        except (ImportError, UnknownRelease) as error:
            print(f"evoattn does not patch {name}: {error}", file=sys.stderr)
    patched._calls = patched._fresh = 1
    print(str(patched).splitlines()[0].partition(":")[0], file=sys.stderr)
    for name in patched.versions:
        if precision != "exact" and not client(name).has_transformers:
            print(f"evoattn leaves {name} in its own precision: it computes no diffusion transformer of it", file=sys.stderr)
    return patched


def patch_as_imported(
    name: str,
    module: str,
    tell: Callable[[str, str], None],
    *,
    layers: bool = True,
    graphs: bool = False,
    precision: str = "exact",
    wait: bool = True,
) -> Patch:
    """Replace what is in one module of a client, which has just been imported; the others follow as they are imported.

    `tell` is told of each call: its kind, of `KINDS`, or "step"; and then as by `Count`. All modules share the client's patch.
    UnknownRelease: the files of the client are not those that are known. Nothing is replaced then.
    """
    of = client(name)
    parts = of.parts(layers, graphs, command=graphs)
    if name not in active:
        check_files(of)
        patched = active[name] = Patch(tell, precision, wait)
        patched._calls = 1
        patched.versions[name], patched._parts[name] = str(of.installed), set(parts)
    for part, sites in parts.items():
        active[name]._replace(of, part, [site for site in sites if site.module == module], module)
    return active[name]


def _names_of(function: Callable[..., Any], of: Client) -> list[tuple[types.ModuleType, str]]:
    """Every name of a function in the client's modules that are imported: some import it by name."""
    packages = {site.module.partition(".")[0] for site in of.sites}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages and module]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is function]
