"""Runs under `s3-published` with predictions far too short: requests are preempted all along."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Finished, Request, Sampling
from actors.recovery.policy import RecoveryEvent
from actors.schedule.scheduler import QueueSizes
from actors.stage_figures import QueueDepth
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Plan
from planner.scheduling import PolicyOptions
from tests.actors.models import named, random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH

pytestmark = pytest.mark.usefixtures("local_ray")

PROMPTS = random_prompts(tuple(1 + 5 * i % PROMPT_LENGTH for i in range(24)))
SAMPLING = Sampling(ignore_eos=True)


def requests_expecting(tokens: int) -> list[Request]:
    return [
        Request(str(i), prompt, NEW_TOKENS, SAMPLING, expected_tokens=tokens)
        for i, prompt in enumerate(PROMPTS)
    ]


def crowded(sizes: QueueSizes, parks: bool) -> QueueSizes:
    """Room for two of the longest, whatever the plan says; preempted requests come back one way."""
    tokens = 2 * (PROMPT_LENGTH + NEW_TOKENS)
    return replace(
        sizes, n_slots=tokens, park_tokens_from=int(parks), parked_tokens=parks * sizes.kv_tokens
    )


class CrowdedGroup(StageGroup):
    """Stages of a plan with little memory that may be reserved."""

    def __init__(self, plan: Plan, folder: Path, options: GroupOptions, parks: bool) -> None:
        super().__init__(plan.spec, str(folder), options)
        self._pipeline.sizes = crowded(self._pipeline.sizes, parks)


def options_for(events: list[RecoveryEvent], transport: Any) -> GroupOptions:
    policy = PolicyOptions("s3-published", max_batch_size=6, prefill_chunk_tokens=4)
    return GroupOptions(policy=policy, transport=transport, on_event=events.append)


@pytest.fixture(scope="module")
def expected(tiny: tuple[Path, Any]) -> dict[str, list[int]]:
    return named(references(tiny[1], PROMPTS, NEW_TOKENS, ignore_eos=True))


@pytest.mark.parametrize(
    ("transport", "parks"),
    [("gloo", True), pytest.param("ray", False, marks=pytest.mark.rare)],
)
def test_a_stage_dies_while_requests_are_preempted(
    tiny: tuple[Path, Any],
    plan: Plan,
    expected: dict[str, list[int]],
    transport: Any,
    parks: bool,
) -> None:
    """Afterwards the stages serve another run, in which nothing is left of the first."""
    events: list[RecoveryEvent] = []
    found: dict[str, Finished] = {}
    before: QueueDepth | None = None
    with CrowdedGroup(plan, tiny[0], options_for(events, transport), parks) as group:
        for some in group.generate(requests_expecting(1)):
            assert not {each.custom_id for each in some} & set(found)
            found |= {each.custom_id: each for each in some}
            if len(found) >= 8 and before is None:
                before = group.observer.figures()[0].queue
                ray.kill(group.stages[1].actor)
        (queue,) = (each.queue for each in group.observer.figures() if each.queue is not None)
        again = {f.custom_id: f for some in group.generate(requests_expecting(2)) for f in some}
        (last,) = (each.queue for each in group.observer.figures() if each.queue is not None)
        ray.get([each.actor.leave_run.remote() for each in group.stages])
        (left,) = (each.queue for each in group.observer.figures() if each.queue is not None)
    assert replace(left.supervision, parked_now=last.supervision.parked_now) == last.supervision
    assert events
    for ended in (found, again):
        assert {name: list(each.token_ids) for name, each in ended.items()} == expected
    assert (queue.waiting, queue.in_slots) == (0, 0)
    assert before is not None
    for counts in (before.supervision, queue.supervision):
        assert counts.grown > 0
        assert (counts.parked > 0, counts.recomputed > 0) == (parks, not parks)


@pytest.mark.rare
def test_a_live_run_loses_and_doubles_no_token(
    tiny: tuple[Path, Any], plan: Plan, expected: dict[str, list[int]]
) -> None:
    """With a stage's death, and a cancelled row; `test_preemption.py` has more of those."""
    events: list[RecoveryEvent] = []
    tokens: dict[str, list[int]] = defaultdict(list)
    ended: set[str] = set()
    cancelled = ""
    with CrowdedGroup(plan, tiny[0], options_for(events, "gloo"), parks=True) as group:
        live = group.live()
        for request in requests_expecting(1):
            live.submit(request)
        live.close()
        killed = False
        for told in live.events():
            for each in told:
                assert each.custom_id not in ended | {cancelled}
                tokens[each.custom_id] += each.token_ids
                if each.finish_reason is not None:
                    ended.add(each.custom_id)
            begun = [name for name, some in tokens.items() if some and name not in ended]
            if not cancelled and len(ended) > 3 and begun:
                cancelled = begun[-1]
                live.cancel(cancelled)
            if len(ended) > 6 and not killed:
                killed = True
                ray.kill(group.stages[2].actor)
    assert events
    assert len(ended) == len(PROMPTS) - 1
    for name, found in tokens.items():
        assert found == expected[name][: len(found)]
        assert name == cancelled or len(found) == NEW_TOKENS


def test_a_plan_is_run_by_its_name(tiny: tuple[Path, Any], plan: Plan) -> None:
    rows = [
        {"custom_id": str(i), "prompt": list(prompt), "max_new_tokens": 1 + i % NEW_TOKENS}
        for i, prompt in enumerate(PROMPTS)
    ]
    found = {r.custom_id: r for r in plan.run(rows, policy="s3", max_batch_size=5)}
    limits = [1 + i % NEW_TOKENS for i in range(len(PROMPTS))]
    for i, wanted in enumerate(references(tiny[1], PROMPTS, limits)):
        assert list(found[str(i)].token_ids) == wanted
