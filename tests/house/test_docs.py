"""The pages: every link leads somewhere, every public name is documented, and tables and notes keep their size."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for folder in ("docs", "notes", "benchmarks") for path in (ROOT / folder).rglob("*.md"))]
)
NOTES = [path for path in PAGES if path.parent.name == "notes" and path.name != "README.md"]

PUBLIC = (
    "evoattn",
    "evoattn.clients",
    "evoattn.compat.cuequivariance",
    "evoattn.compat.deepspeed",
    "evoattn.compat.openfold",
    "evoattn.nn",
    "evoattn.pair",
    "evoattn.testing",
    "evoattn.workloads",
)
"""The modules whose `__all__` is public."""

LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception|data):: (evoattn\.\S+)$", re.MULTILINE)


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Sphinx make them."""
    titles = (line.lstrip("# ") for line in prose(path).splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def tables(path: Path) -> list[list[str]]:
    """The rows of each table, without its header."""
    tables = re.findall(r"(?:^\|.*\n)+", prose(path) + "\n", re.MULTILINE)
    return [table.splitlines()[2:] for table in tables]


def documented() -> dict[str, object]:
    """What api.md has a directive for, by full name."""
    objects = {}
    for name in DIRECTIVE.findall((ROOT / "docs" / "api.md").read_text()):
        module, _, attribute = name.rpartition(".")
        objects[name] = getattr(importlib.import_module(module), attribute)
    return objects


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(prose(path)):
        page = path.parent / target if target else path
        assert page.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(page), f"{target} has no heading #{anchor}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    if path.name == "tests-by-commit.md":
        pytest.skip("its files have the names that they had on their commit")
    names = re.findall(
        r"`((?:src|docs|notes|benchmarks|examples|tests|tools|backends|nn|pair|clients|core|dispatch)/[\w/.-]+)`", prose(path)
    )
    roots = (ROOT, ROOT / "src/evoattn", ROOT / "tests")
    assert [name for name in names if "NAME" not in name and not any((root / name).exists() for root in roots)] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_the_api_page_has_every_public_name(module: str) -> None:
    package = importlib.import_module(module)
    known = {id(value) for value in documented().values()}
    names = set(package.__all__) - {"__version__"}
    assert {name for name in names if id(getattr(package, name)) not in known} == set()


def test_the_api_page_has_no_other_name() -> None:
    public = {f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__}
    assert set(documented()) - public == set()


def test_tables_of_the_readme_are_narrow() -> None:
    rows = [row for table in tables(ROOT / "README.md") for row in table]
    assert max(row.count("|") - 1 for row in rows) <= 5


def test_tables_of_the_support_page_are_short() -> None:
    assert max(map(len, tables(ROOT / "docs" / "support.md"))) <= 10


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_a_note_is_a_screen(path: Path) -> None:
    """Question, set-up, result and conclusion, in this order."""
    text = path.read_text()
    assert len(text.splitlines()) <= 75
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Question", "Set-up", "Result", "Conclusion"]
    assert f"]({path.name})" in (path.parent / "README.md").read_text(), "notes/README.md lists it"
