"""`evoattn doctor`: what is installed, which backend runs where, and whether the numbers are right."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import time
from typing import Any

import torch

import evoattn
from evoattn import testing
from evoattn.bench import machine
from evoattn.core.problem import dtype_name
from evoattn.testing.judging import verdict

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

CASES = (
    "mask_and_both_biases",
    "rows_without_keys",
    "length_192_mask",
    "permuted_pair",
    "padding",
    "length_129",
    "lse_far_from_zero",
    "heads_first_transposed",
    "mask_bias_minus_inf",
    "batch_2_pair_bias_of_1",
    "expanded_cotangent",
    "wider_values",
    "channels_24",
    "one_query",
    "no_keys",
)
"""Names in `evoattn.testing.AWKWARD`, the most telling first: a slow backend may not reach the last."""

SECONDS = 8.0
"""Seconds of all checks, the oracle included."""

HELP = "versions, devices, backends, and a self-check of the numbers"

ABOUT = """\
Shows the versions of what evoattn runs on, the devices, every backend with the reason where it cannot run, and
which backend `auto` takes for each dtype. Then checks every available backend on each device, in about ten seconds
(more where kernels are compiled first): output, LSE and all gradients of awkward calls, against float64.
"""

EPILOG = """\
examples:
  evoattn doctor
  evoattn doctor --json > report.json      one JSON object, to keep or to attach to a report of a problem

exit status: 0 the self-check held; 1 it did not; 2 bad options
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    report = examine()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["ok"] else 1


@dataclasses.dataclass
class Check:
    """The findings of the self-check for one backend on one device in one dtype; cases by name."""

    backend: str
    device: str
    dtype: str
    held: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    not_run: list[str] = dataclasses.field(default_factory=list)


def examine() -> dict[str, Any]:
    """Everything that doctor reports, in types that JSON has."""
    statuses = [dataclasses.asdict(status) for status in evoattn.backends()]
    checks = _self_check([status["name"] for status in statuses if status["available"]])
    return {
        "versions": {**machine.versions(), "triton": _triton(), "cuda": torch.version.cuda, "rocm": torch.version.hip},
        "devices": [_device(device) for device in machine.devices()],
        "backends": statuses,
        "auto": {str(device): {dtype_name(dtype): _auto(device, dtype) for dtype in _DTYPES} for device in machine.devices()},
        "checks": [dataclasses.asdict(check) for check in checks],
        "ok": any(check.held for check in checks) and not any(check.failed for check in checks),
    }


def _triton() -> str | None:
    """The version without importing it; distributions of several names hold the package."""
    if importlib.util.find_spec("triton") is None:
        return None
    for distribution in importlib.metadata.packages_distributions().get("triton", []):
        return f"{importlib.metadata.version(distribution)} ({distribution})"
    return "unknown"


def _device(device: torch.device) -> dict[str, Any]:
    entry: dict[str, Any] = {"device": str(device), "name": machine.name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        entry["capability"] = f"{properties.major}.{properties.minor}"
        entry["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return entry


def _auto(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The backends that `auto` chooses for a small training step of triangle attention."""
    q = torch.empty(1, 64, 64, 4, 32, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 64, 64, device=device, dtype=torch.bool)
    pair_bias = torch.empty(1, 1, 4, 64, 64, device=device, dtype=dtype, requires_grad=True)
    try:
        explanation = evoattn.explain(q, q, q, mask=mask, pair_bias=pair_bias)
    except Exception as error:  # a backend that cannot plan is a finding, and the checks go on
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return {"backend": None, "backward_backend": None, "refused": {"auto": [why]}}
    return {
        "backend": explanation.backend,
        "backward_backend": explanation.backward_backend or explanation.backend,
        "refused": explanation.refused,
    }


def _self_check(available: list[str]) -> list[Check]:
    """Every case of every backend, device and dtype, the most telling cases of all first, until the time is up.

    The first case that each takes is run whatever the time.
    """
    by_name = {case.name: case for case in testing.AWKWARD}
    grid = [
        (Check(backend, str(device), dtype_name(dtype)), device, dtype)
        for backend in available
        for device in machine.devices()
        for dtype in _DTYPES
    ]
    end = time.perf_counter() + SECONDS
    for name in CASES:
        for check, device, dtype in grid:
            if (check.held or check.failed) and time.perf_counter() > end:
                check.not_run.append(name)
            else:
                _run_case(check, dataclasses.replace(by_name[name], dtype=dtype), device)
    return [check for check, _, _ in grid]


def _run_case(check: Check, case: testing.Case, device: torch.device) -> None:
    outcome = verdict(lambda: testing.judge(case.make(device=device), check.backend))
    if outcome.status == "held":
        check.held.append(case.name)
    else:
        (check.failed if outcome.status == "failed" else check.refused)[case.name] = outcome.what


def _print(report: dict[str, Any]) -> None:
    print("versions")
    for name, version in report["versions"].items():
        print(f"  {name:<9} {version or '-'}")
    print("\ndevices")
    for device in report["devices"]:
        gpu = f", compute capability {device['capability']}, {device['memory_gib']} GiB" if "capability" in device else ""
        print(f"  {device['device']:<9} {device['name']}{gpu}")
    print("\nbackends")
    for status in report["backends"]:
        print(f"  {status['name']:<9} {'available' if status['available'] else 'not available: ' + status['reason']}")
    unavailable = {status["name"] for status in report["backends"] if not status["available"]}
    print("\nbackend that auto takes")
    for device, by_dtype in report["auto"].items():
        names = []
        for dtype, auto in by_dtype.items():
            forward, backward = auto["backend"] or "none", auto["backward_backend"] or "none"
            names.append(f"{dtype} {forward}" + (f" (backward {backward})" if backward != forward else ""))
        print(f"  {device:<9} {', '.join(names)}")
        for dtype, auto in by_dtype.items():
            for backend, reasons in auto["refused"].items():
                if backend in unavailable:  # its reason stands above
                    continue
                print(f"  {'':<9} {backend} does not take {dtype}: {'; '.join(reasons)}")
    print("\nself-check against float64: output, LSE and gradients")
    for check in report["checks"]:
        _print_check(check)
    print("\nthe self-check held" if report["ok"] else "\nTHE SELF-CHECK DID NOT HOLD: do not trust the numbers of what failed")


def _print_check(check: dict[str, Any]) -> None:
    counts = {"held": check["held"], "FAILED": check["failed"], "refused": check["refused"], "not run": check["not_run"]}
    summary = ", ".join(f"{len(cases)} {what}" for what, cases in counts.items() if cases)
    print(f"  {check['backend']:<9} {check['device']:<7} {check['dtype']:<8} {summary}")
    for name, message in check["failed"].items():
        print(f"    FAILED  case {name}: {message}")
    reasons = list(dict.fromkeys(check["refused"].values()))
    for reason in reasons if check["held"] or check["failed"] else reasons[:1]:
        print(f"    refused {reason}")
