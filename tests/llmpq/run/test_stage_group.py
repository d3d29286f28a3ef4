"""Feeding the first stage's actor: any number of requests, taken in as they are needed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Request, Sampling, Transport
from actors.recovery.generation import CHUNKS_AHEAD, LEAST_CHUNK_REQUESTS
from actors.recovery.policy import Recovery
from actors.stage_group import StageGroup
from llmpq import Plan
from quant.common.errors import DeviceError, StageLostError
from tests.actors.models import random_prompts, reference
from tests.llmpq.conftest import NEW_TOKENS

pytestmark = pytest.mark.usefixtures("local_ray")

TRANSPORTS: tuple[Transport, ...] = ("ray", "gloo")
COUNT = 3 * LEAST_CHUNK_REQUESTS + 5


class Source:
    """Requests one by one; knows how many were taken."""

    def __init__(self, prompts: list[tuple[int, ...]]) -> None:
        self.taken = 0
        self._prompts = prompts

    def __iter__(self) -> Iterator[Request]:
        for i, prompt in enumerate(self._prompts):
            self.taken += 1
            yield Request(str(i), prompt, 1 + i % NEW_TOKENS, Sampling())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_long_queue_is_taken_in_as_needed_and_each_request_ends_once(
    tiny: tuple[Path, Any], plan: Plan, transport: Transport
) -> None:
    """And a run that was left does not disturb the next ones."""
    prompts = random_prompts([1 + i % 16 for i in range(COUNT)])
    source = Source(prompts)
    ended: dict[str, tuple[int, ...]] = {}
    with StageGroup(plan.spec, str(tiny[0]), transport=transport) as group:
        for finished in group.generate(source):
            for each in finished:
                assert each.custom_id not in ended
                ended[each.custom_id] = each.token_ids
            chunks_used = len(ended) // LEAST_CHUNK_REQUESTS
            assert source.taken <= (chunks_used + 1 + CHUNKS_AHEAD) * LEAST_CHUNK_REQUESTS
            assert len(group.stats()) == 3, "answered while the stages compute"
        left = group.generate(Source(prompts))
        next(left)
        left.close()
        assert list(group.generate([])) == []
        again = [f for batch in group.generate(Source(prompts[:7])) for f in batch]
    assert {f.custom_id: f.token_ids for f in again} == {str(i): ended[str(i)] for i in range(7)}
    assert len(ended) == COUNT
    for i in range(0, COUNT, 7):
        assert list(ended[str(i)]) == reference(tiny[1], prompts[i], 1 + i % NEW_TOKENS)


def kill_process_of(group: StageGroup, stage: int) -> None:
    """As the kernel does when memory is short: the process gets no chance to say good-bye."""
    actors = ray._private.state.actors()
    os.kill(actors[group._actors[stage]._actor_id.hex()]["Pid"], signal.SIGKILL)


@pytest.mark.parametrize(("transport", "stage"), [("ray", 1), ("gloo", 2)])
def test_a_killed_stage_is_named_within_seconds_where_it_is_not_replaced(
    tiny: tuple[Path, Any], plan: Plan, transport: Transport, stage: int
) -> None:
    off = Recovery(retries=0)
    with StageGroup(plan.spec, str(tiny[0]), transport=transport, recovery=off) as group:
        running = group.generate(Source(random_prompts([5] * 50 * COUNT)))
        next(running)
        kill_process_of(group, stage)
        began = time.monotonic()
        with pytest.raises(StageLostError, match=rf"stage {stage}'s process died"):
            list(running)
        assert time.monotonic() - began < 10.0


def test_stages_that_cannot_meet_are_left_to_ray_unless_gloo_was_asked_for(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageGroup, "_meet", cannot_meet)
    with pytest.warns(UserWarning, match=r"no port.*by Ray") as warned:
        assert not StageGroup(plan.spec, "model")._link()
    assert len(warned) == 1
    assert not StageGroup(plan.spec, "model", transport="ray")._link()
    with pytest.raises(DeviceError, match="no port"):
        StageGroup(plan.spec, "model", transport="gloo")._link()


def cannot_meet(_: StageGroup) -> None:
    raise DeviceError("no port")
