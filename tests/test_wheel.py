"""The wheel has all that the packages read at run time, and nothing of the tests or benchmarks."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("llmpq", "actors", "planner", "quant")
NOT_SHIPPED = {".pyc", ".pyo"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel that is built of this tree."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder, capture_output=True, check=True, text=True
    )
    with zipfile.ZipFile(folder / "dist" / done.stdout.splitlines()[-1]) as wheel:
        return set(wheel.namelist())


def shipped() -> set[str]:
    """The files of the four packages."""
    found = (file for package in PACKAGES for file in (ROOT / package).rglob("*"))
    return {
        file.relative_to(ROOT).as_posix()
        for file in found
        if file.is_file() and file.suffix not in NOT_SHIPPED and not _is_hidden(file)
    }


def _is_hidden(file: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in file.relative_to(ROOT).parts)


def test_every_file_of_the_packages_is_in_the_wheel(packed: set[str]) -> None:
    assert sorted(shipped() - packed) == []


def test_the_wheel_has_only_the_packages_and_their_licence(packed: set[str]) -> None:
    outside = {name for name in packed if name.split("/")[0] not in PACKAGES}
    assert all(name.split("/")[0].endswith(".dist-info") for name in outside)
    assert any(name.endswith("licenses/LICENSE") for name in outside)
    assert not [name for name in packed if "/tests/" in name]
