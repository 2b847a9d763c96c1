"""Docstrings begin with the thing that they describe, files are short, and a long function says why it is long."""

import ast
import pathlib
import re

import pytest

import evoattn

PACKAGE = pathlib.Path(evoattn.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
CLAUSE = re.compile(r"(What|How|Whether|Which|Where)\b")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def texts(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the line and text of each docstring, those after a constant included."""
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return [(string.lineno, string.value) for string in strings if isinstance(string.value, str)]


def test_no_docstring_begins_with_a_clause() -> None:
    begun = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        for line, text in texts(ast.parse(path.read_text()))
        if CLAUSE.match(text)
    ]
    assert begun == []


@pytest.mark.parametrize("text", ["What a plan runs.", "Whether a call is small."])
def test_a_clause_is_recognised(text: str) -> None:
    assert CLAUSE.match(texts(ast.parse(f'x = 1\n"""{text}"""'))[0][1])


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_a_function_of_more_than_60_lines_says_why() -> None:
    unexplained = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name}, {length} lines"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, DEFINITIONS)
        and (length := _code_lines(node)) > 60
        and "More than 60 lines" not in (ast.get_docstring(node) or "")
    ]
    assert unexplained == []


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    length = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - length
