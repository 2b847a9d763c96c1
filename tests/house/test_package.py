"""What `python -m build` makes: files that an index takes, and a wheel that works where it alone is installed."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.pages import BLOCK, ROOT

MISSING = [name for name in ("build", "hatchling", "twine") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install '.[release]'"),
]

CHECKOUT = (
    *("src", "tests", "examples", "docs", "notes", "benchmarks", "tools", "conda"),
    *("dev.py", "Makefile", "LICENSE", "CITATION.cff", "pyproject.toml"),
)
"""What the distributions are made of, besides the pages at the top."""


def run(*command: object, folder: Path) -> str:
    """What a command prints."""
    environment = dict(os.environ)
    if not str(command[0]).startswith(sys.prefix):  # the empty environment sees no checkout
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both distributions; the wheel is made from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    checkout.mkdir()
    for path in (*map(ROOT.joinpath, CHECKOUT), *ROOT.glob("*.md")):
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, checkout / path.name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", checkout, folder=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel alone; torch and the like are those of this environment."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=os.name != "nt")
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, folder=folder)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(programs / "python", "-c", where, folder=folder).strip())
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def test_an_index_would_take_both(built: Path) -> None:
    assert sorted(path.suffix for path in built.iterdir()) == [".gz", ".whl"]
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), folder=built)
    assert said.count("PASSED") == 2, said


def test_the_wheel_has_the_package_alone(built: Path) -> None:
    """Each file of `src`, and besides them the records that an installer reads."""
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("evoattn-")}
    files = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "evoattn").rglob("*") if path.is_file()}
    assert names == {file.as_posix() for file in files if "__pycache__" not in file.parts}
    assert {"evoattn/py.typed", "evoattn/clients/sources.json", "evoattn/clients/startup/sitecustomize.py"} <= names


def test_the_sdist_has_what_the_tests_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {str(path.relative_to(ROOT)) for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert {"dev.py", "pyproject.toml", "README.md", "tools/constraints.txt", *files} <= names
    tops = {name.partition("/")[0] for name in names} - {"", "PKG-INFO", ".gitignore"}  # hatchling adds the latter two
    assert tops - {path.name for path in ROOT.glob("*.md")} == set(CHECKOUT)


def test_installed_doctor_lists_the_tiled_backend(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "evoattn", "doctor", folder=tmp_path)
    assert "tiled" in said


def test_the_tutorial(installed: Path, tmp_path: Path) -> None:
    """Its first block, with the package that was installed."""
    block = BLOCK.search((ROOT / "docs" / "tutorial.md").read_text())
    assert block is not None
    code = f"import evoattn\nprint(evoattn.__file__)\n{block['code']}"
    where, *printed = run(installed / "python", "-c", code, folder=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed.parent)
    if block["printed"] is not None:
        assert printed == block["printed"].splitlines()
