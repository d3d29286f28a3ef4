"""What is published: the wheel has all that the packages read at run time and nothing of the tests
or benchmarks, two builds are the same bytes, and it runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.paths import ROOT

PACKAGES = ("llmpq", "actors", "planner", "quant")
NOT_SHIPPED = {".pyc", ".pyo"}
PLAN = ("plan", "--model", "opt-125m", "--cluster", "one.yaml", "--s", "16", "--n", "4")
ONE_T4 = "name: one\nnodes: [{name: a, accelerators: {T4: 1}}]\n"


def build(folder: Path, environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Build a wheel and an archive of the sources of this tree in `folder`."""
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        check=True,
    )
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"), {})


@pytest.fixture(scope="module")
def packed(built: tuple[Path, Path]) -> set[str]:
    """The names of the files in the wheel."""
    with zipfile.ZipFile(built[0]) as wheel:
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


def test_the_sources_have_what_their_tests_and_builds_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(shipped() - names) == []
    asked = ("pyproject.toml", "Makefile", "constraints.txt", "LICENSE", "tests/conftest.py")
    assert set(asked) <= names


def test_a_second_build_is_the_same_bytes(built: tuple[Path, Path], tmp_path: Path) -> None:
    elsewhere = {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "LC_ALL": "C"}
    again = build(tmp_path, elsewhere)
    assert [each.read_bytes() for each in again] == [each.read_bytes() for each in built]


def test_the_index_takes_them(built: tuple[Path, Path]) -> None:
    pytest.importorskip("twine")
    pytest.importorskip("readme_renderer")
    checked = [sys.executable, "-m", "twine", "check", "--strict", *built]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


def all_but_torch() -> Iterator[tuple[str, Path]]:
    """What this environment has installed, by name, without torch and what its paths files add."""
    for folder in filter(Path.is_dir, map(Path, sys.path)):
        if folder.name not in ("site-packages", "dist-packages"):
            continue
        for each in folder.iterdir():
            if each.suffix != ".pth" and not each.name.startswith(("torch", "llmpq", "_llmpq")):
                yield each.name, each


def pip(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Call pip without the network and without the settings of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *arguments],
        env=kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def llmpq(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that has the wheel, and its dependencies without torch."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    libraries = folder / "libraries"
    libraries.mkdir()
    for name, path in dict(all_but_torch()).items():
        (libraries / name).symlink_to(path)
    pip("--python", python, "install", "--no-deps", "--no-compile", built[0]).check_returncode()
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "libraries.pth").write_text(f"{libraries}\n")
    (folder / "one.yaml").write_text(ONE_T4)
    return folder / "bin" / "llmpq"


def call(llmpq: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [llmpq, *arguments],
        cwd=llmpq.parent.parent,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_installed_wheel_plans_without_torch_and_says_what_else_needs_it(llmpq: Path) -> None:
    done = call(llmpq, *PLAN, "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = json.loads((llmpq.parent.parent / "plan.json").read_text())
    assert [len(stage["bitwidths"]) for stage in plan["stages"]] == [12]
    done = call(llmpq, "profile", "--model", "opt-125m", "-o", "times.csv")
    assert done.returncode == 2
    assert "torch is not installed" in done.stderr
    assert "llmpq doctor" in done.stderr


def requirements() -> dict[str, list[Requirement]]:
    """What is asked for, by extra; "" without one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in listed.items()}


def test_torch_comes_with_the_extras_of_its_builds_alone() -> None:
    torch = {
        extra: str(each.specifier)
        for extra, found in requirements().items()
        for each in found
        if each.name == "torch"
    }
    assert torch.pop("dev") == ">=2.6"
    assert set(torch) == {"cpu", "cuda126", "cuda13"}
    assert torch["cpu"].endswith("+cpu")
    assert torch["cuda126"].endswith("+cu126")


def empty_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of that name and version with nothing in it."""
    stem = f"{name.replace('-', '_')}-{version}"
    about = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of the names and least versions that are asked for, and torch as PyPI has it."""
    folder = tmp_path_factory.mktemp("index")
    for extra in ("", "cpu", "cuda126", "cuda13"):
        for each in requirements()[extra]:
            least = next(s.version for s in each.specifier if s.operator in (">=", "=="))
            if each.name != "torch":
                empty_wheel(folder, each.name, least)
    for version in ("2.13.0", "2.14.0"):
        empty_wheel(folder, "torch", version)
    return folder


def chosen(wheel: Path, index: Path, extra: str) -> str | None:
    """The torch that pip takes for an extra in an empty environment; None where it takes none."""
    dry = ("install", "--dry-run", "--ignore-installed", "--report", "-")
    done = pip(*dry, "--find-links", index, f"{wheel}[{extra}]")
    if done.returncode:
        assert "No matching distribution found for torch" in done.stderr, done.stderr
        return None
    found = (each["metadata"] for each in json.loads(done.stdout)["install"])
    return next(each["version"] for each in found if each["name"] == "torch")


@pytest.mark.rare
def test_pip_takes_the_build_of_the_extra_or_none(built: tuple[Path, Path], index: Path) -> None:
    assert chosen(built[0], index, "cuda13") == "2.14.0"
    assert chosen(built[0], index, "cpu") is None
    empty_wheel(index, "torch", "2.13.0+cpu")
    empty_wheel(index, "torch", "2.13.0+cu126")
    assert chosen(built[0], index, "cpu") == "2.13.0+cpu"
    assert chosen(built[0], index, "cuda126") == "2.13.0+cu126"
