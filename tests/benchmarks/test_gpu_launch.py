"""Which Python a GPU is measured with."""

from __future__ import annotations

from pathlib import Path

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
    assert launch.find(paths, dry_run=False) == launch.Interpreter(with_gpu, True)
    assert launch.find(paths, dry_run=True) == launch.Interpreter(without_gpu, False)
    assert launch.find(paths[:3], dry_run=False) is None


def test_a_named_python_is_the_only_one(tmp_path: Path) -> None:
    assert launch.candidates({"GPU_PYTHON": "/x/python"}, ".venv") == ["/x/python"]
    assert launch.candidates({}, str(tmp_path))[0] == str(tmp_path / "bin" / "python")


def test_what_is_missing_of_what_the_project_needs() -> None:
    wanted = launch.requirements()
    names = {launch._package(each) for each in wanted}
    assert {"torch", "ray", "bitsandbytes", "pytest", "huggingface-hub"} <= names
    lacking = launch.missing(wanted, names - {"ray", "huggingface-hub"})
    assert {launch._package(each) for each in lacking} == {"ray", "huggingface-hub"}
