#!/usr/bin/env python3
"""Milliseconds of float32 products on tensor cores, and of the diffusion transformer that consists of them, in CUDA graphs.

    PYTHONPATH=src python benchmarks/diffusion_transformer.py --tokens 152 304 684 --json transformer.json

Products have the sizes of Boltz-2's token transformer, and new weights at each call, as in a step. Errors are against float64,
beside those of torch. The transformer has 24 blocks of 768 channels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from cuda_graphs import captured, milliseconds
from prediction_programs import tf32
from torch import Tensor

from evoattn.bench import machine
from evoattn.bench.clock import CudaClock
from evoattn.nn import DiffusionTransformer, sampling
from evoattn.nn.diffusion import ThreefoldConditionedTransition
from evoattn.pair.products import steps

SIZES = ((768, 768), (3072, 768), (4608, 768), (768, 1536))
"""Outputs and inputs of the products of one block."""

CONDITIONS = (36864, 768)
"""Those of one product of the conditions of all blocks."""


def graph_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of a call, replayed as a CUDA graph: the median of three rounds."""
    replay, output = captured(lambda _: run())
    median = statistics.median(milliseconds(replay, CudaClock(torch.device("cuda")), 3))
    del output  # which the graph writes
    return median


def error(y: Tensor, true: Tensor) -> float:
    """The relative error of the worst row."""
    return float(((y.double() - true).norm(dim=-1) / true.norm(dim=-1)).max())


def product_case(m: int, n: int, k: int) -> dict[str, Any]:
    """Times and errors of one product."""
    x = torch.randn(m, k, device="cuda")
    weights = [torch.randn(n, k, device="cuda") / k**0.5 for _ in range(max(1, min(24, int(2e8 // (4 * n * k)))))]
    split, halves = steps.split(x), [steps.split_weights([w]) for w in weights]
    high, low_weights = steps.split(x, low=False), [steps.split_weights([w], low=False) for w in weights]
    out, count = x.new_empty(m, n), len(weights)
    true = x.double() @ weights[0].double().T
    case: dict[str, Any] = {"m": m, "n": n, "k": k, "tile": str(tuple(steps.tile_of(m, n, k, x.device, low=True)))}
    case["exact_ms"] = graph_ms(lambda: [steps.product(split, w, out=out) for w in halves]) / count
    case["hi_ms"] = graph_ms(lambda: [steps.product(high, w, out=out) for w in low_weights]) / count
    case["split_ms"] = graph_ms(lambda: [steps.split(x) for _ in weights]) / count
    case["exact_error"] = error(steps.product(split, halves[0]), true)
    case["hi_error"] = error(steps.product(high, low_weights[0]), true)
    for on in (False, True):
        with tf32(on):
            name = "tf32" if on else "torch"
            case[f"{name}_ms"] = graph_ms(lambda: [torch.mm(x, w.T, out=out) for w in weights]) / count
            case[f"{name}_error"] = error(x @ weights[0].T, true)
    return case


def transformer_case(tokens: int, samples: int) -> dict[str, Any]:
    """Times and errors of 24 blocks."""
    with torch.device("cuda"):
        model = DiffusionTransformer(768, 768, 16, 48, 16, 24)
        for block in model.blocks:
            block.conditioned_transition = ThreefoldConditionedTransition(768, 768, residual=True)
        model.requires_grad_(False)
        for x in model.parameters():
            if x.ndim == 2:
                x.normal_(std=x.shape[1] ** -0.5)
        a, s = torch.randn(1, samples, tokens, 768), torch.randn(1, 1, tokens, 768)
        bias = torch.randn(24, 1, 1, 16, tokens, tokens)
    case: dict[str, Any] = {"tokens": tokens, "samples": samples}
    with torch.no_grad():
        for on in (False, True):
            with tf32(on):
                name = "tf32" if on else "torch"
                case[f"{name}_ms"] = graph_ms(lambda: model(a, s, pair_bias=bias))
                outputs = {name: model(a, s, pair_bias=bias)}
                for fused, precision in ((f"fused_{name}", "exact"), *([("fused_bf16", "bf16")] if on else [])):
                    with sampling(precision):
                        outputs[fused] = model(a, s, pair_bias=bias)
                        case[f"{fused}_ms"] = graph_ms(lambda: model(a, s, pair_bias=bias))
                if tokens <= 400 and samples == 1:
                    true = model.double()(a.double(), s.double(), pair_bias=bias.double())
                    case |= {f"{key}_error": error(y, true) for key, y in outputs.items()}
                    model.float()
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[152, 304, 684])
    parser.add_argument("--samples", nargs="+", type=int, default=[1, 5])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--commit", help="of the code, where git does not know it")
    chosen = parser.parse_args()
    torch.manual_seed(1)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    record: dict[str, Any] = {"machine": machine.facts(torch.device("cuda"), chosen.commit), "products": [], "transformers": []}
    for tokens, size in itertools.product(chosen.tokens, (*SIZES, CONDITIONS)):
        case = product_case(tokens, *size)
        record["products"].append(case)
        print({key: round(x, 4 if "ms" in key else 9) if isinstance(x, float) else x for key, x in case.items()}, flush=True)
    for tokens, samples in itertools.product(chosen.tokens, chosen.samples):
        case = transformer_case(tokens, samples)
        record["transformers"].append(case)
        print({key: round(x, 3 if "ms" in key else 9) if isinstance(x, float) else x for key, x in case.items()}, flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
