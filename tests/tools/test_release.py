"""tools/release.py: a version, its tag and its changelog agree, and the recipe of conda asks for what the wheel asks for."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.scripts import ROOT, load

release = load("tools/release.py", "evoattn_release")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that a release changes."""
    for name in (*release.VERSIONS, "CHANGELOG.md", "README.md", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_versions_of_this_checkout_agree() -> None:
    assert release.faults(None) == []


def test_a_prepared_version_has_its_tag_and_no_other(checkout: Path) -> None:
    text = (checkout / "CHANGELOG.md").read_text()
    (checkout / "CHANGELOG.md").write_text(re.sub(release.HEADING, "## 7.0.0, unreleased", text, count=1, flags=re.MULTILINE))
    assert "unreleased" in release.faults("v7.0.0", checkout)[0]
    release.prepare("7.1.0rc1", checkout)
    assert release.faults("v7.1.0rc1", checkout) == release.faults(None, checkout) == []
    assert len(release.faults("v7.1.0", checkout)) == 4
    with pytest.raises(SystemExit, match="unreleased"):
        release.prepare("7.2.0", checkout)


def test_an_index_finds_what_the_readme_links_to(checkout: Path) -> None:
    release.address("https://example.org/evoattn", checkout)
    text = (checkout / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert all(link.startswith("https:") for link in links)
    version = re.search(r'"(.*)"$', (ROOT / "src/evoattn/_version.py").read_text())
    assert version is not None
    assert f"](https://example.org/evoattn/blob/v{version[1]}/docs/" in text
    assert f"](https://example.org/evoattn/raw/v{version[1]}/docs/figures/" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python from 3.11 on")
def test_the_recipe_asks_for_what_the_wheel_asks_for() -> None:
    import tomllib

    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "conda" / "meta.yaml").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = package["project"], package["project"]["optional-dependencies"]
    spaced = [re.sub(r"^torch\b", "pytorch", name.replace(">=", " >=")) for name in project["dependencies"]]
    python = f"python {project['requires-python']}"
    assert recipe["requirements"]["run"] == [python, *spaced]
    assert recipe["requirements"]["host"] == [
        python,
        "pip",
        *(x.replace(">=", " >=") for x in package["build-system"]["requires"]),
    ]
    optional = [x.replace(">=", " >=") for extra in ("cli", "compare", "triton") for x in extras[extra]]
    assert recipe["requirements"]["run_constrained"] == optional
    assert recipe["build"]["entry_points"] == [f"{name} = {place}" for name, place in project["scripts"].items()]
    assert recipe["build"]["noarch"] == "python"
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (project["description"], project["license"])
