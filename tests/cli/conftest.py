"""Helpers that the tests of the commands share."""

import os
import subprocess
import sys


def evoattn_run(*arguments: str, stdout: object, **environment: str) -> tuple[int, str]:
    """In a process of its own: exit status and stderr."""
    variables = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-m", "evoattn", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        check=False,
    )  # type: ignore[call-overload]
    return done.returncode, done.stderr
