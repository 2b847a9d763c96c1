"""Facts about this machine: devices, names, versions, free memory."""

from __future__ import annotations

import contextlib
import datetime
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from evoattn._version import __version__
from evoattn.core.devices import driver_version, installed_version, processor

_PEERS = (
    *("cuequivariance-ops-torch-cu13", "cuequivariance-ops-torch-cu12", "trifast", "turbopairformer", "openfold3"),
    *("deepspeed", "nvidia-cudnn-frontend"),
)


def devices() -> list[torch.device]:
    """The CPU, then every GPU that torch can use (AMD's too, which torch also calls cuda)."""
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def name(device: torch.device) -> str:
    """The name of a processor, for titles."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'' if threads == 1 else 's'}"


def free_bytes(device: torch.device) -> int:
    """Bytes that a run may take: the free memory of a GPU, or the CPU's available memory within its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = []
    with contextlib.suppress(OSError, ValueError):  # not Linux
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no control group, or its limit is "max"
        limits.append(int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return min(limits, default=4 << 30)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """In this block torch computes with so many threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def versions() -> dict[str, str | None]:
    """The platform, and the versions that results depend on."""
    return {
        "evoattn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "cute_dsl": installed_version("nvidia-cutlass-dsl"),
    }


def _commit() -> str | None:
    """The commit of the source tree that this package runs from; "-dirty" says that files differ from it."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file():
        return None
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def facts(device: torch.device, commit: str | None = None) -> dict[str, str | None]:
    """Device, driver, versions, commit and date, for a record. An unknown fact is None.

    Args:
        device: where the benchmark runs.
        commit: recorded if git cannot tell.
    """
    on_gpu = device.type == "cuda"
    return {
        "device": name(device),
        "kind": "gpu" if on_gpu else "cpu",
        "driver": driver_version() if on_gpu else None,
        **versions(),
        **{package: version for package in _PEERS if (version := installed_version(package))},
        "commit": commit or _commit(),
        "date": datetime.date.today().isoformat(),
    }
