"""Random problems through the Triton kernels, in Triton's interpreter on the CPU, at sizes that it can bear.

Triton reads TRITON_INTERPRET when a kernel is defined, so these tests need a process of their own: run from the ordinary suite,
this file starts itself once more with the variable set.
"""

import pytest

pytest.importorskip("triton")

from tests.helpers.interpreted import INTERPRETED, PARTS, run

if not INTERPRETED:

    @pytest.mark.parametrize("part", PARTS)
    def test_in_the_interpreter(part: str) -> None:
        """All tests below, in a process where Triton interprets."""
        run(__file__, part)

else:
    from tests.helpers import interpreter

    interpreter.patch()

    import torch

    from tests.fuzz import judge, random_problem

    torch.set_num_threads(1)

    pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

    DTYPES = (torch.float32, torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed % 4 else []) for seed in range(36)])
    def test_random_problem_in_the_interpreter_holds(seed: int) -> None:
        """Up to 40 queries and keys; the GPU runs the others."""
        problem = random_problem(seed, dtypes=DTYPES, largest=1000, longest=40)
        outcome = judge(problem, "triton")
        assert outcome.status == "held", f"{outcome.what}\n{problem!r}"
