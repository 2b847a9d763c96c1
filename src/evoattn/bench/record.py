"""The record of a benchmark as data: versioned JSON, from which results are compared and drawn."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

from evoattn.compile import cache
from evoattn.workloads import Workload

SCHEMA = 1
"""Increased when a reader of the old form would misread the new one."""

PASSES = ("forward", "backward", "both")

_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one pass, one number a round, in order.

    Raises:
        ValueError: there is no round, or the median is not above 0.
    """

    samples_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < self.median_ms < math.inf:
            raise ValueError(f"median_ms is {self.median_ms!r}; expected a number above 0")

    @property
    def median_ms(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.samples_ms)

    @property
    def spread_ms(self) -> float | None:
        """The slowest round less the fastest; None of one round."""
        return max(self.samples_ms) - min(self.samples_ms) if len(self.samples_ms) > 1 else None

    @property
    def range_ms(self) -> tuple[float, float]:
        """The range, in ms, in which another run on the same machine is expected.

        With five rounds or more, it lies between their quartiles; with fewer, between the fastest and the slowest.
        """
        if len(self.samples_ms) < 5:
            return min(self.samples_ms), max(self.samples_ms)
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return low, high


@dataclasses.dataclass
class Result:
    """One contender on one problem.

    Args:
        name: "evoattn" for what `auto` takes, "evoattn/NAME" for a named backend, else the peer's name.
        status: "ok"; "partial" if a pass has no time; "absent", "refused", "failed", "wrong" or "left out" if none has.
        reason: why there is no time, in the words of the contender that refused or failed.
        backend: the backend of evoattn that ran.
        backward_backend: the backend of its backward, if that is another one.
        errors: relative errors against float64, as far as they were verified: of o, dq, dk, dv, dpair_bias; of a layer of o,
            the gradients of its inputs, such as dz, and dparameters, of all parameters as one vector.
        first_call_s: the first forward and backward, compilation included; Triton may find kernels in its cache on disk.
        peak_bytes: held at the most beyond the inputs, over forward and backward.
        host_us: host time of a call by pass; empty on the CPU.
        times: by pass: "forward", "backward", "both"; of a layer also those in a CUDA graph, "graph_forward", "graph_both".
    """

    name: str
    status: str = "ok"
    reason: str = ""
    backend: str = ""
    backward_backend: str = ""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    first_call_s: float | None = None
    peak_bytes: int | None = None
    host_us: dict[str, float] = dataclasses.field(default_factory=dict)
    times: dict[str, Timing] = dataclasses.field(default_factory=dict)

    @property
    def is_evoattn(self) -> bool:
        """True if evoattn is the contender."""
        return self.name.split("/")[0] == "evoattn"

    def backends(self, between: str) -> str:
        """The backend, or that of the forward and that of the backward with `between` between them; empty for a peer."""
        return between.join(filter(None, (self.backend, self.backward_backend)))


@dataclasses.dataclass
class Problem:
    """One workload in one dtype, and every contender's result.

    Args:
        workload: its sizes.
        dtype: of q, k, v and the biases. A layer has float32 tensors, and this is the dtype of autocast.
        bytes: of inputs and output, read or written once: the least a forward can move; None where it is not known.
        results: in the order in which they ran.
    """

    workload: Workload
    dtype: str
    bytes: int | None
    results: list[Result] = dataclasses.field(default_factory=list)

    def result(self, name: str) -> Result | None:
        """The result of a contender."""
        return next((result for result in self.results if result.name == name), None)


@dataclasses.dataclass
class Record:
    """One run of the benchmark.

    Args:
        machine: device, driver, versions, commit, date; see `machine.facts`.
        settings: the options, in types that JSON has.
        problems: in the order in which they were measured.
        finished: "complete" or "interrupted".
        ceilings: the most that the device reaches, if `benchmarks/ceilings.py` measured it.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    problems: list[Problem] = dataclasses.field(default_factory=list)
    finished: str = "complete"
    ceilings: dict[str, Any] = dataclasses.field(default_factory=dict)


def write(record: Record, path: Path) -> None:
    """Write one JSON object that `read` takes, completely, or leave the old file.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, **_plain(record)}, indent=1, allow_nan=False) + "\n"
    cache.write(path, text.encode())


def _plain(value: Any) -> Any:
    """The same in JSON's types: an infinite error (of NaN) becomes the text "inf", and empty fields are left out."""
    if isinstance(value, Timing):
        spread, samples = value.spread_ms, [_rounded(sample) for sample in value.samples_ms]
        value = {"median_ms": _rounded(value.median_ms), "spread_ms": spread and _rounded(spread), "samples_ms": samples}
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items() if x not in (None, "", {}, ()) or key == "where"}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return str(value) if value in (math.inf, -math.inf) else value


def _rounded(milliseconds: float) -> float:
    return float(f"{milliseconds:.{_DIGITS}g}")


def read(path: Path) -> Record:
    """Read what `write` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a record of a schema that this version reads; the message says why.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError('has no "schema"; expected a file that evoattn bench --json wrote')
    if data["schema"] != SCHEMA:
        raise ValueError(f"has schema {data['schema']!r}; this version of evoattn reads {SCHEMA}")
    try:
        parts = {name: dict(data.get(name, {})) for name in ("settings", "ceilings")}
        problems = [_problem(problem) for problem in data.get("problems", [])]
        return Record(dict(data["machine"]), problems=problems, finished=str(data["finished"]), **parts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"is damaged: {type(error).__name__}: {error}") from None


def _problem(data: dict[str, Any]) -> Problem:
    sizes = dict(data["workload"])
    sizes["length_axes"] = tuple(sizes.get("length_axes", ("lq", "lk")))
    return Problem(Workload(**sizes), str(data["dtype"]), data.get("bytes"), [_result(x) for x in data.get("results", [])])


def _result(data: dict[str, Any]) -> Result:
    numbers = {field: {key: float(x) for key, x in data.get(field, {}).items()} for field in ("errors", "host_us")}
    times = {key: Timing(_samples(time)) for key, time in data.get("times", {}).items()}
    return Result(**{**data, **numbers, "times": times})


def _samples(time: dict[str, Any]) -> tuple[float, ...]:
    """The rounds of a timing. Some records have the median alone."""
    return tuple(map(float, time.get("samples_ms") or (time["median_ms"],)))
