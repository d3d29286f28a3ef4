"""Stages on several Ray nodes, each offering one kind of device as a resource. Where one leaves for
good while its device is in use, the rest is planned again and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Request, Sampling
from actors.processes.placement import place
from actors.processes.reservation import copies_granted
from actors.recovery.policy import RecoveryEvent
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan, Workload
from llmpq.rows.results import Result
from quant.common.errors import DeviceError, DeviceLostError
from tests.actors.models import random_prompts, references
from tests.llmpq.conftest import (
    BATCH,
    NEW_TOKENS,
    NODE,
    PROMPT_LENGTH,
    no_metrics,
    ray_cluster,
)

COUNT = 300
PROMPTS = random_prompts([1 + i % PROMPT_LENGTH for i in range(COUNT)])
LOOKS = {"health_check_period_ms": 500, "health_check_failure_threshold": 2}

# Any two of them hold the model, none alone does.
THREE = """
name: three
nodes:
  - {name: a, accelerators: {T4: 1}, usable_memory_gib: 0.0005}
  - {name: b, accelerators: {V100: 1}, usable_memory_gib: 0.0005}
  - {name: c, accelerators: {A100: 1}, usable_memory_gib: 0.0005}
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""


class Nodes:
    """A head with the T4, and a node for each other device; deaths are noticed in two seconds."""

    def __init__(self, cluster: Any, environment: dict[str, str]) -> None:
        self.cluster = cluster
        self.nodes: dict[str, Any] = {}
        self.fill()
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)

    def fill(self) -> None:
        for name in {"V100", "A100"} - {*self.nodes}:
            self.nodes[name] = self.cluster.add_node(num_cpus=1, resources={name: 1}, **NODE)

    def remove(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@pytest.fixture(scope="module")
def all_nodes(worker_environment: dict[str, str]) -> Iterator[Nodes]:
    head: dict[str, Any] = {"num_cpus": 1, "resources": {"T4": 1}, "_system_config": LOOKS}
    with no_metrics(), ray_cluster(**head) as cluster:
        yield Nodes(cluster, worker_environment)
        ray.shutdown()


@pytest.fixture
def nodes(all_nodes: Nodes) -> Nodes:
    """All of them, whatever an earlier test removed."""
    all_nodes.fill()
    return all_nodes


@pytest.fixture
def three(tiny: tuple[Path, Any], tmp_path: Path) -> Plan:
    path = tmp_path / "three.yaml"
    path.write_text(THREE)
    workload = Workload(BATCH, PROMPT_LENGTH, NEW_TOKENS)
    options: dict[str, Any] = {"dtype": "float32", "bits": [16], "keep_all_devices": True}
    return Cluster.from_yaml(path).plan(tiny[0], workload, **options)


@pytest.mark.rare  # `test_placement.py` has the rules; here a cluster of four nodes starts
@pytest.mark.usefixtures("nodes")
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
    for i, expected in enumerate(references(tiny[1], prompts, NEW_TOKENS)):
        assert list(found[str(i)].token_ids) == expected


@pytest.mark.usefixtures("nodes")
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


def test_a_session_stays_with_what_is_left(
    tiny: tuple[Path, Any], three: Plan, nodes: Nodes
) -> None:
    """The call after the one that lost a device plans no more, and waits for nothing."""
    rows = [list(prompt) for prompt in PROMPTS]
    events: list[RecoveryEvent] = []
    with three.session(replace_s=1.0, on_event=events.append) as session:
        results = session.run(rows)
        found = {next(results).custom_id}
        nodes.remove("V100")
        found |= {result.custom_id for result in results}
        again = list(session.run(rows[:9]))
        assert session.spec.origin is not None
        assert session.spec.origin.lost == ("b/V100-SXM2-16GB:0",)
    assert len(found) == COUNT
    assert [event.kind for event in events].count("replanned") == 1
    prompts = [PROMPTS[int(result.custom_id.removeprefix("row-"))] for result in again]
    expected = references(tiny[1], prompts, NEW_TOKENS)
    assert [list(result.token_ids) for result in again] == expected


@pytest.mark.rare  # a device is lost above too
def test_what_is_left_is_planned_for_and_goes_on_until_it_does_not_fit(
    tiny: tuple[Path, Any], three: Plan, nodes: Nodes
) -> None:
    """The second loss leaves too little, which ends the run with what it had."""
    model = tiny[1]
    results: dict[str, Result] = {}
    events: list[RecoveryEvent] = []
    gone_at = {COUNT // 4: "V100", COUNT // 2: "A100"}
    lost: DeviceLostError | None = None
    run = three.run([list(prompt) for prompt in PROMPTS], replace_s=1.0, on_event=events.append)
    try:
        for result in run:
            assert result.custom_id not in results
            results[result.custom_id] = result
            for at in [at for at in gone_at if at <= len(results)]:
                nodes.remove(gone_at.pop(at))
    except DeviceLostError as error:
        lost = error
    (replanned,) = [event.text for event in events if event.kind == "replanned"]
    assert "b/V100" in replanned.split(" gone;")[0]
    assert "a/T4" in replanned.split(" gone;")[1]
    assert lost is not None
    assert "no plan for what is left" in str(lost)
    assert COUNT // 2 <= len(results) < COUNT
    assert all(result.error is None for result in results.values())
    some = list(results)[::4]
    prompts = [PROMPTS[int(custom_id.removeprefix("row-"))] for custom_id in some]
    expected = references(model, prompts, NEW_TOKENS)
    assert [list(results[custom_id].token_ids) for custom_id in some] == expected
