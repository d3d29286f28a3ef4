"""Choice of the Python that a GPU is measured with."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import launch


def python_that(folder: Path, name: str, prints: str | None) -> str:
    """An executable that answers any question so, or fails."""
    path = folder / name
    answer = "exit 1" if prints is None else f"echo {prints}"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_that_sees_a_gpu_is_taken(tmp_path: Path) -> None:
    without_torch = python_that(tmp_path, "a", None)
    without_gpu = python_that(tmp_path, "b", "False")
    with_gpu = python_that(tmp_path, "c", "True")
    paths = [str(tmp_path / "none"), without_torch, without_gpu, with_gpu]
    assert launch.find(paths, dry_run=False) == with_gpu
    assert launch.find(paths, dry_run=True) == without_gpu
    assert launch.find(paths[:3], dry_run=False) is None


def test_the_environment_of_the_checkout_comes_first(tmp_path: Path) -> None:
    assert launch.candidates(str(tmp_path))[0] == str(tmp_path / "bin" / "python")


def test_a_named_python_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPU_PYTHON", python_that(tmp_path, "named", '"$@"'))
    assert launch.main(["--venv", "x", "--parts", "plan", "--time_limit_s", "9"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == "-m benchmarks.gpu --parts plan --time_limit_s 9"


def test_without_a_driver_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_PYTHON", raising=False)
    monkeypatch.setattr(launch, "candidates", lambda _: [])
    monkeypatch.setattr(launch, "_has_driver", lambda: False)
    assert launch.main([]) == 2


def test_what_is_missing_of_what_the_project_needs() -> None:
    wanted = launch.requirements()
    names = {launch._package(each) for each in wanted}
    assert {"ray", "bitsandbytes", "numba", "pytest", "huggingface-hub"} <= names
    assert "torch" not in names  # the Python was chosen for its own
    lacking = launch.missing(wanted, names - {"ray", "huggingface-hub"})
    assert {launch._package(each) for each in lacking} == {"ray", "huggingface-hub"}
