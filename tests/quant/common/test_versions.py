"""Files of other versions: those of a newer llmpq are told as that, by version or by a field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmpq.jobs.store import Manifest
from planner.assumed_predictor import PREDICTOR_FILE, predictor_file
from planner.fleet.fleet_spec import FleetSpec
from planner.plan.spec import PlanSpec
from quant.common.errors import InputError, SpecError
from quant.common.versions import other_version

PLAN = {"version": 1, "stages": []}
PREDICTOR = {
    "version": 1,
    "kind": "boosting",
    "buckets": [4, 8],
    "trained_rows": 9,
    "confusion": [[1, 0], [0, 1]],
}
MANIFEST = {"version": 1, "model": "a", "model_name": "b", "sampling": {}}

Read = Callable[[Path], object]


def read_plan(folder: Path) -> object:
    return PlanSpec.load(folder / "file")


def read_fleet(folder: Path) -> object:
    return FleetSpec.load(folder / "file")


def read_predictor(folder: Path) -> object:
    (folder / "file").rename(folder / PREDICTOR_FILE)
    return predictor_file(folder)


def read_manifest(folder: Path) -> object:
    return Manifest.read(folder / "file")


READERS: dict[str, tuple[Read, dict[str, Any]]] = {
    "plan": (read_plan, PLAN),
    "fleet": (read_fleet, {"version": 1, "replicas": []}),
    "predictor": (read_predictor, PREDICTOR),
    "job": (read_manifest, MANIFEST),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("change", [{"version": 2}, {"colour": "blue"}], ids=["version", "field"])
def test_what_a_newer_llmpq_made_is_refused_as_that(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    read, content = READERS[kind]
    (tmp_path / "file").write_text(json.dumps(content | change))
    with pytest.raises((SpecError, InputError)) as refused:
        read(tmp_path)
    said = str(refused.value)
    assert "newer llmpq" in said
    assert "update it, or" in said
    assert str(tmp_path) in said
    assert next(iter(change)) in said


@pytest.mark.parametrize("kind", ["predictor", "job"])
def test_what_lacks_later_fields_is_read(kind: str, tmp_path: Path) -> None:
    read, content = READERS[kind]
    (tmp_path / "file").write_text(json.dumps({**content} | {"version": 1}))
    assert read(tmp_path) is not None


@pytest.mark.parametrize(
    ("found", "is_newer"), [(2, True), ("2", True), (0, False), (None, False), (True, False)]
)
def test_only_a_greater_number_is_newer(found: object, is_newer: bool) -> None:
    said = other_version(found, 1, "do it again")
    assert ("newer" in said) == is_newer
    assert said.endswith("do it again")
