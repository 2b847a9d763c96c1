"""Heads in turns: how many run together, and where in memory each turn finds its own."""

import pytest
import torch

from evoattn.backends.hopper.head_groups import HeadGroups, divisor, for_each_group
from evoattn.workloads import workload


@pytest.mark.parametrize(
    ("count", "least", "expected"), [(4, 0, 1), (4, 1, 1), (4, 2, 2), (4, 3, 4), (4, 9, 4), (6, 4, 6), (5, 2, 5)]
)
def test_the_smallest_divisor_that_is_enough(count: int, least: int, expected: int) -> None:
    assert divisor(count, least) == expected


def like(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("b", "bias", "units", "expected"),
    [
        (1, (1, 4), 128 * 132, (1, 1)),  # a head keeps all processors busy
        (1, (1, 4), 64 * 132, (1, 2)),
        (1, (1, 4), 63 * 132, (1, 4)),
        (1, (1, 4), 1, (1, 4)),
        (4, (4, 4), 128 * 132, (1, 1)),
        (4, (4, 4), 16 * 132, (2, 4)),  # two of the four b, with all heads
        (4, (4, 4), 1, (4, 4)),
        (4, (1, 4), 128 * 132, (4, 1)),  # all b share one bias
        (4, (4, 1), 128 * 132, (4, 4)),  # all heads do
    ],
)
def test_what_runs_together(b: int, bias: tuple[int, int], units: int, expected: tuple[int, int]) -> None:
    groups = HeadGroups.of(like(b, 2, 4, 64, 32), like(*bias, 64, 64), units, 132)
    assert (groups.b, groups.h) == expected
    assert len(groups.starts) == b * 4 // (groups.b * groups.h)


@pytest.mark.parametrize(
    ("name", "heads_at_once"), [("tri768", 2), ("tri1024", 2), ("tri2048", 1), ("diffusion768", 16), ("wide384", 4)]
)
def test_what_runs_together_of_a_model(name: str, heads_at_once: int) -> None:
    w = workload(name)
    groups = HeadGroups.of(like(w.b, w.n, w.h, w.lq, w.d), like(w.b, w.h, w.lq, w.lk), -(-w.lk // 64) * w.n, 132)
    assert (groups.b, groups.h) == (1, heads_at_once)


def test_without_a_pair_bias_all_run_together() -> None:
    assert HeadGroups.of(like(2, 2, 4, 64, 32), None, 2**30, 132) == HeadGroups(2, 4, ((0, 0),))


@pytest.mark.parametrize("heads_at_once", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_each_turn_finds_its_own(heads_at_once: tuple[int, int]) -> None:
    """A tensor of all heads, one of one b, one of one head, one without heads, and one that is not there."""
    of_b, of_h = heads_at_once
    groups = HeadGroups(of_b, of_h, tuple((x, y) for x in range(0, 2, of_b) for y in range(0, 3, of_h)))
    tensors = (torch.empty(2, 5, 7, 3, 8).transpose(2, 3), torch.empty(1, 3, 9), torch.empty(2, 1, 9), torch.empty(2, 6), None)
    axes = (2, 1, 1, None, 1)
    launched: list[tuple[int | None, ...]] = []
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    for_each_group(lambda *group: launched.append(group), addresses, groups.offsets(tensors, axes))
    for (b, h), group in zip(groups.starts, launched, strict=True):
        for x, axis, address in zip(tensors, axes, group, strict=True):
            if x is None:
                assert address is None
                continue
            part = x[b : b + of_b] if x.shape[0] > 1 else x
            if axis is not None:
                part = part.narrow(axis, h, of_h) if x.shape[axis] > 1 else part
                cut = groups.cut(x, axis)
                assert (cut.shape, cut.stride()) == (part.shape, part.stride())
            assert address == part.data_ptr()
    assert len(set(launched)) == len(groups.starts)
