"""A node that leaves for good while its device is in use: the rest is planned again and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from actors.recovery.policy import RecoveryEvent
from llmpq import Cluster, Plan, Workload
from llmpq.rows.results import Result
from quant.common.errors import DeviceLostError
from tests.actors.models import random_prompts, reference
from tests.llmpq.conftest import BATCH, NEW_TOKENS, PROMPT_LENGTH
from tests.llmpq.forked_workers import SET_UP

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

    def __init__(self, environment: dict[str, str]) -> None:
        head: dict[str, Any] = {"num_cpus": 1, "resources": {"T4": 1}, "include_dashboard": False}
        head |= SET_UP
        self.cluster = RayCluster(
            initialize_head=True, head_node_args=head | {"_system_config": LOOKS}
        )
        self.nodes = {
            name: self.cluster.add_node(num_cpus=1, resources={name: 1}, **SET_UP)
            for name in ("V100", "A100")
        }
        ray.init(address=self.cluster.address, log_to_driver=False, runtime_env=environment)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        ray.shutdown()
        self.cluster.shutdown()

    def remove(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@pytest.fixture
def three(tiny: tuple[Path, Any], tmp_path: Path) -> Plan:
    path = tmp_path / "three.yaml"
    path.write_text(THREE)
    workload = Workload(BATCH, PROMPT_LENGTH, NEW_TOKENS)
    options: dict[str, Any] = {"dtype": "float32", "bits": [16], "keep_all_devices": True}
    return Cluster.from_yaml(path).plan(tiny[0], workload, **options)


def test_a_session_stays_with_what_is_left(
    tiny: tuple[Path, Any], three: Plan, worker_environment: dict[str, str]
) -> None:
    """The call after the one that lost a device plans no more, and waits for nothing."""
    rows = [list(prompt) for prompt in PROMPTS]
    events: list[RecoveryEvent] = []
    with (
        Nodes(worker_environment) as nodes,
        three.session(replace_s=1.0, on_event=events.append) as session,
    ):
        results = session.run(rows)
        found = {next(results).custom_id}
        nodes.remove("V100")
        found |= {result.custom_id for result in results}
        again = list(session.run(rows[:9]))
        assert session.spec.origin is not None
        assert session.spec.origin.lost == ("b/V100-SXM2-16GB:0",)
    assert len(found) == COUNT
    assert [event.kind for event in events].count("replanned") == 1
    for result in again:
        prompt = PROMPTS[int(result.custom_id.removeprefix("row-"))]
        assert list(result.token_ids) == reference(tiny[1], prompt, NEW_TOKENS)


@pytest.mark.rare  # a device is lost above too
def test_what_is_left_is_planned_for_and_goes_on_until_it_does_not_fit(
    tiny: tuple[Path, Any], three: Plan, worker_environment: dict[str, str]
) -> None:
    """The second loss leaves too little, which ends the run with what it had."""
    model = tiny[1]
    results: dict[str, Result] = {}
    events: list[RecoveryEvent] = []
    gone_at = {COUNT // 4: "V100", COUNT // 2: "A100"}
    lost: DeviceLostError | None = None
    with Nodes(worker_environment) as nodes:
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
    for custom_id in list(results)[::4]:
        prompt = PROMPTS[int(custom_id.removeprefix("row-"))]
        assert list(results[custom_id].token_ids) == reference(model, prompt, NEW_TOKENS)
