"""How far a run is, by the figures of its stages and by the requests that have ended, and how long
it still takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeVar

from actors.stage_figures import (
    NO_LATENCIES,
    LatencyCounts,
    QueueDepth,
    StageStats,
    joined_queue,
    pipelines_of,
)

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


NOTHING_DONE = StageStats()
"""The figures of a stage before it has begun."""

Number = TypeVar("Number", int, float)


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
        self._ended = self._ended_tokens = self._ended_limits = 0
        self._read = 0  # prompts that a stage has read in micro-batches of their own
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
        before = self._stages or (NOTHING_DONE,) * len(stages)
        tokens = last.tokens
        for now, old in zip_longest(
            pipelines_of(stages), pipelines_of(self._stages), fillvalue=(NOTHING_DONE,)
        ):
            tokens += _increase(now[-1].sampled_tokens, old[-1].sampled_tokens)
            self._read += _increase(now[0].prefill.requests, old[0].prefill.requests)
            self._latencies = self._latencies.plus(_new_latencies(now[0], old[0]))
        busy_s = tuple(
            so_far + _increase(now.busy_s, old.busy_s)
            for so_far, now, old in zip(
                last.busy_s or (0.0,) * len(stages), stages, before, strict=True
            )
        )
        self._samples.append(_Sample(at_s, tokens, busy_s))
        self._stages = tuple(stages)
        while len(self._samples) > 2 and self._samples[1].at_s <= at_s - WINDOW_S:
            self._samples.popleft()

    def state(self) -> RunState:
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
        stages, last = self._stages, self._samples[-1]
        measured_s = last.at_s - self._loaded_s
        if self._prompts is None or self._max_tokens is None or not stages or measured_s < LEAST_S:
            return None
        pipelines, queue = pipelines_of(stages), joined_queue(stages)
        in_flight, slots = (0, 0) if queue is None else (queue.in_slots, queue.slots)
        steps_of = [min(_tokens(stage) for stage in each) for each in pipelines]
        steps = sum(steps_of)
        is_filled = self._ended >= max(1, slots)
        if not is_filled and (steps < 1 or steps < LEAST_STEPS * in_flight):
            return None
        left, by = self._left(self._prompts, self._max_tokens, tokens, slots)
        prompts = self._unread(self._prompts, [each[0] for each in pipelines])
        shares, all_per_s = iter(_shares(last.busy_s, (), measured_s)), 0.0
        for own_steps, pipeline in zip(steps_of, pipelines, strict=True):
            work = zip(pipeline, shares, strict=False)
            alone = [_work_s(stage, prompts, left) / share for stage, share in work if share > 0]
            if alone and (own_steps or not steps):  # else it has only begun, or is lost
                all_per_s += 1 / max(*alone, _LEAST_WORK_S)  # of all that is left, alone
        return TimeLeft(1 / all_per_s, by) if all_per_s else None

    def _unread(self, prompts: int, firsts: Sequence[StageStats]) -> int:
        """Prompts still to be read, by the first stages: of those in slots some may be."""
        queue = joined_queue(firsts)
        in_flight = 0 if queue is None else queue.in_slots
        outside = max(0, prompts - self._ended - in_flight)
        is_mixed = any(first.mixed.micro_batches for first in firsts)
        if is_mixed or not any(first.prefill.requests for first in firsts):
            return outside
        return max(outside, prompts - self._read)  # after a fault some are read once more

    def _left(
        self, prompts: int, max_tokens: int, tokens: int, slots: int
    ) -> tuple[int, Literal["tokens", "prompts"]]:
        """New tokens still to come after so many `tokens`, and what that is known by.

        The first answers to end are the short ones, so that those of a whole fill of `slots` count.
        """
        ends_early = self._ended_tokens < ENDS_EARLY * self._ended_limits
        if self._ended >= max(EARLY_PROMPTS, slots) and ends_early:
            expected = prompts * self._ended_tokens / self._ended
            return max(prompts - self._ended, round(expected) - tokens), "prompts"
        unused = self._ended_limits - self._ended_tokens  # tokens that will not come
        return max(0, max_tokens - unused - tokens), "tokens"


def _new_latencies(now: StageStats, before: StageStats) -> LatencyCounts:
    """Those that a first stage has counted since; all where its process was restarted."""
    counts = NO_LATENCIES if now.queue is None else now.queue.latencies
    earlier = NO_LATENCIES if before.queue is None else before.queue.latencies
    return counts.since(earlier) if counts.requests >= earlier.requests else counts


def _increase(now: Number, before: Number) -> Number:
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


LEAST_S = 5.0
"""Seconds of generating before which nothing is foretold: the first micro-batches take longer."""

LEAST_STEPS = 8
"""Decode steps of each request in flight that are measured first, unless a whole fill has ended."""

EARLY_PROMPTS = 16  # must have ended before their lengths say anything of the others
_LEAST_WORK_S = 1e-9
ENDS_EARLY = 0.95  # share of their limits below which answers end by themselves


@dataclass(frozen=True)
class TimeLeft:
    """The estimated seconds until the run ends, and what they are estimated `by`.

    Estimates by tokens take every request to reach its limit; those by prompts take the others
    to be as long as the ones that have ended.
    """

    seconds: float
    by: Literal["tokens", "prompts"]


def _work_s(stage: StageStats, prompts: int, tokens: int) -> float:
    """Seconds that `stage` computes for `prompts` that are not read yet, and `tokens` in all."""
    reading, steps = stage.prefill, _tokens(stage)
    read_s = reading.seconds / reading.requests if reading.requests else 0.0
    if reading.requests:
        tokens = max(0, tokens - prompts)  # the first token of a prompt comes with reading it
    step_s = (stage.decode.seconds + stage.mixed.seconds) / steps if steps else 0.0
    return prompts * read_s + tokens * step_s


def _tokens(stage: StageStats) -> int:
    """Tokens of steps, and of micro-batches that hold both steps and prompts."""
    return stage.decode.sampled + stage.mixed.sampled
