"""What each GPU backend has to hold in the same words: offsets that 32 bits do not count, and calls one right after another."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from evoattn import testing

Result = TypeVar("Result")


def capture(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of a step, and the tensors that it writes. The step runs once on a stream of its own before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def check_offsets(which: str, backend: str, pair_bias: str | None = "b1hqk") -> None:
    """Both passes with the elements of one tensor more than 2^31 apart: bit-equal to the same numbers side by side."""
    case = testing.Case("far", n=5, h=2, lq=96, lk=96, d=32, dtype=torch.bfloat16, mask_bias="finite", pair_bias=pair_bias)
    inputs = case.make(seed=4, device="cuda")
    if which == "pair_bias":
        far = giant((1, 1, 2, 96, 96), (1, 1, 96, 2**25, 1))
    else:
        far = giant((1, 5, 96, 2, 32), (1, 2**30, 64, 32, 1))
    inputs = dataclasses.replace(inputs, **{which: far})
    small = dataclasses.replace(inputs, **{which: far.contiguous()})
    results = testing.run(inputs, backend, deterministic=True)
    expected = testing.run(small, backend, deterministic=True)
    testing.check(expected, small)
    for name, value in results.values.items():
        torch.testing.assert_close(value, expected.values[name], rtol=0, atol=0)


def check_same_bits(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each of the expected values, bit for bit."""
    for name, value in expected.items():
        assert torch.equal(values[name], value), name


def giant(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Few elements spread over more than 2^31: random where they are read, NaN all around."""
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    assert extent > 2**31
    x = torch.full((extent,), torch.nan, dtype=dtype, device="cuda").as_strided(shape, stride)
    return x.copy_(torch.randn(shape, device="cuda"))


def check_in_turn(case: testing.Case, backend: str, *, deterministic: bool, device: str = "cuda") -> None:
    """Kernels of a call overlap. Memory given out again holds what the call before made of other inputs: a load that comes too
    early shows."""
    both = [case.make(seed, device) for seed in (1, 2)]
    expected = []
    for inputs in both:
        expected.append(testing.run(inputs, backend, deterministic=deterministic).values)
        torch.cuda.synchronize()
    for _ in range(30):
        runs = [testing.run(inputs, backend, deterministic=deterministic).values for inputs in both]
        for values, right in zip(runs, expected, strict=True):
            for name, value in values.items():
                if deterministic or name != "dpair_bias":
                    assert torch.equal(value, right[name]), name
                else:  # added up in any order
                    assert testing.relative_error(value, right[name]) < 5e-3
