"""Live runs over a pretend pipeline: arrivals and cancels at any iteration, tokens told once."""

from __future__ import annotations

from collections import defaultdict
from queue import Queue
from random import Random
from threading import Thread

import pytest

from actors.messages import Progress, Request, Sampling
from actors.schedule.driver import PipelineDriver
from actors.schedule.live_run import Inbox, LiveRun
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.schedule.table import make_scheduler
from tests.actors.schedule.random_inbox import RandomInbox
from tests.actors.schedule.token_pipeline import NUMBERS, TokenPipeline, request, sizes_of
from tests.seeds import seeds

KV_TOKENS = 40


def make_case(seed: int) -> tuple[list[Request], TokenPipeline, PipelineDriver]:
    random = Random(seed)
    requests = [
        request(i, random.randint(1, 9), 7, generated=random.randint(0, 2))
        for i in range(random.randint(1, 20))
    ]
    outputs = {r.custom_id: random.randint(1 + len(r.generated), 7) for r in requests}
    stages = random.randint(1, 3)
    pipeline = TokenPipeline(stages, KV_TOKENS, outputs)
    pipeline.expect(requests)
    sizes = sizes_of(stages, random.randint(1, 4), KV_TOKENS, chunk=random.choice([0, 2]))
    return requests, pipeline, PipelineDriver(make_scheduler(sizes, stages), pipeline)


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_every_token_is_told_once_and_all_memory_comes_back(seed: int) -> None:
    requests, pipeline, driver = make_case(seed)
    inbox = RandomInbox(Random(seed), requests)
    tokens: dict[str, list[int]] = defaultdict(list)
    for told in LiveRun(driver, inbox, KV_TOKENS, told_every=1 + seed % 4).events():
        for each in told:
            assert each.custom_id not in inbox.ended | inbox.cancelled
            tokens[each.custom_id] += each.token_ids
            if each.finish_reason is not None:
                inbox.ended.add(each.custom_id)
    assert driver.under_way == 0
    assert driver.slot_tokens() == {}
    assert inbox.ended | inbox.cancelled == {each.custom_id for each in requests}
    for each in requests:
        first = len(each.prompt_ids) + len(each.generated)
        last = len(each.prompt_ids) + pipeline.outputs[each.custom_id]
        all_tokens = [int(each.custom_id) * NUMBERS + i for i in range(first, last)]
        found = tokens[each.custom_id]
        assert found == all_tokens[: len(found)]
        assert each.custom_id in inbox.cancelled or found == all_tokens


def test_a_cancelled_request_makes_room_at_the_next_iteration() -> None:
    """Two requests that need all of the memory: the second begins as soon as the first is gone."""
    outputs = {"0": 30, "1": 2}
    pipeline = TokenPipeline(1, KV_TOKENS, outputs)
    requests = [request(0, 10, 30), request(1, 10, 30)]
    pipeline.expect(requests)
    inbox = Inbox(1)
    driver = PipelineDriver(make_scheduler(sizes_of(1, 2, KV_TOKENS), 1), pipeline)
    inbox.put(requests)
    events = LiveRun(driver, inbox, KV_TOKENS).events()
    assert [each.custom_id for each in next(events)] == ["0"]
    inbox.cancel(["0"])
    inbox.close()
    told = list(events)
    assert [each.custom_id for some in told for each in some] == ["1", "1"]
    assert pipeline.names == [("0",), ("1",), ("1",)]


def test_a_request_that_cannot_be_run_ends_with_an_error_alone() -> None:
    requests, _, driver = make_case(1)
    inbox = Inbox(1)
    bad = [
        Request("none", (), 1, Sampling()),
        Request("long", (1,), KV_TOKENS, Sampling()),
        Request("many", (1,), 1, Sampling(), top_logprobs=21),
    ]
    inbox.put([*bad, *requests])
    inbox.close()
    told = [each for some in LiveRun(driver, inbox, KV_TOKENS).events() for each in some]
    errors = {each.custom_id: each.error for each in told if each.finish_reason == "error"}
    assert set(errors) == {"none", "long", "many"}
    assert "top_logprobs is 21; it must be a whole number from 0 to 20" in str(errors["many"])
    assert "1 prompt and 40 new tokens" in str(errors["long"])
    assert len({each.custom_id for each in told}) == len(requests) + 3


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_an_idle_run_waits_until_something_comes(is_abandoned: bool) -> None:
    requests, _, driver = make_case(2)
    inbox = Inbox(1)
    told: Queue[tuple[Progress, ...]] = Queue()

    def run() -> None:
        for some in LiveRun(driver, inbox, KV_TOKENS).events():
            told.put(some)

    thread = Thread(target=run, daemon=True)
    thread.start()
    for each in requests:
        inbox.put([each])
        while told.get(timeout=300)[0].finish_reason is None:
            pass
    if is_abandoned:
        inbox.abandon()
    else:
        inbox.close()
    thread.join(20)
    assert not thread.is_alive()
    assert told.empty()


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_waits_has_the_micro_batches_of_all_requests_at_once(seed: int) -> None:
    """However few come at a time, it asks for more before it submits a smaller one; and tells of
    whole answers.
    """
    random = Random(seed)
    count, stages = random.randint(1, 40), random.randint(1, 3)
    slots = random.randint(1, 12)
    sizes = QueueSizes(slots, random.randint(1, slots), random.randint(1, slots), 20)
    prompts = [random.randint(1, 9) for _ in range(count)]
    requests = [request(i, tokens, 20 - tokens) for i, tokens in enumerate(prompts)]
    outputs = {each.custom_id: random.randint(1, 7) for each in requests}

    def run(at_once: int) -> tuple[list[tuple[str, ...]], dict[str, int]]:
        pipeline = TokenPipeline(stages, 20 * slots, outputs)
        pipeline.expect(requests)
        driver = PipelineDriver(StaticScheduler(sizes, stages), pipeline)
        coming, inbox, ended = list(requests), Inbox(1), dict[str, int]()
        for told in LiveRun(driver, inbox, 20, told_every=0, waits=True).events():
            ended |= {each.custom_id: len(each.token_ids) for each in told}
            if not told:
                inbox.put(coming[:at_once])
                del coming[:at_once]
                if not coming:
                    inbox.close()
        return pipeline.names, ended

    names, ended = run(count)
    assert ended == outputs
    assert run(random.randint(1, 5)) == (names, ended)
