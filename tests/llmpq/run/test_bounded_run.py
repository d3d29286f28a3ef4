"""Runs under a schedule for a bound on latency: tokens are those of `generate`, also when a stage
dies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Finished, Request, Sampling
from actors.recovery.policy import RecoveryEvent
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan
from llmpq.cli.run_options import serve_parser
from llmpq.cli.serve import _run_options
from planner.lengths import LengthDistribution, RequestLengths
from planner.scheduling import RequestSchedule
from quant.common.errors import SpecError
from tests.actors.models import named, random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH
from tests.planner.bounded import bounded

pytestmark = pytest.mark.usefixtures("local_ray")

PROMPTS = random_prompts(tuple(1 + 5 * i % PROMPT_LENGTH for i in range(24)))
SCHEDULE = RequestSchedule("rra", 4, 9, 3, 3, 2, 8.0)


@pytest.fixture(scope="module")
def exegpt(plan: Plan) -> Plan:
    """The plan under a schedule for more requests than it has room for of the longest."""
    return Plan(bounded(plan.spec, SCHEDULE))


@pytest.mark.parametrize("transport", ["gloo", pytest.param("ray", marks=pytest.mark.rare)])
def test_a_stage_that_dies_is_survived_token_for_token(
    tiny: tuple[Path, Any], exegpt: Plan, transport: Any
) -> None:
    """Rows of many lengths and limits; what was in flight goes on from its tokens."""
    events: list[RecoveryEvent] = []
    options = GroupOptions(policy=exegpt.spec.policy, transport=transport, on_event=events.append)
    limits = [1 + i % NEW_TOKENS for i in range(len(PROMPTS))]
    rows = enumerate(zip(PROMPTS, limits, strict=True))
    requests = [Request(str(i), *row, Sampling()) for i, row in rows]
    found: dict[str, Finished] = {}
    with StageGroup(exegpt.spec, str(tiny[0]), options) as group:
        for some in group.generate(requests):
            assert not {each.custom_id for each in some} & set(found)
            found |= {each.custom_id: each for each in some}
            if len(found) >= 3 and not events:
                ray.kill(group.stages[1].actor)
        stats = group.observer.figures()
    assert [event.stage for event in events] == [1]
    assert {name: list(each.token_ids) for name, each in found.items()} == named(
        references(tiny[1], PROMPTS, limits)
    )
    assert all(each.mixed.micro_batches == 0 for each in stats)
    assert stats[0].queue is not None
    assert stats[0].queue.slots == group.sizes.slots == 13
    assert stats[0].queue.latencies.requests == len(PROMPTS)


def test_a_plan_under_a_bound_is_run_by_its_schedule(
    tiny: tuple[Path, Any], cluster_file: Path
) -> None:
    """As planned, without another word."""
    lengths = RequestLengths(
        LengthDistribution.of_sample([len(each) for each in PROMPTS]),
        LengthDistribution.of_sample(range(1, NEW_TOKENS + 1)),
    )
    cluster = Cluster.from_yaml(cluster_file)
    options: dict[str, Any] = {"dtype": "float32", "bits": [16], "schedule": "rra"}
    plan = cluster.plan(tiny[0], lengths, max_request_latency_s="inf", **options)
    assert plan.spec.policy.schedule is not None
    rows = [
        {"custom_id": str(i), "prompt": list(each), "max_new_tokens": 1 + i % NEW_TOKENS}
        for i, each in enumerate(PROMPTS)
    ]
    found = {each.custom_id: list(each.token_ids) for each in plan.run(rows)}
    limits = [1 + i % NEW_TOKENS for i in range(len(PROMPTS))]
    assert found == named(references(tiny[1], PROMPTS, limits))


def test_rows_of_a_run_have_their_tokens(tiny: tuple[Path, Any], exegpt: Plan) -> None:
    rows = [{"custom_id": str(i), "prompt": list(each)} for i, each in enumerate(PROMPTS)]
    found = {each.custom_id: list(each.token_ids) for each in exegpt.run(rows)}
    assert found == named(references(tiny[1], PROMPTS, NEW_TOKENS))


def test_a_plan_without_a_schedule_is_refused_before_anything_starts(plan: Plan) -> None:
    with pytest.raises(SpecError, match=r"the plan has none; .* --max_request_latency_s"):
        plan.run([[1]], policy="exegpt")


def test_a_server_follows_the_schedule_of_its_plan() -> None:
    options = serve_parser().parse(["--plan", "plan.json"])
    assert _run_options(options, "exegpt").policy == "exegpt"
    assert _run_options(options, "static").policy == "orca"


def test_a_schedule_has_no_other_options(exegpt: Plan) -> None:
    with pytest.raises(SpecError, match="max_batch_size has no effect with policy exegpt"):
        exegpt.run([[1]], max_batch_size=4)
