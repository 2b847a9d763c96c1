"""Kernels that were seen on this machine, by key: what they are compiled from, and the digest of what they are compiled to."""

from __future__ import annotations

import gzip
import os
import pathlib
import pickle
import tempfile
from typing import Any

__all__ = ["Store"]


class Store:
    """A folder in the user's cache. Records of several checkouts share it, so that nothing is compiled twice."""

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        self.folder = folder or cache / "evoattn-proofs"
        self.folder.mkdir(parents=True, exist_ok=True)

    def keep(self, source: Any) -> None:
        """Keep what a kernel is compiled from."""
        path = self.folder / f"{source.key}.source"
        if not path.exists():
            self._write(path, gzip.compress(pickle.dumps(source), 3))

    def code_of(self, key: str) -> str:
        """The digest of a kernel's code, which is compiled unless it was before; the key itself if nobody kept the kernel."""
        source, code = (self.folder / f"{key}.{kind}" for kind in ("source", "code"))
        if code.exists():
            return code.read_text()
        if not source.exists():
            return key
        known: Any = pickle.loads(gzip.decompress(source.read_bytes()))
        from proofs import hopper_code, triton_code

        found: str = (hopper_code if isinstance(known, hopper_code.Source) else triton_code).code_of(known)
        self._write(code, found.encode())
        return found

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        """Write a file whole."""
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
