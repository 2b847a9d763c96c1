"""Reading an alignment: A3M, A2M, aligned FASTA or Stockholm, plain or gzipped, checked record by record."""

from __future__ import annotations

import dataclasses
import gzip
import operator
import string
import zlib
from pathlib import Path

from evoattn.cli.terminal import RefusedError

RESIDUES = "ACDEFGHIKLMNPQRSTVWYX-"
"""The classes of an aligned position: twenty amino acids, X for any other, and the gap."""

_OTHER = "BZJUO*"
_GAPS = "-."
_LETTERS = frozenset(RESIDUES + _OTHER + _GAPS)
_NUCLEOTIDES = frozenset("ACGTUN")
_LEAST_LETTERS = 10
_MOST_BYTES = 256 << 20
_EXPECTED = "expected an A3M, aligned FASTA or Stockholm file"
_ONE = "expected one: write each to a file of its own"
_WITHOUT_GAPS = str.maketrans("", "", _GAPS)
_WITHOUT_LOWER_CASE = str.maketrans("", "", string.ascii_lowercase)
_WITHOUT_INSERTIONS = str.maketrans("", "", string.ascii_lowercase + ".")
_STATES = str.maketrans(dict.fromkeys(string.ascii_lowercase + ".", "i") | dict.fromkeys(string.ascii_uppercase + "-*", "M"))
_TO_RESIDUES = str.maketrans(_OTHER + ".", "X" * len(_OTHER) + "-")
_ANNOTATION = frozenset(f"{kind}_{how}" for kind in ("ss", "sa", "aa") for how in ("pred", "conf", "dssp"))
"""Names of records begin so that HH-suite writes beside the sequences: secondary structure, accessibility."""


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

    A file that begins with `# STOCKHOLM` is Stockholm: `-` and `.` are gaps, and lower case means nothing. In other files
    lower-case letters are insertions and are dropped, and `-` and `.` are gaps. If all records have lower case and `.` at the
    same places, these are padded insertions, as in A2M, and are dropped. Stops at the end of all records are dropped.

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


def _binary() -> _UnfitError:
    return _UnfitError(f"is a binary file; {_EXPECTED}, as text or gzipped text")


def _text(path: Path) -> str:
    if path.is_dir():
        raise _UnfitError(f"is a directory; {_EXPECTED}")
    if not path.exists():
        raise _UnfitError(f"there is no such file; {_EXPECTED}")
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as packed:
                data = packed.read(_MOST_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise _UnfitError("the gzip data are damaged or cut off; expected a whole gzipped alignment") from None
    if data[257:262] == b"ustar":
        raise _UnfitError("is a tar archive; unpack it and name one of its alignments")
    if len(data) > _MOST_BYTES:
        raise _UnfitError(f"is larger than {_MOST_BYTES >> 20} MiB; a few thousand sequences are plenty here")
    return _only_one(data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").replace("\r", "\n"))


def _only_one(text: str) -> str:
    """The text without the NUL byte that databases of MMseqs2, and so ColabFold's server, put after each alignment."""
    alignments = [part for part in text.split("\0") if part.strip()]
    if not alignments:
        raise _UnfitError(f"is empty; {_EXPECTED}")
    if any(not part.lstrip().startswith((">", "#")) for part in alignments[1:]):
        raise _binary()
    if len(alignments) > 1:
        raise _UnfitError(f"holds {len(alignments)} alignments, with a NUL byte after each; {_ONE}")
    return alignments[0]


def _records(text: str) -> list[_Record]:
    """The records of A3M, A2M or aligned FASTA, without those that HH-suite adds to the sequences."""
    records: list[_Record] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if line.startswith(">"):
            name = line[1:].split(maxsplit=1)
            records.append(_Record(len(records) + 1, name[0] if name else "", number, []))
        elif "\ufffd" in line:  # bytes that are no text; names may have some
            raise _binary()
        elif not line or (line.startswith("#") and not records):  # A3M files may begin with comments
            continue
        elif not records:
            raise _UnfitError(f"line {number}: expected a header that begins with '>', found {line[:20]!r}")
        elif line.startswith("#"):
            raise _UnfitError(f"line {number}: a comment after the first record; if another alignment begins here, {_ONE}")
        elif records[-1].name not in _ANNOTATION:
            _check_letters(line, number, 1)
            records[-1].parts.append(line)
    if not records:
        raise _UnfitError("holds comments only; expected records that begin with '>'")
    sequences = [record for record in records if record.name not in _ANNOTATION]
    if not sequences:
        raise _UnfitError("holds no sequence beside annotations of HH-suite (ss_, sa_, aa_)")
    has_consensus = len(sequences) > 1 and sequences[0].name.endswith("_consensus")
    return sequences[1:] if has_consensus else sequences


def _check_letters(sequence: str, line: int, first: int) -> None:
    """Refuse letters of a line that are no residues and no gaps; `first` is the column at which the sequence begins."""
    if not _LETTERS.issuperset(sequence.upper()):
        column, letter = next((x, letter) for x, letter in enumerate(sequence, first) if letter.upper() not in _LETTERS)
        raise _UnfitError(f"line {line}, column {column}: {letter!r} is neither an amino acid nor a gap ('-' or '.')")


def _stockholm_records(text: str) -> list[_Record]:
    """The records of a Stockholm file, whose sequences may go on in further blocks. Annotations (#=) are not read."""
    records: dict[str, _Record] = {}
    in_block: set[str] = set()
    ended = False
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words:
            in_block.clear()
        elif ended:
            raise _UnfitError(f"line {number}: another alignment begins after '//'; {_ONE}")
        elif words == ["//"]:
            ended = True
        elif not line.startswith("#"):
            if len(words) != 2:
                raise _UnfitError(f"line {number}: expected a name and a sequence without spaces, found {line[:20]!r}")
            name, sequence = words
            if name in in_block:
                raise _UnfitError(f"line {number}: the name {name[:40]!r} is twice in a block; expected names that differ")
            in_block.add(name)
            _check_letters(sequence, number, line.rindex(sequence) + 1)
            records.setdefault(name, _Record(len(records) + 1, name, number, [])).parts.append(sequence.upper())
    if not ended:
        raise _UnfitError("is a Stockholm file that is cut off; expected '//' at its end")
    if not records:
        raise _UnfitError("is a Stockholm file without a sequence; expected lines of a name and a sequence")
    return list(records.values())


def _columns(records: list[_Record], lower_case_is_inserted: bool) -> list[str]:
    """The aligned columns of each record, all of one length."""
    sequences = ["".join(record.parts) for record in records]
    for record, sequence in zip(records, sequences, strict=True):
        if not sequence:
            raise _UnfitError(f"{record} has no sequence; expected one after its header")
    rows = sequences
    if lower_case_is_inserted:
        padded = len({sequence.translate(_STATES) for sequence in sequences}) == 1
        rows = [sequence.translate(_WITHOUT_INSERTIONS if padded else _WITHOUT_LOWER_CASE) for sequence in sequences]
    without_stops = [row.removesuffix("*") for row in rows]
    if len(set(map(len, without_stops))) == 1:
        rows = without_stops
    for record, sequence, row in zip(records, sequences, rows, strict=True):
        if not row and sequence.islower():
            raise _UnfitError(f"{record} is all lower case, an A3M insertion; expected aligned columns in upper case")
        if len(row) != len(rows[0]):
            same = len(set(map(len, sequences))) == 1
            remedy = "; if lower case means no insertions here, write the sequences in upper case" if same else ""
            expected = f"expected {len(rows[0])}, as in record {records[0].number}{remedy}"
            raise _UnfitError(f"{record} has {len(row)} aligned columns; {expected}")
    return rows


def _parse(text: str, name: str) -> Alignment:
    is_stockholm = text.lstrip().upper().startswith("# STOCKHOLM")
    records = _stockholm_records(text) if is_stockholm else _records(text)
    aligned = _columns(records, lower_case_is_inserted=not is_stockholm)
    letters = "".join(part for record in records for part in record.parts).translate(_WITHOUT_GAPS).upper()
    if len(letters) >= _LEAST_LETTERS and _NUCLEOTIDES.issuperset(letters):
        raise _UnfitError("holds nucleotides (only the letters A, C, G, T, U, N); expected protein sequences")
    kept = [column for column, letter in enumerate(aligned[0]) if letter not in _GAPS]
    if len(kept) < 2:
        raise _UnfitError(f"{records[0]}, the query, has {len(kept)} residues in aligned columns; expected at least 2")
    if all(aligned[0][column] in _OTHER + "X" for column in kept):
        raise _UnfitError(f"{records[0]}, the query, has no known residue; expected a protein sequence")
    rows = ["".join(operator.itemgetter(*kept)(letters)).translate(_TO_RESIDUES) for letters in aligned]
    rows = [letters for letters in rows if letters.strip("-")]
    return Alignment(name=name, query=records[0].name, rows=tuple(rows), left_out=len(records) - len(rows))
