"""The Containerfile fits this tree: what it copies, extras, the command, builds of torch."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from typing import Any

import pytest

from llmpq.doctor.remedies import BUILDS
from tests.paths import ROOT

TEXT = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text())
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if re.match(r"[A-Z]+ ", line)]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def steps(kind: str) -> list[str]:
    return [rest for name, rest in STEPS if name == kind]


def copied() -> list[str]:
    """What is taken from this tree."""
    own = [rest.split() for rest in steps("COPY") if not rest.startswith("--from")]
    return [name for words in own for name in words[:-1]]


def test_what_is_copied_exists_and_is_not_left_out() -> None:
    kept = (ROOT / ".dockerignore").read_text().split()
    assert kept[0] == "*"
    for name in copied():
        assert (ROOT / name).exists()
        assert any(fnmatch(name, each.removeprefix("!")) for each in kept[1:] if each[0] == "!")


def test_all_that_the_wheel_is_built_of_is_copied() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    project = PROJECT["project"]
    needed = {*wheel, project["readme"], *project["license-files"], "pyproject.toml"}
    assert needed <= set(copied())
    (builder,) = PROJECT["build-system"]["requires"]
    assert f"pip install '{builder}'" in TEXT


def test_extras_and_builds_of_torch_are_those_of_the_project() -> None:
    (wanted,) = re.findall(r"\[\$\{EXTRA\},([\w,]+)\]", TEXT)
    assert set(wanted.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
    cases = dict(re.findall(r"(\w+)\) build=(\w+) ;;", TEXT))
    assert cases == {extra: build for extra, build in BUILDS.items() if build is not None}
    (default,) = [rest for rest in steps("ARG") if rest.startswith("EXTRA=")]
    assert default.removeprefix("EXTRA=") in cases


def test_it_starts_a_command_of_the_project_as_no_root() -> None:
    (command,) = json.loads(steps("ENTRYPOINT")[0])
    assert command in PROJECT["project"]["scripts"]
    assert steps("USER") == ["1000"]
    assert any("useradd" in step and "--uid 1000" in step for step in steps("RUN"))


@pytest.mark.parametrize("folder", ["/cache", "/work"])
def test_every_user_can_write_its_folders(folder: str) -> None:
    assert re.search(rf"mkdir --mode 1777 .*{folder}\b", TEXT)
    assert folder in {*steps("WORKDIR"), *re.findall(r"XDG_CACHE_HOME=(\S+)", TEXT)}
