"""Random calls and layers, judged against float64. `python -m tests.fuzz` runs any number of them in worker processes."""

from tests.fuzz.judging import judge
from tests.fuzz.random_problems import RandomProblem, random_problem

__all__ = ["RandomProblem", "judge", "random_problem"]
