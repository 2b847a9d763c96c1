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
    "colabfold: a NUL byte at the end": (">101\nMKV\n>UniRef100_A\t72\t0.9\nM-Va\n\0", ("MKV", "M-V")),
    "colabfold: a NUL byte alone on its line": ("#3\t1\n>101\nMKV\n\0\n", ("MKV",)),
    "colabfold: two chains, paired and not": ("#2,2\t1,1\n>101\t102\nMKVL\n>101\nMK--\n>102\n--VL\n", ("MKVL", "MK--", "--VL")),
    "mmseqs2: an entry of a database, gzipped": (gzip.compress(b">q\nMKV\n\0"), ("MKV",)),
    "hh-suite: annotations": (
        "#q\n>ss_pred PSIPRED\nCEE\n>ss_conf\n915\n>q\nMKV\n>aa_dssp\nMKV\n>sa_dssp\nAB-\n>s\nMgKV\n",
        ("MKV", "MKV"),
    ),
    "hh-suite: a consensus first": (">q_consensus\nxxx\nMXV\n>q\nMKV\n>s_consensus\nMRV\n", ("MKV", "MRV")),
    "a name that is no UTF-8": (b">q M\xfcller\nMKV\n", ("MKV",)),
    "a name with a line separator": (">q\x0b\x85\u2028rest\nMKV\n", ("MKV",)),
    "headers without a name, names that repeat": (">\nMKV\n>\nMRV\n>a\nMK-\n>a\n-KV\n", ("MKV", "MRV", "MK-", "-KV")),
    "line ends of carriage returns": (A3M.replace("\n", "\r"), ("MKVLAT", "MK-LAT", "-KVL-T")),
    "a2m: padded insertions": (">q\nM.K.V\n>s\nMa-.V\n>t\n-aKaV\n", ("MKV", "M-V", "-KV")),
    "a2m: as many dots in each": (">q\nM.Ka\n>s\nMaK.\n", ("MK", "MK")),
    "a3m: dots are gaps beside insertions": (">q\nMKV\n>s\nM.Va\n", ("MKV", "M-V")),
    "stops inside": (">q\nMK*V\n>s\nM*LV\n", ("MKXV", "MXLV")),
    "stops at the end of all": (">q\nMKV*\n>s\nM-V*\n", ("MKV", "M-V")),
    "stops at the end, beyond the columns": (">q\nMKV\n>s\nM-V*\n", ("MKV", "M-V")),
    "a stop at the last column": (">q\nMKV\n>s\nMK*\n", ("MKV", "MKX")),
    "jackhmmer: stockholm": (
        "# STOCKHOLM 1.0\n#=GF ID q-i1\n#=GS s/1-3 DE [subseq from] M\n\nq           MK-VL\n#=GR q PP    99.99\n"
        "s/1-3       M-AV-\n#=GC PP_cons 9*.99\n#=GC RF      xx.xx\n//\n",
        ("MKVL", "M-V-"),
    ),
    "stockholm in blocks": ("# STOCKHOLM 1.0\r\n\r\nq MK\r\ns M.\r\n\r\nq v-\r\ns VA\r\n//\r\n", ("MKV", "M-V")),
    "stockholm, gzipped, with a NUL byte": (gzip.compress(b"# STOCKHOLM 1.0\nq MKV\n//\n\0"), ("MKV",)),
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
    "empty": ("", "is empty; expected an A3M, aligned FASTA or Stockholm file"),
    "blank": ("\n \n", "is empty"),
    "gzip of nothing": (gzip.compress(b""), "is empty"),
    "gzip cut off": (gzip.compress(A3M.encode() * 50)[:-12], "gzip data are damaged or cut off"),
    "gzip damaged": (gzip.compress(A3M.encode())[:12] + b"\xff" * 30, "gzip data are damaged or cut off"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file"),
    "not text": (b">q\nMK\xff\xfeV\n", "is a binary file"),
    "comments only": ("# nothing here\n", "holds comments only; expected records that begin with '>'"),
    "text with a NUL byte": ("MKV\0MKV\n", "is a binary file"),
    "a tar archive": (b"uniref.a3m".ljust(257, b"\0") + b"ustar".ljust(300, b"\0"), "is a tar archive; unpack it"),
    "colabfold: two queries": (
        ">101\nMKV\n\0>102\nMKVL\n\0",
        "holds 2 alignments, with a NUL byte after each; expected one: write",
    ),
    "two files after each other": ("#3\t1\n>q\nMKV\n#4\t1\n>r\nMKVL\n", "line 4: a comment after the first record; if another"),
    "annotations only": (">ss_pred\nCCC\n", "holds no sequence"),
    "stockholm: two": (
        "# STOCKHOLM 1.0\nq MKV\n//\n# STOCKHOLM 1.0\nq MKV\n//\n",
        "line 4: another alignment begins after '//'",
    ),
    "stockholm cut off": ("# STOCKHOLM 1.0\nq MKV\n", "is a Stockholm file that is cut off; expected '//' at its end"),
    "stockholm without a sequence": ("# STOCKHOLM 1.0\n#=GF ID x\n//\n", "is a Stockholm file without a sequence"),
    "stockholm, a name twice": ("# STOCKHOLM 1.0\nq MKV\nq MKL\n//\n", "line 3: the name 'q' is twice in a block"),
    "stockholm, a name in one block": ("# STOCKHOLM 1.0\nq MKV\ns MKV\n\nq MKV\n//\n", "has 3 aligned columns; expected 6"),
    "stockholm, spaces": ("# STOCKHOLM 1.0\nq MKV LAT\n//\n", "line 2: expected a name and a sequence without spaces"),
    "stockholm, digits": ("# STOCKHOLM 1.0\nq  MK1\n//\n", "line 2, column 6: '1' is neither"),
    "lower case that is aligned": (">q\nMKV\n>s\nmkL\n", "expected 3, as in record 1; if lower case means no insertions here"),
    "gaps of GCG": (">q\nMK~V\n", "line 2, column 3: '~' is neither"),
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
