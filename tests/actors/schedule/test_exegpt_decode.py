"""Stages that only decode, over a pretend pipeline that checks every token of its KV cache."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from actors.messages import Finished, HostKey, MicroBatch, Request
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt_waa import DecodeScheduler
from actors.schedule.live_run import LiveRun
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import make_scheduler
from planner.scheduling import RequestSchedule
from quant.common.errors import SpecError
from tests.actors.driving import run_dry
from tests.actors.schedule.random_inbox import ChangingInbox, LimitedPipeline
from tests.actors.schedule.token_pipeline import (
    NUMBERS,
    TokenPipeline,
    assert_right_tokens,
    request,
)

KV_TOKENS = 60


def schedule_of(requests: int, groups: int) -> RequestSchedule:
    return RequestSchedule("waa-c", 2, requests, 1, groups, 2, 5.0)


def sizes_of(requests: int, groups: int, kv_tokens: int = KV_TOKENS) -> QueueSizes:
    return QueueSizes(
        requests,
        prefill_micro_batch=2,
        decode_micro_batch=-(-requests // groups),
        slot_tokens=kv_tokens,
        policy="exegpt",
        role="decode",
        kv_tokens=kv_tokens,
        schedule=schedule_of(requests, groups),
    )


def arrived(made: Request, pipeline: TokenPipeline) -> Request:
    """The request with its keys and values in host memory, under a number of its own."""
    number = 1000 + int(made.custom_id)
    tokens = len(made.prompt_ids) + len(made.generated) - 1
    pipeline.parked[number] = int(made.custom_id) * NUMBERS + np.arange(tokens)
    return replace(made, host_key=HostKey(number))


def run(
    scheduler: DecodeScheduler, pipeline: TokenPipeline, requests: list[Request]
) -> list[Finished]:
    pipeline.expect(requests)
    scheduler.add(requests)
    driver = PipelineDriver(scheduler, pipeline)
    return [each for some in run_dry(driver) for each in some]


def kinds(batches: list[MicroBatch]) -> list[tuple[int, int]]:
    """Requests of each micro-batch, and how many of them are restored; negative in prefills."""
    return [
        (len(each.slots) if each.is_decode else -len(each.slots), len(each.restores))
        for each in batches
    ]


def test_arrived_requests_fill_the_groups_evenly_and_are_restored_with_their_first_step() -> None:
    pipeline = TokenPipeline(2, KV_TOKENS, {str(i): 4 for i in range(6)})
    requests = [arrived(request(i, 5, 4, generated=1), pipeline) for i in range(6)]
    finished = run(DecodeScheduler(sizes_of(6, 3), 2), pipeline, requests)
    assert_right_tokens(finished, requests, [4] * 6)
    assert kinds(pipeline.batches) == [(2, 2)] * 3 + [(2, 0)] * 6
    assert pipeline.parked == {}


def test_newcomers_join_between_two_steps_as_others_leave() -> None:
    """One place is free after the first step: it is taken with the next one."""
    pipeline = TokenPipeline(1, KV_TOKENS, {"0": 2, "1": 4, "2": 4, "3": 3})
    requests = [arrived(request(i, 5, 4, generated=1), pipeline) for i in range(4)]
    finished = run(DecodeScheduler(sizes_of(2, 1), 1), pipeline, requests)
    assert_right_tokens(finished, requests, [2, 4, 4, 3])
    assert pipeline.names == [("0", "1"), ("1", "2"), ("1", "2"), ("2", "3"), ("3",)]


def test_requests_without_keys_and_values_are_prefilled_between_the_steps_of_others() -> None:
    """As after a fault: the first tokens are there, but no stage holds anything of them."""
    pipeline = TokenPipeline(1, KV_TOKENS, {str(i): 5 for i in range(5)})
    requests = [request(i, 4, 5, generated=i % 2) for i in range(4)]
    requests.append(arrived(request(4, 4, 5, generated=2), pipeline))
    finished = run(DecodeScheduler(sizes_of(5, 1), 1), pipeline, requests)
    assert_right_tokens(finished, requests, [5] * 5)
    assert kinds(pipeline.batches)[:4] == [(-2, 0), (1, 1), (-2, 0), (3, 0)]


def test_memory_is_reserved_for_all_new_tokens_and_nobody_is_overtaken() -> None:
    pipeline = TokenPipeline(1, 20, {str(i): 3 for i in range(3)})
    requests = [
        arrived(request(0, 5, 5, generated=1), pipeline),
        arrived(request(1, 10, 5, generated=1), pipeline),
        arrived(request(2, 2, 5, generated=1), pipeline),
    ]
    finished = run(DecodeScheduler(sizes_of(3, 1, 20), 1), pipeline, requests)
    assert_right_tokens(finished, requests, [3] * 3)
    assert pipeline.names == [("0",), ("0",), ("1",), ("1",), ("2",), ("2",)]
    with pytest.raises(SpecError, match="needs 18 prompt and 5 new tokens, but there are 20"):
        DecodeScheduler(sizes_of(3, 1, 20), 1).add([request(1, 18, 5)])


def test_short_memory_makes_more_and_smaller_groups() -> None:
    sizes = replace(sizes_of(8, 2), decode_micro_batch=2)
    pipeline = TokenPipeline(2, KV_TOKENS, {str(i): 3 for i in range(8)})
    requests = [arrived(request(i, 3, 3, generated=1), pipeline) for i in range(8)]
    scheduler = DecodeScheduler(sizes, 2)
    assert scheduler.most_under_way == 5
    assert_right_tokens(run(scheduler, pipeline, requests), requests, [3] * 8)
    assert kinds(pipeline.batches) == [(2, 2)] * 4 + [(2, 0)] * 4


def test_groups_of_another_schedule_are_fewer_and_then_more() -> None:
    """Nobody joins a group that is too many, nor any while more decode than should; later on there
    are as many groups as before.
    """
    outputs = [3 + 5 * i % 7 for i in range(60)]
    pipeline = TokenPipeline(1, 400, {str(i): count for i, count in enumerate(outputs)})
    requests = [arrived(request(i, 5, 9, generated=1), pipeline) for i in range(60)]
    pipeline.expect(requests)
    scheduler = DecodeScheduler(sizes_of(6, 3, 400), 1)
    driver = PipelineDriver(scheduler, pipeline)
    driver.add(requests)
    running = run_dry(driver)
    finished = [*next(running)]
    assert pipeline.names == [("0", "1"), ("2", "3"), ("4", "5")]
    driver.follow(schedule_of(2, 1))
    before = scheduler.in_slots
    while before > 2:
        finished += next(running)
        assert scheduler.in_slots <= before, "one more joined"
        before = scheduler.in_slots
    for _ in range(30):
        finished += next(running)
        assert scheduler.in_slots <= 2
    closed = {"2", "3", "4", "5"}
    assert all(set(each) <= closed for each in pipeline.names if closed & set(each))
    assert scheduler.most_under_way == 2
    driver.follow(schedule_of(60, 3))
    for _ in range(10):
        finished += next(running)
    assert [len(each) for each in pipeline.names[-3:]] == [2, 2, 2], "in the slots that there are"
    finished += [each for some in running for each in some]
    assert_right_tokens(finished, requests, outputs)


@pytest.mark.parametrize("changes", [0, 4])
@pytest.mark.parametrize("seed", range(10))
def test_requests_that_come_and_go_have_every_token_once_and_all_memory_comes_back(
    seed: int, changes: int
) -> None:
    """Some have arrived, some are to be prefilled, and some are given up at any moment; and as
    often another schedule is to be followed.
    """
    random = Random(seed)
    stages, most = random.randint(1, 3), random.randint(1, 6)
    sizes = sizes_of(most, random.randint(1, most))
    largest = max(sizes.decode_micro_batch, sizes.prefill_micro_batch)
    pipeline = LimitedPipeline(stages, KV_TOKENS, {}, most=largest, slots=sizes.slots)
    requests = []
    for i in range(random.randint(1, 20)):
        made = request(i, random.randint(1, 9), 7, generated=random.randint(0, 3))
        pipeline.outputs[made.custom_id] = random.randint(1 + len(made.generated), 7)
        has_keys = made.generated and random.random() < 0.7
        requests.append(arrived(made, pipeline) if has_keys else made)
    pipeline.expect(requests)
    scheduler = make_scheduler(sizes, stages)
    driver = PipelineDriver(scheduler, pipeline)
    others = [schedule_of(random.randint(1, 9), random.randint(1, 9)) for _ in range(changes)]
    inbox = ChangingInbox(Random(seed), requests, driver, others)
    tokens: dict[str, list[int]] = defaultdict(list)
    for told in LiveRun(driver, inbox, KV_TOKENS).events():
        for each in told:
            assert each.custom_id not in inbox.ended | inbox.cancelled
            tokens[each.custom_id] += each.token_ids
            if each.finish_reason is not None:
                inbox.ended.add(each.custom_id)
    assert driver.slot_tokens() == {}
    assert (scheduler.waiting, scheduler.in_slots) == (0, 0)
    assert inbox.ended | inbox.cancelled == {each.custom_id for each in requests}
    for each in requests:
        first = len(each.prompt_ids) + len(each.generated)
        last = len(each.prompt_ids) + pipeline.outputs[each.custom_id]
        found = tokens[each.custom_id]
        assert (
            found == [int(each.custom_id) * NUMBERS + i for i in range(first, last)][: len(found)]
        )
        assert each.custom_id in inbox.cancelled or len(found) == last - first
    assert isinstance(scheduler, DecodeScheduler)
    assert set(pipeline.parked) == set(scheduler._drops), "dropped with the next micro-batch"
