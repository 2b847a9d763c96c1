"""The clients that evoattn knows, and their layers and blocks. Each client has a file of this folder, or shares one.

Only what imports a client's file imports torch.
"""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoattn.clients.blocks import KnownBlock, SplitBlock
    from evoattn.clients.known import KnownLayer
    from evoattn.clients.site import Client

NAMES = ("alphafold3_pytorch", "boltz", "boltzgen", "esmfold", "opendde", "openfold", "openfold3", "protenix", "rf3")
"""Clients that `patch` knows."""

SOURCES = pathlib.Path(__file__).with_name("sources.json")

_FILES = {"boltzgen": "boltz", "opendde": "protenix"}


def client(name: str) -> Client:
    module = importlib.import_module(f"evoattn.clients.{_FILES.get(name, name)}")
    return module.CLIENTS[name]  # type: ignore[no-any-return]


@functools.cache
def sources() -> dict[str, dict[str, dict[str, str]]]:
    """Digests of the functions of the releases that are known, by client, release and site."""
    digests: dict[str, dict[str, dict[str, str]]] = json.loads(SOURCES.read_text())
    return digests


_known: dict[str, KnownLayer | KnownBlock] = {}
_split: dict[str, SplitBlock] = {}


def known() -> dict[str, KnownLayer | KnownBlock]:
    """The layers and blocks of all clients, by the full name of the class. Not functools.cache, of which Dynamo warns."""
    if not _known:
        from evoattn.nn import submodules  # not sooner: `import evoattn` needs no layers

        for of in map(client, NAMES):
            _known.update(of.known)
            submodules.take_for_plain(of.linears, of.norms)
    return _known


def split_blocks() -> dict[str, SplitBlock]:
    """The blocks of all clients whose pair representation can be split over processes, by the full name of the class."""
    for name in NAMES if not _split else ():
        _split.update(client(name).split)
    return _split
