"""Clients that tests of several files patch."""

import importlib
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evoattn.clients import calls, patching, site
from evoattn.clients.layers import sites
from evoattn.clients.registry import known
from evoattn.clients.releases import digest, sources
from evoattn.clients.site import Client
from tests.clients.program import Program
from tests.clients.recording import Watched
from tests.clients.toy import SITES, TOY, function_at


@pytest.fixture(autouse=True)
def _nothing_is_left_to_clients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tests compare small calls on a CPU, which clients compute by themselves, with no kernel that could be missing."""
    monkeypatch.setattr(calls, "few_on_cpu", lambda _: 0)
    monkeypatch.setattr(site, "_has_kernels", lambda: True)


DEFAULT = patching.WAITS


@pytest.fixture(autouse=True)
def _patches_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client computes the first calls on a GPU whose kernels are not kept."""
    monkeypatch.setattr(patching, "WAITS", True)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def toy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An installed client, toy 1.0, that `patch` knows."""
    (tmp_path / "toy_client").mkdir()
    for name, text in (("__init__.py", ""), *TOY.items()):
        (tmp_path / "toy_client" / name).write_text(text)
    (tmp_path / "toy-1.0.dist-info").mkdir()
    (tmp_path / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    openfolds = known()["openfold.model.triangular_attention.TriangleAttention"]
    monkeypatch.setitem(known(), "toy_client.triangle.Triangle", openfolds)
    layer_sites = sites({"toy_client.triangle.Triangle": openfolds})
    client = Client("toy", "toy", SITES, values=(("toy_client.layers", "has_kernel", True),), layers=layer_sites)
    monkeypatch.setattr(patching, "NAMES", ("toy",))
    monkeypatch.setattr(patching, "client", {"toy": client}.__getitem__)
    model = importlib.import_module("toy_client.model")
    layers: Any = sys.modules["toy_client.layers"]
    digests = {str(site): digest(function_at(site)) for site in (*SITES, *layer_sites)}
    monkeypatch.setitem(sources(), "toy", {"0.9": {}, "1.0": digests})
    model.layers = layers
    yield model
    for name in ("toy_client", "toy_client.layers", "toy_client.model", "toy_client.triangle"):
        sys.modules.pop(name, None)
    patching.active.clear()


@pytest.fixture
def triangle(toy: Any) -> Any:
    """A layer of toy, which returns zeros."""
    torch.manual_seed(0)
    return importlib.import_module("toy_client.triangle").Triangle()


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Program:
    return Program(tmp_path)
