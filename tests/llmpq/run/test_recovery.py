"""Stages that die, hang and fail while they generate: the tokens of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Finished, Request, Sampling
from actors.recovery.policy import Recovery, RecoveryEvent
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage_group import GroupOptions, StageGroup
from actors.transport import Transport
from llmpq import Plan
from quant.loading.cache_settings import CacheSettings
from tests.actors.configs import LAYERS
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import random_prompts, stages_of
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH
from tests.llmpq.faulty import LARGEST, FaultyActor
from tests.llmpq.gpu_stages import GpuStageActor

pytestmark = pytest.mark.usefixtures("local_ray")

COUNT = 240
PROMPTS = random_prompts([1 + i % PROMPT_LENGTH for i in range(COUNT)])
SAMPLED = Sampling(temperature=1.0, top_k=20, seed=3, ignore_eos=True)


def requests(count: int) -> Iterator[Request]:
    """Every third one sampled."""
    for i, prompt in enumerate(PROMPTS[:count]):
        yield Request(str(i), prompt, 1 + i % NEW_TOKENS, Sampling() if i % 3 else SAMPLED)


class Recorder:
    """Takes what a group gives, each request once, and its events."""

    def __init__(self) -> None:
        self.ended: dict[str, Finished] = {}
        self.events: list[RecoveryEvent] = []

    def take(self, batch: Iterable[Finished]) -> None:
        for each in batch:
            assert each.custom_id not in self.ended
            self.ended[each.custom_id] = each

    def tokens(self) -> dict[str, tuple[int, ...]]:
        return {i: f.token_ids for i, f in self.ended.items() if f.finish_reason != "error"}


@pytest.fixture(scope="module")
def undisturbed(tiny: tuple[Path, Any]) -> dict[str, tuple[int, ...]]:
    """Without Ray, in stages and micro-batches of other sizes."""
    stages = stages_of(tiny[0], (0, 2, LAYERS), 40, PROMPT_LENGTH + NEW_TOKENS)
    scheduler = StaticScheduler(QueueSizes(40, 20, 20, stages[0].spec.max_tokens), len(stages))
    scheduler.add(list(requests(COUNT)))
    recorder = Recorder()
    recorder.take(chain.from_iterable(drive(scheduler, LocalPipeline(stages))))
    assert len(recorder.ended) == COUNT
    return recorder.tokens()


def send(group: StageGroup, stage: int, what: int) -> None:
    """A signal to the stage's process, which gets no chance to say good-bye."""
    actors = ray._private.state.actors()
    os.kill(actors[group.stages[stage].actor_ids[0]]["Pid"], what)


class FaultyGroup(StageGroup):
    actor_class = FaultyActor


class GpuGroup(StageGroup):
    actor_class = GpuStageActor


@pytest.mark.parametrize(
    ("kind", "transport"),
    [(StageGroup, "gloo"), pytest.param(GpuGroup, "auto", marks=pytest.mark.rare)],
)
def test_stages_that_die_or_hang_are_started_again_and_no_token_differs(
    kind: type[StageGroup],
    transport: Transport,
    tiny: tuple[Path, Any],
    plan: Plan,
    undisturbed: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    """The middle one hangs, then the first and the last one die together."""
    recorder = Recorder()
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    faults = {COUNT // 4: [(1, stop)], COUNT // 2: [(0, kill), (2, kill)]}
    options = GroupOptions(
        cache=CacheSettings(str(tmp_path)),
        transport=transport,
        recovery=Recovery(hang_s=5.0),  # two cores may be busy with other tests for a while
        on_event=recorder.events.append,
    )
    with kind(plan.spec, str(tiny[0]), options) as group:
        survivors = [group.stages[0].actor_ids[0], group.stages[2].actor_ids[0]]
        for batch in group.generate(requests(COUNT)):
            recorder.take(batch)
            for at in [at for at in faults if at <= len(recorder.ended)]:
                kept = [group.stages[0].actor_ids[0], group.stages[2].actor_ids[0]]
                assert kept == survivors, "they keep their shards"
                for stage, what in faults.pop(at):
                    send(group, stage, what)
        assert group.unfinished() == ()
    assert not faults
    assert recorder.tokens() == undisturbed
    kinds = [(e.kind, e.stage) for e in recorder.events if e.kind != "waiting"]
    assert kinds[0] == ("hung", 1)
    assert kinds[1:]
    assert set(kinds[1:]) <= {("died", 0), ("died", 2)}
    assert all(event.lost_s > 0 for event in recorder.events)
    assert f"stage 1 ({plan.stages[1].device}) hung" in recorder.events[0].text


@pytest.fixture(scope="module")
def faulty(
    local_ray: None, tiny: tuple[Path, Any], plan: Plan
) -> Iterator[tuple[StageGroup, list[RecoveryEvent]]]:
    events: list[RecoveryEvent] = []
    options = GroupOptions(transport="ray", recovery=Recovery(retries=1), on_event=events.append)
    with FaultyGroup(plan.spec, str(tiny[0]), options) as group:
        yield group, events


def test_a_poison_row_is_found_and_the_others_finish(
    faulty: tuple[StageGroup, list[RecoveryEvent]], undisturbed: dict[str, tuple[int, ...]]
) -> None:
    group, events = faulty
    events.clear()
    made = list(requests(30))
    made.insert(9, Request("raises", PROMPTS[9], 3, Sampling()))
    recorder = Recorder()
    for batch in group.generate(made):
        recorder.take(batch)
    assert recorder.tokens() == {str(i): undisturbed[str(i)] for i in range(30)}
    found = recorder.ended["raises"]
    assert found.finish_reason == "error"
    assert found.error is not None
    assert found.error.startswith("stage 1 (")
    assert "in 2 of them it ran alone" in found.error
    assert {event.kind for event in events} == {"failed", "given up"}


def test_micro_batches_are_halved_until_they_fit(
    faulty: tuple[StageGroup, list[RecoveryEvent]], undisturbed: dict[str, tuple[int, ...]]
) -> None:
    group, events = faulty
    events.clear()
    sizes = group.sizes
    assert max(sizes.prefill_micro_batch, sizes.decode_micro_batch) > LARGEST
    made = [
        replace(r, custom_id=f"large-{r.custom_id}") for r in requests(40) if int(r.custom_id) % 3
    ]
    recorder = Recorder()
    with pytest.warns(UserWarning, match=r"stage 1 .* memory .* asked for 2147483648; .* halved"):
        recorder.take(chain.from_iterable(group.generate(made)))
    assert recorder.tokens() == {r.custom_id: undisturbed[r.custom_id[6:]] for r in made}
    assert 1 <= len(events) <= 2
    assert {event.kind for event in events} == {"memory"}
    assert (
        1 <= group.sizes.prefill_micro_batch <= LARGEST or group.sizes.decode_micro_batch <= LARGEST
    )


@pytest.mark.rare  # over gloo it dies above
def test_a_first_stage_that_dies_is_replaced_over_ray_too(
    faulty: tuple[StageGroup, list[RecoveryEvent]], undisturbed: dict[str, tuple[int, ...]]
) -> None:
    group, events = faulty
    events.clear()
    recorder = Recorder()
    for batch in group.generate(requests(200)):
        if not recorder.ended:
            send(group, 0, signal.SIGKILL)
        recorder.take(batch)
    assert recorder.tokens() == {str(i): undisturbed[str(i)] for i in range(200)}
    assert [(event.kind, event.stage) for event in events] == [("died", 0)]
