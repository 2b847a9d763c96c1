"""The named attention problems of the AlphaFold family: tests, benchmarks and tuning all read this one list."""

from __future__ import annotations

import dataclasses

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

    @property
    def scores(self) -> int:
        """How many exponentials the softmax takes."""
        return self.b * self.n * self.h * self.lq * self.lk

    def shrunk(self, n: int = 3, length: int = 24) -> Workload:
        """The same problem at a size for tests: at most n rows, lengths at most `length`, all else as it was."""
        return dataclasses.replace(
            self, b=min(self.b, 2), n=min(self.n, n), lq=min(self.lq, length), lk=min(self.lk, length), h=min(self.h, 4)
        )


def _triangle(length: int, d: int = 32, b: int = 1, name: str = "tri", where: str = "triangle attention") -> Workload:
    return Workload(f"{name}{length}", b, length, 4, length, length, d, True, True, where)


WORKLOADS: tuple[Workload, ...] = (
    _triangle(256),
    _triangle(384),
    _triangle(397, where="triangle attention, a length that divides by nothing"),
    _triangle(512),
    _triangle(768),
    _triangle(1024),
    _triangle(2048),
    Workload("msa_row", 1, 512, 8, 384, 384, 32, True, True, "MSA row attention with pair bias"),
    Workload("msa_column", 1, 384, 8, 512, 512, 32, True, False, "MSA column attention"),
    Workload("extra_msa_row", 1, 1024, 8, 384, 384, 8, True, True, "extra-MSA row attention, 8 channels a head"),
    _triangle(384, d=16, b=4, name="template", where="template pair stack, 4 templates"),
    Workload("template_point", 1, 16384, 4, 1, 4, 16, True, False, "template pointwise attention, one query"),
    _triangle(384, d=64, name="wide", where="triangle attention with 64 channels a head"),
    Workload("single768", 1, 1, 16, 768, 768, 24, True, True, "single attention with pair bias (AlphaFold 3 trunk)"),
    Workload("diffusion768", 1, 48, 16, 768, 768, 48, True, True, "diffusion transformer, 48 samples share the pair bias"),
)


def workload(name: str) -> Workload:
    """The workload of a name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    for candidate in WORKLOADS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"no workload {name!r}; there are {', '.join(candidate.name for candidate in WORKLOADS)}")
