"""Runs a file of tests once more, in a process in which Triton interprets its kernels.

Triton reads TRITON_INTERPRET when a kernel is defined, so such tests need a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

__all__ = ["INTERPRETED", "PARTS", "run"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is such a process."""

PARTS = [pytest.param("not slow", id="quick"), pytest.param("slow", marks=pytest.mark.slow)]
"""Which tests of the file are run, by their marks."""


def run(file: str, part: str) -> None:
    """Run the tests of a file that have these marks; what fails there fails here."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", part, "-p", "no:cacheprovider", "-p", "no:xdist", file]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
