"""Stages that prefill and stages that decode on Ray: the tokens of `generate`, though some die."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.handover.group import DividedGroup
from actors.messages import Finished, Request, Sampling
from actors.processes.stage_actor import StageActor
from actors.recovery.faults import RunInterruptedError
from actors.recovery.policy import RecoveryEvent
from actors.stage_group import GroupOptions, StageGroup
from actors.transport.rendezvous import HANDOVER
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.common.errors import SpecError
from tests.actors.configs import CONFIGS
from tests.actors.models import random_prompts, references, save_tiny
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH
from tests.llmpq.divided_plans import GIB, SCHEDULE, divided_plan

pytestmark = pytest.mark.usefixtures("local_ray")

KINDS = 24
PROMPTS = random_prompts([1 + 5 * i % PROMPT_LENGTH for i in range(KINDS)])
TWO, OTHER_TWO = (0.0008, 0.0006), (0.0009, 0.0005)  # GiB: the first two layers, or more of them
COUNT = 48


class WatchedActor(StageActor):
    """Tells what lies in its host memory."""

    @ray.method(concurrency_group=HANDOVER)
    def parked(self) -> int:
        return self._loaded().keys_values._cache.parked.tokens


class WatchedStages(StageGroup):
    actor_class = WatchedActor


class WatchedGroup(DividedGroup):
    group_class = WatchedStages
    is_hit = False

    def parked(self) -> list[int]:
        return ray.get([stage.actor.parked.remote() for stage in self.stages])


def requests(count: int, first: int = 0) -> Iterator[Request]:
    """Each of the prompts with all numbers of new tokens, one after the other."""
    for i in range(first, first + count):
        yield Request(str(i), PROMPTS[i % KINDS], 1 + i // KINDS % NEW_TOKENS, Sampling())


def tokens_of(finished: list[Finished]) -> dict[str, list[int]]:
    found = {each.custom_id: list(each.token_ids) for each in finished}
    assert len(found) == len(finished)
    return found


@pytest.fixture(scope="module")
def greedy(tiny: tuple[Path, Any]) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt; fewer tokens are the first of these."""
    return references(tiny[1], PROMPTS, NEW_TOKENS)


def right(count: int, greedy: list[list[int]], first: int = 0) -> dict[str, list[int]]:
    return {
        each.custom_id: greedy[int(each.custom_id) % KINDS][: each.max_new_tokens]
        for each in requests(count, first)
    }


@pytest.fixture(scope="module")
def watched(
    local_ray: None, tiny: tuple[Path, Any]
) -> Iterator[tuple[WatchedGroup, list[RecoveryEvent]]]:
    events: list[RecoveryEvent] = []
    plan = divided_plan(tiny[0], TWO, OTHER_TWO)
    plan.check()
    with WatchedGroup(plan, str(tiny[0]), GroupOptions(on_event=events.append)) as group:
        yield group, events


def test_every_stage_does_one_phase_and_tokens_are_those_of_generate(
    watched: tuple[WatchedGroup, list[RecoveryEvent]], greedy: list[list[int]]
) -> None:
    """Some end with their first token, by their limit or the end of the text."""
    group, events = watched
    prefill, decode = group.prefill.plan.stages, group.decode.plan.stages
    assert [len(stage.layers) for stage in prefill] != [len(stage.layers) for stage in decode]
    found = tokens_of([each for some in group.generate(requests(COUNT)) for each in some])
    assert found == right(COUNT, greedy)
    stats = group.observer.figures()
    assert [each.prefill.requests for each in stats] == [COUNT, COUNT, 0, 0]
    steps = sum(len(tokens) - 1 for tokens in found.values())
    assert [each.decode.requests for each in stats] == [0, 0, steps, steps]
    assert group.parked() == [0] * 4
    assert group.unfinished() == ()
    assert events == []
    figures = group.observer.figures()
    assert figures is not None
    assert [each.queue is not None for each in figures] == [True, False, True, False]
    counted = [each.queue.latencies.requests for each in figures if each.queue is not None]
    alone = sum(len(tokens) == 1 for tokens in found.values())
    assert counted == [alone, COUNT - alone], "each request where it ends"


def test_a_run_that_is_left_gives_all_back_and_the_next_one_is_right(
    watched: tuple[WatchedGroup, list[RecoveryEvent]], greedy: list[list[int]]
) -> None:
    group, _ = watched
    left = group.generate(requests(COUNT))
    begun = [*next(left)]
    left.close()
    unfinished = group.unfinished()
    assert not {each.custom_id for each in begun} & {each.custom_id for each in unfinished}
    whole = right(COUNT, greedy)
    for each in unfinished:
        assert whole[each.custom_id][: len(each.generated)] == list(each.generated)
    found = tokens_of([each for some in group.generate(unfinished) for each in some])
    assert found == {each.custom_id: whole[each.custom_id] for each in unfinished}
    halted = group.generate(requests(COUNT, first=1000))
    begun = [*next(halted), *group.halt()]
    rest = group.unfinished()
    assert len({each.custom_id for each in (*begun, *rest)}) == len(begun) + len(rest)
    group.abandon()
    assert group.parked() == [0] * 4
    interrupted = group.generate(requests(COUNT))
    next(interrupted)
    group.interrupt()
    with pytest.raises(RunInterruptedError):
        list(interrupted)


@pytest.mark.parametrize(
    "lost", [(1, 2), *(pytest.param(each, marks=pytest.mark.rare) for each in (0, 3))]
)
def test_stages_of_either_kind_that_die_cost_no_request_and_no_token(
    watched: tuple[WatchedGroup, list[RecoveryEvent]], greedy: list[list[int]], lost: Any
) -> None:
    group, events = watched
    events.clear()
    dying = (lost,) if isinstance(lost, int) else lost
    finished: list[Finished] = []
    for some in group.generate(requests(COUNT)):
        finished += some
        if len(finished) > COUNT // 3 and not group.is_hit:
            group.is_hit = True
            for stage in dying:
                ray.kill(group.stages[stage].actor)
    group.is_hit = False
    assert tokens_of(finished) == right(COUNT, greedy)
    died = [event for event in events if event.kind not in ("handover", "waiting")]
    assert sorted((event.kind, event.stage) for event in died) == [("died", i) for i in dying]
    roles = [
        "prefill" if event.stage < 2 else "decode" for event in died if event.stage is not None
    ]
    assert [event.text.split(":")[0] for event in died] == roles
    assert group.parked() == [0] * 4


def test_another_schedule_is_followed_in_the_middle_and_after_a_death(
    watched: tuple[WatchedGroup, list[RecoveryEvent]], greedy: list[list[int]]
) -> None:
    """With one newcomer and two that decode at a time; the stage that decides so is lost later."""
    group, events = watched
    events.clear()
    planned = group.decode.plan
    few = RequestSchedule("waa-c", 1, 2, 1, 1, 1, SCHEDULE.mean_prompt_tokens)
    told, finished = group.generate(requests(2 * COUNT)), list[Finished]()
    while len(finished) < COUNT // 3:
        finished += next(told)
    group.follow(replace(planned, policy=PolicyOptions("exegpt", schedule=few)))
    while len(finished) < COUNT:
        finished += next(told)
    ray.kill(group.decode.stages[0].actor)
    finished += [each for some in told for each in some]
    assert tokens_of(finished) == right(2 * COUNT, greedy)
    assert {event.kind for event in events} - {"handover", "waiting"} == {"died"}
    assert [side.sizes.schedule for side in (group.prefill, group.decode)] == [few, few]
    before = group.observer.figures()[2].decode  # of the actor that was started last
    assert before.micro_batches > COUNT
    assert 1 < before.requests / before.micro_batches <= 2
    group.follow(planned)
    again = tokens_of([each for some in group.generate(requests(COUNT)) for each in some])
    assert again == right(COUNT, greedy)
    # How many decode at a time goes by how fast each side is, which other programs decide too.
    assert [side.sizes.schedule for side in (group.prefill, group.decode)] == [SCHEDULE, SCHEDULE]
    assert group.observer.figures()[2].decode.requests > before.requests
    assert group.parked() == [0] * 4


@pytest.mark.parametrize("dies", [None, 1, pytest.param(2, marks=pytest.mark.rare)])
def test_a_live_run_takes_and_gives_up_requests_at_any_time(
    watched: tuple[WatchedGroup, list[RecoveryEvent]], greedy: list[list[int]], dies: int | None
) -> None:
    """One is given up before it begins, one with its first token, one later on; one cannot be run.

    Nothing that was told of before a stage died is told of again.
    """
    group, events = watched
    events.clear()
    live = group.live()
    coming = iter([replace(each, max_new_tokens=NEW_TOKENS) for each in requests(40)])
    for _ in range(12):
        live.submit(next(coming))
    with pytest.raises(SpecError, match="custom_id '3' is in the run twice"):
        live.submit(replace(next(requests(1)), custom_id="3"))
    live.cancel("11")
    live.cancel("none of that name")
    live.submit(Request("too long", PROMPTS[0], 1000, Sampling()))
    tokens: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, str | None] = {}
    cancelled = {"11"}
    for number, told in enumerate(live.events()):
        for each in told:
            assert each.custom_id not in ended.keys() | cancelled
            tokens[each.custom_id] += each.token_ids
            if each.finish_reason is not None:
                ended[each.custom_id] = each.error
        for name, least in (("2", 1), ("8", 1), ("5", 3)):
            if len(tokens[name]) >= least and name not in ended.keys() | cancelled:
                live.cancel(name)
                cancelled.add(name)
        if number == 9 and dies is not None:
            ray.kill(group.stages[dies].actor)
        following = next(coming, None)
        if following is None:
            live.close()
        else:
            live.submit(following)
    assert live.under_way == 0
    assert "their sum at most" in str(ended.pop("too long"))
    del tokens["too long"]
    assert tokens.pop("11", []) == []
    for name in cancelled - {"11"}:
        begun = tokens.pop(name)
        assert begun == greedy[int(name)][: len(begun)]
    whole = {str(i): greedy[i % KINDS] for i in range(40) if str(i) not in cancelled}
    assert {name: found for name, found in tokens.items() if found} == whole
    assert ended == dict.fromkeys(whole)
    assert sum(event.kind == "died" for event in events) == (dies is not None)
    after = tokens_of([each for some in group.generate(requests(20)) for each in some])
    assert after == right(20, greedy)
    assert group.parked() == [0] * 4, "also of those that were given up"


@pytest.mark.rare  # without Ray in tests/actors/stage/test_handed_over.py
@pytest.mark.parametrize(
    ("name", "prefill", "decode", "options"),
    [
        ("opt", (GIB,), (GIB,), {}),
        ("qwen3", (0.0008, 0.0006), (GIB,), {}),
        ("mistral", (GIB,), (0.0009, 0.0005), {"transport": "ray"}),
        ("llama", (GIB,), (0.0009, 0.0005), {"kv_bits": 8}),
    ],
)
def test_models_and_plans_of_many_kinds(
    tmp_path: Path, name: str, prefill: Any, decode: Any, options: dict[str, Any]
) -> None:
    """At 8 bit as the stages that decode would alone."""
    model = save_tiny(tmp_path, CONFIGS[name])
    kv_bits = options.get("kv_bits", 16)
    plan = divided_plan(tmp_path, prefill, decode, kv_bits=kv_bits)
    plan.check()
    group_options = GroupOptions(transport=options.get("transport", "gloo"))
    with WatchedGroup(plan, str(tmp_path), group_options) as group:
        found = tokens_of([each for some in group.generate(requests(40)) for each in some])
        assert group.observer.figures()[-1].prefill_tokens == 0
    if kv_bits == 16:
        whole = references(model, PROMPTS, NEW_TOKENS)
        assert found == right(40, whole)
        return
    alone = replace(plan, prefill_plan=None, policy=PolicyOptions())
    with StageGroup(alone, str(tmp_path), group_options) as stages:
        both = tokens_of([each for some in stages.generate(requests(40)) for each in some])
    assert found == both
