"""Live runs: rows come and go at any time, and a stage's death costs and doubles no token."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Finished, Request, Sampling
from actors.recovery.policy import RecoveryEvent
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Plan
from planner.scheduling import PolicyOptions, RequestSchedule
from tests.actors.models import named, random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH

pytestmark = pytest.mark.usefixtures("local_ray")

PROMPTS = random_prompts(tuple(1 + 5 * i % PROMPT_LENGTH for i in range(16)))
CANCELLED, TOO_LONG = "5", "too long"


@pytest.mark.parametrize(
    ("transport", "policy"),
    [
        ("gloo", PolicyOptions("orca", prefill_chunk_tokens=4)),
        ("gloo", PolicyOptions("exegpt", schedule=RequestSchedule("rra", 4, 6, 3, 3, 2, 8.0))),
        pytest.param("ray", PolicyOptions(), marks=pytest.mark.rare),
    ],
)
def test_rows_come_one_by_one_while_a_stage_dies(
    tiny: tuple[Path, Any], plan: Plan, transport: Any, policy: PolicyOptions
) -> None:
    """One row is cancelled, unless all its tokens come at once; one cannot be run; afterwards the
    stages serve a run as always.
    """
    faults: list[RecoveryEvent] = []
    options = GroupOptions(transport=transport, policy=policy, on_event=faults.append)
    requests = [Request(str(i), p, NEW_TOKENS, Sampling()) for i, p in enumerate(PROMPTS)]
    tokens: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, str | None] = {}
    with StageGroup(plan.spec, str(tiny[0]), options) as group:
        live = group.live()
        coming = iter(requests)
        live.submit(next(coming))
        live.submit(Request(TOO_LONG, PROMPTS[0], 1000, Sampling()))
        is_cancelled = False
        for told in live.events():
            for each in told:
                assert each.custom_id not in ended
                assert not (is_cancelled and each.custom_id == CANCELLED)
                tokens[each.custom_id] += each.token_ids
                if each.finish_reason is not None:
                    ended[each.custom_id] = each.error
            following = next(coming, None)
            if following is None:
                live.close()
                continue
            live.submit(following)
            if tokens[CANCELLED] and CANCELLED not in ended:
                live.cancel(CANCELLED)
                is_cancelled = True
            if following.custom_id == "9":
                ray.kill(group.stages[1].actor)
        (stats, *_) = group.observer.figures()
        after: list[Finished] = [each for some in group.generate(requests[:3]) for each in some]
    assert [fault.stage for fault in faults] == [1]
    assert stats.queue is not None
    assert (stats.queue.waiting, stats.queue.in_slots, stats.queue.micro_batches) == (0, 0, 0)
    assert "their sum at most" in str(ended.pop(TOO_LONG))
    whole = named(references(tiny[1], PROMPTS, NEW_TOKENS))
    assert {each.custom_id: list(each.token_ids) for each in after} == {
        i: whole[i] for i in ("0", "1", "2")
    }
    begun = tokens.pop(CANCELLED)
    assert begun
    cancelled = whole.pop(CANCELLED)
    assert begun == (cancelled if CANCELLED in ended else cancelled[: len(begun)])
    ended.pop(CANCELLED, None)
    assert ended == dict.fromkeys(whole)
    assert {i: found for i, found in tokens.items() if found} == whole
