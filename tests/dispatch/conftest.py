"""Fixtures of the tests of calls."""

from collections.abc import Iterator

import pytest

from tests.helpers.planner import Planner


@pytest.fixture
def plans(planner: Planner) -> Iterator[None]:
    """The reference backend plans its calls, so that what runs is counted."""
    yield
    assert planner.forwards and planner.backwards
