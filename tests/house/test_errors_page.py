"""docs/errors.md has a row for each message that the package raises, and no row for a message that is gone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "evoattn"

OTHER_ROOMS = ("bench", "cli", "testing")
"""Rooms whose messages are lines of a command or of a test's report, not exceptions that a user's code meets."""

INTERNAL = (
    "backends/hopper/kernels/",  # variants that no plan makes
    "backends/hopper/ahead.py",  # evoattn warm asks first, and says it in its own line
    "backends/hopper/launch.py",
    "backends/tiled/threads.py",  # caught
    "backends/triton/ahead.py",
    "clients/running.py",  # caught
    "compile/",  # caught, and said by the warnings of the page
    "core/tuned_tiles.py",  # caught, but for a refusal of `evoattn tune`
    "empty_rows/in_place.py",
    "clients/known.py",  # said as "has other modules"
)
"""Files whose exceptions are caught inside the package, or show a fault of it."""

FEWEST = 10
"""Letters outside of fields that a message has at least: by fewer nobody finds its row."""

TORCHS_OWN = "torch's own message"


def text_of(node: ast.expr) -> str | None:
    """The text of a string or an f-string, with a null character for each field. None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(x) or "" if isinstance(x, ast.Constant) else "\0" for x in node.values)
    return None


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(SOURCE)), ast.parse(path.read_text())


def raised() -> Iterator[tuple[str, str]]:
    """The place and the text of each message that is raised."""
    for file, tree in sources():
        if file.split("/")[0] in OTHER_ROOMS or file.startswith(INTERNAL):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = text_of(node.exc.args[0])
                if text is not None:
                    yield f"{file}:{node.lineno}", text


def shape(message: str) -> re.Pattern[str]:
    """A pattern of the words of a message, which has anything in place of its fields."""
    text = re.sub(r"\s+", " ", message.replace("{}", "\0"))
    return re.compile(".*".join(map(re.escape, text.strip().split("\0"))))


def rows() -> list[tuple[str, str]]:
    """The message and the remedy of each row of the page, as plain text."""
    lines = [line for line in (ROOT / "docs" / "errors.md").read_text().splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\)\|", line)[1:3] for line in lines]
    return [(plain(message), remedy) for message, remedy in cells if message.strip() not in ("message", "reason")]


def plain(cell: str) -> str:
    return re.sub(r"\s+", " ", cell.replace("\\", "").replace("`", "")).strip()


MESSAGES = dict(raised())
ROWS = rows()


@pytest.mark.parametrize("place", MESSAGES)
def test_a_message_has_a_row(place: str) -> None:
    message = MESSAGES[place]
    assert sum(map(str.isalpha, message)) >= FEWEST, "too few words to look up; write the message in one place"
    assert any(shape(message).search(row) for row, _ in ROWS), message


def test_a_row_has_a_message() -> None:
    """It may be a reason that a list collects, so all texts of the package count, but for docstrings and bare names."""
    strings = {text_of(node) for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.expr)} - {None}
    shapes = [shape(text) for text in strings if " " in text and sum(map(str.isalpha, text)) >= FEWEST and len(text) < 400]
    stale = [row for row, remedy in ROWS if TORCHS_OWN not in remedy and not any(x.search(row) for x in shapes)]
    assert stale == []


@pytest.mark.parametrize(("row", "remedy"), ROWS, ids=[row[:40] for row, _ in ROWS])
def test_a_remedy_says_more_than_the_message(row: str, remedy: str) -> None:
    words = set(re.findall(r"\w+", remedy.lower())) - set(re.findall(r"\w+", row.lower()))
    assert words, "the second cell repeats the first"
