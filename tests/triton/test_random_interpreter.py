"""Random problems through the Triton kernels, in Triton's interpreter on the CPU, at sizes that it can bear.

Triton reads TRITON_INTERPRET when a kernel is defined, so these tests need a process of their own: run from the ordinary suite,
this file starts itself once more with the variable set.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
HERE = pathlib.Path(__file__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        """All tests below, in a process where Triton interprets."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE)]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

else:
    from tests.helpers import interpreter

    interpreter.patch()

    import torch

    from evoattn import testing

    torch.set_num_threads(1)

    pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

    DTYPES = (torch.float32, torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("seed", range(36))
    def test_random_problem(seed: int) -> None:
        """Up to 40 queries and keys; the GPU runs the others."""
        problem = testing.random_problem(seed, dtypes=DTYPES, largest=1000, longest=40)
        outcome = testing.judge(problem, "triton")
        assert outcome.status == "held", f"{outcome.what}\n{problem!r}"
