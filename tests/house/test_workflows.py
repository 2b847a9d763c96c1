"""Continuous integration tests what pyproject.toml declares."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".github" / "workflows" / "ci.yml"


@pytest.mark.skipif(not CI.exists(), reason="an sdist has no workflows")
def test_a_job_has_the_oldest_torch() -> None:
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    (tested,) = re.findall(r"EVOATTN_TORCH: torch==([\d.]+)", CI.read_text())
    assert tested in (oldest, f"{oldest}.0")
