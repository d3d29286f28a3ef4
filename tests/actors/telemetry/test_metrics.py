"""What stages tell Prometheus of reservations that were too small."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.stage_figures import NO_SUPERVISION, QueueDepth, StageStats, Supervision
from actors.telemetry import metrics
from actors.telemetry.meter import StageMeter, TelemetryOptions
from actors.telemetry.metrics import MetricsPublisher

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
        monkeypatch.setattr(metrics, name, Pretend)


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
    assert (both.preemptions, both.doublings) == (4, 10)
    assert NO_SUPERVISION.after(FIRST) == replace(FIRST, parked_now=0)
