"""How far a run is, by the figures of its stages and by the requests that have ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from actors.latency_counts import NO_LATENCIES, LatencyCounts
from actors.stage_figures import QueueDepth, StageStats, joined_queue, pipelines_of
from llmpq.run.monitoring.forecast import Counts, TimeLeft, time_left

INTERVAL_S = 1.0  # between two states
WINDOW_S = 15.0  # over which tokens per second are counted: long enough for several prefills


@dataclass(frozen=True)
class RunState:
    """The state of a run at one moment; tokens per second are of the last seconds.

    `max_tokens` is what all prompts may generate at most, None where their number is not known.
    `busy_share` and `whole_busy_share` [stages] are of the last interval and of the whole run.
    `latencies` are those of all requests that have ended.
    """

    elapsed_s: float
    prompts: int
    total_prompts: int | None
    tokens: int
    max_tokens: int | None
    tokens_per_s: float
    busy_share: tuple[float, ...]
    whole_busy_share: tuple[float, ...]
    queue: QueueDepth | None
    time_left: TimeLeft | None
    stages: tuple[StageStats, ...] = ()
    latencies: LatencyCounts = NO_LATENCIES


@dataclass(frozen=True)
class _Sample:
    at_s: float
    tokens: int
    busy_s: tuple[float, ...]


class RunMeter:
    """Computes the `RunState` from what stages report and from the requests that have ended.

    `prompts` and `max_tokens` are those of the whole run, where they are known. A stage that was
    restarted counts from 0 again.
    """

    def __init__(
        self,
        prompts: int | None,
        max_tokens: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._prompts, self._max_tokens = prompts, max_tokens
        self._clock = clock
        self._began_s = self._loaded_s = clock()
        self._ended = self._ended_tokens = self._ended_limits = self._read = 0
        self._stages: tuple[StageStats, ...] = ()
        self._latencies = NO_LATENCIES
        self._samples = deque([_Sample(self._began_s, 0, ())])

    def begin(self) -> None:
        """Count time from now on, as stages are loaded; with another plan's stages tokens go on."""
        now_s = self._clock()
        self._loaded_s = now_s
        if not self._ended:
            self._began_s = now_s
        self._stages = ()
        self._samples = deque([_Sample(now_s, self._samples[-1].tokens, ())])

    def end(self, tokens: int, limit: int) -> None:
        """Count a request that ended with `tokens` of the `limit` that it was allowed."""
        self._ended += 1
        self._ended_tokens += tokens
        self._ended_limits += limit

    def leave_out(self) -> None:
        """Leave out a row that cannot run; its limit is not known, so the mean of all is taken."""
        if self._prompts and self._max_tokens is not None:
            self._max_tokens -= self._max_tokens // self._prompts
            self._prompts -= 1

    def add(self, stages: Sequence[StageStats]) -> None:
        """Count what the stages report just now."""
        at_s, last = self._clock(), self._samples[-1]
        before = self._stages or (None,) * len(stages)
        tokens = sum(
            int(_increase(generated(now[-1]), generated(old[-1] if old else None)))
            for now, old in self._pipelines(stages)
        )
        busy_s = last.busy_s or (0.0,) * len(stages)
        self._samples.append(
            _Sample(
                at_s,
                last.tokens + tokens,
                tuple(
                    so_far + _increase(now.busy_s, old.busy_s if old is not None else 0.0)
                    for so_far, now, old in zip(busy_s, stages, before, strict=True)
                ),
            )
        )
        self._read += sum(
            int(_increase(now[0].prefill.requests, old[0].prefill.requests if old else 0))
            for now, old in self._pipelines(stages)
        )
        for now, old in self._pipelines(stages):
            self._latencies = self._latencies.plus(_new_latencies(now[0], old[0] if old else None))
        self._stages = tuple(stages)
        while len(self._samples) > 2 and self._samples[1].at_s <= at_s - WINDOW_S:
            self._samples.popleft()

    def _pipelines(
        self, stages: Sequence[StageStats]
    ) -> Iterator[tuple[Sequence[StageStats], Sequence[StageStats] | None]]:
        """The stages of each pipeline, now and as they were reported before."""
        return zip_longest(pipelines_of(stages), pipelines_of(self._stages))

    def state(self) -> RunState:
        """The run as it is now."""
        last = self._samples[-1]
        elapsed_s = self._clock() - self._began_s
        tokens = max(last.tokens, self._ended_tokens)
        return RunState(
            elapsed_s=elapsed_s,
            prompts=self._ended,
            total_prompts=self._prompts,
            tokens=tokens,
            max_tokens=self._max_tokens,
            tokens_per_s=self._tokens_per_s(),
            busy_share=self._busy_share(),
            whole_busy_share=_shares(last.busy_s, (), last.at_s - self._began_s),
            queue=joined_queue(self._stages),
            time_left=self._time_left(tokens),
            stages=self._stages,
            latencies=self._latencies,
        )

    def _tokens_per_s(self) -> float:
        first, last = self._samples[0], self._samples[-1]
        passed_s = last.at_s - first.at_s
        return (last.tokens - first.tokens) / passed_s if passed_s > 0 else 0.0

    def _busy_share(self) -> tuple[float, ...]:
        if len(self._samples) < 2:
            return ()
        before, last = self._samples[-2], self._samples[-1]
        return _shares(last.busy_s, before.busy_s, last.at_s - before.at_s)

    def _time_left(self, tokens: int) -> TimeLeft | None:
        """The time to go, unless too little is measured or the run's size is not known."""
        if self._prompts is None or self._max_tokens is None:
            return None
        counts = Counts(
            self._prompts,
            self._max_tokens,
            tokens,
            self._ended,
            self._ended_tokens,
            self._ended_limits,
            self._read,
        )
        last = self._samples[-1]
        measured_s = last.at_s - self._loaded_s
        share = _shares(last.busy_s, (), measured_s)
        return time_left(counts, self._stages, share, measured_s)


def generated(stage: StageStats | None) -> int:
    """Tokens that a stage's micro-batches gave."""
    return 0 if stage is None else stage.sampled_tokens


def _new_latencies(now: StageStats, before: StageStats | None) -> LatencyCounts:
    """Those that a first stage has counted since; all where its process was restarted."""
    counts = NO_LATENCIES if now.queue is None else now.queue.latencies
    earlier = NO_LATENCIES
    if before is not None and before.queue is not None:
        earlier = before.queue.latencies
    return counts.since(earlier) if counts.requests >= earlier.requests else counts


def _increase(now: float, before: float) -> float:
    """The increase of a count that begins at 0 again where its process was restarted."""
    return now - before if now >= before else now


def _shares(
    busy_s: Sequence[float], before_s: Sequence[float], passed_s: float
) -> tuple[float, ...]:
    """Shares of `passed_s`, at most 1: clocks of two processes are not read at the same time."""
    if passed_s <= 0:
        return ()
    before_s = before_s or (0.0,) * len(busy_s)
    return tuple(min(1.0, (b - a) / passed_s) for a, b in zip(before_s, busy_s, strict=True))
