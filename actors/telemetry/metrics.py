"""A stage's figures as Ray's metrics, which every node offers to Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray.util.metrics import Counter, Gauge, Histogram

from actors.messages import BATCH_KINDS
from actors.stage_figures import StageStats, Supervision
from actors.telemetry.meter import StageMeter

INTERVAL_S = 0.5

BOUNDARIES_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
LATENCY_BOUNDARIES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

_STAGE = ("stage", "device", "job")
_PHASE = (*_STAGE, "phase")


@dataclass(frozen=True)
class _Instruments:
    """All metrics of a stage, with `phase` as a further tag where work differs by phase; that of a
    micro-batch with prompts and decode steps is "mixed", that of its tokens is theirs.
    """

    tokens: Counter
    sampled: Counter
    micro_batches: Counter
    busy: Counter
    seconds: Histogram
    requests: Gauge
    under_way: Gauge
    slots: Gauge
    held: Gauge
    outgrown: Counter
    recomputed: Counter
    parked: Gauge
    latency: Histogram

    @classmethod
    def make(cls, tags: Mapping[str, str]) -> _Instruments:
        made = cls(
            tokens=Counter("llmpq_tokens", "Tokens that passed the stage", _PHASE),
            sampled=Counter("llmpq_generated_tokens", "Tokens sampled", _PHASE),
            micro_batches=Counter("llmpq_micro_batches", "Micro-batches computed", _PHASE),
            busy=Counter("llmpq_busy_seconds", "Seconds of computing", _PHASE),
            seconds=Histogram(
                "llmpq_micro_batch_seconds", "Seconds of a micro-batch", list(BOUNDARIES_S), _PHASE
            ),
            requests=Gauge("llmpq_requests", "Requests waiting or in slots", (*_STAGE, "state")),
            under_way=Gauge("llmpq_micro_batches_under_way", "In the pipeline", _STAGE),
            slots=Gauge("llmpq_kv_slots", "KV slots, used and in all", (*_STAGE, "state")),
            held=Gauge("llmpq_held_bytes", "Bytes of weights and KV cache", (*_STAGE, "kind")),
            outgrown=Counter(
                "llmpq_outgrown_reservations",
                "Reservations that were doubled, and what became of the request",
                (*_STAGE, "answer"),
            ),
            recomputed=Counter(
                "llmpq_recomputed_tokens", "Tokens of preempted requests computed again", _STAGE
            ),
            parked=Gauge("llmpq_parked_tokens", "Tokens in host memory", _STAGE),
            latency=Histogram(
                "llmpq_request_latency_seconds",
                "Seconds from the submission of a request's prefill to its last token",
                list(LATENCY_BOUNDARIES_S),
                _STAGE,
            ),
        )
        for metric in vars(made).values():
            metric.set_default_tags(dict(tags))
        return made


class MetricsPublisher:
    """Publishes what `meter` counts and `stats` returns, a few times a second until the process
    ends, in a thread for which the computing one never waits.

    `new_latencies_s` returns those of the requests that ended since the last call.
    """

    def __init__(
        self,
        meter: StageMeter,
        stats: Callable[[], StageStats],
        tags: Mapping[str, str],
        samples: bool,
        new_latencies_s: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._meter = meter
        self._stats = stats
        self._samples = samples  # whether tokens are sampled on this stage
        self._new_latencies_s = new_latencies_s
        self._instruments = _Instruments.make(tags)
        self._told: dict[tuple[str, str], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-metrics", daemon=True)

    def start(self) -> None:
        """Begin, in a thread that does not keep the process alive."""
        self._thread.start()

    def stop(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.publish()

    def publish(self) -> None:
        """Hand over the figures as they are now."""
        made, meter = self._instruments, self._meter
        for phase, tokens in meter.tokens().items():
            self._count(made.tokens, "tokens", phase, tokens)
        for kind in BATCH_KINDS:
            work = meter.work(kind)
            self._count(made.micro_batches, "micro-batches", kind, work.micro_batches)
            self._count(made.busy, "busy", kind, meter.busy_s(kind))
            if self._samples:
                self._count(made.sampled, "sampled", kind, work.sampled)
        for kind, seconds in meter.new_seconds():
            made.seconds.observe(seconds, {"phase": kind})
        for latency_s in self._new_latencies_s():
            made.latency.observe(latency_s)
        stats = self._stats()
        made.held.set(stats.weight_bytes, {"kind": "weights"})
        made.held.set(stats.kv_cache_bytes, {"kind": "kv_cache"})
        if stats.queue is not None:
            made.requests.set(stats.queue.waiting, {"state": "waiting"})
            made.requests.set(stats.queue.in_slots, {"state": "in_slots"})
            made.slots.set(stats.queue.in_slots, {"state": "used"})
            made.slots.set(stats.queue.slots, {"state": "all"})
            made.under_way.set(stats.queue.micro_batches)
            self._publish_supervision(stats.queue.supervision)

    def _publish_supervision(self, counts: Supervision) -> None:
        made = self._instruments
        for answer in ("grown", "parked", "recomputed"):
            self._count(made.outgrown, "outgrown", answer, getattr(counts, answer), "answer")
        self._count(made.recomputed, "recomputed tokens", "", counts.recomputed_tokens, None)
        made.parked.set(counts.parked_now)

    def _count(
        self, counter: Counter, name: str, value: str, total: float, tag: str | None = "phase"
    ) -> None:
        """Add to `counter`, by the `value` of its `tag`, what `total` has grown by since the last
        call.
        """
        more = total - self._told.get((name, value), 0.0)
        if more > 0:
            counter.inc(more, {} if tag is None else {tag: value})
            self._told[name, value] = total
