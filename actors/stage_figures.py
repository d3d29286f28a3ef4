"""The figures that stages tell of themselves, and how far they are while they load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise
from typing import Any, Literal

PER_OCTAVE = 64
"""Buckets between a latency and twice that: a bucket is 1.1 % wide, and so is what a quantile may
be above the true one."""

LEAST_S, MOST_S = 2.0**-10, 2.0**18
"""Latencies that are told apart: those beyond count as these."""

BUCKETS = round(PER_OCTAVE * math.log2(MOST_S / LEAST_S)) + 1


def bucket_of(seconds: float) -> int:
    """The number of the bucket that a latency is in, from 0."""
    kept = min(max(seconds, LEAST_S), MOST_S)
    return math.ceil(PER_OCTAVE * math.log2(kept / LEAST_S))


def upper_s(bucket: int) -> float:
    """The longest latency of a bucket, in seconds."""
    return float(LEAST_S * 2 ** (bucket / PER_OCTAVE))


@dataclass(frozen=True)
class LatencyCounts:
    """How many requests took how long: pairs of a bucket, ascending, and a count above 0."""

    buckets: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, seconds: Iterable[float]) -> LatencyCounts:
        return cls(tuple(sorted(Counter(map(bucket_of, seconds)).items())))

    @property
    def requests(self) -> int:
        return sum(count for _, count in self.buckets)

    def plus(self, other: LatencyCounts) -> LatencyCounts:
        both = Counter(dict(self.buckets)) + Counter(dict(other.buckets))
        return LatencyCounts(tuple(sorted(both.items())))

    def since(self, earlier: LatencyCounts) -> LatencyCounts:
        """The requests that came after `earlier`."""
        left = Counter(dict(self.buckets)) - Counter(dict(earlier.buckets))
        return LatencyCounts(tuple(sorted(left.items())))

    def quantile_s(self, share: float) -> float | None:
        """Seconds that this share of requests takes at most, to a bucket's width; None for none."""
        wanted, reached = share * self.requests, 0
        for bucket, count in self.buckets:
            reached += count
            if reached >= wanted:
                return upper_s(bucket)
        return None


NO_LATENCIES = LatencyCounts()


@dataclass(frozen=True)
class PhaseWork:
    """The work of a stage in micro-batches of one kind; `sampled` of their `requests` gave a token.

    `full_micro_batches` have at least nine tenths of the planned size; `full_sizes` is the sum of
    their shares of it, so that `full_s / full_sizes` is the seconds of a planned micro-batch. No
    size is planned for mixed ones.
    """

    micro_batches: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    full_micro_batches: int = 0
    full_s: float = 0.0
    full_sizes: float = 0.0
    sampled: int = 0

    def since(self, earlier: PhaseWork) -> PhaseWork:
        return PhaseWork(**_differences(self, earlier))


@dataclass(frozen=True)
class Supervision:
    """What was done about requests that outgrew their reservation, which is doubled then.

    `grown`: how often it grew where it was, or at the cost of moves. Else the request was preempted
    and came back to the queue: `parked` times with its keys and values in host memory, which are
    `parked_tokens` tokens in all and `parked_now` at present, and `recomputed` times without; then
    `recomputed_tokens` tokens are computed again.
    """

    grown: int = 0
    parked: int = 0
    parked_tokens: int = 0
    parked_now: int = 0
    recomputed: int = 0
    recomputed_tokens: int = 0

    def after(self, earlier: Supervision) -> Supervision:
        """Both together; what is parked at present is that of this one."""
        counts = {f.name: getattr(self, f.name) + getattr(earlier, f.name) for f in fields(self)}
        return Supervision(**counts | {"parked_now": self.parked_now})

    def since(self, earlier: Supervision) -> Supervision:
        """What was done after `earlier`; what is parked at present is that of this one."""
        return Supervision(**_differences(self, earlier) | {"parked_now": self.parked_now})

    @property
    def doublings(self) -> int:
        return self.grown + self.parked + self.recomputed


NO_SUPERVISION = Supervision()


@dataclass(frozen=True)
class SharedPrompts:
    """What prompts shared: `rows` began with one of the `heads` that were kept. Of their
    `prompt_tokens`, and those of all others, `shared_tokens` were not computed with them, but
    `head_tokens` once for all.
    """

    heads: int = 0
    head_tokens: int = 0
    rows: int = 0
    shared_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def saved_tokens(self) -> int:
        return max(0, self.shared_tokens - self.head_tokens)

    def after(self, earlier: SharedPrompts) -> SharedPrompts:
        """Both together."""
        return SharedPrompts(
            **{f.name: getattr(self, f.name) + getattr(earlier, f.name) for f in fields(self)}
        )

    def since(self, earlier: SharedPrompts) -> SharedPrompts:
        return SharedPrompts(**_differences(self, earlier))


NOTHING_SHARED = SharedPrompts()


@dataclass(frozen=True)
class QueueDepth:
    """The queue of the first stage's scheduler: requests that wait and requests in KV slots, and
    micro-batches on their way through the pipeline. `supervision`, `shared` and `latencies`, which
    count requests by the seconds from the submission of their prefill to their last token, are of
    all runs so far.
    """

    waiting: int
    in_slots: int
    slots: int
    micro_batches: int
    supervision: Supervision = NO_SUPERVISION
    latencies: LatencyCounts = NO_LATENCIES
    shared: SharedPrompts = NOTHING_SHARED

    def since(self, earlier: QueueDepth | None) -> QueueDepth:
        """The queue as it is, with what counts what was done after `earlier`."""
        if earlier is None:
            return self
        return replace(
            self,
            supervision=self.supervision.since(earlier.supervision),
            latencies=self.latencies.since(earlier.latencies),
            shared=self.shared.since(earlier.shared),
        )


@dataclass(frozen=True)
class LayersLoaded:
    """How many of its `layers` a stage has read or loaded (`done`); None before it has begun."""

    what: Literal["importance", "weights"] | None = None
    done: int = 0
    layers: int = 0


@dataclass(frozen=True)
class StageStats:
    """The figures of a stage so far.

    `busy_s` includes the micro-batch that is being computed, up to now; the other figures count
    those that are done: `prefill`, `decode` and `mixed` the micro-batches of each kind, `*_tokens`
    all tokens of prompts and of decode steps, also those of mixed micro-batches. Only the first
    stage has a `queue`.
    """

    busy_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    micro_batches: int = 0
    weight_bytes: int = 0
    kv_cache_bytes: int = 0
    prefill: PhaseWork = PhaseWork()
    decode: PhaseWork = PhaseWork()
    queue: QueueDepth | None = None
    mixed: PhaseWork = PhaseWork()

    @property
    def sampled_tokens(self) -> int:
        return self.prefill.sampled + self.decode.sampled + self.mixed.sampled

    def since(self, earlier: StageStats) -> StageStats:
        """The work that was done after `earlier`, all of it where the stage began anew since."""
        if self.micro_batches < earlier.micro_batches:
            return self
        queue = None if self.queue is None else self.queue.since(earlier.queue)
        return replace(
            self,
            busy_s=max(0.0, self.busy_s - earlier.busy_s),
            prefill_tokens=self.prefill_tokens - earlier.prefill_tokens,
            decode_tokens=self.decode_tokens - earlier.decode_tokens,
            micro_batches=self.micro_batches - earlier.micro_batches,
            prefill=self.prefill.since(earlier.prefill),
            decode=self.decode.since(earlier.decode),
            mixed=self.mixed.since(earlier.mixed),
            queue=queue,
        )


def pipelines_of(stages: Sequence[StageStats]) -> list[tuple[StageStats, ...]]:
    """The figures of each pipeline, where there are several: its first stage has a queue."""
    starts = [i for i, stats in enumerate(stages) if i == 0 or stats.queue is not None]
    return [tuple(stages[a:b]) for a, b in pairwise([*starts, len(stages)]) if b > a]


def joined_queue(stages: Sequence[StageStats]) -> QueueDepth | None:
    """The queues of all pipelines as one; None where there is none yet."""
    queues = [stats.queue for stats in stages if stats.queue is not None]
    if len(queues) < 2:
        return queues[0] if queues else None
    return QueueDepth(
        waiting=sum(each.waiting for each in queues),
        in_slots=sum(each.in_slots for each in queues),
        slots=sum(each.slots for each in queues),
        micro_batches=sum(each.micro_batches for each in queues),
        latencies=reduce(LatencyCounts.plus, (each.latencies for each in queues)),
        shared=reduce(SharedPrompts.after, (each.shared for each in queues)),
    )


def _differences(
    now: PhaseWork | Supervision | SharedPrompts, earlier: PhaseWork | Supervision | SharedPrompts
) -> dict[str, Any]:
    """Each field of `now` less that of `earlier`."""
    return {f.name: getattr(now, f.name) - getattr(earlier, f.name) for f in fields(now)}
