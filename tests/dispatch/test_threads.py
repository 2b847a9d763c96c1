"""Eight threads call at once, and each has the results that it has alone."""

import concurrent.futures
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import evoattn
from evoattn import testing
from evoattn.backends import Description, Plan, reference
from tests.helpers.seams import forget


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def different(count: int) -> list[testing.CaseInputs]:
    """Different shapes, layouts, dtypes and biases."""
    cases = (
        testing.Case(
            f"thread {i}",
            n=1 + i % 3,
            h=1 + i % 2,
            lq=5 + i,
            lk=7 + 2 * i,
            d=(4, 8, 16)[i % 3],
            mask=("random", None)[i % 2],
            mask_bias=(None, "finite")[i % 2],
            pair_bias=("b1hqk", None, "11hqk")[i % 3],
            layout=("bnlhd", "bnhld")[i // 2 % 2],
            dtype=(torch.float32, torch.float64, torch.bfloat16)[i // 3 % 3],
        )
        for i in range(count)
    )
    return [case.make(seed=i) for i, case in enumerate(cases)]


def at_once(calls: list[Callable[[], None]]) -> None:
    """Each in a thread of its own, all started together."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        barrier.wait(30)
        call()

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(run, call) for call in calls]:
            done.result(60)


def check_threads(backend: str, repetitions: int) -> None:
    """Every thread has the results that it has alone, whatever the others plan, keep and forget meanwhile."""
    inputs = different(8)
    expected = []
    for each in inputs:
        results = testing.run(each, backend)
        testing.check(results, each)
        expected.append(results.values)

    def calls(first: int) -> None:
        for i in range(first, first + len(inputs)):
            i %= len(inputs)
            for name, value in testing.run(inputs[i], backend).values.items():
                torch.testing.assert_close(value, expected[i][name], rtol=0, atol=0)

    for _ in range(repetitions):
        forget()
        at_once([lambda first=i: calls(first) for i in range(8)])  # type: ignore[misc]


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_eight_threads_call_at_once(backend: str, busy_switching: None, one_thread: None) -> None:
    """A thread that finds no plan makes one, and has an equal one if another thread is making it."""
    check_threads(backend, repetitions=6)


def test_eight_threads_call_at_once_on_the_short_way(plans: None, busy_switching: None, one_thread: None) -> None:
    """A call is kept when it is worked out: no other thread sees one that is not.

    Two threads may keep the same call twice: the older is forgotten with time. A list may lose its last elements while
    another thread walks through it: the walk then ends earlier.
    """
    check_threads("reference", repetitions=6)


def test_eight_threads_whose_calls_differ_only_in_strides(plans: None, busy_switching: None, one_thread: None) -> None:
    """More looks of one shape than are kept, so that the list of them is filled and cut all the time."""
    case = testing.Case("strides", n=2, h=2, lq=6, lk=6, d=8, pair_bias="b1hqk")
    inputs = case.make(seed=1)
    expected = testing.run(inputs, "reference").values["o"]

    def calls(first: int) -> None:
        for i in range(first, first + 24):
            room = torch.zeros(*inputs.q.shape[:-1], 8 + i % 24)
            q = room[..., :8].copy_(inputs.q)
            o = evoattn.evoformer_attention(q, inputs.k, inputs.v, pair_bias=inputs.pair_bias, backend="reference")
            torch.testing.assert_close(o, expected, rtol=0, atol=0)

    testing.run(inputs, "reference")
    for _ in range(4):
        forget()
        at_once([lambda first=3 * i: calls(first) for i in range(8)])  # type: ignore[misc]


def test_a_plan_is_whole_before_another_thread_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that asks for a plan while another one makes it makes one too. The plan that is made first is kept for all."""
    planning, others_are_there = threading.Event(), threading.Event()
    numbers, ran = itertools.count(1), []

    def plan(*_: Any, **__: Any) -> Plan:
        number = next(numbers)
        planning.set()
        if number == 1:
            others_are_there.wait(10)
        return Plan(lambda *tensors: ran.append(number), Description)

    monkeypatch.setattr(reference, "plan_forward", plan)
    forget()
    q = torch.randn(1, 2, 2, 5, 8)
    attend = functools.partial(evoattn.evoformer_attention, q, q, q, layout="bnhld", backend="reference")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(attend)
        assert planning.wait(10)
        attend()
        others_are_there.set()
        first.result(10)
    attend()
    assert ran == [2, 2, 2]
