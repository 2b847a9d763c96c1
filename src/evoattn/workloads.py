"""The named attention problems of the AlphaFold family: tests, benchmarks and tuning all read this one list."""

from __future__ import annotations

import dataclasses
import re

__all__ = ["WORKLOADS", "Workload", "workload"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One attention as a model runs it, in canonical sizes `[b,n,h,l,d]`; c = d.

    Args:
        name: what command lines and result files call it.
        b, n, h: batch, rows, heads.
        lq, lk: queries and keys.
        d: channels of a head.
        key_mask: whether keys are masked for each row (padding of an alignment or a crop).
        pair_bias: whether a bias `[b,1,h,lq,lk]` is added.
        where: which module of which model it is.
        length_axes: the axes that grow with the number of residues or tokens.
        kv_heads: heads of keys and values, where one is shared by all; None is h.
        most_rows: where it was given fewer rows, how many there are at most at any length.
        layer: "triangle", "msa_row", "msa_column", "single" or "pair_bias" for a whole layer around this attention; empty: the
            attention.
        channels: of a layer's input and output; None without a layer.
    """

    name: str
    b: int
    n: int
    h: int
    lq: int
    lk: int
    d: int
    key_mask: bool
    pair_bias: bool
    where: str
    length_axes: tuple[str, ...] = ("lq", "lk")
    kv_heads: int | None = None
    most_rows: int | None = None
    layer: str = ""
    channels: int | None = None

    @property
    def family(self) -> str:
        """The name without its length: "tri" of "tri384"."""
        return self.name.rstrip("0123456789") or self.name

    @property
    def length(self) -> int:
        """Residues or tokens."""
        size: int = getattr(self, self.length_axes[-1])
        return size

    @property
    def scores(self) -> int:
        """The number of exponentials in one softmax of all scores."""
        return self.b * self.n * self.h * self.lq * self.lk

    def at(self, length: int) -> Workload:
        """Return the same attention of the same model on another number of residues or tokens.

        Raises:
            ValueError: the length is not positive.
        """
        if length < 1:
            raise ValueError(f"a length must be 1 or more, got {length}")
        sizes: dict[str, int] = dict.fromkeys(self.length_axes, length)
        if length == self.length:
            return self
        if self.most_rows is not None:
            most = self.most_rows
            longer = dataclasses.replace(self, name=self.name.removesuffix(f"n{most}"), most_rows=None).at(length)
            fewer = {"name": f"{longer.name}n{most}", "n": most, "most_rows": most}
            return longer if longer.n < most else dataclasses.replace(longer, **fewer)  # type: ignore[arg-type]
        return dataclasses.replace(self, name=f"{self.family}{length}", **sizes)  # type: ignore[arg-type]

    def with_rows(self, n: int) -> Workload:
        """Return the same attention with at most n rows, named after them."""
        return self if n >= self.n else dataclasses.replace(self, name=f"{self.name}n{n}", n=n, most_rows=n)

    def shrunk(self, n: int = 3, length: int = 24) -> Workload:
        """Return the same problem at a size for tests: at most n rows, lengths at most `length`."""
        return dataclasses.replace(
            self, b=min(self.b, 2), n=min(self.n, n), lq=min(self.lq, length), lk=min(self.lk, length), h=min(self.h, 4)
        )


def _triangle(length: int, d: int = 32, b: int = 1, name: str = "tri", where: str = "triangle attention") -> Workload:
    return Workload(f"{name}{length}", b, length, 4, length, length, d, True, True, where, length_axes=("n", "lq", "lk"))


WORKLOADS: tuple[Workload, ...] = (
    _triangle(384),
    _triangle(397, where="triangle attention, a length that divides by nothing"),
    Workload("msa_row", 1, 512, 8, 384, 384, 32, True, True, "MSA row attention with pair bias"),
    Workload("msa_column", 1, 384, 8, 512, 512, 32, True, False, "MSA column attention", length_axes=("n",)),
    _triangle(1024),
    Workload("diffusion768", 1, 48, 16, 768, 768, 48, True, True, "diffusion transformer, 48 samples share the pair bias"),
    Workload("single768", 1, 1, 16, 768, 768, 24, True, True, "single attention with pair bias (AlphaFold 3 trunk)"),
    Workload("extra_msa_row", 1, 1024, 8, 384, 384, 8, True, True, "extra-MSA row attention, 8 channels a head"),
    _triangle(384, d=16, b=4, name="template", where="template pair stack, 4 templates"),
    _triangle(256),
    _triangle(512),
    _triangle(768),
    _triangle(100, where="triangle attention of a short chain"),
    _triangle(1001, where="triangle attention, an odd length of a complex"),
    _triangle(384, d=64, name="wide", where="triangle attention with 64 channels a head"),
    Workload(
        "msa_global", 1, 384, 8, 1, 1024, 8, True, False, "extra-MSA global column attention, one query and one key head",
        length_axes=("n",), kv_heads=1,
    ),
    Workload(
        "template_point", 1, 16384, 4, 1, 4, 16, True, False, "template pointwise attention, one query", length_axes=("n",)
    ),
    _triangle(2048),
)  # fmt: skip
"""The most telling first: what is cut short has then seen these."""


def workload(name: str, known: tuple[Workload, ...] = WORKLOADS) -> Workload:
    """The workload of a name, one of the list at another length, or with fewer rows: "tri500", "msa_row200n64".

    Args:
        name: of the workload.
        known: the list.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    for candidate in known:
        if candidate.name == name:
            return candidate
    fewer = re.fullmatch(r"(.*\D\d*)n([1-9]\d{0,5})", name)
    if fewer and any(candidate.family == fewer[1].rstrip("0123456789") for candidate in known):
        return workload(fewer[1], known).with_rows(int(fewer[2]))
    found = re.fullmatch(r"(\D+)([1-9]\d{0,5})", name)
    for candidate in known:
        if found and candidate.family == found[1]:
            return candidate.at(int(found[2]))
    names, example = ", ".join(candidate.name for candidate in known), f"{known[0].family}500"
    raise ValueError(f"no workload {name!r}; expected one of {names}, or one of these at another length, such as {example}")
