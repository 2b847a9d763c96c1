"""A program with a toy client, run by `evoattn run` in a process of its own."""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import termios
import textwrap

from evoattn.cli import main, run
from tests.helpers.processes import forked

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

LAYERS = """
import torch


def _attention(query, key, value, biases):
    scores = query @ key.transpose(-1, -2)
    for bias in biases:
        scores = scores + bias
    return torch.softmax(scores, -1) @ value
"""

TOY = """
from evoattn.clients.calls import additive
from evoattn.clients.site import Client, Site


def times(original, count):
    def forward(x):
        count.count_passed_on("too long")
        return original(x)

    return forward


SITES = (Site("toy_client.layers", "_attention", additive), Site("toy_client.model", "long", times))
CLIENTS = {"toy": Client("toy", "toy", SITES)}
"""

MODEL = """
from toy_client.layers import _attention as attend


def long(x):
    return attend(x, x, x, [])
"""

# What makes the toy known in a program, before it is imported. Its small calls on a CPU are not left to it.
PREPARE = """
import evoattn.clients.calls, evoattn.clients.patching, evoattn.clients.releases, torch
evoattn.clients.calls.few_on_cpu = lambda _: 0
from evoattn.clients.registry import client, sources
evoattn.clients.__path__.append({folder!r})
evoattn.clients.patching.NAMES = ("toy",)
of = client("toy")
sources()["toy"] = {{"1.0": {{str(site): {known} for site in (*of.sites, *of.layers, *of.steps)}}}}
x = torch.randn(1, 2, 5, 8)
"""
KNOWN = "max(evoattn.clients.releases.digests_in_file(site))"


class Program:
    """A script beside the toy client, run by `python -m evoattn run`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        (folder / "toy_client").mkdir()
        (folder / "toy-1.0.dist-info").mkdir()
        (folder / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        for name, text in (("__init__.py", ""), ("layers.py", LAYERS), ("model.py", MODEL)):
            (folder / "toy_client" / name).write_text(text)
        (folder / "toy.py").write_text(TOY)

    def write(self, text: str, known: str = KNOWN) -> None:
        prepare = PREPARE.format(folder=str(self.folder), known=known)
        (self.folder / "program.py").write_text(prepare + textwrap.dedent(text))

    def start(self, *command: str, before: str = "", terminal: str | None = None) -> subprocess.Popen[str]:
        """`evoattn run` in a process of its own, in which the toy is known too.

        Args:
            command: what to run.
            before: Python to run first.
            terminal: the path of one to run at, in its foreground.
        """
        prepare = f"{before}\n{PREPARE.format(folder=str(self.folder), known=repr(''))}"

        def work() -> None:
            _heed_signals()
            if terminal is not None:
                fcntl.ioctl(os.open(terminal, os.O_RDWR), termios.TIOCSCTTY, 0)
            # A program that forks after torch has started threads of OpenMP would wait for them forever.
            paths = [
                str(self.folder),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]  # of this checkout, if it is not installed
            os.environ.update(PYTHONPATH=os.pathsep.join(paths), TMPDIR=str(self.folder), OMP_NUM_THREADS="1")
            tempfile.tempdir = None  # as it is before a process asks for it
            sys.path.insert(0, str(self.folder))
            exec(prepare, {})
            run.NAMES = ("toy",)
            sys.exit(main(["run", *command]))

        pipe = subprocess.PIPE
        return forked(work, cwd=self.folder, start_new_session=True, stdout=pipe, stderr=pipe)

    def run(self, *command: str) -> tuple[int, str, str]:
        """Its status, output and the last line of its errors."""
        process = self.start(*(command or ("python", "program.py")))
        out, errors = process.communicate(timeout=120)
        return process.returncode, out, errors.strip().splitlines()[-1]


def _heed_signals() -> None:
    """Heed signals that nohup, or a shell's background, had this process ignore."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
