"""Forked processes for tests whose programs need torch: an import of it takes a second."""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["METHOD", "call_pytest", "forked", "server"]

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
"""How processes start that may have imported less than the process of the tests."""

IMPORTED = ["evoattn.nn", "hypothesis", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor"]
"""Modules that are imported once, for all such processes of a test process. None of them imports Triton."""


def server() -> Any:
    """The context of such processes."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context(METHOD)


def call_pytest(arguments: list[str], printed: str, environment: dict[str, str]) -> None:
    """Call pytest, which prints to a file, in a process of `server` that has this environment.

    It stands here, since a process imports the file of what it calls before it has its environment.
    """
    import pytest

    os.environ.clear()
    os.environ.update(environment)
    file = os.open(printed, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    raise SystemExit(int(pytest.main(arguments)))


def forked(work: Callable[[], object], **options: Any) -> subprocess.Popen[str]:
    """Start `work` in a forked process that has imported what this one has, in place of `python -c`.

    Args:
        work: a function. Its process has standard files of its own, and no other open file.
        options: those of `subprocess.Popen`, but for `env`.
    """

    def begin() -> None:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # with it the pipe on which Popen waits for an exec
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork; torch's own DataLoader does the same
        try:
            work()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    return subprocess.Popen([sys.executable], preexec_fn=begin, text=True, **options)
