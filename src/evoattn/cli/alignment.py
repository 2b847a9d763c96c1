"""Reading an alignment: A3M or aligned FASTA, plain or gzipped, checked record by record."""

from __future__ import annotations

import dataclasses
import gzip
import zlib
from pathlib import Path

from evoattn.cli.terminal import RefusedError

RESIDUES = "ACDEFGHIKLMNPQRSTVWYX-"
"""The classes of an aligned position: twenty amino acids, X for any other, and the gap."""

_OTHER = "BZJUO"
_GAPS = "-."
_LETTERS = frozenset(RESIDUES + _OTHER + _GAPS)
_NUCLEOTIDES = frozenset("ACGTUN")
_LEAST_LETTERS = 10
_MOST_BYTES = 256 << 20
_WITHOUT_GAPS = str.maketrans("", "", _GAPS)
_TO_RESIDUES = str.maketrans(_OTHER + ".", "X" * len(_OTHER) + "-")


@dataclasses.dataclass(frozen=True)
class Alignment:
    """A checked alignment, in the columns where its first sequence, the query, has a residue.

    Args:
        name: the file's name, for titles.
        query: the name of the first record.
        rows: the sequences in letters of `RESIDUES`, all of one length; the query first.
        left_out: how many records have no residue in these columns, and are not in rows.
    """

    name: str
    query: str
    rows: tuple[str, ...]
    left_out: int = 0

    @property
    def length(self) -> int:
        """Number of columns."""
        return len(self.rows[0])


@dataclasses.dataclass
class _Record:
    number: int
    name: str
    line: int
    parts: list[str]

    def __str__(self) -> str:
        name = self.name if len(self.name) <= 40 else self.name[:37] + "..."
        return f"record {self.number} ({name!r}, line {self.line})"


def read_alignment(path: Path) -> Alignment:
    """Read and check an alignment file.

    Lower-case letters are insertions, as in A3M, and are dropped; `-` and `.` are gaps.

    Raises:
        RefusedError: the file cannot be read, or is not an alignment of proteins; the message is one line that names the
            file, the place and what was expected.
    """
    shown = repr(str(path))
    try:
        return _parse(_text(path), path.name)
    except _UnfitError as unfit:
        raise RefusedError(f"{shown}: {unfit}") from None
    except OSError as error:
        raise RefusedError(f"{shown}: cannot be read: {error.strerror or error}") from None


class _UnfitError(Exception):
    """Raised for content that does not fit."""


def _text(path: Path) -> str:
    if path.is_dir():
        raise _UnfitError("is a directory; expected an A3M or aligned FASTA file")
    if not path.exists():
        raise _UnfitError("there is no such file; expected an A3M or aligned FASTA file")
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as packed:
                data = packed.read(_MOST_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise _UnfitError("the gzip data are damaged or cut off; expected a whole gzipped alignment") from None
    if len(data) > _MOST_BYTES:
        raise _UnfitError(f"is larger than {_MOST_BYTES >> 20} MiB; a few thousand sequences are plenty here")
    if not data.strip():
        raise _UnfitError("is empty; expected an A3M or aligned FASTA file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise _UnfitError("is a binary file; expected A3M or aligned FASTA, as text or gzipped text")
    return text


def _records(text: str) -> list[_Record]:
    records: list[_Record] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line.startswith(">"):
            name = line[1:].split(maxsplit=1)
            records.append(_Record(len(records) + 1, name[0] if name else "", number, []))
        elif not line or (line.startswith("#") and not records):  # A3M files may begin with comments
            if line.upper().startswith("# STOCKHOLM"):
                raise _UnfitError("is a Stockholm file; expected A3M or aligned FASTA")
        elif not records:
            raise _UnfitError(f"line {number}: expected a header that begins with '>', found {line[:20]!r}")
        else:
            for column, letter in enumerate(line, start=1):
                if letter.upper() not in _LETTERS:
                    place = f"line {number}, column {column}"
                    raise _UnfitError(f"{place}: {letter!r} is neither an amino acid nor a gap ('-' or '.')")
            records[-1].parts.append(line)
    if not records:
        raise _UnfitError("holds comments only; expected records that begin with '>'")
    return records


def _parse(text: str, name: str) -> Alignment:
    records = _records(text)
    aligned: list[str] = []
    for record in records:
        sequence = "".join(record.parts)
        if not sequence:
            raise _UnfitError(f"{record} has no sequence; expected one after its header")
        letters = "".join(letter for letter in sequence if not letter.islower())
        if not letters:
            raise _UnfitError(f"{record} is all lower case, an A3M insertion; expected aligned columns in upper case")
        if aligned and len(letters) != len(aligned[0]):
            raise _UnfitError(f"{record} has {len(letters)} aligned columns; expected {len(aligned[0])}, as in record 1")
        aligned.append(letters)
    letters = "".join(part for record in records for part in record.parts).translate(_WITHOUT_GAPS).upper()
    if len(letters) >= _LEAST_LETTERS and _NUCLEOTIDES.issuperset(letters):
        raise _UnfitError("holds nucleotides (only the letters A, C, G, T, U, N); expected protein sequences")
    kept = [column for column, letter in enumerate(aligned[0]) if letter not in _GAPS]
    if len(kept) < 2:
        raise _UnfitError(f"{records[0]}, the query, has {len(kept)} residues in aligned columns; expected at least 2")
    if all(aligned[0][column] in _OTHER + "X" for column in kept):
        raise _UnfitError(f"{records[0]}, the query, has no known residue; expected a protein sequence")
    rows = ["".join(letters[column] for column in kept).translate(_TO_RESIDUES) for letters in aligned]
    rows = [letters for letters in rows if letters.strip("-")]
    return Alignment(name=name, query=records[0].name, rows=tuple(rows), left_out=len(records) - len(rows))
