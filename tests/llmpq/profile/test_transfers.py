"""Hops between stages and sums of tensor-parallel groups, measured over the transport of runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.processes.device import stage_environment
from actors.processes.placement import Placement
from actors.profiling.links import PAYLOADS_BYTES, SUMMED_BYTES, measure_hops, measure_sums
from llmpq.profile.transfers import groups, pairs, profile_links, profile_sums
from planner.cluster.spec import ClusterSpec
from planner.profiles.links import (
    LinkRow,
    SumRow,
    fit_sums,
    links_path,
    read_measured,
    sums_path,
)
from quant.common.errors import DeviceError

HERE = Placement({}, num_gpus=0.0, num_cpus=1.0, threads=1)
CPUS = {
    "name": "two",
    "nodes": [
        {"name": name, "accelerators": {"CPU": 1}, "memory_gib": 1, "threads": 64} for name in "ab"
    ],
    "network": {"internode_gbit_per_s": 10},
}


def test_kinds_that_meet_are_paired_once() -> None:
    cluster = ClusterSpec.from_dict(
        {
            "name": "c",
            "nodes": [
                {"name": "a", "accelerators": {"T4": 3}},
                {"name": "b", "accelerators": {"T4": 1}, "host_memory_gib": 64},
                {"name": "c", "accelerators": {"A100": 1}},
                {"name": "d", "accelerators": {"CPU": 1}, "memory_gib": 1},
            ],
            "network": {"internode_gbit_per_s": 10},
        }
    )
    found = [(link, one.node, other.node) for link, (one, other) in pairs(cluster).items()]
    a100, t4 = "A100-SXM4-40GB", "T4-16GB"
    assert found == [
        ((a100, "CPU", "network"), "c", "d"),
        ((a100, t4, "network"), "a", "c"),
        (("CPU", "CPU", "node"), "d", "d"),
        (("CPU", t4, "host"), "b", "b"),
        (("CPU", t4, "network"), "a", "d"),
        ((t4, t4, "network"), "a", "b"),
        ((t4, t4, "node"), "a", "a"),
    ]


@pytest.mark.usefixtures("local_ray")
def test_hops_are_timed_both_ways_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair on two nodes cannot be placed on one: it is reported, the other one is measured."""
    monkeypatch.setattr("llmpq.profile.transfers.measure_hops", partial(measure_hops, turns=5))
    told: list[str] = []
    cluster = ClusterSpec.from_dict(CPUS)
    rows = profile_links(tmp_path / "t.csv", cluster, told.append)
    assert {(row.way, row.payload_bytes) for row in rows} == {
        (way, size) for way in ("gloo", "ray") for size in PAYLOADS_BYTES
    }
    assert all(row.seconds > 0 and row.place == "node" for row in rows)
    assert any("not measured: the Ray cluster has one node only" in line for line in told)
    assert read_measured(links_path(tmp_path / "t.csv"), LinkRow) == rows
    told.clear()
    assert profile_links(tmp_path / "t.csv", cluster, told.append) == rows
    assert not any("on one node" in line for line in told)


@pytest.mark.usefixtures("local_ray")
def test_one_node_is_not_two() -> None:
    with pytest.raises(DeviceError, match="one node only"):
        measure_hops([HERE, HERE], "network")


@pytest.mark.usefixtures("local_ray")
def test_what_a_process_starts_with_is_there_when_it_starts() -> None:
    """Allocator and OpenMP read their variables once: they must be in the process's first ones."""

    def first_variables() -> bytes:
        return Path("/proc/self/environ").read_bytes()

    wanted = stage_environment(3)
    task: Any = ray.remote(first_variables).options(
        runtime_env={"env_vars": wanted, "py_executable": sys.executable}
    )
    found = ray.get(task.remote()).replace(b"\0", b":")  # glibc parts its own in place
    for name, value in wanted.items():
        assert f"{name}={value}".encode() in found


CPUS_OF_A_NODE: dict[str, Any] = {
    "name": "two",
    "nodes": [{"name": "a", "accelerators": {"CPU": 2}, "memory_gib": 1, "threads": 1}],
}


def test_kinds_are_measured_at_every_degree_that_a_node_has() -> None:
    nodes = [{"name": "a", "accelerators": {"T4": 5, "A100": 1}}]
    nodes += [{"name": "b", "accelerators": {"T4": 2}}]
    network = {"internode_gbit_per_s": 10}
    cluster = ClusterSpec.from_dict({"name": "c", "nodes": nodes, "network": network})
    found = [
        (group.accelerator.name, group.degree, group.node) for group in groups(cluster).values()
    ]
    assert found == [("T4-16GB", 2, "a"), ("T4-16GB", 4, "a")]


@pytest.mark.usefixtures("local_ray")
def test_sums_of_two_processes_are_timed_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.profile.transfers.measure_sums", partial(measure_sums, turns=5))
    told: list[str] = []
    cluster = ClusterSpec.from_dict(CPUS_OF_A_NODE)
    rows = profile_sums(tmp_path / "t.csv", cluster, told.append)
    assert told == ["sums of 2 CPU"]
    assert [(row.degree, row.summed_bytes) for row in rows] == [(2, size) for size in SUMMED_BYTES]
    assert all(row.seconds > 0 and row.repetitions == 5 for row in rows)
    assert read_measured(sums_path(tmp_path / "t.csv"), SumRow) == rows
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
    monkeypatch.setattr("llmpq.profile.transfers.measuring_placement", lambda device: nowhere)
    told: list[str] = []
    assert (
        profile_sums(tmp_path / "t.csv", ClusterSpec.from_dict(CPUS_OF_A_NODE), told.append) == ()
    )
    assert any("not measured: Ray did not grant" in line for line in told)
    assert not sums_path(tmp_path / "t.csv").exists()
