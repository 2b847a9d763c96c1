"""Judges that worker processes import in place of the real one: they fail as planted, die, hang or lose their GPU."""

import os
import signal
import time

from evoattn.testing import Outcome
from tests.fuzz import RandomProblem

HELD = Outcome("held")
FAILED = Outcome("failed", "error of o: planted", ("error of o",))


def five_keys(problem: RandomProblem, backend: str, device: str) -> Outcome:
    """Wrong from five keys on with two heads or more; another backend holds."""
    return FAILED if backend == "tiled" and problem.case.lk >= 5 and problem.case.h >= 2 else HELD


def dies(problem: RandomProblem, backend: str, device: str) -> Outcome:
    """Every third seed ends its process, as a segmentation fault does."""
    if problem.seed % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return HELD


def hangs(problem: RandomProblem, backend: str, device: str) -> Outcome:
    """The second seed never ends."""
    if problem.seed == 1:
        time.sleep(600)
    return HELD


def loses_the_gpu(problem: RandomProblem, backend: str, device: str) -> Outcome:
    """The first seed poisons the context; each outcome tells its process."""
    if problem.seed == 0:
        return Outcome("failed", f"RuntimeError: CUDA error: an illegal memory access; {os.getpid()}", ("raised RuntimeError",))
    return Outcome("refused", str(os.getpid()))


def slowly(problem: RandomProblem, backend: str, device: str) -> Outcome:
    """Half a second for each problem, and the first fails."""
    time.sleep(0.5)
    return FAILED if problem.seed == 0 else HELD
