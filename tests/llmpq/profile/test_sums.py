"""Sums of tensor-parallel groups, measured among processes over gloo."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.processes.placement import Placement
from actors.profiling.links import SUMMED_BYTES, measure_sums
from llmpq.profile.sums import groups, profile_sums
from planner.cluster.spec import ClusterSpec
from planner.profiles.links import fit_sums, read_sums, sums_path

TWO_CPUS: dict[str, Any] = {
    "name": "two",
    "nodes": [{"name": "a", "accelerators": {"CPU": 2}, "memory_gib": 1, "threads": 1}],
}


def test_kinds_are_measured_at_every_degree_that_a_node_has() -> None:
    nodes = [{"name": "a", "accelerators": {"T4": 5, "A100": 1}}]
    nodes += [{"name": "b", "accelerators": {"T4": 2}}]
    network = {"internode_gbit_per_s": 10}
    cluster = ClusterSpec.from_dict({"name": "c", "nodes": nodes, "network": network})
    found = [(group.accelerator.name, group.degree, group.node) for group in groups(cluster)]
    assert found == [("T4-16GB", 2, "a"), ("T4-16GB", 4, "a")]


@pytest.mark.usefixtures("local_ray")
def test_sums_of_two_processes_are_timed_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.profile.sums.measure_sums", partial(measure_sums, turns=5))
    told: list[str] = []
    cluster = ClusterSpec.from_dict(TWO_CPUS)
    rows = profile_sums(tmp_path / "t.csv", cluster, told.append)
    assert told == ["sums of 2 CPU"]
    assert [(row.degree, row.summed_bytes) for row in rows] == [(2, size) for size in SUMMED_BYTES]
    assert all(0 < row.seconds < 10 and row.repetitions == 5 for row in rows)
    assert read_sums(sums_path(tmp_path / "t.csv")) == rows
    (fit,) = fit_sums(rows)
    assert fit.s_per_byte > 0
    told.clear()
    assert profile_sums(tmp_path / "t.csv", cluster, told.append) == rows
    assert told == []


@pytest.mark.usefixtures("local_ray")
def test_a_group_that_no_node_has_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Placement({"no such resource": 1.0}, num_gpus=0.0, num_cpus=1.0, threads=1)
    monkeypatch.setattr("actors.profiling.links._PLACING_S", 0.5)
    monkeypatch.setattr("llmpq.profile.sums.measuring_placement", lambda device: nowhere)
    told: list[str] = []
    assert profile_sums(tmp_path / "t.csv", ClusterSpec.from_dict(TWO_CPUS), told.append) == ()
    assert any("not measured: Ray did not grant" in line for line in told)
    assert not sums_path(tmp_path / "t.csv").exists()
