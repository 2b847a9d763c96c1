"""Input factories, the float64 oracle and error budgets: what our tests use, open to anyone who tests attention.

>>> from evoattn import testing
>>> case = testing.Case("mine", n=2, h=2, lq=16, lk=16, d=8, pair_bias="b1hqk")
>>> inputs = case.make(seed=0)
>>> testing.check(testing.run(inputs, backend="tiled"), inputs)
"""

from evoattn.testing.cases import AWKWARD, Case, CaseInputs, from_workload
from evoattn.testing.dense import Results
from evoattn.testing.judging import Outcome, judge
from evoattn.testing.oracle import budgets, check, errors, oracle, relative_error, run

__all__ = [
    "AWKWARD",
    "Case",
    "CaseInputs",
    "Outcome",
    "Results",
    "budgets",
    "check",
    "errors",
    "from_workload",
    "judge",
    "oracle",
    "relative_error",
    "run",
]
