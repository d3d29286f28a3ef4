"""Stages that only prefill, over a pretend pipeline that checks every token of its KV cache."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from actors.messages import Finished, HostKey, Park, Progress, Request
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt_waa import PrefillScheduler
from actors.schedule.live_run import LiveRun
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import make_scheduler
from planner.latency_bound.waa import prompts_in_flight
from planner.scheduling import RequestSchedule
from planner.workload import Job
from quant.common.errors import SpecError
from tests.actors.driving import run_dry
from tests.actors.schedule.random_inbox import ChangingInbox, LimitedPipeline
from tests.actors.schedule.token_pipeline import (
    NUMBERS,
    TokenPipeline,
    assert_right_tokens,
    request,
)

LONGEST = 21  # with the new token
SIZES = QueueSizes(
    slots=18,
    prefill_micro_batch=3,
    decode_micro_batch=3,
    slot_tokens=LONGEST,
    policy="exegpt",
    kv_tokens=3 * LONGEST,
    parked_tokens=15,
    schedule=RequestSchedule("waa-c", 3, 30, 1, 2, 3, mean_prompt_tokens=10.0),
    role="prefill",
)


def prefilled(
    prompts: list[int], stages: int = 2, sizes: QueueSizes = SIZES
) -> tuple[TokenPipeline, list[Finished]]:
    """The micro-batches of requests with so many tokens, all of which are there."""
    requests = [
        replace(request(i, tokens, 1), host_key=HostKey(100 + i))
        for i, tokens in enumerate(prompts)
    ]
    pipeline = TokenPipeline(
        stages, sizes.kv_tokens, {str(i): 1 for i in range(len(prompts))}, fixed_rooms=False
    )
    pipeline.expect(requests)
    scheduler = PrefillScheduler(sizes, stages)
    driver = PipelineDriver(scheduler, pipeline)
    driver.add(requests)
    finished = [each for some in run_dry(driver) for each in some]
    assert_right_tokens(finished, requests, [1] * len(requests))
    assert (scheduler.waiting, scheduler.in_slots) == (0, 0)
    return pipeline, finished


@pytest.mark.parametrize(
    ("prompts", "sizes"),
    [
        ([10] * 9, [3, 3, 3]),
        ([10] * 3, [3]),
        ([10] * 4, [2, 2]),
        ([10] * 5, [3, 2]),
        ([10, 10, 13], [3]),  # within the tolerance of 30 tokens
        ([5] * 12, [6, 6]),  # twice the requests at most
        ([2] * 20, [6, 6, 6, 2]),
        ([20] * 6, [2, 2, 1, 1]),
        ([20, 5, 5, 20, 10, 10], [3, 1, 2]),
        ([1], [1]),
        ([20], [1]),
    ],
)
def test_micro_batches_have_the_tokens_of_the_planned_ones(
    prompts: list[int], sizes: list[int]
) -> None:
    """Three of ten tokens; of a queue that has less than two of these, halves."""
    pipeline, finished = prefilled(prompts)
    assert [len(batch.slots) for batch in pipeline.batches] == sizes
    assert [each.custom_id for each in finished] == [str(i) for i in range(len(prompts))]


def test_every_micro_batch_begins_at_the_first_token_slot_and_keeps_what_has_room() -> None:
    pipeline, _ = prefilled([20, 4, 6, 10, 10, 10])
    for batch in pipeline.batches:
        assert batch.begins.tolist() == (batch.counts.cumsum() - batch.counts).tolist()
    kept = [keep for batch in pipeline.batches for keep in batch.keeps]
    assert [keep.key for keep in kept] == [101, 102, 103, 104, 105], "20 tokens are too many"
    (first, *_) = pipeline.batches
    assert first.keeps == (Park(101, 20, 4), Park(102, 24, 6))


def test_as_many_micro_batches_are_under_way_as_keep_all_stages_busy() -> None:
    for stages in (1, 3):
        scheduler = PrefillScheduler(SIZES, stages)
        driver = PipelineDriver(scheduler, pipeline := TokenPipeline(stages, 63, {}))
        requests = [request(i, 10, 1) for i in range(30)]
        pipeline.expect(requests)
        pipeline.fixed_rooms = False
        driver.add(requests)
        while driver.submit_next() is not None:
            pass
        assert driver.under_way == scheduler.most_under_way == stages + 1


@pytest.mark.parametrize("tokens", [1, 5, 10, 20])
@pytest.mark.parametrize("newcomers", [3, 50])
def test_no_more_prompts_are_under_way_than_the_plan_has_memory_for(
    newcomers: int, tokens: int
) -> None:
    """Of turns of 50 prompts micro-batches of at most six, one on each stage and one that waits."""
    stages, job = 3, Job.of(1000, LONGEST - 1, 4)
    schedule = replace(SIZES.followed_schedule, prefill_requests=newcomers)
    planned = prompts_in_flight(schedule, stages, job)
    assert planned.global_batch == (9 if newcomers == 3 else 24)

    def under_way(slots: int) -> list[int]:
        """Requests of each micro-batch that begins before one is back."""
        scheduler = PrefillScheduler(replace(SIZES, slots=slots), stages)
        scheduler.add([request(i, tokens, 1) for i in range(100)])
        batches = (scheduler.next_batch() for _ in range(scheduler.most_under_way))
        return [len(batch.slots) for batch, _ in filter(None, batches)]

    assert sum(under_way(planned.global_batch)) <= planned.global_batch
    if newcomers == 50:
        assert under_way(planned.global_batch) == under_way(1000)


def test_micro_batches_are_those_of_another_schedule_from_the_next_one_on() -> None:
    """Smaller ones, and no larger ones than there were to begin with."""
    pipeline = TokenPipeline(1, SIZES.kv_tokens, {str(i): 1 for i in range(60)}, fixed_rooms=False)
    requests = [request(i, 10, 1) for i in range(60)]
    pipeline.expect(requests)
    scheduler = PrefillScheduler(SIZES, 1)
    driver = PipelineDriver(scheduler, pipeline)
    driver.add(requests)
    found: list[list[int]] = []
    for size, mean in ((3, 10.0), (1, 10.0), (2, 15.0), (50, 10.0), (50, 5.0)):
        driver.follow(RequestSchedule("waa-c", 50, 30, 1, 2, size, mean_prompt_tokens=mean))
        for _ in range(3):
            driver.submit_next()
            driver.take_back()
        found.append([len(batch.slots) for batch in pipeline.batches[-3:]])
    assert found == [[3] * 3, [1] * 3, [3] * 3, [3] * 3, [2] * 3]


@pytest.mark.parametrize("changes", [0, 4])
@pytest.mark.parametrize("seed", range(8))
def test_requests_that_come_and_go_have_their_token_once(seed: int, changes: int) -> None:
    """Under one schedule, or several after each other."""
    random = Random(seed)
    stages, count = random.randint(1, 3), random.randint(1, 30)
    requests: list[Request] = [request(i, random.randint(1, 20), 1) for i in range(count)]
    sizes = replace(SIZES, slots=6 * (stages + 1))
    pipeline = LimitedPipeline(
        stages,
        SIZES.kv_tokens,
        {each.custom_id: 1 for each in requests},
        fixed_rooms=False,
        most=2 * sizes.prefill_micro_batch,
        slots=sizes.slots,
    )
    pipeline.expect(requests)
    scheduler = make_scheduler(sizes, stages)
    assert isinstance(scheduler, PrefillScheduler)
    driver = PipelineDriver(scheduler, pipeline)
    others = [
        RequestSchedule("waa-c", 9, 30, 1, 2, random.randint(1, 9), random.uniform(1, 20))
        for _ in range(changes)
    ]
    inbox = ChangingInbox(random, requests, driver, others)
    told: dict[str, Progress] = {}
    for some in LiveRun(driver, inbox, LONGEST).events():
        for each in some:
            assert each.custom_id not in told.keys() | inbox.cancelled
            told[each.custom_id] = each
            inbox.ended.add(each.custom_id)
    assert told.keys() | inbox.cancelled == {each.custom_id for each in requests}
    for each in requests:
        if each.custom_id in told:
            token = int(each.custom_id) * NUMBERS + len(each.prompt_ids)
            assert told[each.custom_id].token_ids == (token,)
    assert scheduler.slot_tokens() == {}


@pytest.mark.parametrize("name", ["slots", "prefill_micro_batch", "kv_tokens"])
def test_sizes_without_room_for_a_prompt_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match="room for the longest prompt"):
        PrefillScheduler(replace(SIZES, **{name: 0}), 1)
