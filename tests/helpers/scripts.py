"""Imports scripts of the checkout: for tests of `tools`, `benchmarks` and `dev.py`, which are no packages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load"]

ROOT = Path(__file__).resolve().parents[2]


def load(path: str, name: str | None = None) -> ModuleType:
    """The script at a path in the checkout; its module is called `name`, by default as the file is."""
    name = name or Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
