"""The user's own table: what `evoattn tune` found on this machine. One file a device, read once, when tiles are first chosen.

A file is good for the driver, the Triton and the evoattn that it was measured with. Any other, and one that is damaged, is
ignored with one warning: the built-in tables then choose, as they do where there is no file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evoattn._version import __version__
from evoattn.compile.cache import VARIABLE, folder, write
from evoattn.core import devices
from evoattn.core.config import Config
from evoattn.core.problem import Problem
from evoattn.core.sizes import power_of_two

_FORMAT = 1
_NOTHING_SET = Config()
_LONGEST_TOLD_APART = 2048
_ROWS_TOLD_APART = 4


def tuned(backend: str, direction: str, problem: Problem) -> Config | None:
    """Return the config that `evoattn tune` found for problems like this one, or None."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    on_cpu = problem.device == "cpu"
    table = _table(named, on_cpu, _device(on_cpu))
    return table.get(key(backend, direction, problem)) if table else None


def preferred(backend: str, direction: str, problem: Problem, config: Config) -> Config:
    """Return the user's config of a call, else the one tuned for problems like it, else an empty one."""
    return config if config != _NOTHING_SET else tuned(backend, direction, problem) or config


def is_tuned(backend: str, direction: str, problem: Problem, config: Config) -> bool:
    """Return whether `preferred` uses the tiles that were found on this machine."""
    return config == _NOTHING_SET and tuned(backend, direction, problem) is not None


def key(backend: str, direction: str, problem: Problem) -> str:
    """Problems that share their tiles: the same channels, dtypes and biases; lengths and rows of about the same size."""
    p = problem
    row = p.mask or p.mask_bias is not None
    parts = [
        backend,
        direction,
        str(p.dtype),
        f"d{p.d}",
        f"c{p.c}",
        f"q{min(power_of_two(p.lq), _LONGEST_TOLD_APART)}",
        f"k{min(power_of_two(p.lk), _LONGEST_TOLD_APART)}",
        f"rows{(max(p.b * p.n * p.h, 1).bit_length() + _ROWS_TOLD_APART - 1) // _ROWS_TOLD_APART}",
        "ragged" if p.lk % 16 else "even",
        "row" if row else "-",
        "-" if p.pair_bias is None else str(p.pair_bias),
    ]
    if direction == "backward":
        parts += ["dpair" if p.pair_bias is not None and p.needs[4] else "-", "fixed" if p.deterministic else "any"]
    return "/".join(parts).replace("torch.", "")


def path(on_cpu: bool) -> Path | None:
    """The file of this machine's device; None without a device, or where the user wants no file."""
    cache_folder, device = folder(), _device(on_cpu)
    if cache_folder is None or device is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder / f"tuned-{name}.json"


def machine(on_cpu: bool) -> dict[str, str | None]:
    """The machine and the versions for which a table holds."""
    return {
        "device": _device(on_cpu),
        "driver": None if on_cpu else devices.driver_version(),
        "triton": None if on_cpu else devices.installed_version("triton"),
        "evoattn": __version__,
    }


def _device(on_cpu: bool) -> str | None:
    """The name of the processor, or of the GPU that plans are made for; None if there is none."""
    if on_cpu:
        return f"cpu {devices.processor()}"
    card = devices.planned()
    if card is not None:
        return card.name
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@functools.cache
def _table(folder: str | None, on_cpu: bool, device: str | None) -> dict[str, Config]:
    """Configs by key; empty where there is no file or it is not this machine's. The cache goes by `folder` and `device` too."""
    return {name: Config(**entry["config"]) for name, entry in entries(on_cpu).items()}


def entries(on_cpu: bool) -> dict[str, dict[str, Any]]:
    """Return the file's entries by key; none, with one warning, if it is damaged or of another machine or version."""
    file = path(on_cpu)
    if file is None or not os.path.exists(file):  # Path.exists raises where a folder may not be entered
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}, expected {_FORMAT}")
        made_by = dict(found["machine"])
        table = {str(name): dict(entry) for name, entry in found["entries"].items()}
        for entry in table.values():
            if not Config(**entry["config"]).given():
                raise ValueError("an entry without a config")
    except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _warn(file, f"is damaged ({type(error).__name__}: {error})")
        return {}
    here = machine(on_cpu)
    differing = [f"{name} {made_by.get(name)}, this is {value}" for name, value in here.items() if made_by.get(name) != value]
    if differing:
        _warn(file, f"was made with {'; '.join(differing)}")
        return {}
    return table


def _warn(file: Path, why: str) -> None:
    warnings.warn(f"{file} {why}: ignored. `evoattn tune` makes a new one, `evoattn tune --clear` removes it.", stacklevel=2)


def save(found: dict[str, dict[str, Any]], on_cpu: bool) -> Path:
    """Add entries to the table file, all of them or none, and return its path. Calls that are planned afterwards use them.

    Each entry has a "config", and may have other fields for information.

    Raises:
        OSError: the file cannot be written.
        ValueError: EVOATTN_CACHE_DIR is empty, which means that there is no file.
    """
    file = path(on_cpu)
    if file is None:
        raise ValueError(f"{VARIABLE} is empty, which means no table; expected a folder, or the variable unset")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is damaged or foreign is replaced
        table = {**entries(on_cpu), **found}
    text = json.dumps({"format": _FORMAT, "machine": machine(on_cpu), "entries": table}, indent=1) + "\n"
    write(file, text.encode())
    forget()
    return file


def clear(on_cpu: bool) -> Path | None:
    """Remove the file; the path, or None where there was none."""
    file = path(on_cpu)
    if file is None or not os.path.exists(file):
        return None
    file.unlink(missing_ok=True)  # another process may have removed it meanwhile
    forget()
    return file


listeners: list[Callable[[], None]] = []
"""Called when other tiles may be chosen from now on: whoever keeps what was planned has to plan anew."""


def forget() -> None:
    """Read the file again at the next look."""
    _table.cache_clear()
    for listener in listeners:
        listener()


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """No table meanwhile, in every thread: the built-in tables choose."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ""
    forget()
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
        forget()
