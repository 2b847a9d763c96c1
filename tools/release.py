"""Prepare a release, and check it.

python tools/release.py prepare 0.1.0   write the version into every file that has it, and today's date into the changelog
python tools/release.py check v0.1.0    compare a tag with these files; without a tag, the files with each other
python tools/release.py address URL     let the links of the README lead to a repository, and name it to the index
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

VERSIONS = {
    "src/evoattn/_version.py": r'(?<=^__version__ = ").*(?="$)',
    "CITATION.cff": r"(?<=^version: ).*$",
    "conda/meta.yaml": r"(?<=^  version: ).*$",
}
"""The version in each file."""

HEADING = r"^## (\S+), (unreleased|\d{4}-\d\d-\d\d)$"
"""A version and its date in the changelog. The newest one is the first."""

_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def replace(path: Path, pattern: str, new: str) -> None:
    """Replace the first text that a pattern matches in a file.

    Raises:
        SystemExit: it matches nothing.
    """
    text, count = re.subn(pattern, lambda _: new, path.read_text(), count=1, flags=re.MULTILINE)
    if not count:
        sys.exit(f"{path.name} has no {pattern}")
    path.write_text(text)


def prepare(version: str, root: Path = ROOT) -> None:
    """Make the unreleased changes those of a version of today."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        sys.exit(f"a version is 1.2.3 or 1.2.3rc1, not {version}")
    today = datetime.date.today().isoformat()
    replace(root / "CHANGELOG.md", r"^## \S+, unreleased$", f"## {version}, {today}")
    for name, pattern in VERSIONS.items():
        replace(root / name, pattern, version)
    replace(root / "CITATION.cff", r"(?:^date-released: .*\n)?(?=^license:)", f"date-released: {today}\n")


def faults(tag: str | None, root: Path = ROOT) -> list[str]:
    """List what keeps these files from being a release of this tag; without a tag, where their versions differ."""
    found = {name: re.search(pattern, (root / name).read_text(), re.MULTILINE) for name, pattern in VERSIONS.items()}
    versions = {name: match[0] if match else "" for name, match in found.items()}
    newest = re.search(HEADING, (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if newest is None:
        return ["CHANGELOG.md has no version"]
    if newest[2] != "unreleased":
        versions["CHANGELOG.md"] = newest[1]
    elif tag is not None:
        return [f"CHANGELOG.md says that {newest[1]} is unreleased"]
    wanted = versions["src/evoattn/_version.py"] if tag is None else tag.removeprefix("v")
    return [f"{name} has {version}, and {wanted} is wanted" for name, version in versions.items() if version != wanted]


def address(url: str, root: Path = ROOT) -> None:
    """Write the address of a repository into this checkout. An index shows the README without the files beside it."""
    version = re.search(VERSIONS["src/evoattn/_version.py"], (root / "src/evoattn/_version.py").read_text(), re.MULTILINE)
    assert version is not None

    def absolute(link: re.Match[str]) -> str:
        picture, title, target = link.groups()
        return f"{picture}{title}({url}/{'raw' if picture else 'blob'}/v{version[0]}/{target})"

    readme = root / "README.md"
    readme.write_text(_LINK.sub(absolute, readme.read_text()))
    replace(root / "pyproject.toml", r"^(?=\[project\.scripts\])", f'[project.urls]\nRepository = "{url}"\n\n')


def main(arguments: list[str]) -> None:
    match arguments:
        case ["prepare", version]:
            prepare(version)
        case ["check", *tag] if len(tag) < 2:
            if found := faults(tag[0] if tag else None):
                sys.exit("\n".join(found))
        case ["address", url]:
            address(url.rstrip("/"))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
