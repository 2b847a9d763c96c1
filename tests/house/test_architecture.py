"""Imports point one way, `import evoattn` needs torch alone, and starts nothing."""

import ast
import importlib
import inspect
import pathlib
import subprocess
import sys

import pytest

import evoattn
from evoattn.backends import BACKENDS, Backend

PACKAGE = pathlib.Path(evoattn.__file__).parent

# Each room and the rooms that it may import. What is not listed may not be imported.
ARROWS: dict[str, set[str]] = {
    "_version": set(),
    "compile": set(),
    "workloads": set(),
    "core": {"compile", "_version"},
    "kit": {"compile", "core"},
    "backends": {"compile", "core", "kit"},
    "dispatch": {"backends", "core"},
    "api": {"backends", "core", "dispatch"},
    "empty_rows": {"core", "dispatch", "kit"},
    "pair": {"core", "dispatch", "kit"},
    "compat": {"api", "core", "dispatch", "empty_rows", "pair"},
    "nn": {"api", "core", "dispatch", "empty_rows", "kit", "pair"},
    "clients": {"compat", "compile", "core", "dispatch", "nn"},
    "testing": {"api", "core", "workloads"},
    "__init__": {"_version", "api", "clients", "core"},
    "bench": {"__init__", "_version", "compile", "core", "testing", "workloads"},
    "cli": {
        "__init__",
        "_version",
        "backends",
        "bench",
        "clients",
        "compile",
        "core",
        "dispatch",
        "kit",
        "testing",
        "workloads",
    },
    "__main__": {"cli"},
}

FACES: dict[str, set[str]] = {"nn/__init__.py": {"clients"}}
"""Files with names of rooms above their own, which they import when somebody asks for one."""


def room(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: pathlib.Path) -> set[str]:
    """Full names of the evoattn modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; the rooms are named in full"
            module = node.module or ""
            packages = ("evoattn", "evoattn.backends")
            names |= {f"{module}.{alias.name}" for alias in node.names} if module in packages else {module}
    return {name for name in names if name.split(".")[0] == "evoattn"}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(path: pathlib.Path) -> None:
    importer = room(path)
    assert importer in ARROWS, f"the room {importer} is not in the picture: say what it may import"
    lower = ARROWS[importer] | FACES.get(str(path.relative_to(PACKAGE)), set())
    for name in imported(path):
        target = name.split(".")[1] if "." in name else "__init__"
        public = target not in ARROWS  # `from evoattn import evoformer_attention` is the package's face
        target_room = "__init__" if public else target
        assert target_room == importer or target_room in lower, f"{importer} may not import {name}"


MEASURED = ("cli/warm/cards.py", "evoattn.backends.hopper")
"""The file that measures this machine's card for later processes, and the backend that has such a measurement."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_but_dispatch_imports_into_a_backend(path: pathlib.Path) -> None:
    """Other rooms see the protocol, `evoattn.backends`. What they share with a backend is in `kit`."""
    inside = {".".join(name.split(".")[:3]) for name in imported(path) if set(name.split(".")[2:3]) & {*BACKENDS}}
    if str(path.relative_to(PACKAGE)) == MEASURED[0]:
        inside.remove(MEASURED[1])
    assert room(path) in ("backends", "dispatch") or not inside, f"{path.name} imports {inside}"


OF_BACKENDS = [path for path in FILES if room(path) == "backends" and path != PACKAGE / "backends" / "__init__.py"]


@pytest.mark.parametrize("path", OF_BACKENDS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_backend_imports_another(path: pathlib.Path) -> None:
    own = path.relative_to(PACKAGE).parts[1].removesuffix(".py")
    for name in imported(path):
        pieces = name.split(".")
        assert pieces[1:2] != ["backends"] or not {*pieces[2:3]} & ({*BACKENDS} - {own}), f"{path.name} imports {name}"


NAMES = [*Backend.__annotations__, *(name for name in vars(Backend) if not name.startswith("_"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_has_the_names_of_its_protocol(backend: str) -> None:
    """And its functions take the same arguments, since they are called by name."""
    module = importlib.import_module(f"evoattn.backends.{backend}")
    for name in NAMES:
        expected, actual = getattr(Backend, name, None), getattr(module, name)
        if expected is not None:
            assert [*inspect.signature(actual).parameters] == [*inspect.signature(expected).parameters][1:], name


def fresh(code: str) -> str:
    """What a fresh Python process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(name + ' is blocked', name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_import_and_use_without_any_extra() -> None:
    blocked = BLOCKER.format(blocked={"triton", "rich", "matplotlib", "numpy", "hypothesis", "pytest"})
    code = "import torch, evoattn; q = torch.randn(1, 2, 5, 2, 8); print(evoattn.evoformer_attention(q, q, q).shape[2])"
    assert fresh(blocked + code) == "5"


def test_import_pulls_in_torch_alone() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import evoattn;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    added = set(ast.literal_eval(fresh(code)))
    assert added <= {"evoattn"} | set(sys.stdlib_module_names), added


def test_layers_import_nothing_of_clients_models() -> None:
    code = (
        "import sys, evoattn; before = set(sys.modules); import evoattn.nn;"
        "print(sorted(m for m in set(sys.modules) - before if m.startswith('evoattn.clients')));"
        "evoattn.nn.replace; print('evoattn.clients.replace' in sys.modules)"
    )
    assert fresh(code).split("\n") == ["[]", "True"]


def test_what_patches_clients_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import sys, evoattn; print(any(m.startswith('evoattn.clients') for m in sys.modules));"
        "from evoattn import Patch; print('patch' in dir(evoattn), Patch.__module__);"
        "print(hasattr(evoattn, 'unknown'))"
    )
    assert fresh(code).split("\n") == ["False", "True evoattn.clients.patching", "False"]


def test_import_starts_no_cuda_and_writes_nothing(tmp_path: pathlib.Path) -> None:
    code = (
        "import os, builtins, torch\n"
        "real = builtins.open\n"
        "def guarded(file, mode='r', *a, **k):\n"
        "    assert not set(mode) & set('wax+'), file\n"
        "    return real(file, mode, *a, **k)\n"
        "builtins.open = guarded\n"
        "import evoattn\n"
        "print(torch.cuda.is_initialized(), sorted(os.listdir('.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.strip() == "False []", done.stderr


def test_the_public_names() -> None:
    assert sorted(evoattn.__all__) == [
        "BackendStatus",
        "Config",
        "Explanation",
        "Patch",
        "__version__",
        "backends",
        "evoformer_attention",
        "explain",
        "patch",
    ]
    assert (PACKAGE / "py.typed").exists()
