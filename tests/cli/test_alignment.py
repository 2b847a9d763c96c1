"""The alignment reader: what it takes, and the one line with which it refuses the rest."""

import gzip
from pathlib import Path

import pytest

from evoattn.cli.alignment import read_alignment
from evoattn.cli.terminal import RefusedError

A3M = ">query some words\nMKVLAT\n>second\nMK-LaaAT\n>third\n-KVL.T\n"


def write(folder: Path, content: str | bytes, name: str = "family.a3m") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a3m_is_read_without_insertions(tmp_path: Path) -> None:
    alignment = read_alignment(write(tmp_path, A3M))
    assert alignment.name == "family.a3m"
    assert alignment.query == "query"
    assert alignment.rows == ("MKVLAT", "MK-LAT", "-KVL-T")
    assert (alignment.length, alignment.left_out) == (6, 0)


GOOD = {
    "gzip": (gzip.compress(A3M.encode()), ("MKVLAT", "MK-LAT", "-KVL-T")),
    "windows line ends": (A3M.replace("\n", "\r\n"), ("MKVLAT", "MK-LAT", "-KVL-T")),
    "byte order mark": ("\ufeff" + A3M, ("MKVLAT", "MK-LAT", "-KVL-T")),
    "blank lines and no last line end": ("\n>q\nMKV\n\n>s\nMKL", ("MKV", "MKL")),
    "a comment before the records": ("#3\t1\n>q\nMKV\n", ("MKV",)),
    "sequences over several lines": (">q\nMKV\nLAT\n>s\nM\nKV-AT\n", ("MKVLAT", "MKV-AT")),
    "gaps in the query": (">q\nM-KV.\n>s\nMAKVA\n", ("MKV", "MKV")),
    "rare letters": (">q\nMKBZ\n>s\nUOJX\n", ("MKXX", "XXXX")),
    "a short sequence of letters that nucleotides have too": (">q\nGATTACA\n", ("GATTACA",)),
}


@pytest.mark.parametrize(("content", "rows"), GOOD.values(), ids=GOOD)
def test_valid_alignment_is_read(content: str | bytes, rows: tuple[str, ...], tmp_path: Path) -> None:
    assert read_alignment(write(tmp_path, content)).rows == rows


def test_records_without_a_residue_are_counted(tmp_path: Path) -> None:
    """Such a row would be a row of masked keys; it is left out and not hidden."""
    alignment = read_alignment(write(tmp_path, ">q\nMK-V\n>empty\n--A-\n>s\nM--V\n"))
    assert alignment.rows == ("MKV", "M-V")
    assert alignment.left_out == 1


BAD = {
    "empty": ("", "is empty; expected an A3M or aligned FASTA file"),
    "blank": ("\n \n", "is empty"),
    "gzip of nothing": (gzip.compress(b""), "is empty"),
    "gzip cut off": (gzip.compress(A3M.encode() * 50)[:-12], "gzip data are damaged or cut off"),
    "gzip damaged": (gzip.compress(A3M.encode())[:12] + b"\xff" * 30, "gzip data are damaged or cut off"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file"),
    "not text": (b">q\nMK\xff\xfeV\n", "is a binary file"),
    "comments only": ("# nothing here\n", "holds comments only; expected records that begin with '>'"),
    "stockholm": ("# STOCKHOLM 1.0\nseq MKV\n//\n", "is a Stockholm file; expected A3M or aligned FASTA"),
    "no header": ("hello world\n", "line 1: expected a header that begins with '>', found 'hello world'"),
    "sequence before the first header": ("\nMKV\n>q\nMKV\n", "line 2: expected a header"),
    "ragged": (
        ">q\nMKV\n>s\nMKV\n>third one\nMK\n",
        r"record 3 \('third', line 5\) has 2 aligned columns; expected 3, as in record 1",
    ),
    "no sequence": (">q\nMKV\n>s\n>t\nMKV\n", r"record 2 \('s', line 3\) has no sequence"),
    "insertions only": (">q\nMKV\n>s\nmkv\n", r"record 2 \('s', line 3\) is all lower case"),
    "digits": (">q\nMKV\n>s\nMK1\n", "line 4, column 3: '1' is neither an amino acid nor a gap"),
    "spaces": (">q\nMK V\n", "line 2, column 3: ' ' is neither an amino acid nor a gap"),
    "nucleotides": (">q\nACGTACGTAC\n>s\nACGU-CGTNC\n", "holds nucleotides"),
    "lower-case nucleotides": (">q\nACGTacgtacgt\n", "holds nucleotides"),
    "one residue column": (
        ">q\nM\n>s\nM\n",
        r"record 1 \('q', line 1\), the query, has 1 residues in aligned columns; expected at least 2",
    ),
    "one residue column among gaps": (">q\nM--\n>s\nMKV\n", "the query, has 1 residues in aligned columns"),
    "a query of gaps": (">q\n---\n>s\nMKV\n", "the query, has 0 residues in aligned columns"),
    "a query of unknowns": (">q\nXXBX\n>s\nMKVL\n", "the query, has no known residue"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_invalid_alignment_is_refused_with_its_path(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(RefusedError, match=message) as refused:
        read_alignment(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="there is no such file"):
        read_alignment(tmp_path / "nothing.a3m")
    with pytest.raises(RefusedError, match="is a directory"):
        read_alignment(tmp_path)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, permissions refuse nothing: the error of the system is made by hand."""
    path = write(tmp_path, A3M)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RefusedError, match="cannot be read: Permission denied"):
        read_alignment(path)


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    """A control sequence in a record's name is shown, not sent."""
    path = write(tmp_path, ">q\nMKV\n>\x1b[31mred\nMK\n")
    with pytest.raises(RefusedError) as refused:
        read_alignment(path)
    assert "\x1b" not in str(refused.value)


def test_alignment_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoattn.cli.alignment._MOST_BYTES", 20)
    with pytest.raises(RefusedError, match="is larger than"):
        read_alignment(write(tmp_path, A3M))
    with pytest.raises(RefusedError, match="is larger than"):
        read_alignment(write(tmp_path, gzip.compress(b">q\n" + b"M" * 1000)))
