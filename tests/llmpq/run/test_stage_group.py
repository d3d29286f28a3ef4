"""Feeding the first stage's actor: any number of requests, taken in as they are needed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Request, Sampling
from actors.recovery.generation import MOST_AHEAD
from actors.recovery.policy import Recovery
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Plan
from quant.common.errors import StageLostError
from tests.actors.models import random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS

TOGETHER = 8
"""In place of `LEAST_TOGETHER`, and more than the slots of the plan."""
AHEAD = (1 + MOST_AHEAD) * TOGETHER
COUNT = 2 * AHEAD


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.recovery.generation.LEAST_TOGETHER", TOGETHER)


class Source:
    """Requests one by one; knows how many were taken."""

    def __init__(self, prompts: list[tuple[int, ...]]) -> None:
        self.taken = 0
        self._prompts = prompts

    def __iter__(self) -> Iterator[Request]:
        for i, prompt in enumerate(self._prompts):
            self.taken += 1
            yield Request(str(i), prompt, 1 + i % NEW_TOKENS, Sampling())


@pytest.fixture(scope="module")
def group(local_ray: None, tiny: tuple[Path, Any], plan: Plan) -> Iterator[StageGroup]:
    off = GroupOptions(transport="gloo", recovery=Recovery(retries=0))
    with StageGroup(plan.spec, str(tiny[0]), off) as stages:
        yield stages


def test_a_long_queue_is_taken_in_as_needed_and_each_request_ends_once(
    group: StageGroup, tiny: tuple[Path, Any]
) -> None:
    """And a run that was left does not disturb the next ones."""
    prompts = random_prompts([1 + i % 16 for i in range(COUNT)])
    source = Source(prompts)
    ended: dict[str, tuple[int, ...]] = {}
    for finished in group.generate(source):
        for each in finished:
            assert each.custom_id not in ended
            ended[each.custom_id] = each.token_ids
        assert source.taken <= len(ended) + group.sizes.slots + AHEAD
        assert len(group.observer.figures()) == 3, "answered while the stages compute"
    left = group.generate(Source(prompts))
    next(left)
    left.close()
    assert list(group.generate([])) == []
    again = [f for batch in group.generate(Source(prompts[:7])) for f in batch]
    assert {f.custom_id: f.token_ids for f in again} == {str(i): ended[str(i)] for i in range(7)}
    assert len(ended) == COUNT
    some = range(0, COUNT, 71)
    limits = [1 + i % NEW_TOKENS for i in some]
    expected = references(tiny[1], [prompts[i] for i in some], limits)
    assert [list(ended[str(i)]) for i in some] == expected


def test_a_killed_stage_is_named_where_it_is_not_replaced(group: StageGroup) -> None:
    """As when memory is short: the kernel gives the process no chance to say good-bye. It is known
    by its end, not by its silence.
    """
    running = group.generate(Source(random_prompts([5] * 40 * COUNT)))
    next(running)
    actors = ray._private.state.actors()
    os.kill(actors[group.stages[2].actor_ids[0]]["Pid"], signal.SIGKILL)
    with pytest.raises(StageLostError, match=r"stage 2's process died"):
        list(running)
