"""Runs under the policy `orca`: mixed batches, prompts in parts, more requests than equal slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Finished, Request, Sampling
from actors.processes.meter import TelemetryOptions
from actors.recovery.policy import RecoveryEvent
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Plan
from planner.scheduling import PolicyOptions
from quant.common.errors import SpecError
from tests.actors.models import random_prompts, references
from tests.llmpq.conftest import BATCH, NEW_TOKENS, PROMPT_LENGTH

pytestmark = pytest.mark.usefixtures("local_ray")

PROMPTS = random_prompts(tuple(1 + 5 * i % PROMPT_LENGTH for i in range(24)))


@pytest.mark.parametrize(
    "options", [{}, {"max_batch_size": 5, "prefill_chunk_tokens": 3, "transport": "ray"}]
)
def test_tokens_are_those_of_generate(
    tiny: tuple[Path, Any], plan: Plan, options: dict[str, Any]
) -> None:
    """Rows of many lengths and limits, which join and leave at any iteration."""
    rows = [
        {"custom_id": str(i), "prompt": list(prompt), "max_new_tokens": 1 + i % NEW_TOKENS}
        for i, prompt in enumerate(PROMPTS)
    ]
    found = {r.custom_id: r for r in plan.run(rows, policy="orca", **options)}
    assert len(found) == len(rows)
    limits = [1 + i % NEW_TOKENS for i in range(len(PROMPTS))]
    for i, expected in enumerate(references(tiny[1], PROMPTS, limits)):
        assert list(found[str(i)].token_ids) == expected


def test_short_rows_leave_room_for_more_than_the_plan_has_slots(
    tiny: tuple[Path, Any], plan: Plan
) -> None:
    """Rows of a quarter of a slot's tokens: more of them are in flight than slots were planned."""
    telemetry = TelemetryOptions(trace=True)
    policy = PolicyOptions("orca", max_batch_size=6)
    options = GroupOptions(policy=policy, telemetry=telemetry)
    requests = [Request(str(i), PROMPTS[i][:3], 3, Sampling()) for i in range(24)]
    with StageGroup(plan.spec, str(tiny[0]), options) as group:
        ended: list[Finished] = [each for some in group.generate(requests) for each in some]
        spans = ray.get(group.stages[0].spans())
    assert {each.custom_id for each in ended} == {str(i) for i in range(24)}
    assert group.sizes.slots == 18 > BATCH
    assert spans is not None
    assert max(spans.rows["requests"]) == 6


@pytest.mark.rare  # `test_live_run.py` loses one under the same policy
def test_a_stage_that_dies_is_survived_token_for_token(tiny: tuple[Path, Any], plan: Plan) -> None:
    events: list[RecoveryEvent] = []
    policy = PolicyOptions("orca", prefill_chunk_tokens=4)
    options = GroupOptions(policy=policy, on_event=events.append)
    requests = [Request(str(i), p, NEW_TOKENS, Sampling()) for i, p in enumerate(PROMPTS)]
    found: dict[str, Finished] = {}
    killed = False
    with StageGroup(plan.spec, str(tiny[0]), options) as group:
        for some in group.generate(requests):
            assert not {each.custom_id for each in some} & set(found)
            found |= {each.custom_id: each for each in some}
            if len(found) >= 8 and not killed:
                killed = True
                ray.kill(group.stages[1].actor)
    assert events
    for i, expected in enumerate(references(tiny[1], PROMPTS, NEW_TOKENS)):
        assert list(found[str(i)].token_ids) == expected


def test_options_of_a_policy_are_checked_before_anything_starts(plan: Plan) -> None:
    with pytest.raises(SpecError, match="policy is 'fifo'"):
        plan.run([[1]], policy="fifo")
    with pytest.raises(SpecError, match="prefill_chunk_tokens has no effect with policy static"):
        plan.run([[1]], prefill_chunk_tokens=8)
