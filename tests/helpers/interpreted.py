"""Runs a file of tests once more, in a process in which Triton interprets its kernels.

Triton reads TRITON_INTERPRET when a kernel is defined, so such tests need a process of their own.
"""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.helpers.processes import server

__all__ = ["INTERPRETED", "PARTS", "run"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a process."""

PARTS = [pytest.param("not slow", id="quick"), pytest.param("slow", marks=pytest.mark.slow)]
"""Which tests of the file are run, by their marks."""


def run(file: str, part: str) -> None:
    """Run the tests of a file that have these marks; what fails there fails here."""
    arguments = ["-q", "-x", "-m", part, "-p", "no:cacheprovider", "-p", "no:xdist", file]
    with tempfile.NamedTemporaryFile("r+") as printed:
        process = server().Process(target=_interpret, args=(arguments, printed.name, {**os.environ, "TRITON_INTERPRET": "1"}))
        process.start()
        process.join()
        assert process.exitcode == 0, printed.read()[-8000:]


def _interpret(arguments: list[str], printed: str, environment: dict[str, str]) -> None:
    """Call pytest, which prints to a file."""
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(printed, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    raise SystemExit(int(pytest.main(arguments)))
