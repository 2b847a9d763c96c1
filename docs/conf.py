"""Sphinx configuration: `sphinx-build -W --keep-going -b html docs build/docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import evoattn

project = "evoattn"
author = "the evoattn authors"
copyright = author
version = release = evoattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["figures/*.py"]
nitpicky = False

html_theme = "furo"
html_title = f"evoattn {release}"
html_show_sphinx = False
html_show_copyright = False

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shape, dtype and meaning, which the annotations cannot
autodoc_preserve_defaults = True

smartquotes = False  # messages and code are quoted as they are
default_role = "code"  # docstrings write `like this`


def equations(lines: list[str]) -> list[str]:
    """Indented paragraphs of a docstring, which hold equations and import lines, as literal blocks."""
    made: list[str] = []
    section = literal = False
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        section = section if indented or not line else bool(re.fullmatch(r"[A-Z]\w+( \w+)*:", line))
        if indented and not section and not literal and i and not lines[i - 1] and not line.lstrip().startswith(">>>"):
            made += [".. code-block:: text", ""]
            literal = True
        elif not indented and line:
            literal = False
        made.append(line)
    return made


def process_docstring(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = equations(lines)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", process_docstring, priority=100)  # before napoleon reads the sections
