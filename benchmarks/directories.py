#!/usr/bin/env python3
"""Time `boltz predict DIR` over many proteins, and show where the time of the whole command goes.

    PYTHONPATH=src:tools python benchmarks/directories.py --inputs 40 --lengths 100 400

Run it where all that `boltz predict` imports is installed, and biotite unless `--files` has the chemical components. Sequences
and weights are random. The model is Boltz-2 of the published depth, or with `--narrow` one for tests. Ways:

- "as installed": the command without evoattn.
- "bare": under `evoattn run`, with empty folders of kernels.
- "kept": the same again, with the kernels of "bare".

Stages lie beside one another and add up to the wall time. "busy" is the share of the time between the ends of the
first and the last structure in which the GPU computed, as NVML tells it. "predicting" is the share of the same time that
is inside predictions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import case_records
import torch

from evoattn.bench import machine
from evoattn.core.devices import installed_version

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # `clients` is there

WAYS = ("as installed", "bare", "kept")
STAGES = ("start", "imports", "inputs", "checkpoint", "set-up", "loader", "transfer", "prediction", "writing", "other", "end")
"""Parts of the wall time: until the program runs, its imports, reading of the inputs, reading of the checkpoint, until the
first batch is asked for, waiting for features, their way to the GPU, predictions, what writing takes on the main thread, what
else lies between the first batch and the last structure, and what follows."""

_CLOCK = Path(__file__).resolve().parent / "directory_clock.py"
_LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def write_inputs(folder: Path, lengths: list[int], rows: int, seed: int = 0) -> None:
    """Write a protein of each length, with an alignment of so many rows if there are more than one."""
    drawn = random.Random(seed)
    folder.mkdir(parents=True)
    for number, length in enumerate(lengths):
        sequence = "".join(drawn.choices(_LETTERS, k=length))
        alignment = "empty"
        if rows > 1:
            aligned = [
                "".join(x if drawn.random() < 0.6 else drawn.choice(_LETTERS) for x in sequence) for _ in range(rows - 1)
            ]
            path = folder.parent / f"{folder.name}-{number}.a3m"
            path.write_text("".join(f">{i}\n{row}\n" for i, row in enumerate([sequence, *aligned])))
            alignment = str(path.resolve())
        protein = f"{{id: A, sequence: {sequence}, msa: {alignment}}}"
        (folder / f"p{number:03}.yaml").write_text(f"version: 1\nsequences:\n  - protein: {protein}\n")


def spread(inputs: int, shortest: int, longest: int, drawn: random.Random | None = None) -> list[int]:
    """Lengths at equal distances, in an order that is always the same, or that is drawn."""
    lengths = [round(shortest + (longest - shortest) * i / max(inputs - 1, 1)) for i in range(inputs)]
    (drawn or random.Random(0)).shuffle(lengths)
    return lengths


def prepare(files: Path, narrow: bool, device: str) -> None:
    """Write the chemical components and the checkpoint, unless they are there."""
    if (files / "mols").exists() and (files / "boltz2_conf.ckpt").exists():
        return
    whole: Any = importlib.import_module("clients.whole.boltz")  # imports Boltz
    files.mkdir(parents=True, exist_ok=True)
    if not (files / "mols").exists():
        whole.write_components(files)
    if (files / "boltz2_conf.ckpt").exists():
        return
    if narrow:
        of, arguments = whole.MODELS["boltz2"]
        model = whole.fill(of(**arguments), whole.drawn_by(torch.Generator().manual_seed(0)))
    else:
        programs: Any = importlib.import_module("prediction_programs")
        model, arguments = programs.boltz2(torch.device(device)), programs.boltz2_arguments()
        read = ("training_args", "validation_args")  # by attributes
        arguments |= {name: whole.OmegaConf.create(dict(arguments[name])) for name in read}
    whole.write_checkpoint(files / "boltz2_conf.ckpt", model, arguments)


@contextlib.contextmanager
def watched(seconds: float = 0.1) -> Iterator[list[tuple[float, float]]]:
    """Times, and the percentage of the time before in which the first GPU computed. Empty without nvidia-ml-py or a GPU."""
    readings: list[tuple[float, float]] = []
    ended = threading.Event()
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # the error of a machine without a GPU is nvml's own
        yield readings
        return

    def read() -> None:
        while not ended.wait(seconds):
            readings.append((time.time(), float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield readings
    finally:
        ended.set()
        reader.join()


def parts(marks: list[list[Any]], begin: float, end: float, readings: list[tuple[float, float]]) -> dict[str, Any]:
    """The stages of a command, from the clock's record and the times at which the command began and ended."""
    seconds = dict.fromkeys(STAGES, 0.0)
    for stage, first, last, _ in marks:
        if stage in seconds:
            seconds[stage] += last - first
    confidence = sum(last - first for stage, first, last, _ in marks if stage == "confidence")
    predictions = [x for x in marks if x[0] == "prediction"]
    written = [x[2] for x in marks if x[0] == "writing"]
    loop = [x[1] for x in marks if x[0] == "loader"]
    found: dict[str, Any] = {"wall_s": end - begin, "structures": len(written), "confidence_s": confidence}
    found["predictions"] = [[x[3]["tokens"], round(x[2] - x[1], 3)] for x in predictions]
    if written and loop:
        seconds["start"] = next(x[1] for x in marks if x[0] == "imports") - begin
        seconds["set-up"] = loop[0] - next(x[2] for x in marks if x[0] == "checkpoint")
        seconds["end"] = end - max(written[-1], predictions[-1][2])
        first, last = written[0], written[-1]
        inside = sum(x[2] - x[1] for x in predictions if x[1] >= first)
        shares = [share for at, share in readings if first <= at <= last]
        found["predicting"] = inside / (last - first) if last > first else None
        found["busy"] = sum(shares) / len(shares) / 100 if shares else None
        found["first_structure_s"] = first - begin
        found["a_structure_s"] = (last - first) / max(len(written) - 1, 1)
    seconds["other"] = found["wall_s"] - sum(seconds.values())
    return found | {"stages_s": {name: round(x, 3) for name, x in seconds.items()}}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | str:
    """The exit status of a command, or what to say of one that was ended, with all its processes, because it took too long."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done after {seconds:.0f} s"


def run(way: str, folder: Path, files: Path, inputs: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the command in one of the ways."""
    name = way.replace(" ", "-")
    record, out = folder / f"{name}.jsonl", folder / f"{name}-out"
    record.unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)  # Boltz leaves out what it finds there
    command = [sys.executable, str(_CLOCK), str(record), "predict", str(inputs), "--cache", str(files), "--out_dir", str(out)]
    command += ["--accelerator", "gpu" if options.device == "cuda" else "cpu", "--sampling_steps", str(options.steps)]
    command += [
        "--recycling_steps",
        str(options.recycles),
        *(["--seed", str(options.seed)] if options.seed is not None else []),
    ]
    if not options.kernels:
        command.append("--no_kernels")
    if way != "as installed":
        command = [sys.executable, "-m", "evoattn", "run", *command]
    kept = {"EVOATTN_CACHE_DIR": str(folder / "kept-evoattn"), "TRITON_CACHE_DIR": str(folder / "kept-triton")}
    log = folder / f"{name}.log"
    with log.open("w") as file, watched() as readings:
        begin = time.time()
        process = subprocess.Popen(command, env={**os.environ, **kept}, stdout=file, stderr=file, start_new_session=True)
        status = _wait(process, options.seconds)
        end = time.time()
    marks = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    printed = log.read_text(errors="replace").splitlines()
    report = next((line for line in reversed(printed) if line.startswith("evoattn run:")), "")
    found: dict[str, Any] = {"way": way, "status": status, "files": len(list(out.rglob("*.cif"))), "report": report}
    if status:
        found["printed"] = printed[-5:]
    return found | parts(marks, begin, end, readings)


def lines(record: dict[str, Any]) -> Iterator[str]:
    """A way in a few lines."""
    yield f"{record['way']}: {record['wall_s']:.1f} s, {record['files']} structures, status {record['status']}"
    yield "    " + ", ".join(f"{name} {x:.1f}" for name, x in record["stages_s"].items())
    if "a_structure_s" in record:
        shares = ", ".join(f"{x} {record[x]:.0%}" for x in ("busy", "predicting") if record[x] is not None)
        yield (
            f"    first structure after {record['first_structure_s']:.1f} s, then one each {record['a_structure_s']:.2f} s "
            f"({shares}); confidence {record['confidence_s']:.1f} s of the predictions"
        )
    yield from (f"    {line}" for line in (record["report"], *record.get("printed", ())) if line)


SETTINGS = ("inputs", "lengths", "rows", "steps", "recycles", "kernels", "narrow")
"""Options that tell a case of a record from others of its way."""


def begun(path: Path | None, device: torch.device, commit: str | None) -> dict[str, Any]:
    """The record in a file, if there is one, or a fresh one."""
    facts = {key: value for key, value in machine.facts(device, commit).items() if value is not None}
    programs = {"boltz": installed_version("boltz")}
    return case_records.begun(path, {"schema": 1, "machine": facts, "programs": programs, "cases": []})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=40, metavar="N", help="proteins (default: 40)")
    parser.add_argument("--lengths", nargs=2, type=int, default=[100, 400], metavar=("MIN", "MAX"), help="of proteins")
    parser.add_argument("--rows", type=int, default=1, help="of each alignment (default: 1, the protein alone)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--installed-inputs", type=int, metavar="N", help='proteins "as installed", where all take too long')
    parser.add_argument("--steps", type=int, default=200, help="of the denoiser (default: 200)")
    parser.add_argument("--recycles", type=int, default=3, help="of the trunk (default: 3)")
    parser.add_argument("--seed", type=int, help="of Boltz (default: none, as Boltz')")
    parser.add_argument("--kernels", action="store_true", help="let Boltz use cuEquivariance, which must be installed")
    parser.add_argument("--narrow", action="store_true", help="a narrow model")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="keep components and checkpoint here")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep kernels, logs and structures here")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="for one command (default: 3600)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="add to this record")
    parser.add_argument("--commit", metavar="HASH", help="the commit that the record names (default: that of the checkout)")
    options = parser.parse_args()
    lengths = spread(options.inputs, *options.lengths)
    record = begun(options.json, torch.device(options.device), options.commit)
    with tempfile.TemporaryDirectory(prefix="evoattn-directories-") as temporary:
        folder = options.out or Path(temporary) / "out"
        folder.mkdir(parents=True, exist_ok=True)
        files = options.files or folder / "files"
        prepare(files, options.narrow, options.device)
        for way in (x for x in WAYS if x in options.ways):
            few = way == "as installed" and options.installed_inputs
            inputs = folder / ("few" if few else "inputs")
            if not inputs.exists():
                write_inputs(inputs, lengths[:few] if few else lengths, options.rows)
            settings = {name: getattr(options, name) for name in SETTINGS}
            case = {"way": way, **settings, "inputs": few or options.inputs} | run(way, folder, files, inputs, options)
            print(*lines(case), sep="\n", flush=True)
            case_records.add(case, record, ("way", *SETTINGS), options.json)
    if any(case["status"] for case in record["cases"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
