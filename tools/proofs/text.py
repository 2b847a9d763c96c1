"""Text of compilers without names, and digests of it."""

from __future__ import annotations

import hashlib
import re
from typing import Any

__all__ = ["digest", "unnamed"]

_QUOTED = re.compile(r"'@[^']*'")
"""A symbol in a string, as in an error message of the compiler's own."""

_SYMBOL = re.compile(r'@"[^"]*"|@[A-Za-z_$][\w$.]*|"(?:[^"\\]|\\.)*"')
"""A symbol of MLIR, or a string, in which "@p" is no symbol but assembler."""


def digest(*parts: Any) -> str:
    """Sixteen letters that stand for a text."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def unnamed(text: str) -> str:
    """MLIR with symbols that are numbered in the order in which they stand."""
    names: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        if found[0][0] == '"':
            return _QUOTED.sub("'@'", found[0])
        return names.setdefault(found[0], f"@f{len(names)}")

    return _SYMBOL.sub(number, text)
