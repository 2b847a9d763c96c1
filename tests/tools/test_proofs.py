"""The record that `dev.py proofs` compares: blind to names and to the order of arguments, and to nothing else."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from evoattn.cli.warm.cards import ARCHITECTURES  # noqa: E402
from proofs import compare, recording, store, triton_code  # noqa: E402

RECORDER = recording.Recorder()
"""The one of this process: what Triton keeps in memory tells it of launches."""


@triton.jit
def scaled_kernel(x, y, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def renamed_kernel(unused, n, to, of, by, SIZE: tl.constexpr):
    # A comment, and other names in another order.
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(to + place, tl.load(of + place, mask=place < n) * by, mask=place < n)


@triton.jit
def squared_kernel(x, y, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor * factor, mask=at < n)


def recorded(kernel: Any, *arguments: Any, **roles: torch.Tensor) -> tuple[str, triton_code.Source]:
    """The line of a launch without names, and the kernel."""
    recorder = RECORDER
    recorder.triton.clear()
    with recording.on_card(ARCHITECTURES["sm_90"][0], recorder):
        recorder.start(**roles)
        kernel[(3,)](*arguments)
    (source,) = recorder.triton.values()
    return recorder.lines[-1].partition("  # ")[0], source


def test_names_and_orders_do_not_count_and_code_does() -> None:
    x, y = torch.empty(300, device="meta"), torch.empty(300, device="meta")
    line, source = recorded(scaled_kernel, x, y, 2.0, 300, 128, x=x, y=y)
    assert line == f"triton {{{source.key}}} 3x1x1 | 300 y x 2.0"
    assert recorded(renamed_kernel, 7, 300, y, x, 2.0, 128, x=x, y=y)[0] == line
    assert recorded(scaled_kernel, x, y, 2.0, 300, 64, x=x, y=y)[1].key != source.key
    squared = recorded(squared_kernel, x, y, 2.0, 300, 128, x=x, y=y)[1]
    assert squared.key != source.key and triton_code.code_of(squared) != triton_code.code_of(source)


def test_memory_is_told_by_its_role() -> None:
    x = torch.empty(600, device="meta")
    line, _ = recorded(scaled_kernel, x[300:], torch.empty(300, device="meta"), 2.0, 300, 128, x=x)
    assert line.endswith("| 300 m1[1200] x+1200 2.0")


def test_compare_tells_equal_and_changed_kernels(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, name, programs in ((before, "old_kernel", 3), (after, "new_kernel", 3)):
        folder.mkdir()
        (folder / "launches.txt").write_text(f"== a call\ntriton {{{'0' * 16}}} {programs}x1x1 | q  # {name}\n")
    assert compare.compare(before, after, 1) == 0 and "no difference" in capsys.readouterr().out
    (after / "launches.txt").write_text(f"== a call\ntriton {{{'0' * 16}}} 4x1x1 | q  # new_kernel\n== another call\n")
    assert compare.compare(before, after, 1) == 1
    told = capsys.readouterr().out
    assert "- triton" in told and "# old_kernel" in told and "+ another call" in told


def test_code_is_compiled_once(tmp_path: pathlib.Path) -> None:
    x = torch.empty(300, device="meta")
    _, source = recorded(scaled_kernel, x, x, 2.0, 300, 128, x=x)
    kept = store.Store(tmp_path)
    assert kept.code_of(source.key) == source.key  # nobody kept it
    kept.keep(source)
    assert kept.code_of(source.key) == triton_code.code_of(source) == kept.code_of(source.key)


def test_the_command_refuses_what_it_does_not_know() -> None:
    done = subprocess.run([sys.executable, TOOLS / "proofs", "compare", "one"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "compare BEFORE AFTER" in done.stderr
