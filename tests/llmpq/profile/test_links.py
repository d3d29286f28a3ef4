"""Hops between stages, measured over the transport that runs use."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.processes.device import stage_environment
from actors.processes.placement import Placement
from actors.profiling.links import PAYLOADS_BYTES, measure_hops
from llmpq.profile.links import pairs, profile_links
from planner.cluster.spec import ClusterSpec
from planner.profiles.links import links_path, read_links
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
                {"name": "b", "accelerators": {"T4": 1}},
                {"name": "c", "accelerators": {"A100": 1}},
                {"name": "d", "accelerators": {"CPU": 1}, "memory_gib": 1},
            ],
            "network": {"internode_gbit_per_s": 10},
        }
    )
    found = [(p.link, p.one.node, p.other.node) for p in pairs(cluster)]
    a100, t4 = "A100-SXM4-40GB", "T4-16GB"
    assert found == [
        ((a100, "CPU", "network"), "c", "d"),
        ((a100, t4, "network"), "a", "c"),
        (("CPU", "CPU", "node"), "d", "d"),
        (("CPU", t4, "network"), "a", "d"),
        ((t4, t4, "network"), "a", "b"),
        ((t4, t4, "node"), "a", "a"),
    ]


@pytest.mark.usefixtures("local_ray")
def test_hops_are_timed_both_ways_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair on two nodes cannot be placed on one: it is reported, the other one is measured."""
    monkeypatch.setattr("llmpq.profile.links.measure_hops", partial(measure_hops, turns=5))
    told: list[str] = []
    cluster = ClusterSpec.from_dict(CPUS)
    rows = profile_links(tmp_path / "t.csv", cluster, told.append)
    assert {(row.way, row.payload_bytes) for row in rows} == {
        (way, size) for way in ("gloo", "ray") for size in PAYLOADS_BYTES
    }
    assert all(0 < row.seconds < 1 and row.place == "node" for row in rows)
    assert any("not measured: the Ray cluster has one node only" in line for line in told)
    assert read_links(links_path(tmp_path / "t.csv")) == rows
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
