"""How far a run is: what stages tell of themselves, and what has ended, as a state."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.messages import QueueDepth, StageStats

WINDOW_S = 15.0  # tokens per second are of this time: long enough for several prefills

EARLY_PROMPTS = 16  # that have ended, before their lengths say anything of the others
ENDS_EARLY = 0.95  # of its limit: below, answers end by themselves and prompts tell more


@dataclass(frozen=True)
class Outlook:
    """Seconds to go, and what they were told by.

    Tokens go by each request's limit and are right where answers do not end before it; prompts go
    by those that have ended.
    """

    seconds: float
    by: Literal["tokens", "prompts"]


@dataclass(frozen=True)
class RunState:
    """A run at one moment; shares and tokens per second are of the last seconds.

    `max_tokens` is what all prompts may generate at most, None where their number is not known.
    `busy_share` and `whole_busy_share` [stages] are of the last interval and of the whole run.
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
    outlook: Outlook | None
    stages: tuple[StageStats, ...] = ()


@dataclass(frozen=True)
class _Sample:
    at_s: float
    tokens: int
    busy_s: tuple[float, ...]


class RunMeter:
    """Turns what stages tell, and what has ended, into a `RunState`.

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
        self._began_s = clock()
        self._ended = self._ended_tokens = self._ended_limits = 0
        self._stages: tuple[StageStats, ...] = ()
        self._samples = deque([_Sample(self._began_s, 0, ())])

    def begin(self) -> None:
        """Stages are loaded: count from now; those of another plan go on with the tokens."""
        now_s = self._clock()
        if not self._ended:
            self._began_s = now_s
        self._stages = ()
        self._samples = deque([_Sample(now_s, self._samples[-1].tokens, ())])

    def end(self, tokens: int, limit: int) -> None:
        """Take in a request that ended with `tokens` of the `limit` that it was allowed."""
        self._ended += 1
        self._ended_tokens += tokens
        self._ended_limits += limit

    def leave_out(self) -> None:
        """Take in a row that cannot run; its limit is not known, so the mean of all is taken."""
        if self._prompts and self._max_tokens is not None:
            self._max_tokens -= self._max_tokens // self._prompts
            self._prompts -= 1

    def add(self, stages: Sequence[StageStats]) -> None:
        """Take in what the stages told just now."""
        at_s, last = self._clock(), self._samples[-1]
        before = self._stages or (None,) * len(stages)
        tokens = _increase(generated(stages[-1]), generated(before[-1]))
        busy_s = last.busy_s or (0.0,) * len(stages)
        self._samples.append(
            _Sample(
                at_s,
                last.tokens + int(tokens),
                tuple(
                    so_far + _increase(now.busy_s, old.busy_s if old is not None else 0.0)
                    for so_far, now, old in zip(busy_s, stages, before, strict=True)
                ),
            )
        )
        self._stages = tuple(stages)
        while len(self._samples) > 2 and self._samples[1].at_s <= at_s - WINDOW_S:
            self._samples.popleft()

    def state(self) -> RunState:
        """The run as it is now."""
        last = self._samples[-1]
        elapsed_s = self._clock() - self._began_s
        tokens = max(last.tokens, self._ended_tokens)
        rate = self._tokens_per_s()
        return RunState(
            elapsed_s=elapsed_s,
            prompts=self._ended,
            total_prompts=self._prompts,
            tokens=tokens,
            max_tokens=self._max_tokens,
            tokens_per_s=rate,
            busy_share=self._busy_share(),
            whole_busy_share=_shares(last.busy_s, (), last.at_s - self._began_s),
            queue=self._stages[0].queue if self._stages else None,
            outlook=self._outlook(tokens, rate, elapsed_s),
            stages=self._stages,
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

    def _outlook(self, tokens: int, rate: float, elapsed_s: float) -> Outlook | None:
        """By tokens until enough prompts have ended early to go by prompts."""
        if self._prompts is None or self._max_tokens is None:
            return None
        ends_early = self._ended_tokens < ENDS_EARLY * self._ended_limits
        if self._ended >= EARLY_PROMPTS and ends_early and elapsed_s > 0:
            left = max(0, self._prompts - self._ended)
            return Outlook(left * elapsed_s / self._ended, "prompts")
        if rate <= 0:
            return None
        unused = self._ended_limits - self._ended_tokens  # will not come any more
        return Outlook(max(0, self._max_tokens - unused - tokens) / rate, "tokens")


def generated(stage: StageStats | None) -> int:
    """Tokens that came of a stage's micro-batches: each gives one for each of its requests."""
    return 0 if stage is None else stage.prefill.requests + stage.decode.requests


def _increase(now: float, before: float) -> float:
    """Of a count that begins at 0 again where its process was restarted."""
    return now - before if now >= before else now


def _shares(
    busy_s: Sequence[float], before_s: Sequence[float], passed_s: float
) -> tuple[float, ...]:
    """Each at most 1: the clocks of two processes are not read at the same time."""
    if passed_s <= 0:
        return ()
    before_s = before_s or (0.0,) * len(busy_s)
    return tuple(min(1.0, (b - a) / passed_s) for a, b in zip(before_s, busy_s, strict=True))
