"""The record as one HTML page that needs nothing else: no network, no library, the data inside."""

from __future__ import annotations

import html
import importlib.resources
import json

from evoattn.bench import table
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Record

__all__ = ["page"]

_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end the script element that holds the data, or break JavaScript: reasons are other libraries' words."""


def page(record: Record) -> str:
    """The page's text."""
    headline = table.headline(record)
    names = {result.name for problem in record.problems for result in problem.results}
    data = {
        **json.loads(record.to_json()),
        "titles": {name: table.title(name) for name in sorted(names)},
        "bounds": [peer.name for peer in PEERS.values() if not peer.biased],
    }
    pieces = {
        "TITLE": html.escape(f"evoattn bench: {record.machine.get('device', 'results')}"),
        "HEADLINE": html.escape(headline),
        "STYLE": _part("page.css"),
        "DRAW": _part("draw.js"),
        "SHOW": _part("show.js"),
        "DATA": _embedded(data),
    }
    text = _part("page.html")
    before, *rest = text.split("@")  # pieces are put in once, and never searched for each other's marks
    return before + "".join(pieces.get(word, word) for word in rest)


def _part(name: str) -> str:
    return importlib.resources.files("evoattn.bench").joinpath("page").joinpath(name).read_text(encoding="utf-8").strip()


def _embedded(data: object) -> str:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    for sign, safe in _UNSAFE.items():
        text = text.replace(sign, safe)
    return text
