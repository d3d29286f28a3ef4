"""Stages on several Ray nodes, each offering one kind of device as a resource."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from actors.stage_group import GroupOptions, StageGroup, Timeouts
from llmpq import Cluster, Plan, Workload
from quant.common.errors import DeviceError
from tests.actors.models import random_prompts, reference
from tests.llmpq.conftest import NEW_TOKENS


@pytest.fixture(scope="module")
def ray_nodes(worker_environment: dict[str, str]) -> Iterator[None]:
    """A head without devices, and a node each for T4, V100 and A100."""
    cluster = RayCluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for name in ("T4", "V100", "A100"):
        cluster.add_node(num_cpus=1, resources={name: 1})
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=worker_environment)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.usefixtures("ray_nodes")
def test_every_stage_runs_on_the_node_of_its_device(tiny: tuple[Path, Any], plan: Plan) -> None:
    with StageGroup(plan.spec, str(tiny[0])) as group:
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
        actors = ray._private.state.actors()
        for stage, handle in zip(plan.stages, group.stages, strict=True):
            resources = nodes[actors[handle.actor_id]["Address"]["NodeID"]]
            assert stage.accelerator.split("-")[0] in resources
        second = StageGroup(
            plan.spec, str(tiny[0]), GroupOptions(timeouts=Timeouts(placement_s=1.0))
        )
        with pytest.raises(DeviceError, match="in use"):
            second.__enter__()
    prompts = random_prompts((5, 11, 1, 8, 16, 2, 11))
    results = {r.custom_id: r for r in plan.run([list(p) for p in prompts])}
    for i, prompt in enumerate(prompts):
        assert list(results[f"row-{i}"].token_ids) == reference(tiny[1], prompt, NEW_TOKENS)


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
