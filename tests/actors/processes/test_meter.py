"""Counts and times of a stage's work, as they are kept and as they are published."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.messages import MicroBatch
from actors.processes import meter as meter_module
from actors.processes.meter import MetricsPublisher, SpanLog, StageMeter, TelemetryOptions
from actors.stage_figures import NO_SUPERVISION, PhaseWork, QueueDepth, StageStats, Supervision
from tests.actors.batches import batch_in_ranges


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def prefill(*lengths: int) -> MicroBatch:
    counts = np.array(lengths, dtype=np.int64)
    return batch_in_ranges(np.arange(len(lengths)), np.zeros_like(counts), counts)


def decode(*contexts: int) -> MicroBatch:
    starts = np.array(contexts, dtype=np.int64)
    return batch_in_ranges(np.arange(len(contexts)), starts, np.ones_like(starts))


def computed(meter: StageMeter, clock: Clock, batch: MicroBatch, seconds: float) -> None:
    with meter.computing(batch):
        clock.now_s += seconds


def test_work_is_counted_by_phase_and_full_micro_batches_apart() -> None:
    clock = Clock()
    meter = StageMeter(TelemetryOptions(prefill_tokens=20, decode_requests=4), clock)
    computed(meter, clock, prefill(10, 9), 1.9)  # 95 % of a planned one
    computed(meter, clock, prefill(3), 0.7)
    clock.now_s += 5.0
    computed(meter, clock, decode(10, 9, 3, 4), 0.25)
    computed(meter, clock, decode(10, 9, 3), 0.125)
    work = meter.work("prefill")
    assert (work.micro_batches, work.requests, work.tokens) == (2, 3, 22)
    assert work.seconds == pytest.approx(2.6)
    assert work.full_micro_batches == 1
    assert work.full_s / work.full_sizes == pytest.approx(2.0)  # 1.9 s for 95 %
    work = meter.work("decode")
    assert (work.micro_batches, work.requests, work.full_micro_batches) == (2, 7, 1)
    assert work.full_s / work.full_sizes == pytest.approx(0.25)
    assert meter.busy_s() == pytest.approx(2.975)
    assert meter.busy_s("decode") == pytest.approx(0.375)
    phases = [phase for phase, _ in meter.new_seconds()]
    assert phases == ["prefill", "prefill", "decode", "decode"]
    assert meter.new_seconds() == []


def test_mixed_micro_batches_are_counted_apart_but_for_their_tokens() -> None:
    """Their seconds are those of neither phase, and no size is planned for them."""
    clock = Clock()
    meter = StageMeter(TelemetryOptions(prefill_tokens=2, decode_requests=1, trace=True), clock)
    mixed = batch_in_ranges([0, 1, 2, 3], [7, 0, 4, 9], [1, 5, 3, 1])
    computed(meter, clock, replace(mixed, samples=np.array([True, True, False, True])), 2.0)
    computed(meter, clock, decode(3, 4), 0.5)
    assert meter.work("mixed") == PhaseWork(1, 4, 10, 2.0, sampled=3)
    assert meter.work("prefill") == PhaseWork()
    assert meter.work("decode").seconds == 0.5
    assert meter.tokens() == {"prefill": 8, "decode": 4}
    assert (meter.busy_s(), meter.busy_s("mixed")) == (2.5, 2.0)
    assert meter.new_seconds() == [("mixed", 2.0), ("decode", 0.5)]
    spans = meter.spans(0)
    assert spans is not None
    assert spans.rows["decode_requests"].tolist() == [2, 2]
    assert spans.rows["requests"].tolist() == [4, 2]


def test_the_micro_batch_under_way_is_busy_time() -> None:
    clock = Clock()
    meter = StageMeter(TelemetryOptions(), clock)
    computed(meter, clock, prefill(5), 1.0)
    with meter.computing(decode(5)):
        clock.now_s += 0.5
        assert meter.busy_s() == pytest.approx(1.5)
        assert meter.busy_s("prefill") == pytest.approx(1.0)
        assert meter.busy_s("decode") == pytest.approx(0.5)
        assert meter.work("decode").micro_batches == 0
    assert meter.busy_s() == pytest.approx(1.5)
    with meter.sampling():
        clock.now_s += 0.25
    assert meter.busy_s() == pytest.approx(1.75)


def test_a_micro_batch_that_fails_is_neither_counted_nor_under_way() -> None:
    clock = Clock()
    meter = StageMeter(TelemetryOptions(trace=True), clock)

    def broken() -> None:
        with meter.computing(prefill(5)):
            clock.now_s += 1.0
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    clock.now_s += 1.0
    assert meter.busy_s() == 0
    spans = meter.spans(0)
    assert spans is not None
    assert len(spans.rows) == 0


def test_spans_hold_times_and_sizes_of_each_micro_batch() -> None:
    clock = Clock()
    meter = StageMeter(TelemetryOptions(trace=True), clock)
    computed(meter, clock, prefill(5, 7), 1.0)
    clock.now_s += 0.125
    meter.sent()
    clock.now_s += 2.0
    computed(meter, clock, decode(5, 7), 0.5)
    spans = meter.spans(3)
    assert spans is not None
    assert (spans.stage, spans.dropped) == (3, 0)
    assert spans.rows.tolist() == [
        (100.0, 101.0, 101.125, 2, 12, 0, 0),
        (103.125, 103.625, 103.625, 2, 2, 7, 2),
    ]
    assert StageMeter(TelemetryOptions()).spans(0) is None


def test_a_full_log_keeps_the_first_ones_and_counts_the_others() -> None:
    log = SpanLog(limit=2)
    for at_s in range(5):
        log.add(decode(at_s), at_s, at_s + 0.5)
        log.sent(at_s + 0.75)
    spans = log.spans(0)
    assert spans.rows["began_s"].tolist() == [0, 1]
    assert spans.rows["sent_s"].tolist() == [0.75, 1.75]
    assert spans.dropped == 3


FIRST = Supervision(grown=5, parked=2, parked_tokens=40, parked_now=25, recomputed=1)


class Pretend:
    """Stands for all of Ray's kinds of metrics: sums of what is counted, and the last value."""

    made: dict[str, Pretend]

    def __init__(self, name: str, *_: Any) -> None:
        self.counted: Counter[tuple[tuple[str, str], ...]] = Counter()
        self.value: float | None = None
        Pretend.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> None: ...

    def inc(self, more: float, tags: dict[str, str]) -> None:
        self.counted[tuple(tags.items())] += more  # type: ignore[assignment]

    def observe(self, value: float) -> None:
        self.counted[()] += value  # type: ignore[assignment]

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def pretend_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretend.made = {}
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(meter_module, name, Pretend)


def test_each_answer_is_counted_once() -> None:
    now = SimpleNamespace(queue=QueueDepth(1, 2, 3, 4, FIRST))
    stats = StageStats(0.0, 0, 0, 0, 5, 5)
    publisher = MetricsPublisher(
        StageMeter(TelemetryOptions()), lambda: replace(stats, queue=now.queue), {}, True
    )
    publisher.publish()
    publisher.publish()
    outgrown = Pretend.made["llmpq_outgrown_reservations"].counted
    assert outgrown == {
        (("answer", "grown"),): 5,
        (("answer", "parked"),): 2,
        (("answer", "recomputed"),): 1,
    }
    assert Pretend.made["llmpq_parked_tokens"].value == 25
    then = Supervision(grown=6, parked=2, recomputed=4, recomputed_tokens=90)
    now.queue = replace(now.queue, supervision=then)
    publisher.publish()
    assert outgrown == {
        (("answer", "grown"),): 6,
        (("answer", "parked"),): 2,
        (("answer", "recomputed"),): 4,
    }
    assert Pretend.made["llmpq_recomputed_tokens"].counted == {(): 90}
    assert Pretend.made["llmpq_parked_tokens"].value == 0


def test_each_latency_is_observed_once() -> None:
    new = [[2.5, 0.5], [], [1.0]]
    stats = StageStats(0.0, 0, 0, 0, 5, 5)
    meter = StageMeter(TelemetryOptions())
    publisher = MetricsPublisher(meter, lambda: stats, {}, True, lambda: new.pop(0))
    for _ in range(3):
        publisher.publish()
    assert Pretend.made["llmpq_request_latency_seconds"].counted == {(): 4.0}


def test_counts_of_several_runs_are_added_but_for_what_is_parked_now() -> None:
    second = Supervision(grown=1, parked=1, parked_tokens=7, parked_now=7)
    both = second.after(FIRST)
    assert both == Supervision(6, 3, 47, 7, 1, 0)
    assert both.doublings == 10
    assert NO_SUPERVISION.after(FIRST) == replace(FIRST, parked_now=0)
