"""Stages on several Ray nodes, each offering one kind of device as a resource."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from actors.messages import Request, Sampling
from actors.processes.placement import place
from actors.processes.reservation import copies_granted
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan, Workload
from quant.common.errors import DeviceError
from tests.actors.models import random_prompts, reference
from tests.llmpq.conftest import NEW_TOKENS
from tests.llmpq.forked_workers import SET_UP


@pytest.fixture(scope="module")
def ray_nodes(worker_environment: dict[str, str]) -> Iterator[None]:
    """A head without devices, a node of a T4, and one of a V100 and an A100."""
    head = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False}
    cluster = RayCluster(initialize_head=True, head_node_args=head | SET_UP | {"no_monitor": True})
    cluster.add_node(num_cpus=1, resources={"T4": 1}, **SET_UP)
    cluster.add_node(num_cpus=2, resources={"V100": 1, "A100": 1}, **SET_UP)
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=worker_environment)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.rare  # `test_placement.py` has the rules; here a cluster of four nodes starts
@pytest.mark.usefixtures("ray_nodes")
def test_every_stage_runs_on_the_node_of_its_device(tiny: tuple[Path, Any], plan: Plan) -> None:
    with StageGroup(plan.spec, str(tiny[0])) as group:
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
        actors = ray._private.state.actors()
        for stage, handle in zip(plan.stages, group.stages, strict=True):
            resources = nodes[actors[handle.actor_ids[0]]["Address"]["NodeID"]]
            assert stage.accelerator.split("-")[0] in resources
        second = StageGroup(plan.spec, str(tiny[0]), GroupOptions(placement_s=1.0))
        with pytest.raises(DeviceError, match="in use"):
            second.__enter__()
        placements = place(plan.stages, ray.cluster_resources())
        assert copies_granted(placements, 2, limit_s=1.0) == 0
        prompts = random_prompts((5, 11, 1, 8, 16, 2, 11))
        requests = [Request(str(i), p, NEW_TOKENS, Sampling()) for i, p in enumerate(prompts)]
        found = {each.custom_id: each for some in group.generate(requests) for each in some}
    assert copies_granted(placements, 2) == 1
    for i, prompt in enumerate(prompts):
        assert list(found[str(i)].token_ids) == reference(tiny[1], prompt, NEW_TOKENS)


@pytest.mark.usefixtures("ray_nodes")
def test_detected_from_the_live_cluster(tmp_path: Path) -> None:
    detected = Cluster.detect()
    assert sorted(d.accelerator.name.split("-")[0] for d in detected.spec.devices) == [
        "A100",
        "T4",
        "V100",
    ]
    path = tmp_path / "found.yaml"
    path.write_text(detected.to_yaml())
    assert Cluster.from_yaml(path).spec == detected.spec
    plan = detected.plan("opt-13b", Workload(4, 64, 16))
    assert sum(len(stage.layers) for stage in plan.stages) == 40
