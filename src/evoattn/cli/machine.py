"""What this machine is and has: names for titles, devices, free memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from evoattn.cli.terminal import RefusedError

__all__ = ["devices", "free_bytes", "name", "pick", "synchronize"]


def devices() -> list[torch.device]:
    """The CPU, then every GPU that torch can use (AMD's too, which torch also calls cuda)."""
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def pick(wish: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        RefusedError: there is no GPU that torch can use.
    """
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cuda" and not torch.cuda.is_available():
        raise RefusedError("--device cuda: torch finds no GPU here; expected one, or --device cpu (evoattn doctor tells more)")
    return torch.device(wish)


def name(device: torch.device) -> str:
    """The name of a processor, such as a title wants it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def free_bytes(device: torch.device) -> int:
    """Memory that a run may take: free on the GPU; on the CPU available, and within the control group where there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [room for room in (_linux_available(), _control_group_room()) if room is not None]
    if found:
        return min(found)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def _linux_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return None


def _control_group_room() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
