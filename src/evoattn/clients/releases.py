"""Checks that an installed client is one that its patch was written for, by digests of the source of its functions.

`python tools/client_sources.py NAME` writes the digests of the release that is installed to `sources.json`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import inspect
import pathlib
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

from evoattn.clients.registry import sources
from evoattn.clients.site import Client, Site
from evoattn.core.own_code import is_from


class UnknownRelease(RuntimeError):  # noqa: N818
    """A client's code is not the code that the patch was written for."""


def digest(function: Callable[..., Any]) -> str:
    """A digest of a function's source. Comments count; indentation and spaces at the ends of lines do not."""
    return _digest(inspect.getsource(function))


def digests_in_file(site: Site) -> set[str]:
    """The same of all functions or classes of a site's name in its file, without importing it."""
    path = _file_of(site.module)
    if path is None:
        return set()
    with tokenize.open(path) as file:
        text = file.read()
    lines = text.splitlines(keepends=True)
    nodes: list[ast.AST] = [ast.parse(text)]
    for part in site.name.split("."):
        nodes = [definitions for node in nodes for definitions in _defined(node) if getattr(definitions, "name", None) == part]
    definitions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    firsts = [min([node.lineno, *(x.lineno for x in node.decorator_list)]) for node in definitions]
    return {_digest("".join(inspect.getblock(lines[first - 1 :]))) for first in firsts}


def check_function(of: Client, site: Site) -> tuple[Any, str, Callable[..., Any]]:
    """A site's owner, a module or a class, its name there, and the function; UnknownRelease unless it is one that is known."""
    owner, name, function = site.find()
    if function is None:
        raise UnknownRelease(_unknown(of, f"has no {site}"))
    if not inspect.isclass(function) and not is_from(function, site.module):
        raise UnknownRelease(_unknown(of, f"holds a program's own {site}"))
    try:
        if digest(function) not in _known(of, site):
            raise UnknownRelease(_unknown(of, f"has another {site}"))
    except (OSError, TypeError) as error:
        raise UnknownRelease(_unknown(of, f"does not show the source of {site}")) from error
    return owner, name, function


def is_known(of: Client, site: Site) -> bool:
    """Return whether a known function stands at a site."""
    try:
        return bool(check_function(of, site))
    except UnknownRelease:
        return False


def check_files(of: Client) -> None:
    """Raise UnknownRelease unless the files of a client hold the functions that are known. Nothing is imported.

    A class that is a site stands for its methods: what `digest` sees of a decorated one may be the decorator's.
    """
    names = {(site.module, site.name) for site in of.sites}
    for site in of.sites:
        if (site.module, site.name.rpartition(".")[0]) in names:
            continue
        digests = digests_in_file(site)
        if not digests & _known(of, site):
            raise UnknownRelease(_unknown(of, f"has another {site}" if digests else f"has no {site}"))


def _known(of: Client, site: Site) -> set[str]:
    return {sites[str(site)] for sites in sources()[of.name].values() if str(site) in sites}


def _digest(source: str) -> str:
    lines = textwrap.dedent(source).strip().splitlines()
    return hashlib.sha256("\n".join(line.rstrip() for line in lines).encode()).hexdigest()[:16]


def _defined(node: ast.AST) -> Iterator[ast.AST]:
    """The definitions of a module or a class, under conditions too."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, field, []):
            yield child
            if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _defined(child)


def _file_of(module: str) -> pathlib.Path | None:
    """A module's file. No package is imported."""
    first, *parts = module.split(".")
    spec = importlib.util.find_spec(first)
    for part in parts:
        locations = [str(x) for x in spec.submodule_search_locations or ()] if spec else []  # transformers has paths there
        spec = importlib.machinery.PathFinder.find_spec(part, locations)
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin)


def _unknown(of: Client, what: str) -> str:
    return (
        f"{of.name} {of.installed} {what}; known are {', '.join(sources()[of.name])}. "
        "Install one of these, or replace the calls by those of evoattn.compat"
    )
