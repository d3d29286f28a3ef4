"""Counts and times of a stage's work, kept while it computes, read by other threads, and offered as
Ray's metrics, which every node gives to Prometheus.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from ray.util.metrics import Counter, Gauge, Histogram

from actors.messages import BATCH_KINDS, BatchKind, MicroBatch
from actors.processes.request_log import RequestLog, RequestTimes
from actors.stage_figures import PhaseWork, StageStats, Supervision
from planner.scheduling import Phase

FULL_SHARE = 0.9
"""Micro-batches of at least this share of the planned size are compared with the plan: their time
divided by their share is that of a planned one, as nearly all of it grows with the size."""

MAX_SPANS = 2**17
"""Micro-batches of which a stage keeps the times: 5 MB, and 20 minutes of steps of 10 ms."""

UNSEEN_SECONDS = 2**14  # times of micro-batches that are kept until metrics are published next

SPAN = np.dtype(
    [
        ("began_s", "f8"),
        ("ended_s", "f8"),
        ("sent_s", "f8"),
        ("requests", "i4"),
        ("tokens", "i4"),
        ("context", "i4"),  # tokens in the longest request's slot before
        ("decode_requests", "i4"),
    ]
)
"""One micro-batch on one stage: computed from `began_s` to `ended_s`, passed on until `sent_s`."""


@dataclass(frozen=True)
class TelemetryOptions:
    """Options for what stages note beside their counts.

    `job` names the run in metrics. `prefill_tokens` and `decode_requests` are those of the planned
    micro-batches. `trace`: keep the times of every micro-batch. `requests`: and of every request.
    """

    job: str = "llmpq"
    prefill_tokens: int = 0
    decode_requests: int = 0
    trace: bool = False
    requests: bool = False


@dataclass(frozen=True, eq=False)
class Spans:
    """Times of a stage's first micro-batches, `rows` `[M]` of type `SPAN`; `dropped` came after."""

    stage: int
    rows: npt.NDArray[np.void]
    dropped: int


class SpanLog:
    """Keeps the times of the first `limit` micro-batches."""

    def __init__(self, limit: int = MAX_SPANS) -> None:
        self._rows = np.zeros(limit, dtype=SPAN)  # memory is only taken as it is written
        self._count = 0

    def add(self, batch: MicroBatch, began_s: float, ended_s: float) -> None:
        if self._count < len(self._rows):
            counts = batch.counts
            tokens, context = int(counts.sum()), int(batch.starts.max(initial=0))
            decodes = batch.decode_tokens
            row = (began_s, ended_s, ended_s, len(counts), tokens, context, decodes)
            self._rows[self._count] = row
        self._count += 1

    def sent(self, at_s: float) -> None:
        if 0 < self._count <= len(self._rows):
            self._rows["sent_s"][self._count - 1] = at_s

    def spans(self, stage: int) -> Spans:
        kept = min(self._count, len(self._rows))
        return Spans(stage, self._rows[:kept].copy(), self._count - kept)


@dataclass(frozen=True)
class _State:
    """Work done so far by kind of micro-batch, the decode tokens in it, and kind and start of the
    micro-batch that is `running`. It is replaced as a whole, so that readers see all of a
    micro-batch or nothing.
    """

    work: Mapping[BatchKind, PhaseWork]
    decode_tokens: int = 0
    running: tuple[BatchKind, float] | None = None


class StageMeter:
    """Counts and times what one thread computes; other threads may read at any time."""

    def __init__(
        self, options: TelemetryOptions, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.options = options
        self._clock = clock
        self._state = _State(dict.fromkeys(BATCH_KINDS, PhaseWork()))
        self._head_s = 0.0
        self._log = SpanLog() if options.trace else None
        self._requests = RequestLog() if options.requests else None
        self._unseen: deque[tuple[BatchKind, float]] = deque(maxlen=UNSEEN_SECONDS)

    @contextmanager
    def computing(self, batch: MicroBatch) -> Iterator[None]:
        """Time the computation of `batch` inside this context; one that fails is not counted."""
        kind, began_s = batch.kind, self._clock()
        before = self._state
        self._state = replace(before, running=(kind, began_s))
        done = before
        try:
            yield
            ended_s = self._clock()
            work = self._after(kind, batch, ended_s - began_s)
            done = _State({**before.work, kind: work}, before.decode_tokens + batch.decode_tokens)
            if self._log is not None:
                self._log.add(batch, began_s, ended_s)
            if self._requests is not None:
                self._requests.add(batch, began_s, ended_s)
            self._unseen.append((kind, ended_s - began_s))
        finally:
            self._state = done

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Time LM head and sampling of a micro-batch that was counted before."""
        began_s = self._clock()
        yield
        self._head_s += self._clock() - began_s

    def sent(self) -> None:
        """Note that the last micro-batch's result was passed on."""
        if self._log is not None:
            self._log.sent(self._clock())

    def _after(self, kind: BatchKind, batch: MicroBatch, seconds: float) -> PhaseWork:
        before, requests, tokens = self.work(kind), len(batch.counts), int(batch.counts.sum())
        size = self._share(kind, requests, tokens)
        is_full = size >= FULL_SHARE
        return PhaseWork(
            micro_batches=before.micro_batches + 1,
            requests=before.requests + requests,
            tokens=before.tokens + tokens,
            seconds=before.seconds + seconds,
            full_micro_batches=before.full_micro_batches + is_full,
            full_s=before.full_s + seconds * is_full,
            full_sizes=before.full_sizes + size * is_full,
            sampled=before.sampled + len(batch.sampled_rows),
        )

    def _share(self, kind: BatchKind, requests: int, tokens: int) -> float:
        """Return the size as a share of the planned micro-batch; 0 where none is planned."""
        if kind == "mixed":
            return 0.0
        done, planned = tokens, self.options.prefill_tokens
        if kind == "decode":
            done, planned = requests, self.options.decode_requests
        return done / planned if planned else 0.0

    def work(self, kind: BatchKind) -> PhaseWork:
        return self._state.work[kind]

    def tokens(self) -> dict[Phase, int]:
        """Return the tokens of prompts and of decode steps, in whatever micro-batch."""
        state = self._state
        every = sum(work.tokens for work in state.work.values())
        return {"prefill": every - state.decode_tokens, "decode": state.decode_tokens}

    def busy_s(self, kind: BatchKind | None = None) -> float:
        """Seconds of computing so far, of a `kind`, or of all with LM head and sampling."""
        state = self._state
        done = sum(work.seconds for each, work in state.work.items() if kind in (None, each))
        if state.running is not None and kind in (None, state.running[0]):
            done += max(0.0, self._clock() - state.running[1])
        return done + (self._head_s if kind is None else 0.0)

    def new_seconds(self) -> list[tuple[BatchKind, float]]:
        """Return kind and seconds of each micro-batch since the last call."""
        return [self._unseen.popleft() for _ in range(len(self._unseen))]

    def spans(self, stage: int) -> Spans | None:
        return None if self._log is None else self._log.spans(stage)

    def take_requests(self, custom_ids: Sequence[str]) -> dict[str, RequestTimes]:
        """The times of requests that have ended, where they are kept; they are forgotten then."""
        return {} if self._requests is None else self._requests.take(custom_ids)


INTERVAL_S = 0.5

BOUNDARIES_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
LATENCY_BOUNDARIES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

_STAGE = ("stage", "device", "run")
_PHASE = (*_STAGE, "phase")


class _Instruments:
    """All metrics of a stage, with `phase` as a further tag where work differs by phase; that of a
    micro-batch with prompts and decode steps is "mixed", that of its tokens is theirs.
    """

    def __init__(self, tags: Mapping[str, str]) -> None:
        self.tokens = Counter("llmpq_tokens", "Tokens that passed the stage", _PHASE)
        self.sampled = Counter("llmpq_generated_tokens", "Tokens sampled", _PHASE)
        self.micro_batches = Counter("llmpq_micro_batches", "Micro-batches computed", _PHASE)
        self.busy = Counter("llmpq_busy_seconds", "Seconds of computing", _PHASE)
        self.seconds = Histogram(
            "llmpq_micro_batch_seconds", "Seconds of a micro-batch", list(BOUNDARIES_S), _PHASE
        )
        states = (*_STAGE, "state")
        self.requests = Gauge("llmpq_requests", "Requests waiting or in slots", states)
        self.under_way = Gauge("llmpq_micro_batches_under_way", "In the pipeline", _STAGE)
        self.slots = Gauge("llmpq_kv_slots", "KV slots, used and in all", states)
        self.held = Gauge("llmpq_held_bytes", "Bytes of weights and KV cache", (*_STAGE, "kind"))
        self.outgrown = Counter(
            "llmpq_outgrown_reservations",
            "Reservations that were doubled, and what became of the request",
            (*_STAGE, "answer"),
        )
        self.recomputed = Counter(
            "llmpq_recomputed_tokens", "Tokens of preempted requests computed again", _STAGE
        )
        self.shared = Counter(
            "llmpq_shared_prompt_tokens", "Tokens of prompts restored from a head's copy", _STAGE
        )
        self.parked = Gauge("llmpq_parked_tokens", "Tokens in host memory", _STAGE)
        self.latency = Histogram(
            "llmpq_request_latency_seconds",
            "Seconds from the submission of a request's prefill to its last token",
            list(LATENCY_BOUNDARIES_S),
            _STAGE,
        )
        for metric in vars(self).values():
            metric.set_default_tags(dict(tags))


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
        self._instruments = _Instruments(tags)
        self._told: dict[tuple[str, str], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
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
            shared = stats.queue.shared.shared_tokens
            self._count(made.shared, "shared prompt tokens", "", shared, None)

    def _publish_supervision(self, counts: Supervision) -> None:
        made = self._instruments
        for answer in ("grown", "parked", "recomputed"):
            self._count(made.outgrown, "outgrown", answer, getattr(counts, answer), "answer")
        self._count(made.recomputed, "recomputed tokens", "", counts.recomputed_tokens, None)
        made.parked.set(counts.parked_now)

    def _count(
        self, counter: Counter, name: str, value: str, total: float, tag: str | None = "phase"
    ) -> None:
        """Add to `counter`, by the `value` of its `tag`, what `total` has grown by."""
        more = total - self._told.get((name, value), 0.0)
        if more > 0:
            counter.inc(more, {} if tag is None else {tag: value})
            self._told[name, value] = total
