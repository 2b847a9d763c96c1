"""Calls that are given up rather than wait for a compiler."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from evoattn.core import attempts, keeping

NEVER: Future[None] = Future()
"""A compilation that does not end."""


def is_given_up(call: Callable[[attempts.Attempt], Any]) -> bool:
    """Whether a call is given up, which hides its errors: it only notes what it sees."""
    try:
        with attempts.attempt() as attempt:
            call(attempt)
    except attempts.NotCompiled:
        return True
    return False


def test_a_call_goes_on_to_its_end_and_is_then_given_up() -> None:
    seen: list[Any] = []

    def call(attempt: attempts.Attempt) -> None:
        seen.append(attempts.given_up())
        attempts.check()
        attempt.give_up(NEVER)
        seen.extend([attempts.given_up(), attempt.waits_for])

    assert is_given_up(call)
    assert seen == [False, True, [NEVER]]
    assert attempts.current() is None and not attempts.given_up()
    attempts.check()
    assert not is_given_up(lambda _: attempts.check())


def test_nobody_writes_for_a_call_that_was_given_up() -> None:
    written: list[int] = []

    def call(attempt: attempts.Attempt) -> None:
        attempt.give_up(NEVER)
        attempts.check()
        written.append(1)

    assert is_given_up(call) and not written


def test_errors_of_a_call_that_was_given_up_mean_nothing() -> None:
    def fail(attempt: attempts.Attempt, *waits_for: Future[None]) -> None:
        for one in waits_for:
            attempt.give_up(one)
        raise KeyError

    with pytest.raises(KeyError):
        is_given_up(fail)
    assert attempts.current() is None
    assert is_given_up(lambda attempt: fail(attempt, NEVER))


def test_an_attempt_inside_is_given_up_alone() -> None:
    seen: list[bool] = []

    def call(_: attempts.Attempt) -> None:
        seen.append(is_given_up(lambda inner: inner.give_up(NEVER)))
        seen.append(attempts.given_up())

    assert not is_given_up(call)
    assert seen == [True, False]


def test_an_attempt_inside_one_that_was_given_up_is_too() -> None:
    seen: list[bool] = []

    def call(attempt: attempts.Attempt) -> None:
        attempt.give_up(NEVER)
        seen.append(is_given_up(lambda _: seen.append(attempts.given_up())))

    assert is_given_up(call)
    assert seen == [True, True]


def test_a_sampling_keeps_nothing_that_was_made_without_values() -> None:
    x, made = torch.ones(2), dict[str, list[int]]()

    def kept(name: str) -> list[int]:
        return keeping.made_once(name, (x,), list)

    def call(attempt: attempts.Attempt) -> None:
        made["before"] = kept("before")
        attempt.give_up(NEVER)
        made["after"] = kept("after")
        made["fact"] = [keeping.fact("sum", x, lambda _: 17)]

    with keeping.sampling():
        assert is_given_up(call) and made["fact"] == [17]
        assert kept("before") is made["before"], "it was whole"
        assert kept("after") is not made["after"]
        assert keeping.fact("sum", x, lambda y: y.sum().item()) == 2
