"""Timing requests from the submission of their prefill to their last token."""

from __future__ import annotations

from dataclasses import replace

from actors.messages import (
    Admission,
    Finished,
    HostKey,
    MicroBatch,
    Request,
    Sampled,
    Sampling,
    TokenIds,
)
from actors.schedule.driver import MOST_BEGUN, LatencyRecord, PipelineDriver
from actors.schedule.orca import OrcaScheduler
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage_figures import LatencyCounts
from tests.actors.driving import run_dry
from tests.actors.schedule.token_pipeline import TokenPipeline, request, sizes_of


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowPipeline(TokenPipeline):
    """A stage that takes a second for each micro-batch when its result is asked for."""

    clock: Clock

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        self.clock.now_s += 0.25
        return super().submit(batch, token_ids)

    def result(self, handle: MicroBatch) -> Sampled:
        self.clock.now_s += 1.0
        return super().result(handle)


def test_requests_are_timed_from_their_prefill_to_their_last_token() -> None:
    """The second one waits for memory, which does not count."""
    requests = [request(0, 5, 4), request(1, 5, 2)]
    pipeline = SlowPipeline(1, 10, {"0": 4, "1": 2})
    pipeline.expect(requests)
    pipeline.clock = Clock()
    record = LatencyRecord(pipeline.clock)
    driver = PipelineDriver(OrcaScheduler(sizes_of(1, 2, 10), 1), pipeline, record)
    driver.add(requests)
    list(run_dry(driver))
    assert record.counts == LatencyCounts.of([4 * 1.25, 2 * 1.25])
    assert record.new_seconds() == [5.0, 2.5]
    assert record.new_seconds() == []


def test_what_comes_back_with_tokens_began_when_it_was_prefilled_first() -> None:
    """Where that is not known it is not counted, nor are errors and what was given up."""
    clock = Clock()
    record = LatencyRecord(clock)
    fresh = [Admission(i, str(i), 9, Sampling()) for i in range(4)]
    record.begin(fresh)
    clock.now_s = 3.0
    record.begin([replace(fresh[0], generated=(5, 6)), Admission(4, "4", 9, Sampling(), (1,))])
    record.forget("3")
    clock.now_s = 7.0
    ends = [("0", "stop"), ("1", "length"), ("2", "error"), ("3", "stop"), ("4", "stop")]
    record.end([Finished(name, (1,), why) for name, why in ends])  # type: ignore[arg-type]
    assert record.new_seconds() == [7.0, 7.0]
    record.begin([fresh[0]])
    clock.now_s = 8.0
    record.end([Finished("0", (1,), "stop")])
    assert record.new_seconds() == [1.0], "another run has a request of this name"


def test_a_request_that_other_stages_go_on_with_is_counted_by_them_from_its_prefill() -> None:
    """Unless it ends with its first token; what both take, and the way between them, counts."""
    clock = Clock()
    first, second = LatencyRecord(clock), LatencyRecord(clock)
    prompts = [
        Request(name, (1, 2), 1, Sampling(), host_key=HostKey(i)) for i, name in enumerate("abc")
    ]
    first.expect(prompts)
    first.begin([Admission(i, each.custom_id, 1, Sampling()) for i, each in enumerate(prompts)])
    clock.now_s = 2.0
    first.forget("c")
    first.end([Finished("a", (1,), "length"), Finished("b", (1,), "stop")])
    assert first.new_seconds() == [2.0]
    assert (first.take_age_s("a"), first.take_age_s("b"), first.take_age_s("c")) == (
        2.0,
        None,
        None,
    )
    assert first.take_age_s("a") is None
    clock.now_s = 3.0
    second.expect([Request("a", (1, 2), 9, Sampling(), (1,), host_key=HostKey(0), age_s=3.0)])
    clock.now_s = 4.0
    second.begin([Admission(0, "a", 9, Sampling(), (1,))])
    clock.now_s = 10.0
    second.end([Finished("a", (1, 2), "length")])
    assert second.new_seconds() == [10.0]


def test_a_driver_forgets_cancelled_requests() -> None:
    record = LatencyRecord(Clock())
    scheduler = StaticScheduler(QueueSizes(1, 1, 1, 9), 1)
    pipeline = _Echo()
    driver = PipelineDriver(scheduler, pipeline, record)
    driver.add([Request("a", (1, 2), 3, Sampling())])
    driver.submit_next()
    driver.cancel("a")
    list(run_dry(driver))
    assert record.counts.requests == 0


class _Echo:
    stages = 1

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        count = len(handle.slots)
        return Sampled(handle.slots, (None,) * count)


def test_what_began_and_never_ends_takes_bounded_memory() -> None:
    record = LatencyRecord(Clock())
    record.begin([Admission(0, str(i), 9, Sampling()) for i in range(MOST_BEGUN + 5)])
    assert len(record._began_s) == MOST_BEGUN
