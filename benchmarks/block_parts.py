#!/usr/bin/env python3
"""Time the layers of a PairformerBlock, each alone, and the whole block, in evoattn.nn and in plain torch.

    python benchmarks/block_parts.py --lengths 256 1024 --json benchmarks/results/blocks/NAME.json

The sizes are those of AlphaFold 3's family: C 128, 4 heads of 32, 16 heads of 24 in the single track. z and s are float32. On a
GPU a time is that of a CUDA graph's replay. The host's time is that of an eager call on an idle GPU until it returns. The block
and plain torch are compared with float64 first: status 1 if the block is further off. A record of the same machine and commit
is added to.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import case_records
import torch
import torch.nn.functional as F
from layer_parts import milliseconds
from layer_ways import fill
from torch import Tensor, nn

from evoattn import testing
from evoattn.bench import machine
from evoattn.bench.clock import Clock, clock_for
from evoattn.bench.memory import peak_bytes, release
from evoattn.nn import PairformerBlock

SCHEMA = 1
C_S, C_Z = 384, 128
VERIFIED = {"cuda": 200, "cpu": 24}
KINDS = ("bfloat16", "float32", "tf32")
"""Autocast to bfloat16, and float32 with full or with TF32 products."""

ALLOWED, FLOOR = 1.5, 1e-5
"""So many times the error of plain torch plus a floor may the block's be: both round at other places."""

EVOATTN, PLAIN, COMPILED = "evoattn.nn", "plain torch", "torch.compile"
PAIR = ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "pair_transition")
SINGLE = ("attn_pair_bias", "single_transition")
BLOCK = "whole block"
HOST_CALLS = 20


class Plain:
    """The layers of a block as models write them. Each returns its input plus its update."""

    def __init__(self, block: PairformerBlock) -> None:
        self.block = block

    def multiplication(self, layer: Any, z: Tensor, mask: Tensor) -> Tensor:
        y, m = layer.layer_norm_in(z), mask[..., None]
        a = m * torch.sigmoid(layer.linear_a_g(y)) * layer.linear_a_p(y)
        b = m * torch.sigmoid(layer.linear_b_g(y)) * layer.linear_b_p(y)
        t = torch.einsum("...ikd,...jkd->...ijd" if layer.outgoing else "...kid,...kjd->...ijd", a, b)
        made: Tensor = z + torch.sigmoid(layer.linear_g(y)) * layer.linear_z(layer.layer_norm_out(t))
        return made

    def attention(self, layer: Any, z: Tensor, mask: Tensor) -> Tensor:
        x, m = (z, mask) if layer.starting else (z.transpose(1, 2), mask.transpose(1, 2))
        y, mha = layer.layer_norm(x), layer.mha
        bias = layer.linear(y).movedim(-1, 1)[:, None] + layer.inf * (m[:, :, None, None] - 1)
        update = self._attend(mha, y, bias, layer.no_heads)
        return z + (update if layer.starting else update.transpose(1, 2))

    def single_attention(self, layer: Any, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        bias = layer.linear_z(layer.layer_norm_z(z)).movedim(-1, 1) + layer.inf * (mask[:, None, None] - 1)
        return s + self._attend(layer.mha, layer.layer_norm_a(s), bias, layer.no_heads)

    def transition(self, layer: Any, x: Tensor) -> Tensor:
        y = layer.layer_norm(x)
        made: Tensor = x + layer.linear_out(F.silu(layer.swiglu.linear_a(y)) * layer.swiglu.linear_b(y))
        return made

    def whole(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        pair = self.block.pair_stack
        z = self.multiplication(pair.tri_mul_in, self.multiplication(pair.tri_mul_out, z, pair_mask), pair_mask)
        z = self.attention(pair.tri_att_end, self.attention(pair.tri_att_start, z, pair_mask), pair_mask)
        z = self.transition(pair.pair_transition, z)
        s = self.single_attention(self.block.attn_pair_bias, s, z, mask)
        return self.transition(self.block.single_transition, s), z

    def _attend(self, mha: Any, y: Tensor, bias: Tensor, heads: int) -> Tensor:
        q, k, v = (to(y).unflatten(-1, (heads, -1)).transpose(-2, -3) for to in (mha.linear_q, mha.linear_k, mha.linear_v))
        p = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias, -1)
        o = (p.to(v.dtype) @ v).transpose(-2, -3).flatten(-2)
        made: Tensor = mha.linear_o(torch.sigmoid(mha.linear_g(y)) * o)
        return made


class Example:
    """A block with random weights, its inputs and the cotangents of its outputs."""

    def __init__(self, length: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        block = PairformerBlock(C_S, C_Z)
        fill(block, torch.Generator().manual_seed(0))
        self.block = block.eval().to(device, dtype)
        s, z, ds, dz = (torch.randn(1, *shape) for shape in ((length, C_S), (length, length, C_Z)) * 2)
        self.s, self.z, self.ds, self.dz = (x.to(device, dtype) for x in (s, z, ds, dz))
        mask, pair_mask = torch.rand(1, length) < 0.9, torch.rand(1, length, length) < 0.9
        mask[:, 0] = pair_mask[:, 0] = pair_mask[:, :, 0] = True  # in a row without a key float64 computes something else
        self.mask, self.pair_mask = (x.to(device, dtype) for x in (mask, pair_mask))

    def calls(self, way: str) -> dict[str, tuple[Callable[..., Any], tuple[str, ...], nn.Module]]:
        """For each part the function, what it reads that gets a gradient, and its parameters' module."""
        block, m, pm = self.block, self.mask, self.pair_mask
        pair, plain = block.pair_stack, Plain(block)
        layers: dict[str, Any] = {name: getattr(pair, name) for name in PAIR} | {name: getattr(block, name) for name in SINGLE}
        calls: dict[str, Callable[..., Any]] = dict(layers)  # the transitions take no mask
        if way == EVOATTN:
            calls |= {name: functools.partial(layers[name], mask=pm) for name in PAIR[:4]}
            calls["attn_pair_bias"] = functools.partial(layers["attn_pair_bias"], mask=m)
            calls[BLOCK] = functools.partial(block, mask=m, pair_mask=pm)
        else:
            calls |= {name: functools.partial(plain.multiplication, layers[name], mask=pm) for name in PAIR[:2]}
            calls |= {name: functools.partial(plain.attention, layers[name], mask=pm) for name in PAIR[2:4]}
            calls |= {name: functools.partial(plain.transition, layers[name]) for name in (PAIR[4], SINGLE[1])}
            calls["attn_pair_bias"] = functools.partial(plain.single_attention, layers["attn_pair_bias"], mask=m)
            calls[BLOCK] = functools.partial(plain.whole, mask=m, pair_mask=pm)
        if way == COMPILED:
            calls = {BLOCK: torch.compile(calls[BLOCK])}
        reads = dict.fromkeys(PAIR, ("z",)) | {"single_transition": ("s",)}
        return {name: (call, reads.get(name, ("s", "z")), layers.get(name, block)) for name, call in calls.items()}

    def passes(self, way: str, part: str, kind: str) -> dict[str, Callable[[int], Any]]:
        """A part's inference, and its training step without an optimizer."""
        call, names, module = self.calls(way)[part]
        inputs = [getattr(self, name) for name in names]
        leaves = [x.detach().requires_grad_() for x in inputs]
        wanted = [*leaves, *module.parameters()]
        made_of = {"s": self.ds, "z": self.dz}
        outputs = ("s", "z") if part == BLOCK else names[:1]

        def inference(number: int = 0) -> Any:
            with torch.no_grad(), computing(kind, self.z.device):
                return call(*inputs)

        def training(number: int = 0) -> Any:
            with computing(kind, self.z.device):
                made = call(*leaves)
            made = made if isinstance(made, tuple) else (made,)
            cotangents = [made_of[name].to(x.dtype) for name, x in zip(outputs, made, strict=True)]
            return torch.autograd.grad(made, wanted, cotangents)

        return {"inference": inference, "training": training}


@contextlib.contextmanager
def computing(kind: str, device: torch.device) -> Iterator[None]:
    """Compute as `kind` says."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=kind == "bfloat16"):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def errors(kind: str, device: torch.device) -> dict[str, dict[str, float]]:
    """By way and tensor, relative to plain torch in float64: the outputs, and the gradients of s and z."""
    length, errors_by_way = VERIFIED[device.type], {}
    example = Example(length, device)
    true = outcome(Example(length, device, torch.float64), PLAIN, "float64")
    for way in (EVOATTN, PLAIN):
        values = outcome(example, way, kind)
        errors_by_way[way] = {name: float(f"{testing.relative_error(values[name], true[name]):.2e}") for name in true}
    return errors_by_way


def outcome(example: Example, way: str, kind: str) -> dict[str, Tensor]:
    passes = example.passes(way, BLOCK, kind)
    (s, z), (ds, dz, *_) = passes["inference"](0), passes["training"](0)
    return {"s": s, "z": z, "ds": ds, "dz": dz}


def measured(call: Callable[[int], Any], clock: Clock, device: torch.device, rounds: int, *, host: bool) -> dict[str, float]:
    """Milliseconds of a call and of its host, and the peak of its memory in GiB beyond what was held before."""
    call(0)
    numbers = {"peak_gib": round(peak_bytes(lambda: call(0), device) / 2**30, 3)} if device.type == "cuda" else {}
    if host and (seconds := clock.host_s(call, HOST_CALLS)) is not None:
        numbers["host_ms"] = round(1e3 * seconds, 3)
    return numbers | {"ms": round(milliseconds(call, clock, device, rounds), 4)}


def measure(length: int, kind: str, ways: list[str], device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """A case for each way, part and pass. What does not fit says so."""
    example, clock = Example(length, device), clock_for(device)
    for way in ways:
        for part in example.calls(way):
            for name, call in example.passes(way, part, kind).items():
                case: dict[str, Any] = {"length": length, "dtype": kind, "way": way, "part": part, "pass": name}
                try:
                    case |= measured(call, clock, device, rounds, host=way == EVOATTN and kind == "bfloat16")
                except torch.OutOfMemoryError:
                    case["failed"] = "out of memory"
                release(device)
                yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 1024], metavar="N")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=KINDS)
    parser.add_argument("--ways", nargs="+", default=[EVOATTN, PLAIN], choices=[EVOATTN, PLAIN, COMPILED])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what to record if git cannot tell")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record, or add to it")
    options = parser.parse_args()
    device = torch.device(options.device)
    try:
        facts = {key: value for key, value in machine.facts(device, options.commit).items() if value is not None}
        record = case_records.begun(options.json, {"schema": SCHEMA, "machine": facts, "errors": {}, "cases": []})
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for kind in options.dtypes:
        record["errors"][kind] = errors(kind, device)
        print(kind, record["errors"][kind], flush=True)
        own, plain = record["errors"][kind][EVOATTN], record["errors"][kind][PLAIN]
        if not all(own[name] <= ALLOWED * plain[name] + FLOOR for name in plain):
            print(f"{kind}: the block is further from float64 than plain torch; nothing was timed", file=sys.stderr)
            return 1
        for length in options.lengths:
            for case in measure(length, kind, options.ways, device, options.rounds):
                names = ("length", "dtype", "way", "part", "pass")
                print(*(case[key] for key in names), {key: x for key, x in case.items() if key not in names}, flush=True)
                case_records.add(case, record, names, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
