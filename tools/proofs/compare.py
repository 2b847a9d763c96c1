"""Compares two records. A kernel that is written in another way is the same if it is compiled to the same."""

from __future__ import annotations

import concurrent.futures
import difflib
import multiprocessing
import pathlib
import re
import sys
from collections.abc import Iterator

from proofs.store import Store

__all__ = ["compare"]

_KEY = re.compile(r"(?<=\{)([0-9a-f]{16})(?=\})")
_MOST, _CALLS = 12, 4
"""Lines of a difference, and calls, that are shown of each file."""


def compare(before: pathlib.Path, after: pathlib.Path, processes: int) -> int:
    """Print a table of what differs, and the first differences; return 1 if there are any."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.txt")})
    if not names:
        raise SystemExit(f"no records in {before} and {after}")
    both = {name: (_read(before / name), _read(after / name)) for name in names}
    codes = _codes([pair for pair in both.values() if pair[0] != pair[1]], processes)
    print(f"{'file':40}{'equal':>9}{'changed':>9}{'removed':>9}{'added':>9}")
    told = []
    for name, (old, new) in both.items():
        left, right = (_Compared(sections, codes) for sections in (old, new))
        changed = [call for call in left.of if call in right.of and left.of[call] != right.of[call]]
        removed, added = left.but_for(right), right.but_for(left)
        equal = len(old) - len(changed) - len(removed)
        print(f"{name:40}{equal:9}{len(changed):9}{len(removed):9}{len(added):9}")
        if changed or removed or added:
            told += ["", name, *_shown(left, right, changed, removed, added)]
    print("\n".join(told) if told else "no difference")
    return int(bool(told))


Sections = dict[str, list[str]]
"""The lines of each call of a file. In a file without calls each line is one, without lines."""


def _read(path: pathlib.Path) -> Sections:
    """The sections of a file; none if there is no file."""
    sections: Sections = {}
    lines: list[str] | None = None
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("== "):
            lines = sections[line[3:]] = []
        elif lines is None:
            sections[line] = []
        else:
            lines.append(line)
    return sections


class _Compared:
    """Sections without names, with the code of kernels in the place of their keys.

    Args:
        sections: as they stand in the file.
        codes: the code of a key.
    """

    def __init__(self, sections: Sections, codes: dict[str, str]) -> None:
        self.codes = codes
        self.of: Sections = {}
        self.names: dict[str, list[str]] = {}
        self.lines = sections
        for call, lines in sections.items():
            plain = self.plain(call)
            self.of[plain] = [self.plain(line) for line in lines]
            self.names.setdefault(plain, []).append(call)

    def plain(self, line: str) -> str:
        return _KEY.sub(lambda found: self.codes.get(found[1], found[1]), line.partition("  # ")[0])

    def but_for(self, other: _Compared) -> list[str]:
        """The calls as they stand in the file that the other has not."""
        return [name for plain, names in self.names.items() if plain not in other.of for name in names]


def _codes(pairs: list[tuple[Sections, Sections]], processes: int) -> dict[str, str]:
    """The digests of the code of all kernels in lines that differ."""
    keys: set[str] = set()
    for old, new in pairs:
        left, right = (_Compared(sections, {}) for sections in (old, new))
        for call in {*left.of, *right.of}:
            if left.of.get(call) != right.of.get(call):
                keys.update(_KEY.findall(call), *(_KEY.findall(line) for x in (left, right) for line in x.of.get(call, [])))
    return _compiled(sorted(keys), processes)


def _compiled(keys: list[str], processes: int) -> dict[str, str]:
    """The digests of the code of kernels, which are compiled unless they were before."""
    codes: dict[str, str] = {}
    if keys:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
            for key, code in zip(keys, pool.map(_code, keys, chunksize=4), strict=True):
                codes[key] = code
                print(f"\r{len(codes)} of {len(keys)} kernels that are written in another way", end="", file=sys.stderr)
        print(file=sys.stderr)
    return codes


def _code(key: str) -> str:
    return Store().code_of(key)


def _shown(left: _Compared, right: _Compared, changed: list[str], removed: list[str], added: list[str]) -> Iterator[str]:
    """The first lines of what differs."""
    for sign, calls in (("-", removed), ("+", added)):
        yield from (f"{sign} {call}" for call in calls[:_MOST])
        if len(calls) > _MOST:
            yield f"{sign} and {len(calls) - _MOST} more"
    for call in changed[:_CALLS]:
        yield f"  {call}"
        old, new = (x.lines[x.names[call][0]] for x in (left, right))
        before, after = ([x.plain(line) for line in lines] for x, lines in ((left, old), (right, new)))
        shown: list[str] = []
        for kind, i, j, k, n in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            if kind != "equal":
                shown += [*(f"  - {line}" for line in old[i:j]), *(f"  + {line}" for line in new[k:n])]
        yield from shown[:_MOST]
    if len(changed) > _CALLS:
        yield f"  and {len(changed) - _CALLS} more calls"
