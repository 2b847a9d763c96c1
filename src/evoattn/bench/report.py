"""The record as one HTML page with its data inside, without network or libraries."""

from __future__ import annotations

import html
import importlib.resources
import json

from evoattn.bench import table
from evoattn.bench.peers import PEERS
from evoattn.bench.record import Record

_UNSAFE = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})
"""Characters that could end the script element with the data, or break JavaScript. Reasons are other libraries' texts."""


def page(record: Record) -> str:
    """The page's text."""
    names = {result.name for problem in record.problems for result in problem.results}
    data = {
        **json.loads(record.to_json()),
        "titles": {name: table.title(name) for name in sorted(names)},
        "bounds": [peer.name for peer in PEERS.values() if not peer.biased],
    }
    pieces = {
        "TITLE": html.escape(f"evoattn bench: {record.machine.get('device', 'results')}"),
        "HEADLINE": html.escape(table.headline(record)),
        "STYLE": _part("page.css"),
        "DRAW": _part("draw.js"),
        "SHOW": _part("show.js"),
        "DATA": json.dumps(data, ensure_ascii=False, allow_nan=False).translate(_UNSAFE),
    }
    before, *words = _part("page.html").split("@")  # pieces are put in once, and never searched for each other's marks
    return before + "".join(pieces.get(word, word) for word in words)


def _part(name: str) -> str:
    return importlib.resources.files("evoattn.bench").joinpath("page").joinpath(name).read_text(encoding="utf-8").strip()
