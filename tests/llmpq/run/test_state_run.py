"""Plans of a model with constant states on Ray, under every policy: tokens of `generate`, in the
memory that was planned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from actors.messages import Request, Sampling
from actors.recovery.policy import RecoveryEvent
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan, Workload
from planner.cluster.spec import ClusterSpec
from planner.scheduling import PolicyOptions
from tests.actors.configs import STATE_CONFIGS
from tests.actors.models import named, random_prompts, references, save_tiny
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH
from tests.llmpq.divided_plans import divided_plan

CLUSTER = """
name: two-emulated
nodes:
  - {name: a, accelerators: {T4: 1}, usable_memory_gib: 0.0009}
  - {name: b, accelerators: {A100-SXM4-40GB: 1}, usable_memory_gib: 0.0009}
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""

pytestmark = pytest.mark.usefixtures("local_ray")
PROMPTS = random_prompts(tuple(1 + 5 * i % PROMPT_LENGTH for i in range(14)))
BATCH = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("states")
    return folder, save_tiny(folder, STATE_CONFIGS["qwen3_5"])


def plan_of(folder: Path) -> Plan:
    cluster = Cluster(ClusterSpec.from_dict(yaml.safe_load(CLUSTER)))
    given: dict[str, Any] = {"dtype": "float32", "bits": [16], "keep_all_devices": True}
    return cluster.plan(folder, Workload(BATCH, PROMPT_LENGTH, NEW_TOKENS), **given)


def check(plan: Plan, model: Any, **options: Any) -> None:
    rows = [
        {"custom_id": str(i), "prompt": list(prompt), "max_new_tokens": 1 + i % NEW_TOKENS}
        for i, prompt in enumerate(PROMPTS)
    ]
    found = {each.custom_id: list(each.token_ids) for each in plan.run(rows, **options)}
    limits = [1 + i % NEW_TOKENS for i in range(len(PROMPTS))]
    assert found == named(references(model, PROMPTS, limits))


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        pytest.param("static", {}, marks=pytest.mark.rare),
        ("orca", {"max_batch_size": 3, "prefill_chunk_tokens": 4}),
        pytest.param("s3", {"prefill_chunk_tokens": 4}, marks=pytest.mark.rare),
    ],
)
def test_tokens_are_those_of_generate(
    policy: str, options: dict[str, Any], model: tuple[Path, Any]
) -> None:
    """Memory has room for the states of three requests, also where batches could have six."""
    plan = plan_of(model[0])
    assert len(plan.stages) == 2
    assert sum(stage.state_bytes for stage in plan.spec.stages) > 0
    check(plan, model[1], policy=policy, **options)


@pytest.mark.rare
def test_stages_that_prefill_hand_over_states(model: tuple[Path, Any]) -> None:
    check(Plan(divided_plan(model[0])), model[1])


@pytest.mark.rare
def test_a_stage_that_dies_is_survived_token_for_token(model: tuple[Path, Any]) -> None:
    """Requests go on from their tokens, with states that begin anew in the slots of others."""
    events: list[RecoveryEvent] = []
    policy = PolicyOptions("orca", prefill_chunk_tokens=4)
    options = GroupOptions(policy=policy, on_event=events.append)
    requests = [Request(str(i), p, NEW_TOKENS, Sampling()) for i, p in enumerate(PROMPTS)]
    found: dict[str, list[int]] = {}
    with StageGroup(plan_of(model[0]).spec, str(model[0]), options) as group:
        for some in group.generate(requests):
            found |= {each.custom_id: list(each.token_ids) for each in some}
            if len(found) >= 4 and not events:
                ray.kill(group.stages[1].actor)
    assert events
    assert found == named(references(model[1], PROMPTS, NEW_TOKENS))
