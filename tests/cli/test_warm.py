"""`evoattn warm`: what it compiles, tells and keeps, also when something fails or it is interrupted."""

import errno
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("triton.runtime._async_compile", reason="no Triton, or one that compiles no kernel ahead")

from evoattn import cli
from evoattn.cli import warm
from evoattn.cli.warm import cards
from evoattn.cli.warm.families import LENGTHS
from evoattn.core.devices import Card

SMALL = ("--arch", "sm_80", "--model", "esmfold", "--lengths", "64", "--dtypes", "bfloat16")


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache folder, of Triton too."""
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(tmp_path / "evoattn"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def counts(printed: str, backend: str) -> tuple[int, int, int]:
    """Kernels compiled, there and failed, of the table."""
    row = re.search(rf"^{backend} +(\d+) +(\d+) +(\d+) ", printed, re.MULTILINE)
    assert row, printed
    return int(row[1]), int(row[2]), int(row[3])


def test_kernels_are_compiled_once(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warm", *SMALL, "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    compiled, there, failed = counts(printed, "triton")
    assert compiled > 3 and there == failed == 0
    assert len(list(cache.glob("triton/*/*.cubin"))) == compiled
    assert printed.splitlines()[1].endswith(str(cache / "triton"))
    assert cli.main(["warm", *SMALL, "--jobs", "1"]) == 0
    assert counts(capsys.readouterr().out, "triton") == (0, compiled, 0)


@pytest.mark.slow
def test_training_needs_more_than_inference(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warm", *SMALL]) == 0
    inference = counts(capsys.readouterr().out, "triton")[0]
    assert cli.main(["warm", *SMALL, "--training"]) == 0
    compiled, there, failed = counts(capsys.readouterr().out, "triton")
    assert compiled > 3 and there == inference and failed == 0


@pytest.mark.slow
def test_what_fails_is_told_and_the_rest_is_kept(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that can no longer be made once it was checked: that stops root too."""
    monkeypatch.setattr(warm, "check_folders", lambda cards: None)
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")
    (cache / "file").write_text("")
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(cache / "file" / "evoattn"))
    assert cli.main(["warm", *SMALL, "--arch", "sm_90a"]) == 1
    printed = capsys.readouterr().out
    compiled, _, failed = counts(printed, "hopper")
    assert compiled == 0 and failed > 1
    assert len(re.findall(r"^FAILED  hopper Forward-\S+ \(triangle, 64, .*\): NotADirectoryError", printed, re.M)) == 1
    assert counts(printed, "triton")[0] > 0 and counts(printed, "triton")[2] == 0


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "evoattn", "warm", *SMALL, "--training", "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(list(cache.glob("triton/*/__grp__*"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "evoattn warm: interrupted" in told
    compiled = counts(printed, "triton")[0]
    assert compiled >= 1
    assert cli.main(["warm", *SMALL, "--training"]) == 0
    assert counts(capsys.readouterr().out, "triton")[1] >= compiled


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--arch", "sm_70"], "--arch: unknown architecture 'sm_70'; expected one of sm_80"),
        (["--arch", "sm_80", "--model", "alphafold"], "argument --model: invalid choice: 'alphafold'"),
        (["--arch", "sm_80", "--dtypes", "float64"], "argument --dtypes: invalid choice: 'float64'"),
        (["--arch", "sm_80", "--lengths", "0"], "expected a whole number from 1 up"),
        ([], "there is no NVIDIA GPU here: name the one that kernels are for, such as --arch sm_90a"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cards.torch.cuda, "device_count", lambda: 0)
    assert cli.main(["warm", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_no_folder_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EVOATTN_CACHE_DIR", "")
    assert cli.main(["warm", *SMALL]) == 2
    assert "EVOATTN_CACHE_DIR is empty, which means that nothing is kept" in capsys.readouterr().err


def test_no_home_is_told_apart_from_an_empty_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a user whom the system does not know, in a container."""
    monkeypatch.delenv("EVOATTN_CACHE_DIR")
    monkeypatch.setattr("evoattn.compile.cache.folder", lambda: None)
    assert cli.main(["warm", *SMALL]) == 2
    assert "no home folder is known: name a folder in EVOATTN_CACHE_DIR" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_first(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setattr(warm, "warm", lambda wish: pytest.fail("it compiles"))
    monkeypatch.setattr(warm, "why_not", lambda backend: None)
    for variable, arch in (("TRITON_CACHE_DIR", "sm_80"), ("EVOATTN_CACHE_DIR", "sm_90a")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(cache / "file" / "folder"))
            assert cli.main(["warm", *SMALL, "--arch", arch]) == 2
        assert f"cannot be written: Not a directory; {variable} names another folder" in capsys.readouterr().err


def test_a_folder_that_no_kernel_goes_to_is_not_looked_at(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for other cards than Hopper's lie in Triton's folder alone."""
    (cache / "file").write_text("")
    monkeypatch.setattr(warm, "warm", lambda wish: 0)
    monkeypatch.setattr(warm, "why_not", lambda backend: None)
    monkeypatch.setenv("EVOATTN_CACHE_DIR", str(cache / "file" / "folder"))
    assert cli.main(["warm", *SMALL]) == 0
    assert (cache / "triton").is_dir()


def test_a_folder_that_is_there_and_takes_no_file_is_refused(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of another user's, or on a disk that is mounted for reading."""

    def refuse(place: pathlib.Path) -> None:
        tried.append(place)
        raise PermissionError(errno.EACCES, "Permission denied")

    tried: list[pathlib.Path] = []
    (cache / "triton").mkdir()
    monkeypatch.setattr(warm, "warm", lambda wish: pytest.fail("it compiles"))
    monkeypatch.setattr(warm, "why_not", lambda backend: None)
    monkeypatch.setattr(warm, "try_to_write", refuse)
    assert cli.main(["warm", *SMALL]) == 2
    assert tried == [cache / "triton"]
    assert "cannot be written: Permission denied; TRITON_CACHE_DIR names another folder" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME"])
def test_tritons_folder_is_where_triton_writes(variable: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.knobs", reason="a Triton without knobs")
    for each in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path if variable == "TRITON_CACHE_DIR" else tmp_path / ".triton" / "cache"
    if variable == "HOME":  # Triton reads it when it is imported
        command = [sys.executable, "-c", "from evoattn.cli import warm; print(warm.triton_folder())"]
        path = pathlib.Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    else:
        path = warm.triton_folder()
    assert path == folder


def test_a_missing_backend_is_told(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evoattn.backends import hopper, triton

    monkeypatch.setattr(hopper, "availability", lambda: "CuTe DSL is not installed: pip install '.[hopper]'")
    warm.tell_missing(cards.cards_of("sm_90a")[0])
    assert "evoattn warm: without hopper: CuTe DSL is not installed" in capsys.readouterr().err
    warm.tell_missing(cards.cards_of("sm_80")[0])
    assert capsys.readouterr().err == ""
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None if "async" in name else name)  # as with Triton 3.3
        with pytest.raises(warm.RefusedError, match=r"compiles no kernel ahead: pip install 'triton>=3\.6'"):
            warm.tell_missing(cards.cards_of("sm_80")[0])
    monkeypatch.setattr(triton, "availability", lambda: "Triton is not installed: pip install triton")
    with pytest.raises(warm.RefusedError, match="Triton is not installed"):
        warm.tell_missing(cards.cards_of("sm_80")[0])


def test_further_cards_of_an_architecture_have_fewer_calls() -> None:
    """Not if lengths are named, and not if they are of another architecture, as in a machine with two kinds."""
    a100, h200, h100, *_ = (*cards.cards_of("sm_80")[:1], *cards.cards_of("sm_90"))

    def calls(lengths: tuple[int, ...], *of: Card) -> dict[Card, int]:
        wish = warm.Request(("esmfold",), lengths, (torch.bfloat16,), False, of, 1)
        counted = dict.fromkeys(of, 0)
        for chunk, card in warm.chunks(wish):
            counted[card] += len(chunk)
        return counted

    assert calls((64, 70), a100, h200, h100) == dict.fromkeys((a100, h200, h100), calls((64, 70), a100)[a100])
    every = calls(LENGTHS, a100, h200, h100)
    assert every[a100] == every[h200] > 4 * every[h100] > 0
