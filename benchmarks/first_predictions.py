#!/usr/bin/env python3
"""Time the first predictions of processes: as installed, and patched with no kernel kept and with all of them.

    PYTHONPATH=src python benchmarks/first_predictions.py --lengths 152 304

Each line is a fresh process, with 8 steps and random weights. Folders of kernels are empty but for "kept":

- "as installed": the client without evoattn.
- "beside": the client computes while workers compile, as under `evoattn run`. It predicts on until nothing is missing.
- "kept": the same in a new process, with the kernels of the process before. Also the modules that its first prediction imports.
- "waiting": every call waits for its kernels.

Times are those of whole predictions, in seconds. The patch comes before the model is built, as under `evoattn run`: compilers
are imported meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = ("as installed", "beside", "kept", "waiting")
_PREDICTIONS = {"as installed": 2, "kept": 2, "waiting": 1, "beside": 30}
"""Predictions of a process at most."""

_MARK = "evoattn: the first prediction begins"
_SHOWN = 12
"""Imports that are shown."""


def predicted(spec: dict[str, Any]) -> dict[str, Any]:
    """The predictions of this process."""
    import torch

    programs: Any = importlib.import_module("prediction_programs")
    program = programs.PROGRAMS[spec["program"]]
    device = torch.device(spec["device"])
    record: dict[str, Any] = {"seconds": [], "left": []}
    begun = time.perf_counter()
    patched = None
    if spec["case"] != "as installed":
        import evoattn

        patched = evoattn.patch(program.client, graphs=True, wait=spec["case"] == "waiting")
    record["patch_s"] = round(time.perf_counter() - begun, 2)
    model = program.build(device)
    inputs = program.inputs(spec["length"], device)
    if program.kernels is not None:
        program.kernels(model, False)
    record["build_s"] = round(time.perf_counter() - begun - record["patch_s"], 2)
    begun = time.perf_counter()
    print(_MARK, file=sys.stderr, flush=True)
    for _ in range(_PREDICTIONS[spec["case"]]):
        start = time.perf_counter()
        _predict(program, model, inputs, device, spec["steps"])
        record["seconds"].append(round(time.perf_counter() - start, 2))
        if len(record["seconds"]) == 1:
            print(_MARK, file=sys.stderr, flush=True)
        if patched is not None:
            left = record["left"]
            left.append(_compiling(patched))
            if spec["case"] == "beside" and len(left) > 2 and left[-1] == left[-3]:
                break
    record["all_s"] = round(time.perf_counter() - begun, 2)
    return record


def _compiling(patched: Any) -> int:
    """Calls that the client has computed because their kernels were being compiled."""
    from evoattn.clients.site import COMPILING

    return int(patched.passed_on.get(COMPILING, 0))


def _predict(program: Any, model: Any, inputs: Any, device: Any, steps: int) -> None:
    import torch

    programs: Any = importlib.import_module("prediction_programs")
    torch.manual_seed(1)
    low = torch.autocast(device.type, torch.bfloat16, enabled=program.autocast)
    with torch.no_grad(), low, programs.tf32(program.tf32):
        for x in program.predict(model, inputs, steps, programs.RECYCLES, 1).values():
            x.float().cpu()


@dataclasses.dataclass(frozen=True)
class Process:
    """A fresh process with its folders of kernels."""

    spec: dict[str, Any]
    folder: Path

    def run(self, seconds: float) -> tuple[dict[str, Any] | str, list[str]]:
        """Its record, or why there is none, and the imports of its first prediction."""
        environment = {
            **os.environ,
            "EVOATTN_CACHE_DIR": str(self.folder / "evoattn"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        profile = ["-X", "importtime"] if self.spec["case"] == "kept" else []
        command = [sys.executable, *profile, str(Path(__file__).resolve()), "--process", json.dumps(self.spec)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:.0f} s", []
        if done.returncode:
            return f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:300]}", []
        record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return record, slowest(done.stderr) if profile else []


def slowest(errors: str) -> list[str]:
    """The imports of the first prediction that took longest, from what `-X importtime` writes, without those inside others."""
    lines = errors.split(_MARK)[1].splitlines() if errors.count(_MARK) > 1 else []
    found = []
    for line in lines:
        if match := re.match(r"import time:\s*\d+ \|\s*(\d+) \| (\S+)$", line):  # no indent: nobody else imports it
            found.append((int(match[1]) / 1e6, match[2]))
    return [f"{name} {seconds:.2f} s" for seconds, name in sorted(found, reverse=True)[:_SHOWN] if seconds >= 0.01]


def line(spec: dict[str, Any], record: dict[str, Any] | str) -> str:
    """A case in a line."""
    words = f"{spec['program']} {spec['length']:4} {spec['case']:12}"
    if isinstance(record, str):
        return f"{words} {record}"
    times = [f"{x:.2f}" for x in record["seconds"]]
    shown = times if len(times) < 6 else [*times[:3], "...", *times[-2:]]
    text = f"{words} first {times[0]} s, all {' '.join(shown)}; patched in {record['patch_s']:.2f} s"
    text += f", model built in {record['build_s']:.1f} s"
    if record["left"]:
        text += f"; {record['left'][0]} calls of the first by the client meanwhile, {record['left'][-1]} in all"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="boltz2", help="as benchmarks/predictions.py names it (default: boltz2)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[152, 304], metavar="N", help="residues")
    parser.add_argument("--steps", type=int, default=8, help="of the denoiser (default: 8)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=235.0, metavar="S", help="for all processes (default: 235)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        print(json.dumps(predicted(json.loads(options.process))), flush=True)
        return
    end, records = time.monotonic() + options.seconds, []
    specs = [{"case": case, "length": length} for length in options.lengths for case in CASES if case in options.cases]
    specs.sort(key=lambda spec: spec["case"] == "waiting")  # the longest ones come last
    with tempfile.TemporaryDirectory(prefix="evoattn-first-predictions-") as folder:
        for spec in specs:
            spec |= {"program": options.program, "steps": options.steps, "device": options.device}
            name = "waiting" if spec["case"] == "waiting" else "beside"
            process = Process(spec, Path(folder) / f"{name}-{spec['length']}")
            record, imports = process.run(max(end - time.monotonic(), 1.0))
            print(line(spec, record), flush=True)
            if imports:
                print(f"    the first prediction imports {', '.join(imports)}", flush=True)
            records.append(spec | ({"failed": record} if isinstance(record, str) else record))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
