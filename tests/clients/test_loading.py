"""Imports of what calls on a GPU need, in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed: pip install '.[hopper]'")

LOADING = """
import sys, evoattn.clients.loading as loading
loading.driver_version = lambda: {driver}
thread = loading.load_ahead()
if thread is not None:
    thread.join()
    from evoattn.kit.compiling import digest_of_triton
    assert digest_of_triton().result() is __import__("triton").runtime.cache.triton_key()
assert loading.load_ahead() is thread
print(all(name in sys.modules for name in loading.MODULES), "triton" in sys.modules, "cutlass" in sys.modules)
"""


@pytest.mark.parametrize(
    ("kept", "driver", "imported"),
    [
        (True, "'570.1'", "True True True"),
        pytest.param(False, "'570.1'", "True True False", marks=pytest.mark.slow),
        (True, "None", "False False False"),
    ],
)
def test_compilers_are_imported_on_a_machine_with_a_gpu(kept: bool, driver: str, imported: str, tmp_path: pathlib.Path) -> None:
    """CuTe DSL where some of its kernels are kept."""
    if kept:
        (tmp_path / "hopper").mkdir()
        (tmp_path / "hopper" / "kernel.o").touch()
    environment = {**os.environ, "EVOATTN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LOADING.format(driver=driver)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == imported, done.stderr
