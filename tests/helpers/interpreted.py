"""Runs a file of tests once more, in a process in which Triton interprets its kernels.

Triton reads TRITON_INTERPRET when a kernel is defined, so such tests need a process of their own.
"""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.helpers.processes import call_pytest, server

__all__ = ["INTERPRETED", "PARTS", "run"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a process."""

SHARE = "EVOATTN_TEST_SHARE"
"""The share of slow tests that are run. It counts a file as one: all its slow tests are run, or none."""

PARTS = [pytest.param("not slow", id="quick"), pytest.param("slow", marks=pytest.mark.slow)]
"""Which tests of the file are run, by their marks."""


def run(file: str, part: str) -> None:
    """Run the tests of a file that have these marks; what fails there fails here."""
    arguments = ["-q", "-x", "-m", part, "-p", "no:cacheprovider", "-p", "no:xdist", file]
    environment = {name: value for name, value in os.environ.items() if name != SHARE} | {"TRITON_INTERPRET": "1"}
    with tempfile.NamedTemporaryFile("r+") as printed:
        process = server().Process(target=call_pytest, args=(arguments, printed.name, environment))
        process.start()
        process.join()
        assert process.exitcode == 0, printed.read()[-8000:]
