"""The environments that are pinned: constraints.txt, and constraints-cuda126.txt for older GPUs."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.paths import ROOT

CUDA_126 = "constraints-cuda126.txt"


def constraints(name: str) -> dict[str, Requirement]:
    """Lines of a constraints file by package."""
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    by_name = {canonicalize_name(each.name): each for each in found}
    assert len(by_name) == len(found), f"{name} names a package twice"
    return by_name


def pinned(requirement: Requirement) -> Version | None:
    """The one version that it allows; None where it is a range."""
    specifiers = list(requirement.specifier)
    exact = len(specifiers) == 1 and specifiers[0].operator == "=="
    return Version(specifiers[0].version) if exact else None


def bounds() -> list[Requirement]:
    """What pyproject.toml asks for, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in listed]


def is_other_build(bound: Requirement, version: Version) -> bool:
    """Whether `bound` wants another build of this very `version` (torch's CPU and CUDA wheels)."""
    wanted = pinned(bound)
    return wanted is not None and wanted.local is not None and wanted.public == version.public


@pytest.mark.parametrize("name", ["constraints.txt", CUDA_126])
def test_pins_keep_to_the_bounds_of_the_project(name: str) -> None:
    held = constraints(name)
    checked = set()
    for bound in bounds():
        pin = held.get(canonicalize_name(bound.name))
        version = pinned(pin) if pin else None
        if version is not None and not is_other_build(bound, version):
            assert version in bound.specifier, f"{name}: {pin} is outside {bound}"
            checked.add(bound.name)
    assert {"torch", "ray", "transformers", "numpy"} <= checked


def test_both_environments_have_the_same_versions() -> None:
    """The wheels of CUDA 12.6 have a local version, and the NVRTC of any 12.6 will do."""
    usual, older = constraints("constraints.txt"), constraints(CUDA_126)
    shared = usual.keys() & older.keys()
    assert {"torch", "ray", "transformers", "tokenizers", "safetensors"} <= shared
    for name in shared:
        version, other = pinned(usual[name]), pinned(older[name])
        assert version is not None
        if other is None:
            assert version in older[name].specifier, f"{older[name]} leaves out {usual[name]}"
        else:
            assert other.public == version.public, f"{older[name]} is not {usual[name]}"


def test_all_that_a_node_imports_is_pinned_for_older_gpus() -> None:
    """But for what no version of matters: it is not in constraints.txt either."""
    usual, older = constraints("constraints.txt"), constraints(CUDA_126)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + project["optional-dependencies"]["cuda126"]
    needed = {canonicalize_name(Requirement(line).name) for line in listed}
    assert needed & usual.keys() <= older.keys()


def test_the_wheels_are_of_cuda_12_6() -> None:
    """CUDA 13 has dropped compute capability 6.0 and 7.0; torch 2.15 has CUDA 13 alone."""
    older = constraints(CUDA_126)
    torch = pinned(older["torch"])
    assert torch is not None
    assert torch.local == "cu126"
    assert torch < Version("2.15")
    nvrtc = older["nvidia-cuda-nvrtc-cu12"].specifier
    assert "12.6.85" in nvrtc
    assert "12.8.61" not in nvrtc
