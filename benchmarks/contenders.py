"""The names of all contenders in the tables and pictures of the project: peers, bounds and ways to compute a layer."""

from __future__ import annotations

from bounds import BOUNDS
from layer_ways import WAYS

from evoattn.bench import table
from evoattn.bench.peers import PEERS


def title(name: str) -> str:
    """The name of a contender."""
    titles = {way.name: way.title for way in WAYS if way.name != "evoattn" and way.name not in PEERS}
    titles |= {bound.contender.name: bound.contender.title for bound in BOUNDS}
    return titles.get(name) or table.title(name)


def is_bound(name: str) -> bool:
    """True if a contender solves an easier problem: no speed-up over it is claimed."""
    return any(bound.contender.name == name for bound in BOUNDS)
