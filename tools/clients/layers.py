"""Compare the layers of installed clients with ours in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from clients.blocks import Block, Call, Problem
from clients.compare import DTYPES, LIMITS, Outcome, errors, outcome
from evoattn.nn import replace

__all__ = ["compare_layers", "faults_of"]


def compare_layers(block: Block, dtype: torch.dtype, residues: Iterable[int] = (16, 33)) -> tuple[int, float, float]:
    """Run a block as it is, and with `evoattn.nn.replace`.

    Args:
        block: the block.
        dtype: of parameters and inputs.
        residues: the lengths.

    Returns:
        How many layers were replaced, and the largest errors of outputs and of all gradients, as `clients.compare` has them. No
        layer: nothing was run.
    """
    replaced: list[str] = []

    def ours(problem: Problem) -> Call:
        call = block.call(problem)
        replaced.extend(replace(call.module))
        return call

    worst = (0.0, 0.0)
    for length in residues:
        try:
            found: Outcome = outcome(dataclasses.replace(block, call=ours), dtype, length, block.ways[-1])
        except ValueError as error:
            if "no layer of" in str(error):
                return 0, 0.0, 0.0
            raise
        here = errors(outcome(block, dtype, length, block.ways[0]), found)
        worst = (max(worst[0], here[0]), max(worst[1], here[1]))
    return len(replaced), *worst


def faults_of(name: str, blocks: Iterable[Block]) -> list[str]:
    """Print a line for each block of a client and dtype in which layers are replaced; return what is beyond the limits."""
    faults = []
    for block in blocks:
        for dtype in DTYPES:
            count, outputs, gradients = compare_layers(block, dtype)
            if not count:
                continue
            what = f"{block.name}, {count} layers"
            print(f"{name:20}{what:43}{str(dtype).removeprefix('torch.'):>13}{outputs:>9.0e}{gradients:>11.0e}", flush=True)
            for where, error, limit in zip(("outputs", "gradients"), (outputs, gradients), LIMITS[dtype], strict=True):
                if not error <= limit:
                    faults.append(f"{what} in {dtype}: {where} are off by {error:.1e}, the bound is {limit:.0e}")
    return faults
