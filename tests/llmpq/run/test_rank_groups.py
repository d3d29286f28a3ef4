"""A stage of two ranks beside one of a single device: the tokens of `generate`, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from actors.messages import Finished, Request, Sampling
from actors.processes.placement import place
from actors.recovery.policy import Recovery, RecoveryEvent
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Workload
from planner.plan.spec import PlanSpec
from tests.actors.models import random_prompts, reference
from tests.llmpq.conftest import BATCH, NEW_TOKENS, PROMPT_LENGTH

COUNT = 120
PROMPTS = random_prompts([1 + i % PROMPT_LENGTH for i in range(COUNT)])
TWO = "{name: two, nodes: [{name: a, accelerators: {CPU: 2}, threads: 1, memory_gib: 1}]}"
GROUP, SINGLE = 0, 1


@pytest.fixture(scope="module")
def three_cpus(worker_environment: dict[str, str]) -> Iterator[None]:
    head = {"num_cpus": 3, "include_dashboard": False, "include_log_monitor": False}
    cluster = RayCluster(initialize_head=True, head_node_args=head | {"no_monitor": True})
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=worker_environment)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def grouped(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> PlanSpec:
    """Two stages on CPUs, the first of which has two of them."""
    path = tmp_path_factory.mktemp("two") / "cluster.yaml"
    path.write_text(TWO)
    workload = Workload(BATCH, PROMPT_LENGTH, NEW_TOKENS)
    options: dict[str, Any] = {"dtype": "float32", "bits": [16], "keep_all_devices": True}
    spec = Cluster.from_yaml(path).plan(tiny[0], workload, **options).spec
    first, second = spec.stages
    divided = replace(first, devices=(first.device, "a/CPU:2"))
    return replace(spec, stages=(divided, second))


class Run:
    """Takes what a group generates, each request once, and its events."""

    def __init__(self) -> None:
        self.ended: dict[str, Finished] = {}
        self.events: list[RecoveryEvent] = []

    def of(self, group: StageGroup) -> Iterator[int]:
        """Yield how many have ended, after some more have."""
        requests = [
            Request(str(i), prompt, 1 + i % NEW_TOKENS, Sampling())
            for i, prompt in enumerate(PROMPTS)
        ]
        for batch in group.generate(requests):
            for each in batch:
                assert each.custom_id not in self.ended
                self.ended[each.custom_id] = each
            yield len(self.ended)

    def check(self, model: Any) -> None:
        assert len(self.ended) == COUNT
        for i in range(0, COUNT, 5):
            expected = reference(model, PROMPTS[i], 1 + i % NEW_TOKENS)
            assert list(self.ended[str(i)].token_ids) == expected


def signal_rank(group: StageGroup, stage: int, rank: int, what: int = signal.SIGKILL) -> None:
    """Send a signal to the process of a rank, which gets no chance to say good-bye."""
    actors = ray._private.state.actors()
    os.kill(actors[group.stages[stage].actor_ids[rank]]["Pid"], what)


@pytest.mark.usefixtures("three_cpus")
def test_tokens_are_those_of_generate_also_when_ranks_die(
    tiny: tuple[Path, Any], grouped: PlanSpec
) -> None:
    """First the one that follows, then the neighbour of the group, then its rank 0."""
    run = Run()
    options = GroupOptions(transport="gloo", on_event=run.events.append)
    deaths = {COUNT // 5: (GROUP, 1), 2 * COUNT // 5: (SINGLE, 0), 3 * COUNT // 5: (GROUP, 0)}
    with StageGroup(grouped, str(tiny[0]), options) as group:
        assert [len(stage.actor_ids) for stage in group.stages] == [2, 1]
        whole, rest = group.stats()
        for ended in run.of(group):
            for at in [at for at in deaths if at <= ended]:
                before = [stage.actor_ids for stage in group.stages]
                signal_rank(group, *deaths.pop(at))
        after = [stage.actor_ids for stage in group.stages]
    assert not deaths
    run.check(tiny[1])
    assert [(e.kind, e.stage) for e in run.events] == [
        ("died", GROUP),
        ("died", SINGLE),
        ("died", GROUP),
    ]
    assert after[SINGLE] == before[SINGLE], "it keeps its shard"
    assert not set(after[GROUP]) & set(before[GROUP]), "all ranks are started again"
    assert whole.weight_bytes and rest.weight_bytes
