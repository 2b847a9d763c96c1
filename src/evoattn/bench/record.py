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
    """Milliseconds of one pass.

    Args:
        median_ms: of the rounds.
        spread_ms: the slowest round less the fastest, or None.
        samples_ms: every round, in order; empty in records that did not keep them.

    Raises:
        ValueError: the median is not above 0.
    """

    median_ms: float
    spread_ms: float | None = None
    samples_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.median_ms < math.inf:
            raise ValueError(f"median_ms is {self.median_ms!r}; expected a number above 0")

    @classmethod
    def of(cls, samples_ms: list[float]) -> Timing:
        """The timing of these rounds, at least one."""
        samples = tuple(float(f"{sample:.{_DIGITS}g}") for sample in samples_ms)
        return cls(statistics.median(samples), float(f"{max(samples) - min(samples):.{_DIGITS}g}"), samples)

    @property
    def range_ms(self) -> tuple[float, float]:
        """The range, in ms, in which another run on the same machine is expected.

        With five rounds or more, it lies between their quartiles; with fewer, between the fastest and the slowest. A record
        without samples gives the median minus and plus the spread, which covers all rounds.
        """
        if len(self.samples_ms) >= 5:
            low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
            return low, high
        if self.samples_ms:
            return min(self.samples_ms), max(self.samples_ms)
        spread = self.spread_ms or 0.0
        return self.median_ms - spread, self.median_ms + spread


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

    def mark_untimed(self, status: str, reason: str) -> None:
        """Note why some or all times are missing."""
        self.status = status
        self.reason = f"{self.reason}; {reason}" if self.reason else reason

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


def _plain(value: Any) -> Any:
    """The same in JSON's types: an infinite error (of NaN) becomes the text "inf", and empty fields are left out."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items() if x not in (None, "", {}, ()) or key == "where"}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value


def write(record: Record, path: Path) -> None:
    """Write one JSON object that `read` takes, completely, or leave the old file.

    Raises:
        OSError: it cannot be written.
    """
    data = {"schema": SCHEMA, **_plain(dataclasses.asdict(record))}
    write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file completely, or leave the old one.

    Raises:
        OSError: it cannot be written.
    """
    cache.write(path, text.encode())


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
        return Record(
            machine=dict(data["machine"]),
            settings=dict(data.get("settings", {})),
            problems=[_problem(problem) for problem in data.get("problems", [])],
            finished=str(data["finished"]),
            ceilings=dict(data.get("ceilings", {})),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"is damaged: {type(error).__name__}: {error}") from None


def _problem(data: dict[str, Any]) -> Problem:
    sizes = dict(data["workload"])
    sizes["length_axes"] = tuple(sizes.get("length_axes", ("lq", "lk")))
    results = [_result(result) for result in data.get("results", [])]
    return Problem(Workload(**sizes), str(data["dtype"]), data.get("bytes"), results)


def _result(data: dict[str, Any]) -> Result:
    fields = dict(data)
    for name in ("errors", "host_us"):
        fields[name] = {key: float(value) for key, value in fields.get(name, {}).items()}
    fields["times"] = {name: _timing(time) for name, time in fields.get("times", {}).items()}
    return Result(**fields)


def _timing(data: dict[str, Any]) -> Timing:
    spread = data.get("spread_ms")
    samples = tuple(map(float, data.get("samples_ms", ())))
    return Timing(float(data["median_ms"]), None if spread is None else float(spread), samples)
