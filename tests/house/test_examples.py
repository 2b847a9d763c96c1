"""Examples print what their docstrings say, and the python blocks of the pages and the examples in docstrings run."""

import ast
import contextlib
import doctest
import importlib
import io
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.pages import BLOCK, ROOT
from tests.helpers.processes import forked

PACKAGE = ROOT / "src" / "evoattn"
DOCUMENTED = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text())
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("tutorial", "testing", "layers", "sharded")))


def promised(source: str) -> list[str]:
    """The lines under "Prints:" in a module's docstring."""
    _, separator, lines = (ast.get_docstring(ast.parse(source)) or "").partition("Prints:\n")
    assert separator, "the docstring of an example ends with what it prints, under 'Prints:'"
    return words(textwrap.dedent(lines))


def words(text: str) -> list[str]:
    """Lines without the white space that nobody reads."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def run_blocks(page: str, name: str = "page") -> int:
    """Run the blocks of a page in order, in one namespace, and hold them to the outputs shown; how many outputs there were."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    shown = 0
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        printed = io.StringIO()
        code = compile("\n" * line + match["code"], name, "exec")  # an error then names the line of the page
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if match["printed"] is not None:
            shown += 1
            assert words(printed.getvalue()) == words(match["printed"]), f"{name}, line {line}: the block prints something else"
    return shown


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


GROUPED = "train_pair_stack.py"
"""It starts a process group. A forked process may have one already, without the threads that serve it."""


@pytest.mark.parametrize(
    "path", [pytest.param(x, marks=pytest.mark.slow if x.name == GROUPED else []) for x in EXAMPLES], ids=lambda path: path.name
)
def test_example_prints_what_it_says(path: Path) -> None:
    def run() -> None:
        sys.argv[:] = [str(path)]
        runpy.run_path(str(path), run_name="__main__")

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, path], text=True, **pipes) if path.name == GROUPED else forked(run, **pipes)
    printed, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert words(printed) == promised(path.read_text())


@pytest.fixture
def no_process_group() -> None:
    """End the process group that torch's compiler, or a test that failed, left in this process. Pages start their own."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_blocks_of_page_run(path: Path) -> None:
    page = path.read_text()
    assert BLOCK.search(page), f"{path.name} has no python block"
    run_blocks(page, path.name)


def test_a_wrong_output_is_caught() -> None:
    page = "```python\nx = 1\n```\n\nwords\n\n```python\nprint(x + 1)\n```\n```text\n{}\n```\n"
    assert run_blocks(page.format(2)) == 1
    with pytest.raises(AssertionError, match="line 7: the block prints something else"):
        run_blocks(page.format(3))


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstring_examples(path: Path) -> None:
    parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
    results = doctest.testmod(importlib.import_module(".".join(["evoattn", *parts])))
    assert results.attempted > 0
    assert results.failed == 0
